"""The kernel that makes gradients of decays, on the CPU under every schedule, beside the functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cula_emulator import mutation, resources
from cula_emulator.covering import covering_cases
from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90 import decays, launch
from cula_lightning_sm90.config import EVERY, WARPS, DecaysConfig
from cula_testing.comparing import same
from cula_testing.compiled import emulated_kernel, report
from cula_testing.tensors import int32

FACTORS = {
    # Lengths of sequences, and tokens behind the last packed one.
    "sequences": (
        (False, (1300, 1300), 0), (False, (EVERY,), 0), (False, (70, 70), 0), (False, (1024,), 0),
        (True, (600, 0, 1, EVERY, 1025, EVERY + 1), 40), (True, (0, 0), 0), (True, (130, 300), 0),
    ),
    "gate": ("float32", "bfloat16", "float16", None),
    "decay": (True, False),
    "started": (True, False),
    "ended": (True, False),
    "columns": (64, 128),
    "kind": ("gentle", "strong", "mixed"),
    "index": (torch.int32, torch.int64),
}  # fmt: skip
CASES = covering_cases(FACTORS, lambda case: case["gate"] or case["decay"])
HEADS, SCALE = 2, 0.3


def make(
    sequences: tuple[bool, tuple[int, ...], int], gate: str | None, decay: bool, started: bool, ended: bool,
    columns: int, kind: str, index: torch.dtype,
) -> decays.Sums:  # fmt: skip
    """Random sums and states, in memory that is poisoned where no pass writes."""
    packed, lengths, behind = sequences
    generator = torch.Generator().manual_seed(len(lengths))
    batch, tokens = (1, sum(lengths) + behind) if packed else (len(lengths), lengths[0])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def of_sequences(wanted: bool) -> Tensor | None:
        return normal(len(lengths), HEADS) if wanted else None

    dots = [normal(batch, HEADS, WARPS * columns // 64, 2, tokens) for _ in range(2)]
    states: list[Tensor | None] = [None, None]
    if tokens > EVERY:
        states = [normal(batch, tokens // EVERY, HEADS, columns, 64) for _ in range(2)]
    rates = {
        "gentle": -0.01 * normal(batch, tokens, HEADS).abs(),
        "strong": -normal(batch, tokens, HEADS).abs(),
        "mixed": torch.where(normal(batch, tokens, HEADS) > 2.2, -20.0, -1e-4),
    }
    g = None
    if gate is not None:
        g = rates[kind].to(getattr(torch, gate)).transpose(1, 2).contiguous().transpose(1, 2)
    offsets = int32(0, *torch.tensor(lengths).cumsum(0).tolist()).to(index) if packed else None
    return decays.Sums(
        *dots, *states, of_sequences(started), of_sequences(ended), g,
        torch.tensor([0.3, 0.0]) if decay else None, -1, offsets, SCALE,
    )  # fmt: skip


@pytest.fixture
def run(emulated) -> Callable[[decays.Sums], decays.Found]:
    def run(sums: decays.Sums, **changes: Any) -> decays.Found:
        def kernels(config):
            kernel = emulated_kernel(emulated, launch.unit(config))
            run.kernels[config] = kernel
            return lambda *given: kernel(*given, **changes)

        with poisoned_memory():
            return launch.gradients_of_decays(sums, kernels=kernels)

    run.kernels = {}
    return run


def assert_near(found: decays.Found, want: decays.Found) -> None:
    for a, b in zip(found, want):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.float32
            most = b.abs().max() if b.numel() else 0.0
            torch.testing.assert_close(a.double(), b, rtol=0, atol=float(2e-6 * most))


def test_the_cases_hold_every_value():
    for name, values in FACTORS.items():
        assert {case[name] for case in CASES} == set(values)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_numbers(run, case):
    sums = make(**case)
    assert_near(run(sums), decays.on_cpu(sums))


PLAIN = {
    "gate": "float32", "decay": True, "started": True, "ended": True, "columns": 64, "kind": "gentle",
    "index": torch.int32,
}  # fmt: skip


def test_a_sequence_has_the_same_bits_alone(run):
    """Though its neighbours differ, and their order in the table with them."""
    both = make(FACTORS["sequences"][4], **PLAIN)
    found, _ = run(both)
    start, stop = both.cu_seqlens[4:6].tolist()
    rows = slice(start // EVERY, start // EVERY + 2)
    own = both._replace(
        of_q=both.of_q[..., start:stop].contiguous(), of_k=both.of_k[..., start:stop].contiguous(),
        states=both.states[:, rows].contiguous(), d_states=both.d_states[:, rows].contiguous(),
        started=both.started[4:5], ended=both.ended[4:5], g=both.g[:, start:stop], cu_seqlens=int32(0, stop - start),
    )  # fmt: skip
    assert same(run(own)[0], found[:, start:stop])


def test_nothing_to_do(run):
    """No token, and no head."""
    sums = make((False, (0, 0), 0), **PLAIN)
    dg, of_heads = run(sums)
    assert dg.shape == (2, 0, HEADS) and not of_heads.any()


def test_machine_code():
    """No local memory; what is most, with eight parts and states of 128 columns."""
    for config in (
        DecaysConfig(8, 128 * 128, True, True, "float32", True, True),
        DecaysConfig(4, None, False, False, "bfloat16", False, False),
    ):
        found = report(launch.unit(config)).kernel
        resources.check(found)
        assert found.registers <= 128


@pytest.mark.emulated(schedules="immediate")
def test_every_barrier_matters(run):
    sums = make(FACTORS["sequences"][0], **PLAIN)
    run(sums)
    kernel = next(k for config, k in run.kernels.items() if isinstance(config, DecaysConfig))
    want = decays.on_cpu(sums)
    result = mutation.run(
        lambda options: assert_near(run(sums, **vars(options)), want), kernel,
        schedules=mutation.SCHEDULES[:3],
    )  # fmt: skip
    assert len(result.noticed) == len(result.mutants) > 0, str(result)
