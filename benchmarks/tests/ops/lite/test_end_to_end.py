"""Whole denoising steps: the study on a CPU, what it replays, its rows, its table, its plot and its command."""

from __future__ import annotations

import copy
import json
import os
import re
import types
from importlib.util import find_spec

import pytest
import torch

from benchmarks import tables
from benchmarks.harness import results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.checks import SEED
from benchmarks.ops.lite import (
    end_to_end,
    end_to_end_plot,
    end_to_end_rows,
    end_to_end_study,
    internals,
)
from benchmarks.ops.lite.end_to_end_study import Replayed, Stack, Study, Variant
from benchmarks.ops.lite.internals import replay
from benchmarks.ops.lite.workloads import Shape, structured
from benchmarks.report import sections
from liteattention_sm89 import LiteAttention

needs_diffusers = pytest.mark.skipif(
    not find_spec("diffusers") and not os.environ.get("CI"), reason="needs diffusers"
)
(MODEL,), GRID = end_to_end_study.SMALL_MODELS, (2, 8, 16)
SHAPE = Shape(1, GRID, MODEL.heads, MODEL.head_dim)
STEPS = 3
PLACE = {
    "model": "wan", "resolution": "480p", "tokens": 32760, "heads": 12, "head_dim": 128, "ffn": 8960, "layers": 30,
    "blocks": 2, "steps": 2, "peak_gib": 5.5,
}  # fmt: skip
DENSE = {"target": None, "threshold": None, "density_by_step": [1.0, 1.0], "l1_by_step": None}


def times(step: float, blocks: float, attention: float) -> dict:
    return {
        "step_ms": step, "p20_ms": step, "p80_ms": step, "total_ms": 2 * step, "blocks_ms": blocks,
        "attention_ms": attention, "ms_by_step": [step, step],
    }  # fmt: skip


@pytest.fixture
def result(first_call_result):
    """Two rows: 100 ms of dense attention by cuDNN, and 60 ms with lists."""
    rows = [
        PLACE | DENSE | {"provider": "torch_cudnn", "kernel": "cuDNN"} | times(100.0, 90.0, 50.0),
        PLACE | times(60.0, 50.0, 10.0) | {
            "provider": "lite", "kernel": "sm90", "target": 0.01, "threshold": -6.25,
            "density_by_step": [1.0, 0.5], "l1_by_step": [0.002, 0.011],
        },
    ]  # fmt: skip
    more = {"title": "Whole steps", "method": {"steps": 2}, "skipped": [], "rows": rows}
    origin = first_call_result["provenance"]
    return {**first_call_result, **more, "provenance": {**origin, "clocks_before": {}}}


def data(block: int):
    return structured(SHAPE, STEPS, "cpu", SEED + block)


@pytest.fixture(scope="module")
def study():
    said: list[str] = []
    found = Study("cpu", steps=STEPS, tried=3, text_tokens=24, targets=(0.05,), say=said.append)
    with torch.inference_mode():
        found.run(MODEL, "tiny", GRID)
    assert "threshold" in said[0] and f"step {STEPS} of {STEPS}" in said[-1]
    return found


@needs_diffusers
def test_a_row_per_variant(study):
    content = {
        "title": "", "provenance": {}, "method": study.method(), "notes": [], "skipped": study.skipped,
        "rows": study.rows,
    }  # fmt: skip
    end_to_end_rows.validate(content)
    assert [(r["provider"], r["kernel"]) for r in study.rows] == [
        ("torch_default", "torch"),
        ("lite_dense", "reference"),
        ("lite", "reference"),
    ]
    for row in study.rows:
        assert (row["tokens"], row["blocks"], row["layers"], row["steps"]) == (256, 2, 3, STEPS)
        assert 0 < row["attention_ms"] < row["blocks_ms"] < row["step_ms"]
        assert row["total_ms"] == pytest.approx(sum(row["ms_by_step"]), rel=1e-4)
    listed = study.rows[-1]
    assert listed["density_by_step"][0] == 1 > listed["density_by_step"][-1]
    assert listed["l1_by_step"][0] < 1e-2 < max(listed["l1_by_step"]) < 0.1


@needs_diffusers
def test_every_block_has_lists_of_its_own_on_the_replayed_inputs(study):
    """The shares of tiles and the errors are those of modules that see nothing but the workload."""
    row = study.rows[-1]
    tracks = [
        replay(list(data(block)), {"": LiteAttention(threshold=row["threshold"])})[""]
        for block in range(2)
    ]
    for step, share in enumerate(row["density_by_step"]):
        shares = [track.density[step] for track in tracks]
        assert share == pytest.approx(sum(shares) / 2, rel=1e-4)
    assert tracks[0].last.l1 != tracks[1].last.l1
    worst = max(track.last.l1 for track in tracks)
    assert row["l1_by_step"][-1] == pytest.approx(worst, rel=0.1)


@needs_diffusers
def test_the_rest_of_the_model_is_its_own():
    """With the q, k and v that a block computed anyway, the model's output is that of the model as it was."""
    built = end_to_end_study.build(MODEL, 2, "cpu").float()
    stack = Stack.of(MODEL, GRID, 2, 24, "cpu")
    stack.built.float()
    arguments = {k: v.float() if hasattr(v, "float") else v for k, v in stack.arguments.items()}
    seen = []
    for block in stack.built.blocks:

        def attend(func, given):
            seen.append(given["query"].shape)
            return func(**given)

        block.attn1.processor.attend = attend
    when = torch.full((1,), 500)
    with torch.inference_mode():
        got, want = (m(timestep=when, **arguments)[0] for m in (stack.built, built))
    assert torch.equal(got, want) and seen == [(1, 4, 256, 32)] * 2


@needs_diffusers
def test_weights_have_the_dtypes_of_a_loaded_model():
    dtypes = {n: p.dtype for n, p in end_to_end_study.build(MODEL, 1, "cpu").named_parameters()}
    assert dtypes["blocks.0.attn1.to_q.weight"] == dtypes["proj_out.weight"] == torch.bfloat16
    assert dtypes["blocks.0.norm2.weight"] == dtypes["scale_shift_table"] == torch.float32


def test_attention_gets_the_replayed_inputs_and_nothing_else_does():
    step = next(iter(data(0)))
    marks = iter((1.0, 2.0))

    def processor(attn, hidden_states, *_):
        double = hidden_states + hidden_states
        q, k, v = (torch.zeros(1, 4, 256, 32, dtype=torch.bfloat16) for _ in range(3))
        attention = torch.nn.functional.scaled_dot_product_attention
        return double, attention(q, k, v, scale=0.5), attention(query=q, key=k, value=v)

    replayed = Replayed(processor, lambda: next(marks))
    replayed.inputs, replayed.keep = step, True
    replayed.mark = lambda: 0.0
    double, first, second = replayed(None, torch.ones(2))
    assert double.tolist() == [2, 2]
    q, k, v = (x.transpose(1, 2) for x in step)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
    assert torch.equal(first, exact) and not torch.equal(second, exact)
    assert replayed.out is second and replayed.marks == (0.0, 0.0)
    replayed.inputs = tuple(x[:, :128] for x in step)
    with pytest.raises(RuntimeError, match="expected queries"):
        replayed(None, torch.ones(2))


@needs_diffusers
def test_a_kernel_is_asked_for_while_it_runs(monkeypatch):
    """What `auto` chooses anyway runs once."""
    seen = []

    def kernel_of(q):
        from liteattention_sm89 import choice

        seen.append(choice._asked)
        return choice._asked or "sm89"

    monkeypatch.setattr(end_to_end_study, "kernel_of", kernel_of)
    study = Study("cpu", providers=("lite_dense",), kernels=("auto", "sm89", "sm90"))
    assert study._variants(SHAPE, "x") == [
        Variant("lite_dense", "sm89", None),
        Variant("lite_dense", "sm90", "sm90"),
    ]
    assert seen == [None, "sm89", "sm90"]


@needs_diffusers
def test_a_wrong_dense_kernel_and_a_backend_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(end_to_end_study, "DENSE_LIMIT", 1e-9)
    study = Study("cpu", 1, 1, text_tokens=24, providers=("torch", "lite_dense"))
    with torch.inference_mode(), pytest.raises(CheckFailed, match="reference: dense attention has"):
        study.run(MODEL, "tiny", GRID)
    assert study.rows == []
    memory = Stack.memory

    def refused(self, variant, inputs):
        if variant.provider == "torch_default":
            raise RuntimeError("No available kernel.\nMore.")
        return memory(self, variant, inputs)

    monkeypatch.setattr(Stack, "memory", refused)
    with torch.inference_mode():
        study.run(MODEL, "tiny", GRID)
    assert [r["provider"] for r in study.rows] == ["lite_dense"]
    (left,) = study.skipped
    assert left["provider"] == "torch_default" and left["reason"] == "No available kernel."
    assert end_to_end_rows.left_out({"skipped": study.skipped}) == [
        "toy tiny, torch_default: No available kernel.."
    ]


@needs_diffusers
def test_a_gpu_is_timed_by_events_and_its_memory_counts_weights_and_lists(monkeypatch):
    """A stack that takes the CPU for a GPU whose every event comes a millisecond after the one before."""
    from torch.nn.attention import SDPBackend

    class Event:
        made = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.made += 1
            self.ms = float(Event.made)

        def elapsed_time(self, end):
            return end.ms - self.ms

    allocated, waits = [7 * 2**30], []
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.append(Event.made))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: allocated[0])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 10 * 2**30)
    stack = Stack.of(MODEL, GRID, 2, 24, "cpu")
    stack.device, stack.backend = "cuda", SDPBackend.MATH
    listed, inputs = Variant("lite", "reference", None, 0.01, -4.0), [next(data(b)) for b in (0, 1)]
    with torch.inference_mode():
        stack.add(listed)
        times, outs = stack.step(listed, inputs, 0.5)
        # Of the step, its blocks, and two pairs around attentions: start 1, first 2, 3 to 6, last 7, end 8.
        assert times == {"step_ms": 7, "blocks_ms": 5, "attention_ms": 2} and waits == [0, 8]
        assert [out.shape for out in outs] == [(1, 4, 256, 32)] * 2
        weights = [*stack.built.parameters(), *stack.built.buffers()]
        # Two blocks, the list that was read and the one for the next step, a word for each of 4 x 2 query tiles.
        size = sum(x.numel() * x.element_size() for x in weights) + 2 * 2 * 4 * 2 * 4
        assert stack.memory(listed, inputs) == pytest.approx(3 + size / 2**30, rel=1e-12)
        assert all(replayed.out is None for replayed in stack.replays)


def test_the_kernel_that_serves_is_named_by_its_package(monkeypatch):
    from liteattention_sm89 import choice

    def launcher(name, q, block_n, keys, packed):
        assert (name, block_n, keys, packed) == ("forward", 64, 4096, False)
        return types.FunctionType((lambda: None).__code__, {"__name__": served[choice._asked]})

    served = {None: "liteattention_sm89.launch", "sm90": "liteattention_sm90.launch"}
    monkeypatch.setattr(internals, "launcher", launcher)
    q = types.SimpleNamespace(is_cuda=True, shape=(1, 4096, 2, 128))
    with internals.asked(None):
        assert internals.kernel_of(q) == "sm89"
    with internals.asked("sm90"):
        assert internals.kernel_of(q) == "sm90"
    assert internals.kernel_of(torch.ones(1, 64, 1, 8)) == "reference"
    with internals.forced("sm90"), internals.asked(None):
        assert internals.kernel_of(q) == "sm90"


def test_sizes_are_those_of_the_published_models():
    small, large = end_to_end_study.MODELS
    assert (small.heads * small.head_dim, small.ffn, small.layers) == (1536, 8960, 30)
    assert (large.heads * large.head_dim, large.ffn, large.layers) == (5120, 13824, 40)
    tokens = {name: Shape(1, grid, 1, 1).tokens for name, grid in end_to_end_study.GRIDS.items()}
    assert tokens == {"480p": 32760, "720p": 75600}


def test_distance_is_relative():
    exact = torch.tensor([1.0, -3.0]).bfloat16()
    assert end_to_end_study.distance(exact, exact) == 0
    assert end_to_end_study.distance(torch.tensor([1.5, -3.0]), exact) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provider": "flash"}, r"rows\[1\].provider: expected one of"),
        ({"p20_ms": 61.0}, "expected 0 < p20_ms <= step_ms <= p80_ms"),
        ({"blocks": 31}, "blocks: expected 1 to 30, got 31"),
        ({"ms_by_step": [60.0]}, "ms_by_step: expected 2 steps, got 1"),
        ({"density_by_step": [1.0, 0.0]}, "density_by_step: expected shares above 0"),
        ({"threshold": None}, "threshold: expected one where there are lists"),
        ({"kernel": None}, "kernel: expected str"),
    ],
)
def test_wrong_rows_are_refused(result, change, message, tmp_path):
    result["rows"][1] |= change
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=message):
        end_to_end_rows.load(path)


def test_rows_that_appear_twice_are_refused(result):
    result["rows"].append(result["rows"][1])
    with pytest.raises(ValueError, match="appears twice"):
        end_to_end_rows.validate(result)


def test_the_table_compares_with_cudnn_and_names_what_is_extrapolated(result, tmp_path):
    path = results.result_path("lite_end_to_end", "toy-100", tmp_path)
    results.write(result, path)
    text = tables.rendered("<!-- bench:lite_end_to_end:toy-100 -->\n<!-- /bench -->\n", tmp_path)
    header, _, first, second = text.splitlines()[2:6]
    assert header.count("(extrapolated)") == 2
    # 10 ms outside of the blocks, and 45 or 25 ms for each of 30 layers, twice.
    assert first.endswith("| 100.0 (100.0-100.0) | 50.0 | 0.20 | 1.00 | 5.50 | 2.7 | 1.00 |")
    assert (
        "| wan 480p | 32,760 | 2 of 30 | lists, 1%, sm90 | -6.25 | 75.0%, 50.0% | 1.10% |" in second
    )
    assert second.endswith("| 60.0 (60.0-60.0) | 10.0 | 0.12 | 1.67 | 5.50 | 1.5 | 1.79 |")
    assert "Medians over 2 steps" in text and "NVIDIA Toy 100" in text
    with pytest.raises(ValueError, match="expected no table="):
        end_to_end_rows.region(path, "steps", tmp_path)
    absent = tables.rendered("<!-- bench:lite_end_to_end:h200 -->\n<!-- /bench -->\n", tmp_path)
    assert "Not measured on h200." in absent
    assert "## Whole steps" in tables.card_page("toy-100", tmp_path)


def test_nothing_is_compared_without_cudnn(result):
    result["rows"] = result["rows"][1:]
    result["rows"][0] |= {"peak_gib": None, "target": None}
    (line,) = end_to_end_rows.table(result)[1]
    assert line[3] == "lists at -6.25, sm90" and line[10] == line[11] == line[13] == "-"


def test_joining_keeps_other_rows_of_the_same_commit(result):
    later = copy.deepcopy(result)
    later["rows"] = [result["rows"][1] | {"kernel": "sm89"}, result["rows"][1] | {"step_ms": 60.0}]
    later["provenance"]["date"] = "2030-01-01T00:00:00Z"
    whole = end_to_end_rows.joined(result, later)
    end_to_end_rows.validate(whole)
    assert [r["kernel"] for r in whole["rows"]] == ["cuDNN", "sm89", "sm90"]
    later["provenance"]["commit"] = "another"
    with pytest.raises(ValueError, match="commit: the results to join have"):
        end_to_end_rows.joined(result, later)


def test_a_result_is_drawn_and_the_report_has_it(result, tmp_path):
    path = results.result_path("lite_end_to_end", "toy-100", tmp_path)
    results.write(result, path)
    assert end_to_end_plot.main([str(path)]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    section = sections.read(path)
    (plot,), (table,) = section.plots, section.tables
    assert plot.caption == "wan 480p: 32,760 tokens, 2 of 30 blocks" and len(table.lines) == 2
    words = set(re.findall(r">([^<>]+)</text>", plot.svg))
    assert {"dense, cuDNN", "lists, 1%, sm90", "share of tiles"} <= words
    with pytest.raises(ValueError, match="expected rows"):
        end_to_end_plot.draw({**result, "rows": []}, tmp_path / "x.png")


@needs_diffusers
def test_the_command_writes_a_file_and_joins(tmp_path, capsys):
    path = tmp_path / "x" / "lite_end_to_end.json"
    few = ["--device", "cpu", "--steps", "2", "--blocks", "1", "--tried", "2", "--json", str(path)]
    assert end_to_end.main([*few, "--providers", "lite_dense"]) == 0
    printed = capsys.readouterr().out
    assert "toy tiny: step 2 of 2" in printed and f"wrote {path}" in printed
    assert end_to_end.main([*few, "--providers", "lite", "--targets", "0.1", "--join"]) == 0
    found = end_to_end_rows.load(path)
    assert [(r["provider"], r["target"]) for r in found["rows"]] == [
        ("lite_dense", None),
        ("lite", 0.1),
    ]
    # Without the dense row of the same run there is nothing to compare with.
    assert found["rows"][1]["l1_by_step"] is None
    assert found["provenance"]["gpu"] == "cpu" and "diffusers" in found["provenance"]["versions"]
    assert end_to_end.main([*few, "--limit", "-1"]) == 0
    assert "skipped toy tiny, all: not started after -1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--blocks", "4"], "blocks: expected 1 to 3, got 4"),
        (["--targets", "1.5"], "targets: expected relative errors"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(end_to_end, "find_spec", lambda name: name)
    assert end_to_end.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_diffusers_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(end_to_end, "find_spec", lambda name: None)
    assert end_to_end.main(["--device", "cpu"]) == 2
    assert "needs diffusers" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--join"], ["--steps", "0"], ["--tried", "0"]])
def test_impossible_options(wrong):
    with pytest.raises(SystemExit):
        end_to_end.main(wrong)


def test_measured_results_are_whole():
    for path in results.RESULTS.glob("*/lite_end_to_end.json"):
        found = end_to_end_rows.load(path)
        places = {end_to_end_rows.setting_of(r) for r in found["rows"]}
        assert places == {
            (m.name, g) for m in end_to_end_study.MODELS for g in end_to_end_study.GRIDS
        }
        assert path.with_suffix(".png").exists()
