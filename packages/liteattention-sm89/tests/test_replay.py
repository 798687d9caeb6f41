"""Recorded calls replayed: trajectories, files, the recorder, and the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import struct

import pytest
import torch
from replay_helpers import inputs, trajectory
from torch import nn

from liteattention_sm89 import LiteAttention, LiteAttentionRunConfig, lite_attention, masks
from liteattention_sm89 import replay as replay_module
from liteattention_sm89.quality import compare
from liteattention_sm89.replay import (
    Capture,
    Recorder,
    calibrated,
    capture,
    load,
    main,
    replay,
    threshold_for,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


# --- replaying -------------------------------------------------------------------------------------------------------


def manual(steps, threshold, refresh=None, **options):
    """(out, read mask, direction) of every step, by the functional call."""
    mask, direction, found = None, 1, []
    for number, (q, k, v) in enumerate(steps):
        if refresh and number % refresh == 0:
            mask, direction = None, 1
        listed = masks.full(len(q), q.shape[2], 3, 5) if mask is None else mask
        out, _, mask = lite_attention(
            q, k, v, listed, threshold=threshold, direction=direction, **options
        )
        found.append((out, listed, direction))
        direction = -direction
    return found


@pytest.mark.parametrize("refresh", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_a_replay_is_what_the_calls_one_by_one_give(refresh, causal):
    steps = trajectory(6)
    modules = {
        "-1": LiteAttention(threshold=-1.0),
        "steps": LiteAttention(
            config=[LiteAttentionRunConfig(t) for t in (-4, -3, -2, -1, -0.5, 0)]
        ),
        "dense": LiteAttention(enable_skipping=False),
    }
    modules["-1"](*steps[-1])  # what a module did before does not count
    tracks = replay(steps, modules, scale=0.4, causal=causal, refresh=refresh, every=2, deep=True)
    want = manual(steps, -1.0, refresh, scale=0.4, causal=causal)
    track = tracks["-1"]
    assert sorted(track.quality) == [1, 3, 5] and len(track.density) == 6
    for number, (out, listed, _) in enumerate(want):
        deep = {"scale": 0.4, "causal": causal, "deep": number == 5}
        (expected,) = compare(*steps[number], [(out, listed)], **deep)
        assert track.density[number] == expected.density
        if number in track.quality:
            assert track.quality[number] == expected
    assert track.density[-1] < 0.9 and track.last is track.quality[5]
    assert torch.equal(track.mask, want[-1][1]) and track.direction == want[-1][2]
    assert track.thresholds == [-1.0] * 6 and track.mean_density == sum(track.density) / 6
    assert track.worst.l1 == max(q.l1 for q in track.quality.values()) > 0
    cycle = [-4, -3, -2, -1, -0.5, 0]
    assert tracks["steps"].thresholds == (cycle[:3] * 2 if refresh else cycle)
    dense = tracks["dense"]
    assert dense.thresholds == [None] * 6 and dense.mask is None and dense.density == [1.0] * 6
    assert dense.last.l1 < 1e-6 < 1e-3 < track.last.l1


def test_a_timer_is_given_every_step_as_it_ran():
    steps, outs = trajectory(4), []

    def timer(call):
        outs.append(call())
        return float(len(outs))

    modules = {"-1": LiteAttention(threshold=-1.0), "dense": LiteAttention(enable_skipping=False)}
    tracks = replay(steps, modules, timer=timer)
    assert tracks["-1"].times == [1.0, 3.0, 5.0, 7.0]
    assert tracks["dense"].times == [2.0, 4.0, 6.0, 8.0]
    after = [mask for _, mask, _ in manual(steps, -1.0)][1:]
    for (out, _, written), (want, *_), mask in zip(outs[::2], manual(steps, -1.0), after):
        assert torch.equal(out, want) and torch.equal(written, mask)
    for (out, _, written), step in zip(outs[1::2], steps):
        assert written is None and torch.equal(out, lite_attention(*step, threshold=None)[0])


def test_a_replay_moves_the_steps_and_refuses_what_it_cannot_do():
    steps = trajectory(2)
    moved = replay([tuple(x.double() for x in step) for step in steps], {}, device="cpu")
    assert moved == {}
    for wrong, error in (({"every": 0}, ValueError), ({"refresh": 0}, ValueError)):
        with pytest.raises(error, match=next(iter(wrong))):
            replay(steps, {}, **wrong)
    with pytest.raises(TypeError, match="every"):
        replay(steps, {}, every=1.0)
    for function in (
        lambda: replay([], {}),
        lambda: threshold_for([], 0.1),
        lambda: calibrated([], 0.1),
    ):
        with pytest.raises(ValueError, match="steps: expected at least one, got none"):
            function()


def test_the_threshold_for_a_target_is_that_of_the_worst_step():
    steps = trajectory(3, heads=4, queries=512)
    threshold = threshold_for(steps, 0.05, max_steps=20)
    assert -20 < threshold < 0

    def worst(t):
        track = replay(steps, {"": LiteAttention(threshold=t)})[""]
        return track.worst.l1

    assert 0.045 <= worst(threshold) <= 0.055
    assert worst(threshold + 0.5) > 0.055 and worst(threshold - 0.5) < 0.045
    q, k, v = steps[-1]
    harmless = (q, k, torch.ones_like(v))  # whichever tiles are left out
    assert threshold_for([*steps, harmless], 0.05, max_steps=20) == threshold
    assert threshold_for(steps, 10.0) == 0.0
    assert threshold_for(steps, 0.05, low=-4.0, high=-3.0) == -3.0


def test_not_a_number_is_no_small_error():
    steps = trajectory(2)
    steps[1][2][:] = math.nan
    with pytest.warns(RuntimeWarning, match="no threshold"):
        assert threshold_for(steps, 0.1, max_steps=3) == -20.0


def test_calibrated_thresholds_are_those_of_the_package():
    steps = trajectory(3, heads=4)
    found = calibrated(steps, 0.05, max_steps=8)
    module = LiteAttention(config=replay_module.LiteAttentionCalibConfig(0.05, max_steps=8))
    for step in steps:
        module(*step)
    assert [config.threshold for config in found] == module.found_thresholds and len(found) == 3


# --- files -----------------------------------------------------------------------------------------------------------


def same_steps(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for s, t in zip(a, b) for x, y in zip(s, t))


def write_safetensors(path, tensors, metadata=None, pad=0):
    """The format as its description has it; `pad` shifts the data off its alignment."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
    header, data = {}, b""
    for name, x in tensors.items():
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        data += raw
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def steps():
    return trajectory(3, queries=40, dim=8, heads_kv=1, dtype=torch.bfloat16)


def columns(steps):
    return {name: [step[i] for step in steps] for i, name in enumerate("qkv")}


@pytest.mark.parametrize(
    "form", ["saved", "lists", "stacked", "one", "safe", "safe-odd", "safe-steps"]
)
def test_files_hold_what_was_written(form, steps, tmp_path):
    path = tmp_path / ("x.safetensors" if form.startswith("safe-") or form == "safe" else "x.pt")
    lists = columns(steps)
    stacked = {name: torch.stack(column) for name, column in lists.items()}
    scale, causal = 0.25, True
    if form == "saved":
        Capture(steps, scale, causal).save(path)
    elif form == "lists":
        torch.save({**lists, "scale": scale, "causal": causal, "prompt": "a cat"}, path)
    elif form == "stacked":
        torch.save(stacked, path)
        scale, causal = None, False
    elif form == "one":
        steps, scale, causal = steps[:1], None, False
        torch.save({name: column[0] for name, column in lists.items()}, path)
    elif form == "safe-steps":
        split = {f"{n}.{i}": x for n, column in lists.items() for i, x in enumerate(column)}
        write_safetensors(path, dict(reversed(split.items())), {"scale": "0.25", "causal": "True"})
    else:
        extra = {"timestep": torch.arange(3)}
        write_safetensors(path, {**extra, **stacked}, pad=form == "safe-odd")
        scale, causal = None, False
    found = load(path)
    assert same_steps(found.steps, steps)
    assert (found.scale, found.causal) == (scale, causal)
    assert load(str(path)).steps[0][0].dtype == torch.bfloat16


def bad(name, content=None, message="", **changed):
    return pytest.param(name, content, changed, message, id=f"{name} {message}"[:50])


BAD_FILES = [
    bad("x.bin", b"", "a file ending in .pt, .pth, .safetensors"),
    bad("x.pt", b"not a zip file", "expected a file of torch.save"),
    bad("x.pt", b"", "expected a file of torch.save"),
    bad("x.pt", [1, 2], "expected a dict with q, k and v, got list"),
    bad("x.pt", {"q": 1}, "got no k, v"),
    bad("x.pt", {}, "q: expected a list of tensors", q="text"),
    bad("x.pt", {}, "v: expected a list of tensors", v=[1.0]),
    bad("x.pt", {}, "as many steps of q, k and v, got 1, 3, 3", q=[torch.zeros(1, 40, 2, 8)]),
    bad("x.pt", {}, "at least one step", q=[], k=[], v=[]),
    bad("x.pt", {}, r"step 0: q, k, v: expected \[B, S, H, D\]", q=[torch.zeros(40, 2, 8).bfloat16()] * 3),
    bad("x.pt", {}, "one floating-point dtype, got torch.float32, torch.bfloat16", q=torch.zeros(3, 1, 40, 2, 8)),
    bad("x.pt", {}, "one floating-point dtype", **{n: torch.ones(3, 1, 4, 2, 8, dtype=torch.int64) for n in "qkv"}),
    bad("x.pt", {}, r"all steps alike, got q .* in step 2", longer=True),
    bad("x.pt", {}, "a number or None for scale, got 'half'", scale="half"),
    bad("x.pt", {}, "a number or None for scale, got True", scale=True),
    bad("x.pt", {}, "a bool for causal, got 1", causal=1),
    bad("x.safetensors", b"", "expected a safetensors file"),
    bad("x.safetensors", struct.pack("<Q", 99) + b"{}", "the header is longer than the file"),
    bad("x.safetensors", struct.pack("<Q", 2) + b"[]", "expected a safetensors file"),
    bad("x.safetensors", struct.pack("<Q", 2) + b"{]", "expected a safetensors file"),
    bad("x.safetensors", struct.pack("<Q", 2) + b"{}", "got no q, k, v"),
    bad("x.safetensors", {"q": "I64"}, "q is I64, not one of BF16, F16, F32, F64"),
    bad("x.safetensors", {"q": [5, 9]}, "q has a size that does not fit its shape"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "changed", "message"), BAD_FILES)
def test_files_that_hold_something_else(name, content, changed, message, steps, tmp_path, capsys):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".pt":
        if changed.pop("longer", False):
            steps[2] = inputs(queries=48, dim=8, heads_kv=1, dtype=torch.bfloat16)
        torch.save(content if content else {**columns(steps), **changed}, path)
    else:
        (wrong,) = content.values()
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        entry |= {"dtype": wrong} if isinstance(wrong, str) else {"shape": wrong}
        text = json.dumps({"q": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(error.value).startswith(str(path))
    assert main([str(path), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}")


def test_files_that_are_not_there(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load(tmp_path / "x.pt")
    assert main([str(tmp_path / "x.pt")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_only_steps_that_can_be_replayed_are_saved(steps, tmp_path):
    for wrong in ([], [steps[0], inputs(queries=20, dim=8)]):
        with pytest.raises(ValueError, match="steps: expected"):
            Capture(wrong).save(tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


# --- recording -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = LiteAttention(threshold=-1.0)

    def forward(self, q, k, v, **options):
        return self.attention(q, key=k, value=v, scale=0.5, **options)


def test_a_recorder_keeps_copies_of_what_its_module_was_called_with(steps, tmp_path):
    model, plain = Model(), Model()
    held = [tuple(x.clone() for x in step) for step in steps]
    model(*steps[0])
    model.attention.reset_skip_state()
    with capture(model.attention, tmp_path / "x.pt") as recorder:
        for step, other in zip(steps, held):
            assert torch.equal(model(*step), plain(*other))
            step[0].zero_()
        assert len(recorder.steps) == 3
    model(*steps[0])
    assert len(recorder.steps) == 3
    assert same_steps(recorder.steps, held)
    found = load(tmp_path / "x.pt")
    assert same_steps(found.steps, held) and (found.scale, found.causal) == (0.5, False)


def test_a_recorder_takes_one_branch_and_so_many_calls(steps):
    model = Model()
    q, k, v = (x.requires_grad_() for x in steps[0])
    other = model.attention.state.fork()
    with Recorder(model.attention) as own, Recorder(model.attention, other, limit=1) as branch:
        model(q, k, v)
        model(q, k, v, state=other)
        model(*steps[1])
        model(*steps[2], state=other)
    assert same_steps(own.steps, steps[:2]) and same_steps(branch.steps, steps[:1])
    assert not any(x.requires_grad for x in own.steps[0])


def test_a_recording_that_cannot_be_replayed_is_refused(steps, tmp_path):
    attention = LiteAttention()
    with pytest.raises(TypeError, match="module: expected a LiteAttention, got Model"):
        Recorder(Model())
    with pytest.raises(TypeError, match="state: expected a SkipState"):
        Recorder(attention, state=1)
    with pytest.raises(ValueError, match="limit: expected at least 1"):
        Recorder(attention, limit=0)
    offsets = torch.tensor([0, 10, 40], dtype=torch.int32)
    packed = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 30,
        "max_seqlen_k": 30,
    }
    with pytest.raises(ValueError, match="packed calls cannot be recorded"):
        with capture(attention, tmp_path / "x.pt"):
            attention(*steps[0], **packed)
    with pytest.raises(
        ValueError, match="expected .*None, False.* as in the first call, got .*True"
    ):
        with capture(attention, tmp_path / "x.pt"):
            attention(*steps[0])
            attention(*steps[1], causal=True)
    with pytest.raises(ValueError, match="at least one step"):
        with capture(attention, tmp_path / "x.pt"):
            pass
    assert not list(tmp_path.iterdir())
    with Recorder(attention) as recorder, pytest.raises(RuntimeError, match="recording already"):
        recorder.__enter__()
    attention(*steps[0], **packed)
    assert recorder.capture() == Capture([], None, False)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    Capture(trajectory(3, heads=4, queries=256)).save(tmp_path / "x.pt")
    return tmp_path / "x.pt"


def table(text):
    """The header, and the rest by threshold."""
    first, header, *lines, note = text.splitlines()
    assert note.startswith("density: mean over the steps")
    return first, header.split(), {line.split()[0]: line.split()[1:] for line in lines}


def test_the_command_prints_what_a_replay_measures(file, capsys):
    arguments = ["--threshold", "-0.5", "-3", "--target", "0.05", "--device", "cpu"]
    assert main([str(file), *arguments]) == 0
    first, header, lines = table(capsys.readouterr().out)
    assert first == "3 steps of q [1, 256, 4, 32], k [1, 256, 4, 32], float32"
    assert header == ["threshold", "density", "last", "L1", "worst", "L2", "dropped", "p99"]
    steps = load(file).steps
    target = threshold_for(steps, 0.05)
    assert list(lines) == ["-0.5", "-3", f"{target:.2f}", "dense"]
    modules = {str(t): LiteAttention(threshold=t) for t in (-0.5, -3, round(target, 12))}
    for track, cells in zip(replay(steps, modules).values(), lines.values()):
        last = dataclasses.astuple(track.last)[:6]
        want = [f"{track.mean_density:.4f}", f"{last[0]:.4f}", f"{last[1]:.3%}"]
        want += [f"{track.worst.l1:.3%}", *(f"{x:.3%}" for x in (last[2], *last[4:]))]
        assert cells == want
    assert lines["dense"][:3] == ["1.0000", "1.0000", "0.000%"]
    assert float(lines["-0.5"][0]) < float(lines["-3"][0]) <= 1


def test_the_command_attends_as_the_file_or_the_arguments_say(tmp_path, capsys):
    steps = trajectory(2, queries=256)
    Capture(steps, 0.7, True).save(tmp_path / "a.pt")
    Capture(steps).save(tmp_path / "b.pt")
    given = ["--threshold", "-1", "--device", "cpu", "--refresh", "1"]
    assert main([str(tmp_path / "a.pt"), *given]) == 0
    first, _, of_file = table(capsys.readouterr().out)
    assert first.endswith("float32, causal")
    assert main([str(tmp_path / "b.pt"), *given, "--scale", "0.7", "--causal"]) == 0
    assert table(capsys.readouterr().out) == (first, _, of_file)
    assert of_file["-1"][0] == "1.0000"
    assert main([str(tmp_path / "b.pt"), *given[:4]]) == 0
    assert table(capsys.readouterr().out)[2] != of_file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threshold", "2"], "threshold: expected log2 units"),
        (["--target", "-1"], "target_error: expected a finite number above 0"),
        (["--refresh", "0"], "refresh: expected at least 1"),
        (["--scale", "nan"], "scale: expected a finite number"),
        (["--device", "abacus"], "device: "),
    ],
)
def test_wrong_arguments_of_the_command(file, arguments, message, capsys):
    assert main([str(file), "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(file, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([str(file), "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_command_times_the_steps_on_a_gpu(cuda, tmp_path, capsys):
    steps = trajectory(2, queries=512, dim=64, dtype=torch.bfloat16)
    Capture(steps).save(tmp_path / "x.pt")
    assert main([str(tmp_path / "x.pt"), "--threshold", "-4"]) == 0
    _, header, lines = table(capsys.readouterr().out)
    assert header[-3:] == ["us/step", "last", "speedup"]
    assert all(float(cells[-3]) > 0 for cells in lines.values()) and lines["dense"][-1] == "1.00"
