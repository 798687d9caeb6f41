"""States as engines keep them: pools with padding, fresh sequences, other rows at the end, states on the way."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule import launch, prefill
from cula_core.delta_rule.config import BLOCK_BYTES, Config, RecurrenceConfig
from cula_core.delta_rule.target import Target
from cula_emulator.memory import poisoned_memory

from ..comparing import assert_within, same
from ..tensors import column, int32, one_thread
from .inputs import flags, inputs
from .running import compiler, forced
from .subject import Subject

BOUND = 3e-3


@dataclass(frozen=True)
class Case:
    """One call. lengths: of packed sequences, or None for a batch of 2 with `tokens` each.

    pool: its states are in a pool, at rows; else they are given and returned. fresh: sequences that begin from zero.
    targets: rows of final states. every, offsets: where states on the way are kept; kept_rows: in which rows, in_pool:
    of the pool. before_chunks: whether the states before all chunks are returned. slots: chunks that the workspace
    holds.
    """

    lengths: tuple[int, ...] | None = None
    tokens: int = 200
    pool: bool = True
    rows: tuple[int, ...] | None = None
    null_slot: int | None = None
    fresh: tuple[int, ...] = ()
    targets: tuple[int, ...] | None = None
    every: int | None = None
    offsets: tuple[int, ...] | None = None
    kept_rows: tuple[int, ...] | None = None
    in_pool: bool = False
    before_chunks: bool = False
    v_first: bool = False
    segment_chunks: int = 0
    slots: int | None = None
    rows_in_pool: int = 8
    state_dtype: torch.dtype = torch.float32

    @property
    def sequences(self) -> int:
        return 2 if self.lengths is None else len(self.lengths)

    @property
    def padding(self) -> list[int]:
        """The sequences that are padding."""
        rows = self.rows or range(self.sequences)
        return [n for n, row in enumerate(rows) if self.pool and (row < 0 or row == self.null_slot)]

    def given(self, device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the arguments of `chunk_kda`; with dtype float64 all numbers are of it."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        batch, tokens = (2, self.tokens) if self.lengths is None else (1, sum(self.lengths))
        x = inputs(
            batch, tokens, 1, 2, lengths=self.lengths, initial=True, dtype=torch.bfloat16,
            states=self.rows_in_pool if self.pool else self.sequences, state_v_first=self.v_first, device=device,
        )  # fmt: skip
        given = {n: t.to(dtype) if n in ("q", "k", "v") else t for n, t in x.items()}
        given |= flags("safe") | {"use_qk_l2norm_in_kernel": True, "state_v_first": self.v_first}
        states = given.pop("initial_state").to(self.state_dtype)
        states = states.to(exact) if dtype == torch.float64 else states
        if self.pool:
            states[self._unread] = math.nan
            given |= {"state_pool": states, "null_slot": self.null_slot}
        else:
            given |= {"initial_state": states, "output_final_state": True}
        vectors = {
            "initial_state_indices": self.rows, "output_state_indices": self.targets,
            "checkpoint_rows": self.kept_rows, "checkpoint_offsets": self.offsets,
        }  # fmt: skip
        given |= {
            n: column(int32(*row).to(device)) for n, row in vectors.items() if row is not None
        }
        if self.fresh:
            known = [n not in self.fresh for n in range(self.sequences)]
            given["has_initial_state"] = column(torch.tensor(known, device=device))
        given["checkpoint_every_n_tokens"] = self.every
        if self.before_chunks:
            given["return_intermediate_states"] = True
        if (self.every or self.offsets) and not self.in_pool:
            shape = (12,) if self.kept_rows or self.offsets else (batch, tokens // self.every)
            given["state_checkpoints"] = states.new_full((*shape, *states.shape[1:]), math.nan)
        elif self.every:
            given["state_checkpoints"] = states
        return given

    @property
    def _unread(self) -> list[int]:
        """Rows of the pool that no sequence may read."""
        rows = self.rows or tuple(range(self.sequences))
        read = {row for n, row in enumerate(rows) if n not in self.padding and n not in self.fresh}
        return [row for row in range(self.rows_in_pool) if row not in read]


PACKED = (130, 0, 64, 200)
CASES = {
    "dense": Case(rows=(5, 3), fresh=(1,), every=64),
    "dense, cut": Case(rows=(5, 0), null_slot=0, every=128, segment_chunks=1, v_first=True),
    "packed": Case(PACKED, rows=(0, 3, 6, 2), null_slot=0, targets=(7, 4, -1, 2), every=64, kept_rows=(-1, 9, 4, 1)),
    "in the pool": Case(
        PACKED, rows=(1, 2, 5, 3), targets=(6, 2, 0, 3), null_slot=0, fresh=(0,), offsets=(128, 64, 64, 192),
        kept_rows=(7, 4, 1, -1), in_pool=True,
    ),
    "packed, cut": Case(
        PACKED, pool=False, fresh=(3, 0), offsets=(64, 64, 128, 192), segment_chunks=2, v_first=True,
    ),
    "padding, cut": Case(PACKED, rows=(-1, 3, 6, 0), null_slot=6, fresh=(3,), every=64, segment_chunks=1),
    "pieces": Case(
        PACKED, rows=(1, 2, 0, 3), targets=(6, 2, 5, -3), null_slot=0, fresh=(0,), every=64, slots=2,
    ),
    "every so many tokens, in the pool": Case(rows=(5, 4), every=64, kept_rows=(0, -1), in_pool=True),
    "before chunks": Case(tokens=192, pool=False, before_chunks=True),
    "before chunks, packed and cut": Case(
        (0, *PACKED, 0), pool=False, fresh=(1,), before_chunks=True, segment_chunks=1, v_first=True,
        state_dtype=torch.bfloat16,
    ),
    "16 bits": Case(rows=(5, 3), fresh=(1,), every=64, state_dtype=torch.float16),
    "16 bits, in the pool": Case(
        PACKED, rows=(1, 2, 5, 3), targets=(6, 2, 0, 3), null_slot=0, fresh=(0,), offsets=(128, 64, 64, 192),
        kept_rows=(7, 4, 1, -1), in_pool=True, v_first=True, state_dtype=torch.bfloat16,
    ),
    "16 bits, cut": Case(PACKED, pool=False, every=64, segment_chunks=1, state_dtype=torch.bfloat16),
    "16 bits, pieces in place": Case(
        rows=(0, 4), null_slot=0, offsets=(64, 128), kept_rows=(3, 2), slots=2, state_dtype=torch.float16
    ),
    "16 bits, pieces": Case(pool=False, slots=2, every=64, state_dtype=torch.float16),
    "pieces in place": Case(rows=(0, 4), null_slot=0, offsets=(64, 128), kept_rows=(3, 2), slots=2),
}  # fmt: skip


def launches(every: tuple[int, ...]) -> list[tuple[str, int]]:
    """Returns cases with the tiles of v per CTA that they are emulated with.

    They take turns at the tiles, so that every option meets all of them; states in fp16 are in one case alone.
    """
    return [
        (name, tiles)
        for n, name in enumerate(CASES)
        for tiles in (every if name == "16 bits" else (every[n % len(every)],))
    ]


def configs_of(target: Target, case: Case, tiles: int) -> list[Config]:
    """Returns the configs of the kernels that a case launches."""
    configs: list[Config] = []

    def kernels(config: Config) -> Callable[..., None]:
        configs.append(config)
        return lambda *_: None

    _call(_Stub(target), case.given("cpu", torch.bfloat16), case, tiles, kernels)
    return configs


@functools.cache
def engine_configs(target: Target) -> tuple[RecurrenceConfig, ...]:
    """Returns the configs of an architecture's recurrence in all cases; tests of machine code have them too."""
    found = (
        config
        for name, tiles in launches(tuple(sorted({1, target.v_tiles})))
        for config in configs_of(target, CASES[name], tiles)
        if isinstance(config, RecurrenceConfig)
    )
    return tuple(dict.fromkeys(found))


class _Stub:
    """A package of a target, for what is launched."""

    def __init__(self, target: Target) -> None:
        self.chunk_kda = partial(prefill.Prefill.chunk_kda, Unregistered(target))


class Unregistered(prefill.Prefill):
    """What has no operator, because nothing goes through a dispatcher."""

    def __init__(self, target: Target) -> None:
        self._target, self._trained = target, None


def _call(
    package: Any, given: dict[str, Any], case: Case, tiles: int, kernels: launch.Kernels
) -> tuple[Any, ...]:
    """Calls `chunk_kda` as if its tensors were on a GPU, with other kernels."""
    run = partial(
        launch.run, multiprocessors=132, kernels=kernels, planner=forced(tiles, case.segment_chunks)
    )
    heads = given["v"].shape[2]
    if case.slots is not None:
        size = case.slots * heads * BLOCK_BYTES
        given = given | {"workspace": torch.full((size,), 255, dtype=torch.uint8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "is_plain_cuda_call", lambda x: True)
        patch.setattr(prefill.Prefill, "_require_target", lambda *_: None)
        patch.setattr(launch, "run", run)
        return package.chunk_kda(**given)


def written(given: dict[str, Any], result: tuple[Any, ...]) -> dict[str, Tensor]:
    """Returns what a call writes, by name."""
    found = {"out": result[0], "states": result[1]}
    if "return_intermediate_states" in given:
        found["before_chunks"] = result[2]
    if "state_checkpoints" in given:
        found["state_checkpoints"] = given["state_checkpoints"]
    return found


def assert_right(case: Case, got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Holds what was written to the oracle; where that is NaN nothing may have been written."""
    for name, exact in expected.items():
        actual = got[name].cpu()
        untouched = exact.isnan()
        assert torch.equal(actual.isnan(), untouched), name
        for one, other in zip(actual.flatten(0, -4), exact.flatten(0, -4)):
            # A state at a time, so that none hides behind larger ones.
            if not other.isnan().any() and name != "out":
                assert_within(one, other, BOUND, name=name)
        if name == "out":
            assert_within(actual, exact, BOUND, name=name)


class EngineStates:
    """A call of every case, on the CPU as the emulator runs the kernels, and on a GPU, against the oracle in fp64."""

    subject: Subject

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes with what depends on the subject."""
        if "tiles" in metafunc.fixturenames:
            metafunc.parametrize("name, tiles", launches(self.subject.tiles))
        elif "name" in metafunc.fixturenames:
            metafunc.parametrize("name", CASES)

    def expected(self, case: Case) -> dict[str, Tensor]:
        """What a call of the reference writes, in fp64."""
        given = case.given("cpu", torch.float64)
        with one_thread():
            return written(given, self.subject.package.chunk_kda(**given))

    @pytest.mark.emulated(seeds=1)
    def test_states_as_engines_keep_them(self, emulated, name, tiles):
        case, target = CASES[name], self.subject.target
        compiled = compiler(emulated, target, self.subject.architectures[0])
        given = case.given("cpu", torch.bfloat16)
        with poisoned_memory():
            result = _call(self.subject.package, given, case, tiles, compiled)
        assert_right(case, written(given, result), self.expected(case))

    @pytest.mark.emulated(schedules="immediate")
    def test_a_checkpoint_is_the_state_of_a_shorter_call(self, emulated):
        """Bit for bit, and a call that goes on from there has the bits of the whole one."""
        target, package = self.subject.target, self.subject.package
        compiled = compiler(emulated, target, self.subject.architectures[0])
        case = Case(tokens=200, pool=False, every=64)
        whole = case.given("cpu", torch.bfloat16)
        out, final = _call(package, whole, case, 1, compiled)
        tokens = ("q", "k", "v", "g", "beta")
        short = whole | {n: whole[n][:, :128] for n in tokens} | {"state_checkpoints": None}
        short["checkpoint_every_n_tokens"] = None
        begun, state = _call(package, short, case, 1, compiled)
        assert same(whole["state_checkpoints"][:, 1], state) and same(out[:, :128], begun)
        rest = short | {n: whole[n][:, 128:] for n in tokens} | {"initial_state": state}
        ended, last = _call(package, rest, case, 1, compiled)
        assert same(out[:, 128:], ended) and same(final, last)

    @pytest.mark.gpu
    def test_states_as_engines_keep_them_on_a_gpu(self, cuda, name):
        """With cuts where the emulated ones are, in segments of 1024 tokens."""
        case = CASES[name]
        if case.segment_chunks:
            long = 1024 * case.segment_chunks
            stretch = {"tokens": case.tokens + 2 * long}
            if case.lengths is not None:
                stretch["lengths"] = tuple(n and n + 2 * long for n in case.lengths)
            case = replace(case, **stretch)
        given = case.given(cuda, torch.bfloat16)
        if case.segment_chunks:
            given["use_intracard_cp"] = True
        if case.slots is not None:
            size = case.slots * given["v"].shape[2] * BLOCK_BYTES
            given["workspace"] = torch.full((size,), 255, dtype=torch.uint8, device=cuda)
        result = self.subject.package.chunk_kda(**given)
        assert_right(case, written(given, result), self.expected(case))

    def test_the_cases_have_every_flag(self):
        """Otherwise the tests above would prove little."""
        found = [c for c in engine_configs(self.subject.target) if not c.scan]
        for split in (False, True):
            of = [config for config in found if config.split == split]
            assert {config.checkpoints for config in of} == {"every", "once"}
            kinds = {"float32", "bfloat16", "float16"}
            assert split or {config.state_dtype for config in of} == kinds
            assert {config.kept_dtype for config in of} >= kinds - {"float16"}
            for flag in ("fresh", "packed", *(() if split else ("redirected", "placed"))):
                assert {getattr(config, flag) for config in of} == {False, True}, flag
        fields = ("checkpoints", "state_dtype", "kept_dtype", "fresh", "packed", "redirected")
        fields += ("placed", "split", "indexed", "in_place", "state_v_first")
        for field in fields:
            for value in {getattr(config, field) for config in found}:
                of = [config for config in found if getattr(config, field) == value]
                assert {config.tiles for config in of} == set(self.subject.tiles), (field, value)
