"""Calls of KDA over slices of sequences."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cula_core.delta_rule import slices as sliced
from cula_core.delta_rule.config import Config, RecurrenceConfig
from cula_core.delta_rule.target import Target
from cula_emulator.memory import poisoned_memory

from .. import slices
from ..slices import BOUNDS, LENGTHS
from .problems import Outcome, Problem, assert_right, make_problem
from .running import compiler, forced
from .states import Unregistered
from .subject import Subject


@functools.cache
def problem() -> Problem:
    return make_problem(LENGTHS, (1, 2), packed=True)


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
    options = {"planner": forced(tiles, segment_chunks), "multiprocessors": 132} | more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unregistered, "_require_target", lambda *_: None)
        patch.setattr(sliced, "begin", functools.partial(sliced.begin, **options))
        begin = functools.partial(
            Unregistered(target).begin_chunk_kda, A_log=given["A_log"], dt_bias=given["dt_bias"],
            scale=problem().scale, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            lower_bound=problem().options["lower_bound"],
        )  # fmt: skip
        tokens = {name: given[name] for name in ("q", "k", "v", "g", "beta")}
        initial = problem().initial[: len(LENGTHS)].to(device)
        return Outcome(*slices.over_ranks(begin, tokens, initial, bounds))


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

    @pytest.mark.gpu
    @pytest.mark.parametrize("back", [False, True])
    def test_maps_are_folded_on_a_gpu(self, cuda, back):
        slices.assert_folds(Unregistered(self.subject.target).fold_slices, back, cuda)
