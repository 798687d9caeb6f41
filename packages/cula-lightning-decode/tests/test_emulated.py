"""The compiled kernels on the CPU, for their real architectures, under every schedule, with race detection."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from decode_helpers import MODES, clone, exact, keys, possible, rows
from torch import Tensor

from cula_core.compiled.artifacts import Unit
from cula_core.reference import lightning_decode as reference
from cula_emulator import mutation
from cula_emulator.covering import covering_cases
from cula_lightning_decode import build, launch
from cula_lightning_decode.config import STATE_DTYPES, Problem
from cula_lightning_decode.kernels.decode import LightningDecode
from cula_lightning_decode.plan import select
from cula_testing.comparing import same
from cula_testing.compiled import emulated_kernel
from cula_testing.tensors import column

SLOTS = (5, -1, 0, 3)
FACTORS = {
    "mode": MODES,
    "tokens": (1, 2, 3, 4, 8),
    "arch": ("sm_80", "sm_89", "sm_90a", "sm_100a"),
    "dims": ((64, 64), (128, 64), (64, 128), (256, 64)),
    # (H, HV)
    "heads": ((1, 1), (2, 2), (1, 3), (2, 4)),
    # Elements before and after the rows of a fused projection, None for dense tensors.
    "offset": (None, 0, 3, 8),
    "state_dtype": STATE_DTYPES,
    "dtype": ("bfloat16", "float16"),
    "v_first": (False, True),
    "indexed": (False, True),
    # Below 100 `select` takes other tiles.
    "multiprocessors": (132, 78),
}


def label(case: dict) -> str:
    mode, stochastic = case["mode"]
    order = "VK" if case["v_first"] else "KV"
    dims = "x".join(map(str, case["dims"]))
    return f"{case['arch']}-{mode}{'-sr' * stochastic}-{case['state_dtype']}-{dims}-{order}-T{case['tokens']}"


CASES = covering_cases(FACTORS, possible)


class Overlapping(Unit):
    """A kernel that waits for the one before it only where it must, or does not, whatever its architecture can."""

    def make(self) -> tuple:
        config, overlap = self.config
        return LightningDecode(config, overlap), *build.fake_arguments(config.problem)


@pytest.fixture
def run(emulated) -> Callable[..., None]:
    """run(inputs, out, arch, ...) launches one emulated call, as `launch.run` does on a GPU.

    inputs: as of `make_inputs`; "state" is updated in place. `changes` are fields of the emulator's Options.
    """

    def run(
        inputs: dict[str, Tensor],
        out: Tensor | None,
        arch: str,
        *,
        mode: str = "decode",
        state_v_first: bool = False,
        state_indices: Tensor | None = None,
        num_accepted: Tensor | None = None,
        rounding_seed: int | None = None,
        null_slot: int | None = None,
        scale: float | None = None,
        multiprocessors: int = 132,
        overlap: bool | None = None,
        **changes,
    ) -> None:
        q, k, v, state, decay = (inputs.get(name) for name in ("q", "k", "v", "state", "decay"))
        kernel = compiled(
            Problem(
                str(k.dtype).removeprefix("torch."), str(state.dtype).removeprefix("torch."),
                k.shape[3], v.shape[3], k.shape[1], state_v_first, state_indices is not None,
                mode, rounding_seed is not None, null_slot is not None,
            ),
            arch, multiprocessors, overlap,
        )  # fmt: skip
        seed = None if rounding_seed is None else torch.tensor([rounding_seed])
        scale = k.shape[3] ** -0.5 if scale is None else scale
        if mode == "commit":
            q = out = None
        kernel(
            q,
            k,
            v,
            state,
            decay,
            state_indices,
            num_accepted,
            seed,
            out,
            scale,
            null_slot,
            **changes,
        )

    def compiled(problem, arch, multiprocessors, overlap):
        assert problem.illegal() is None
        config = select(problem, arch, multiprocessors)
        unit = launch.unit(config, arch)
        if overlap is not None:  # whatever the architecture can
            unit = Overlapping(unit.module, (config, overlap), arch)
        return emulated_kernel(emulated, unit)

    run.compiled = compiled
    return run


@pytest.fixture
def guarded(emulated) -> Callable[[Tensor], Tensor]:
    """A copy of a tensor; writes beside it fail the test."""
    return lambda tensor: emulated.empty_like(tensor).copy_(tensor)


def fused(inputs: dict[str, Tensor], offset: int) -> dict[str, Tensor]:
    """q, k and v as slices of one projection that starts `offset` elements late, with NaN around and between them."""
    batch, tokens = inputs["q"].shape[:2]
    widths = {name: inputs[name][0, 0].numel() for name in ("q", "k", "v")}
    pitch = sum(widths.values()) + offset + (8 if offset % 8 == 0 else 1)
    whole = torch.full((2 * batch, tokens + 2, pitch), math.nan, dtype=inputs["q"].dtype)
    views, first = {}, offset
    for name, width in widths.items():
        view = whole[1::2, 1 : 1 + tokens, first : first + width]
        views[name] = view.unflatten(2, inputs[name].shape[2:]).copy_(inputs[name])
        first += width
    return inputs | views


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(run, emulated, guarded, make_inputs, assert_rounded_once, case):
    (mode, stochastic), tokens, v_first = case["mode"], case["tokens"], case["v_first"]
    inputs = make_inputs(
        4, tokens, *case["heads"], *case["dims"], pool=6, dtype=getattr(torch, case["dtype"]),
        state_dtype=getattr(torch, case["state_dtype"]), state_v_first=v_first,
    )  # fmt: skip
    slots = list(SLOTS) if case["indexed"] else [0, 1, 2, 3]
    layout = {
        "state_v_first": v_first,
        "state_indices": column(rows("cpu", *slots)) if case["indexed"] else None,
    }
    padding = [row for row, slot in enumerate(slots) if slot < 0]
    for name in ("q", "k", "v"):
        inputs[name][padding] = math.nan
    unused = [slot for slot in range(6) if slot not in slots]
    inputs["state"][unused] = math.nan
    before = inputs["state"].clone()
    options = {}
    if mode == "commit":
        # Counts outside 0..T are as the nearest that is inside.
        options["num_accepted"] = column(rows("cpu", 9, tokens, -2, max(tokens - 1, 1)))
    if stochastic:
        # Without decay every fp32 value is exact on both sides, so the rounded ones agree bit for bit.
        inputs["decay"].zero_()
        options["rounding_seed"] = (7 << 32) + 5

    given = inputs if case["offset"] is None else fused(inputs, case["offset"])
    given = given | {"state": guarded(inputs["state"])}
    out = emulated.empty_like(inputs["v"])
    run(
        given, out, case["arch"],
        mode=mode, multiprocessors=case["multiprocessors"], **layout, **options,
    )  # fmt: skip

    live = [slot for slot in slots if slot >= 0]
    if mode == "verify":
        assert same(given["state"], before)
    elif stochastic:
        expected = clone(inputs)
        if mode == "commit":
            reference.linear_attention_commit(**keys(expected), **layout, **options)
        else:
            reference.linear_attention_decode(**expected, **layout, **options)
        assert same(given["state"][live], expected["state"][live])
    elif mode == "commit":
        wide = {name: tensor.double() for name, tensor in keys(inputs).items()}
        reference.linear_attention_commit(**wide, **layout, **options)
        assert_rounded_once(given["state"][live], wide["state"][live])
    else:
        assert_rounded_once(given["state"][live], exact(inputs, **layout)[1][live])
    assert same(given["state"][unused], before[unused])
    if mode == "commit":
        still = slots[2]  # nothing of row 2 is accepted
        assert same(given["state"][still], before[still])
        assert out.isnan().all()
    else:
        kept = [row for row in range(4) if row not in padding]
        assert_rounded_once(out[kept], exact(inputs, **layout)[0][kept])
        assert not out[padding].any()


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_odd_token_counts(run, emulated, make_inputs, assert_rounded_once, tokens, v_first):
    inputs = make_inputs(2, tokens, 1, 2, 64, 64, dtype=torch.bfloat16, state_v_first=v_first)
    expected, state = exact(inputs, state_v_first=v_first, scale=-1.5)
    out = emulated.empty_like(inputs["v"])
    run(inputs, out, "sm_90a", state_v_first=v_first, scale=-1.5)
    assert_rounded_once(out, expected)
    assert_rounded_once(inputs["state"], state)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("mode", ["decode", "commit"])
def test_a_slot_that_means_padding(run, emulated, make_inputs, mode):
    """It has the bits of a negative one; without indices a row is padding by its own number."""
    found = []
    for slots, null_slot in (
        ((5, 3, 0, 2), 3),
        ((5, -1, 0, 2), None),
        (None, 1),
        ((0, -1, 2, 3), None),
    ):
        torch.manual_seed(0)
        inputs = make_inputs(4, 2, 1, 2, 64, 64, pool=6, dtype=torch.bfloat16)
        for name in ("q", "k", "v"):
            inputs[name][1] = math.nan
        inputs["state"][1 if slots is None else 3 if slots[0] else 1] = math.nan
        out = emulated.empty_like(inputs["v"])
        accepted = {"num_accepted": rows("cpu", 1, 2, 2, 0)} if mode == "commit" else {}
        indices = None if slots is None else rows("cpu", *slots)
        run(
            inputs, out, "sm_90a", mode=mode, state_indices=indices, null_slot=null_slot, **accepted
        )
        found.append((out, inputs["state"]))
    for one, other in (found[:2], found[2:]):
        assert same(one[0], other[0]) and same(one[1], other[1])
        assert mode == "commit" or not one[0][1].any()


@pytest.mark.parametrize("v_first", [False, True])
def test_several_tokens_are_several_calls(run, emulated, make_inputs, v_first):
    """The same fp32 states, bit for bit; a commit leaves those of the accepted tokens."""
    inputs = make_inputs(2, 4, 1, 2, 64, 64, dtype=torch.bfloat16, state_v_first=v_first)
    steps, start = inputs["state"].clone(), inputs["state"].clone()
    after = []
    for t in range(4):
        one = {name: inputs[name][:, t : t + 1] for name in ("q", "k", "v")}
        one |= {"state": steps, "decay": inputs["decay"]}
        run(one, emulated.empty_like(one["v"]), "sm_90a", state_v_first=v_first)
        after.append(steps.clone())
    run(inputs, emulated.empty_like(inputs["v"]), "sm_90a", state_v_first=v_first)
    assert same(inputs["state"], after[3])
    inputs["state"].copy_(start)
    accepted = rows("cpu", 3, 1)
    run(inputs, None, "sm_90a", mode="commit", state_v_first=v_first, num_accepted=accepted)
    assert same(inputs["state"][0], after[2][0]) and same(inputs["state"][1], after[0][1])


@pytest.mark.parametrize("v_first", [False, True])
def test_overlap_changes_no_bit(run, emulated, make_inputs, v_first):
    """With and without programmatic dependent launch."""
    results = []
    for overlap in (False, True):
        inputs = make_inputs(2, 2, 1, 2, 64, 64, dtype=torch.bfloat16, state_v_first=v_first)
        out = emulated.empty_like(inputs["v"])
        run(inputs, out, "sm_90a", state_v_first=v_first, overlap=overlap)
        results.append((out, inputs["state"]))
    assert all(same(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("v_first", [False, True])
def test_ctas_in_any_number(run, emulated, make_inputs, assert_rounded_once, v_first):
    """Several CTAs side by side, states with gaps between them, and outputs with gaps."""
    inputs = make_inputs(3, 1, 2, 4, 64, 128, dtype=torch.bfloat16, state_v_first=v_first)
    expected, state = exact(inputs, state_v_first=v_first)
    start = inputs["state"]
    rows_, columns = start.shape[2:]
    gaps = emulated.empty(
        start.shape, stride=(5 * start[0].numel(), 2 * rows_ * columns, columns, 1)
    )
    inputs["state"] = gaps.copy_(start)
    out = emulated.empty(expected.shape, torch.bfloat16, stride=(1201, 1201, 135, 1))
    run(inputs, out, "sm_100a", state_v_first=v_first, concurrent_ctas=5)
    assert_rounded_once(out, expected)
    assert_rounded_once(inputs["state"], state)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize(
    "arch, tokens, v_first, barriers",
    [
        ("sm_80", 2, False, 2),
        ("sm_90a", 1, False, 1),
        ("sm_90a", 1, True, 0),
        ("sm_90a", 2, False, 2),
        ("sm_90a", 2, True, 1),
    ],
)
def test_every_barrier_matters(
    run, make_inputs, assert_rounded_once, arch, tokens, v_first, barriers
):
    """The table of docs/lightning-decode.md: every schedule notices, with and without the race detector."""
    inputs = make_inputs(2, tokens, 1, 2, 64, 64, dtype=torch.bfloat16, state_v_first=v_first)
    expected, state = exact(inputs, state_v_first=v_first)

    def check(options) -> None:
        given, out = clone(inputs), torch.full_like(inputs["v"], math.nan)
        run(given, out, arch, state_v_first=v_first, **vars(options))
        assert torch.isfinite(out).all(), "not finite"
        assert_rounded_once(out, expected)
        assert_rounded_once(given["state"], state)

    problem = Problem("bfloat16", "float32", 64, 64, tokens, v_first, False)
    kernel = run.compiled(problem, arch, 132, None)
    for detect_races, how in ((True, "DataRace"), (False, "NaN")):
        schedules = [replace(o, detect_races=detect_races) for o in mutation.SCHEDULES]
        report = mutation.run(check, kernel, schedules=schedules, exhaustive=True)
        assert [m.text for m in report.noticed] == ["bar.sync 0"] * barriers, str(report)
        assert all([f.how for f in m.findings] == [how] * 7 for m in report.noticed)
        # One kernel runs at a time in the emulator, so nothing can show that it waits for another.
        previous = ["griddepcontrol.wait"] if arch == "sm_90a" else []
        assert [m.text for m in report.not_modelled] == previous
        assert not report.unnoticed and not report.not_reached


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_no_memory_is_touched_before_the_previous_kernel_is_done(run, tokens, v_first):
    """What skipping `griddepcontrol.wait` cannot show: it comes before every access but those to the parameters."""
    problem = Problem("bfloat16", "float32", 64, 64, tokens, v_first, False)
    ptx = run.compiled(problem, "sm_90a", 132, None).kernel.ptx
    body = ptx[ptx.index("{") :]
    before, wait, after = body.partition("griddepcontrol.wait")
    access = re.compile(r"\b(?:ld|st|atom|red|cp)\.(?!param)\S+")
    assert wait and access.search(after) and not access.search(before)
    assert not re.search(r"^\S+:", before, re.MULTILINE)  # no label: the wait is on every path
