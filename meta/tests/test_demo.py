"""The demo: its command line, its files, what makes it fail, and a small run from end to end."""

from __future__ import annotations

import importlib
import io
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

import cula.kda
import cula.lightning
import cula.lite
from cula import __main__ as command_line
from cula.demo import (
    data,
    kda_steps,
    lightning_steps,
    main,
    memory,
    plot,
    report,
    runner,
    runtime,
    skip_steps,
)
from cula.demo.results import Check, Outcome, Row, relative_rmse

WORDS = (
    "the state of a head keeps what it read and forgets slowly while keys point at values that queries ask for "
    "again when chunks end tokens flow through gates with decay and every write corrects what was stored before"
).split()


def prose(seed: int, length: int) -> bytes:
    """Sentences over a small vocabulary: contexts come again, with several continuations each."""
    rng = random.Random(seed)
    text = ""
    while len(text) < length:
        text += " ".join(rng.choices(WORDS, k=rng.randint(4, 9))).capitalize() + ". "
    return text[:length].encode()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for i, length in enumerate((900, 300, 700)):
        (folder / f"{i}.txt").write_bytes(prose(i, length))
    return [str(folder / f"{i}.txt") for i in range(3)]


@dataclass
class Finished:
    code: int
    outcome: Outcome
    png: Path
    output: str


@pytest.fixture(scope="module")
def finished(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One run of everything, with the numbers behind the table."""
    seen: list[Outcome] = []
    save, lines = plot.save, []
    png = tmp_path_factory.mktemp("plot") / "demo.png"

    def spy(outcome: Outcome, path: Path) -> None:
        seen.append(outcome)
        save(outcome, path)

    class Tee:
        def write(self, text: str) -> int:
            lines.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "save", spy)
        patch.setattr(sys, "stdout", Tee())
        code = main([*texts, "--tokens", "1200", "--device", "cpu", "--out", str(png)])
    yield Finished(code, seen[0], png, "".join(lines))


def run_step(
    monkeypatch: pytest.MonkeyPatch,
    step: object,
    texts: list[str],
    out: Path,
    plotted: bool = False,
) -> int:
    """One step of the demo, with two of the skip list's steps; the plot is drawn if the test is about it."""
    monkeypatch.setattr(runner, "STEPS", (("step", step),))
    monkeypatch.setattr(skip_steps, "STEPS", 2)
    if not plotted:
        monkeypatch.setattr(plot, "save", lambda outcome, path: None)
    return main([*texts, "--tokens", "400", "--device", "cpu", "--out", str(out / "x.png")])


def test_a_run_passes_and_every_op_is_in_the_table(finished: Finished) -> None:
    assert finished.code == 0
    assert "all checks passed" in finished.output
    ops = [row.op for row in finished.outcome.rows]
    assert {op: ops.count(op) for op in ops if op} == {
        "lightning.prefill": 3,
        "lightning.decode": 1,
        "kda.prefill": 4,
        "lightning.gated_delta_rule": 1,
        "lite.attention": skip_steps.STEPS,
    }
    for row in finished.outcome.rows:
        if row.op:
            assert row.impl == "reference"
            assert row.tokens_per_s > 0
            assert row.error.value < 5e-6
            assert row.op in finished.output


def test_the_delta_rule_recalls_more(finished: Finished) -> None:
    curves = {curve.kind: curve.recall for curve in finished.outcome.recall}
    mean = {kind: sum(recall) / len(recall) for kind, recall in curves.items()}
    assert mean["delta"] > mean["plain"] + 0.05
    assert mean["delta"] > mean["forgetful"]
    assert mean["plain"] > mean["baseline"] + 0.2
    delta = [row for row in finished.outcome.rows if row.what == "memory: delta rule (KDA)"][0]
    (recall,) = delta.checks
    assert recall.at_least and recall.value > recall.bound + 0.05
    assert f"{recall.value:.1%}" in delta.note


def test_skipping_gets_sparse_and_stays_close(finished: Finished) -> None:
    restarted, never = finished.outcome.skips
    assert restarted.density[0] == restarted.density[skip_steps.RESTART] == 1
    assert restarted.error[0] < 1e-5 and restarted.error[skip_steps.RESTART] < 1e-5
    assert max(restarted.error) < skip_steps.SKIP_BOUND
    assert restarted.density[skip_steps.RESTART - 1] < 0.4
    assert never.density == sorted(never.density, reverse=True)
    assert never.error[-1] > 3 * restarted.error[-1]


def test_the_plot_is_a_png(finished: Finished) -> None:
    content = finished.png.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 20_000


WRONG = {
    "prefill": (lightning_steps, cula.lightning, "lightning_attn_fwd"),
    "kda": (kda_steps, cula.kda, "chunk_kda"),
    "delta": (memory, cula.lightning, "chunk_gated_delta_rule"),
    "plain": (memory, cula.lightning, "chunk_simple_gla"),
    "lite": (skip_steps, cula.lite, "lite_attention"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result_exits_with_1(
    case: str,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step, module, name = WRONG[case]
    honest = getattr(module, name)

    def wrong(*args: object, **options: object) -> tuple[torch.Tensor, ...]:
        first, *rest = honest(*args, **options)
        return first * (1 + 1e-4), *rest

    monkeypatch.setattr(module, name, wrong)
    assert run_step(monkeypatch, step, texts, tmp_path) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_state_that_is_not_carried_exits_with_1(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = cula.lightning.linear_attention_decode

    def forgetful(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, *rest: object
    ) -> object:
        return honest(q, k, v, state.clone(), *rest)

    monkeypatch.setattr(cula.lightning, "linear_attention_decode", forgetful)
    assert run_step(monkeypatch, lightning_steps, texts, tmp_path) == 1


def test_a_mask_that_grows_exits_with_1(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = cula.lite.lite_attention

    def greedy(*args: object, **options: object) -> tuple[torch.Tensor, ...]:
        out, lse, written = honest(*args, **options)
        return out, lse, torch.ones_like(written)

    monkeypatch.setattr(cula.lite, "lite_attention", greedy)
    assert run_step(monkeypatch, skip_steps, texts, tmp_path) == 1


def test_an_implementation_that_raises_fails_its_step_only(
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(cula.kda, "chunk_kda", broken)
    monkeypatch.setattr(runner, "STEPS", (("KDA", kda_steps), ("Lightning", lightning_steps)))
    code = main([*texts, "--tokens", "200", "--device", "cpu", "--out", str(tmp_path / "x.png")])
    output = capsys.readouterr().out
    assert code == 1
    assert "RuntimeError: no such device" in output and "lightning.decode" in output
    assert "1 of 3 rows failed" in output


def test_one_byte_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(skip_steps, "STEPS", 2)
    path = tmp_path / "one"
    path.write_bytes(b"\xff")
    assert (
        main([str(path), "--tokens", "300", "--device", "cpu", "--out", str(tmp_path / "x.png")])
        == 0
    )
    assert "one (1 B)" in capsys.readouterr().out


def test_a_terminal_without_unicode_gets_the_table_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "\u4e00.txt"
    path.write_bytes(prose(0, 200))
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(skip_steps, "STEPS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        code = command_line.main(["demo", str(path), "--tokens", "64", "--device", "cpu"])
    terminal.flush()
    text = terminal.buffer.getvalue().decode("ascii")
    assert code == 0
    assert "text: ?.txt (64 B)" in text and "all checks passed" in text
    assert (tmp_path / "cula-demo.png").is_file()


def test_files_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "secret").write_text("x")
    opened = Path.open

    def guarded(path: Path, *args: object, **options: object) -> object:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", guarded)
    expected = {
        "empty": "the file is empty, at least one byte is needed",
        "missing": "no such file",
        "secret": "cannot be read (Permission denied)",
        "": "expected a file, got a directory",
    }
    for name, reason in expected.items():
        path = tmp_path / name
        assert main([str(path), "--out", str(tmp_path / "x.png")]) == 2
        assert capsys.readouterr().err == f"cula demo: {path}: {reason}\n"
    assert not (tmp_path / "x.png").exists()


def test_arguments_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (
        ["--tokens", "0"],
        ["--tokens", "many"],
        ["--seed", "-1"],
        ["--device", "tpu"],
        ["--fast"],
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(options)
        assert exit_info.value.code == 2
        assert options[0] in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "no" / "x.png")]) == 2
    assert "expected a path in an existing directory" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda", "--out", str(tmp_path / "x.png")]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written(
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x.png").mkdir()
    assert run_step(monkeypatch, kda_steps, texts, tmp_path, plotted=True) == 2
    assert "x.png: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "user"), [("rich", "report"), ("matplotlib", "plot")])
def test_a_missing_extra_is_named(
    module: str, user: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cula.demo as package

    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"cula.demo.{user}")
    monkeypatch.delattr(package, user)
    assert main([]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"cula demo: the demo needs {module}, which is not installed: pip install {module}\n"
    )


def test_default_files_exist_in_a_checkout_and_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(path.stat().st_size > 0 for path in data.default_files())
    package = tmp_path / "site-packages" / "cula"
    (package / "demo").mkdir(parents=True)
    (package / "varlen.py").write_text("x = 1\n")
    (package / "empty.py").touch()
    monkeypatch.setattr(data, "_PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    assert data.default_files() == [package / "varlen.py"]


def test_bytes_are_shared_evenly() -> None:
    assert data.share([10, 1000, 1000], 600) == [10, 295, 295]
    assert data.share([5, 5], 100) == [5, 5]
    assert data.share([9, 9, 9], 1) == [1, 1, 1]
    rng = random.Random(0)
    for _ in range(100):
        lengths = [rng.randint(1, 50) for _ in range(rng.randint(1, 6))]
        budget = rng.randint(len(lengths), 200)
        parts = data.share(lengths, budget)
        assert all(1 <= part <= length for part, length in zip(parts, lengths))
        assert sum(parts) == min(budget, sum(lengths))


def test_loading_cuts_and_finds_companions(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)))
    (tmp_path / "b").write_bytes(b"xyz")
    both = data.load([tmp_path / "a", tmp_path / "b"], 100)
    assert [len(d) for d in both.documents] == [97, 3] and both.companions == ()
    assert both.stream(100).tolist() == [*range(97), *b"xyz"]
    alone = data.load([tmp_path / "b"], 100)
    assert alone.stream(100).tolist() == [*b"xyz"] * 10 + [*b"xy"]
    assert len(alone.packable(100)) >= 2 and alone.packable(100)[0][0] == "b"


def test_projections_are_fixed_and_of_unit_length() -> None:
    text = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(0))
    same, other = data.Projections(3), data.Projections(4)
    for make in ("embed", "blend"):
        vectors = getattr(same, make)(text, "k", 2, 16)
        assert vectors.shape == (2, 7, 2, 16)
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(2, 7, 2))
        assert torch.equal(vectors, getattr(data.Projections(3), make)(text, "k", 2, 16))
        assert not torch.equal(vectors, getattr(other, make)(text, "k", 2, 16))
        assert not torch.equal(vectors, getattr(same, make)(text, "v", 2, 16))
    # Only the last three bytes matter.
    changed = text.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 256
    moved = (same.blend(text, "k", 2, 16) - same.blend(changed, "k", 2, 16)).abs().amax((0, 2, 3))
    assert (moved[:3] > 1e-3).all() and (moved[3:] == 0).all()


def test_a_memory_task_remembers_the_last_continuation() -> None:
    text = torch.tensor(list(b"abcXabcYabcZ"))
    task = memory.task_of(text)
    stored = {int(t) + 1: chr(int(task.stored[t])) for t in task.seen.nonzero().flatten()}
    assert stored == {7: "X", 11: "Y"}
    assert task.score(task.stored) == (1.0, 0.0)
    assert task.score(task.truth) == (0.0, 1.0)
    assert all(map(math.isnan, memory.task_of(text[:5]).score(torch.zeros(4))))
    assert memory.task_of(text[:5]).curve("x", "delta", torch.zeros(4)).positions == []


def test_context_keys_tell_contexts_apart() -> None:
    keys = memory.context_keys(torch.tensor(list(b"abcabcabd")), data.Projections(0))
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(9, memory.HEADS))
    alike = torch.einsum("shk,thk->hst", keys, keys).amin(0)
    assert torch.equal(keys[4], keys[7]) and torch.equal(keys[3], keys[6])
    assert alike[4, 7] > 0.999 and alike[3, 4] < 0.5 and alike[5, 3] < 0.5


def test_pieces_cover_the_text_raggedly() -> None:
    assert kda_steps.ragged(1) == [0, 1]
    assert kda_steps.ragged(200) == [0, 1, 64, 129, 146, 200]


def test_checks_and_rows() -> None:
    assert Check("x", 1, 1).ok and not Check("x", 1.1, 1).ok
    assert Check("x", 1, 1, at_least=True).ok and not Check("x", 0.9, 1, at_least=True).ok
    assert not Check("x", math.nan, 1).ok and not Check("x", math.nan, 1, at_least=True).ok
    assert not Row("op", "what").checked and Row("op", "what").ok
    assert not Row("op", "what", failure="broke").ok
    assert not Row("op", "what", error=Check("error", 0, 1), checks=(Check("x", 2, 1),)).ok


def test_a_narrow_terminal_still_shows_what_failed() -> None:
    row = Row("op", "what", checks=(Check("fine", 1, 2), Check("bad", 3, 2)), note="a note")
    for width, words in ((160, ("fine", "bad", "a note", "FAIL")), (80, ("bad", "a note", "FAIL"))):
        out = Console(width=width, file=io.StringIO())
        out.print(report.table([row], width))
        text = out.file.getvalue()
        assert [word in text for word in ("fine", "bad", "a note", "FAIL")] == [
            word in words for word in ("fine", "bad", "a note", "FAIL")
        ]


def test_relative_rmse() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_rmse(want, want) == 0
    assert relative_rmse(want * 1.5, want) == pytest.approx(0.5)
    assert relative_rmse(torch.ones(2), torch.zeros(2)) == 1
    assert math.isnan(relative_rmse(torch.tensor([math.nan, 4.0]), want))
    assert relative_rmse(torch.ones(0), torch.ones(0)) == 0
    with pytest.raises(ValueError, match="expected shape"):
        relative_rmse(torch.ones(3), want)


def test_bounds_fit_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = runtime.machine("cpu")
    assert (cpu.dtype, cpu.bound, cpu.pair_bound) == (torch.float32, 1e-5, 2e-5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = runtime.machine("auto")
    assert (gpu.device.type, gpu.dtype, gpu.bound) == ("cuda", torch.bfloat16, 5e-3)


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), runtime.single_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_importing_the_demo_needs_no_extra() -> None:
    source = Path(importlib.import_module("cula.demo").__file__).read_text()
    top = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not any(name in line for line in top for name in ("torch", "rich", "matplotlib"))
