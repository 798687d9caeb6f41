"""Sequences cut into slices, as GPUs beside each other hold them, all of which one process computes in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule import slices as sliced
from cula_core.delta_rule.call import Slice
from cula_core.delta_rule.config import Config, RecurrenceConfig
from cula_core.delta_rule.target import Target
from cula_emulator.memory import poisoned_memory

from ..tensors import int32
from .problems import Outcome, Problem, assert_right, make_problem
from .running import compiler, forced
from .states import Unregistered
from .subject import Subject

LENGTHS = (70, 0, 230)
# Of three ranks: the middle one lies inside a sequence; one rank cuts nothing.
BOUNDS = {"three": (0, 150, 220, 300), "one": (0, 300), "in a chunk": (0, 10, 235, 300)}


@functools.cache
def problem() -> Problem:
    return make_problem(LENGTHS, (1, 2), packed=True)


def slices_of(low: int, high: int) -> list[tuple[int, Slice]]:
    """Returns the slices of a rank with tokens low .. high - 1, and whose they are. Empty sequences are the first's."""
    found = []
    ends = list(itertools.accumulate(LENGTHS, initial=0))
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        start, stop = max(low, begin), min(high, end)
        if start < stop or (begin == end and low <= begin < high):
            found.append((n, Slice(start - low, stop - low, begin < start, stop < end)))
    return found


def over_ranks(
    target: Target,
    bounds: Sequence[int],
    tiles: int,
    segment_chunks: int,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Outcome:
    """Runs `begin_chunk_kda` of every rank, tells each what those before it do to a state, and finishes all."""
    given = {name: x.to(device) for name, x in problem().given.items()}
    initial = problem().initial[: len(LENGTHS)].to(device)
    options = {"planner": forced(tiles, segment_chunks), "multiprocessors": 132} | more
    outs: list[Tensor] = []
    states: list[Tensor] = list(initial)  # in front of the sequences' next slices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unregistered, "_require_target", lambda *_: None)
        patch.setattr(sliced, "begin", functools.partial(sliced.begin, **options))
        for low, high in itertools.pairwise(bounds):
            own = slices_of(low, high)
            cuts = int32(*[part.start for _, part in own], high - low).to(device)
            x = {name: given[name][:, low:high] for name in ("q", "k", "v", "g", "beta")}
            unknown = torch.stack(
                [initial[n] * (torch.nan if part.comes_on else 1) for n, part in own]
            )
            begun = Unregistered(target).begin_chunk_kda(
                **x, slices=tuple(part for _, part in own), cu_seqlens=cuts, initial_state=unknown,
                A_log=given["A_log"], dt_bias=given["dt_bias"], scale=problem().scale, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, lower_bound=problem().options["lower_bound"],
            )  # fmt: skip
            out, final = begun.finish(torch.stack([states[n] for n, _ in own]))
            maps = iter(begun.maps)
            for (n, part), state in zip(own, final):
                if part.goes_on:
                    added, matrix = next(maps)
                    states[n] = added if matrix is None else matrix @ states[n] + added
                    # Not the last digit, because states are rounded for the products on the way.
                    torch.testing.assert_close(
                        states[n], state, rtol=0, atol=4e-3 * state.abs().max().item()
                    )
                else:
                    states[n] = state
            outs.append(out)
    return Outcome(torch.cat(outs, 1).cpu(), torch.stack(states).cpu())


@functools.cache
def slice_configs(target: Target) -> tuple[RecurrenceConfig, ...]:
    """Returns the configs of an architecture's recurrence in all cases; tests of machine code have them too."""
    found: list[Config] = []

    def kernels(config: Config):
        found.append(config)
        return lambda *_: None

    for tiles, chunks in itertools.product(sorted({1, target.v_tiles}), (0, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.testing, "assert_close", lambda *_, **__: None)
            over_ranks(target, BOUNDS["three"], tiles, chunks, kernels=kernels)
    return tuple(dict.fromkeys(c for c in found if isinstance(c, RecurrenceConfig)))


class Slices:
    """Slices of all ranks give what whole sequences give."""

    subject: Subject

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes with what depends on the subject."""
        if "tiles" in metafunc.fixturenames:
            metafunc.parametrize("tiles", self.subject.tiles)

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize("segment_chunks", [0, 1])
    @pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
    def test_slices_over_ranks(self, emulated, bounds, segment_chunks):
        target = self.subject.target
        compiled = compiler(emulated, target, self.subject.architectures[0])
        tiles = self.subject.tiles[-1 if segment_chunks else 0]
        with poisoned_memory():
            found = over_ranks(target, bounds, tiles, segment_chunks, kernels=compiled)
        assert_right(problem(), found)

    @pytest.mark.gpu
    @pytest.mark.parametrize("segment_chunks", [0, 1])
    def test_slices_over_ranks_on_a_gpu(self, cuda, segment_chunks):
        target, tiles = self.subject.target, self.subject.tiles[-1]
        for bounds in BOUNDS.values():
            assert_right(problem(), over_ranks(target, bounds, tiles, segment_chunks, cuda))
