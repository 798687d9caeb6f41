"""The chunk-parallel kernel for a backward pass and both walks in the emulator, against the oracle in fp64."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.backward.config import WalkConfig
from cula_core.delta_rule.config import CHUNK, HEAD_DIM, chunk_slots
from cula_core.delta_rule.kernels.block import BLOCK, SQUARE, WIDE
from cula_core.dtypes import dtype_name
from cula_core.reference import kda_backward as oracle
from cula_core.reference.common import normalized
from cula_core.reference.gates import log_decay
from cula_cp_sm90.backward.launch import unit
from cula_testing.comparing import relative_rmse
from cula_testing.compiled import emulated_kernel
from cula_testing.kda.blocks import chunks, unpacked
from cula_testing.kda.problems import Problem, make_problem
from cula_testing.kda.running import prepare_config
from cula_testing.tensors import one_thread

# Relative RMSE. Rounding to fp16 alone costs 2e-4; bf16 operands have an eighth of its precision.
ERRORS = {"float16": 1.5e-3, "bfloat16": 8e-3}
FACTOR_ERROR = 1e-6
PROBLEMS = {
    "dense": make_problem((130, 130), (2, 2), kind="mixed"),
    "packed": make_problem((70, 0, 1, 130), (2, 2), packed=True, strength="doubled"),
    "any decay": make_problem((100,), (1, 1), kind="resets", gate="softplus", dtype="float16"),
    "states with V first": make_problem((64,), (1, 1), initial=False, v_first=True, l2norm=False),
    "equal keys": make_problem((128,), (1, 1), kind="equal_keys"),
    "bfloat16": make_problem((66,), (1, 1), kind="moderate", operand="bfloat16"),
}
TILES = {"dense": 2, "packed": 1}
SIZES = {"do": 1e-5, "dht": 3e-5}


class Memory(NamedTuple):
    """What the kernels write."""

    blocks: Tensor
    factors: Tensor
    peaks: Tensor
    states: Tensor
    z: Tensor
    d_states: Tensor
    minus_y: Tensor
    dh0: Tensor


def gradients_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns small gradients of the outputs, and of the final states as [N, HV, K, V]."""
    generator = torch.Generator().manual_seed(1)
    v = problem.given["v"]
    do = SIZES["do"] * torch.randn(v.shape, generator=generator)
    shape = (len(problem.lengths), v.shape[2], HEAD_DIM, HEAD_DIM)
    return do.to(v.dtype), SIZES["dht"] * torch.randn(shape, generator=generator)


def run(name: str, emulated) -> Memory:
    """Launches all three."""
    problem = PROBLEMS[name]
    x, operand = problem.given, getattr(torch, problem.operand)
    batch, tokens, heads = x["v"].shape[:3]
    count = len(problem.lengths)
    slots = chunk_slots(batch, tokens, count if problem.packed else None)
    cu_seqlens = segments = None
    if problem.packed:
        cu_seqlens = problem.cu_seqlens(torch.int32)
        segments = torch.full((1 + count, 6), -1, dtype=torch.int32)
    do, dht = gradients_of(problem)

    def empty(*shape: int, dtype: torch.dtype = operand) -> Tensor:
        return emulated.empty(shape, dtype)

    memory = Memory(
        empty(slots, heads, BLOCK),
        empty(slots, heads, 4, CHUNK, dtype=torch.float32),
        dht.abs().amax((-2, -1)).view(torch.int32).clone(),
        empty(slots, heads, 2, WIDE),
        empty(slots, heads, 2, SQUARE),
        empty(slots, heads, 2, WIDE),
        empty(slots, heads, 2, SQUARE),
        empty(*dht.shape, dtype=torch.float32),
    )
    config = dataclasses.replace(prepare_config(problem), rooted=True, peaks=True)
    kernel = emulated_kernel(emulated, unit(config, "sm_90a"))
    longest = max(tokens, CHUNK)
    kernel(
        x["q"], x["k"], x["g"], x["beta"], x["A_log"], x["dt_bias"], cu_seqlens, segments, memory.blocks, None, None,
        do, memory.factors, memory.peaks, problem.scale, problem.options["lower_bound"], longest, longest, 0, slots,
    )  # fmt: skip
    for back in (False, True):
        start = turned(problem, dht) if back else None
        if not back and problem.initial is not None:
            start = turned(problem, problem.initial[:count].contiguous())
        config = WalkConfig(
            dtype_name(x["v"].dtype), back, problem.operand, TILES.get(name, 1), problem.packed, start is not None,
            back, problem.v_first,
        )  # fmt: skip
        kept = (memory.d_states, memory.minus_y) if back else (memory.states, memory.z)
        emulated_kernel(emulated, unit(config, "sm_90a"))(
            memory.blocks, do if back else x["v"], None if back else memory.factors, memory.peaks if back else None,
            start, memory.dh0 if back else None, *kept, None, None, segments, longest, 3,
        )  # fmt: skip
    return memory


def turned(problem: Problem, states: Tensor) -> Tensor:
    return states.mT.contiguous() if problem.v_first else states


@cache
def expected(name: str) -> dict[int, tuple]:
    """Returns, by sequence, roots of strengths, chunks, states, z, D and y of every chunk, and dh0."""
    problem = PROBLEMS[name]
    x = {name: t.double() for name, t in problem.given.items() if t is not None}
    bound = problem.options["lower_bound"] if problem.gate == "safe" else None
    decays = log_decay(x["g"], x["A_log"], x["dt_bias"], bound)
    strength = x["beta"]
    if problem.strength != "plain":
        strength = (2 if problem.strength == "doubled" else 1) * strength.sigmoid()
    q, k = (normalized(x[n]) if problem.l2norm else x[n] for n in ("q", "k"))
    do, dht = (t.double() for t in gradients_of(problem))
    found = {}
    for n, length in enumerate(problem.lengths):
        own = [
            problem.tokens(t, n).transpose(0, 1)
            for t in (q, k, decays, x["v"], strength[..., None], do)
        ]
        r = own[4].sqrt()
        parts = [
            t.split(CHUNK, 1)
            for t in (problem.scale * own[0], r * own[1], own[2], r * own[3], own[5])
        ]
        made = [oracle.prepare(*part) for part in zip(*parts[:3])] if length else []
        state = torch.zeros_like(dht[n]) if problem.initial is None else problem.initial[n].double()
        forward = oracle.walk(made, list(parts[3]), state)
        back = oracle.walk_back(made, list(parts[4]), dht[n])
        found[n] = (r[..., 0], made, *forward[:2], *back)
    return found


def unpacked_wide(kept: Tensor) -> Tensor:
    """Returns a kept state [K, V] or kept rows [tokens, V] of 128 columns of V."""
    rows, columns = (64, HEAD_DIM) if kept.shape[1] == WIDE else (CHUNK, 64)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    place = column // 64 * (64 * 64) + row * 64 + (column % 64 // 8 ^ row % 8) * 8 + column % 8
    tiles = [tile[place] for tile in kept]
    return torch.cat(tiles).mT if columns == HEAD_DIM else torch.cat(tiles, 1)


@pytest.mark.parametrize("name", PROBLEMS)
def test_chunks_and_walks(emulated, name):
    """Chunks with roots of strengths, factors and peaks; states and z; gradients of states and -y, scaled; dh0."""
    problem = PROBLEMS[name]
    with one_thread():
        exact = expected(name)
    memory = run(name, emulated)
    bound = ERRORS[problem.operand]
    do, dht = gradients_of(problem)
    largest = memory.peaks.view(torch.float32)
    dh0 = memory.dh0.mT if problem.v_first else memory.dh0
    for n, length in enumerate(problem.lengths):
        for head in range(do.shape[2]):
            seen = [
                problem.tokens(do, n)[:, head].float().abs().flatten(),
                dht[n, head].abs().flatten(),
            ]
            assert largest[n, head] == torch.cat(seen).max()
        if length == 0:
            assert torch.equal(dh0[n], dht[n])
        else:
            assert relative_rmse(dh0[n], exact[n][6]) <= bound
    compared = 0
    for n, slot, rows in chunks(problem):
        r, made, states, zs, d_states, ys, _ = exact[n]
        c, size = rows.start // CHUNK, rows.stop - rows.start
        for head in range(do.shape[2]):
            grown = 2.0 ** (1 - math.floor(math.log2(largest[n, head])))
            block = unpacked(memory.blocks[slot, head])
            factors = [r[head, rows]]
            for name_of in ("q", "k"):
                own = problem.tokens(problem.given[name_of], n)[rows, head].double()
                norm = (own.square().sum(-1) + 1e-6).rsqrt()
                factors.append(norm if problem.l2norm else torch.ones_like(norm))
            factors.append(factors[0])
            assert (
                relative_rmse(memory.factors[slot, head, :, :size], torch.stack(factors))
                <= FACTOR_ERROR
            )
            pairs = {
                "kh": (block["kh"][:size], made[c].kh[head]),
                "inverse": (block["t_prime"][:size, :size], made[c].Q[head]),
                "S": (unpacked_wide(memory.states[slot, head]), states[c][head]),
                "z": (unpacked_wide(memory.z[slot, head])[:size], zs[c][head]),
                "D": (unpacked_wide(memory.d_states[slot, head]), grown * d_states[c][head]),
                "-y": (unpacked_wide(memory.minus_y[slot, head])[:size], -grown * ys[c][head]),
            }
            for what, (found, right) in pairs.items():
                if not right.any():
                    assert not found.any(), what
                    continue
                error = relative_rmse(found, right)
                assert error <= bound, f"{what} of slot {slot}, head {head}: {error:.1e}"
                compared += 1
            for kept in (memory.z, memory.minus_y):
                assert not unpacked_wide(kept[slot, head])[size:].any()
    assert compared


def test_values_behind_a_sequence_do_not_count(emulated):
    """Rows of a chunk that belong to the next sequence may hold anything."""
    problem = PROBLEMS["packed"]
    before = run("packed", emulated)
    start = problem.lengths[0]
    v = problem.given["v"]
    kept = v[:, start:].clone()
    v[:, start:] = math.nan
    try:
        after = run("packed", emulated)
    finally:
        v[:, start:] = kept
    count = -(-start // CHUNK)
    for name in ("states", "z"):
        assert torch.equal(getattr(before, name)[:count], getattr(after, name)[:count]), name
