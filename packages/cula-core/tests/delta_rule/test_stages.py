"""The stages of a call that all architectures share, one by one, on the CPU, against their definitions in fp64.

What the chunk-parallel kernel writes is unpacked and compared part by part: gate, norm, products inside a chunk,
inverse.
"""

from __future__ import annotations

import pytest
import torch
from delta_rule_problems import ARCHITECTURE, PROBLEMS, WITH_FACTORS, WITH_PRODUCTS
from delta_rule_targets import HOPPER
from torch import Tensor

from cula_core.delta_rule.config import CHUNK, TRIANGLE, FactorsConfig
from cula_core.delta_rule.kernels.block import WIDE
from cula_core.dtypes import dtype_name
from cula_core.reference import kda as reference
from cula_emulator import mutation
from cula_testing.comparing import relative_rmse
from cula_testing.kda.blocks import (
    PARTS,
    blocks_of,
    chunks,
    factors,
    packed,
    triangle_places,
    unpacked,
    wide_places,
)
from cula_testing.kda.problems import make_problem
from cula_testing.kda.running import compiler, prepare_config
from cula_testing.tensors import one_thread

ROUNDED_ERROR = 3e-3  # relative RMSE, to bfloat16


def test_places():
    """Every element of a block has one place, and parts come back as they were packed."""
    place, there = triangle_places()
    assert sorted(place[there].tolist()) == list(range(TRIANGLE))
    assert sorted(wide_places().flatten().tolist()) == list(range(WIDE))
    (parts,) = factors(make_problem((64,))).values()
    found = unpacked(packed(parts, torch.float16))
    for part in PARTS:
        assert torch.equal(found[part], getattr(parts, part).to(found[part].dtype)), part


SEGMENT = 64  # tokens


def prepare(
    compiled, problem, blocks: Tensor, intra: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    """Runs the chunk-parallel kernel alone; returns the table of segments of packed sequences."""
    x = problem.given
    cu_seqlens = segments = None
    if problem.packed:
        cu_seqlens = problem.cu_seqlens(torch.int32)
        segments = torch.full(
            (1 + x["q"].shape[1] // SEGMENT + len(problem.lengths), 6), -1, dtype=torch.int32
        )
    compiled(prepare_config(problem, intra=intra is not None))(
        x["q"], x["k"], x["g"], x["beta"], x["A_log"], x["dt_bias"], cu_seqlens, segments, blocks,
        *(intra or (None, None)), None, None, None, problem.scale, problem.options["lower_bound"], SEGMENT, SEGMENT, 0,
        blocks.shape[0],
    )  # fmt: skip
    return segments


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_chunk_parallel_stages(emulated, name):
    """Gate (decay), norm and gate (qg, kh, kg), products inside a chunk (Aqk), inverse (T')."""
    compiled = compiler(emulated, HOPPER, ARCHITECTURE[name])
    problem = PROBLEMS[name]
    blocks = blocks_of(problem, emulated)
    segments = prepare(compiled, problem, blocks)
    if problem.packed:
        # Of lengths 70, 0, 1, 64: start, tokens, sequence, slot, number in the sequence, segments of the sequence.
        rows = [
            [0, 64, 0, 0, 0, 2],
            [64, 6, 0, 1, 1, 2],
            [70, 0, 1, 2, 0, 1],
            [70, 1, 2, 3, 0, 1],
            [71, 64, 3, 4, 0, 1],
        ]
        assert segments[0, :5].tolist() == [len(rows), 0, 0, 0, 0]
        assert sorted(segments[1 : 1 + len(rows)].tolist()) == rows
    with one_thread():
        expected = factors(problem)
    assert expected
    for (slot, head), parts in expected.items():
        found = unpacked(blocks[slot, head])
        for part, bound in PARTS.items():
            exact = getattr(parts, part)
            if part == "decay":  # may be too small to be a normal number, and is zero then
                exact = exact.where(exact >= torch.finfo(torch.float32).smallest_normal, 0)
            error = relative_rmse(found[part], exact)
            assert error <= bound, f"{part} of slot {slot}, head {head}: {error:.1e}"


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_products_and_inverse_for_the_caller(emulated, name):
    """Aqk and (I + Akk)^-1 by token, zero above the diagonal; the blocks are the same bits."""
    compiled = compiler(emulated, HOPPER, ARCHITECTURE[name])
    problem = PROBLEMS[name]
    batch, tokens, heads_v = problem.given["v"].shape[:3]
    alone, blocks = blocks_of(problem, emulated), blocks_of(problem, emulated)
    prepare(compiled, problem, alone)
    dtype = problem.given["q"].dtype
    intra = tuple(emulated.empty((batch, tokens, heads_v, CHUNK), dtype) for _ in range(2))
    prepare(compiled, problem, blocks, intra)
    assert torch.equal(blocks.view(torch.int16), alone.view(torch.int16))
    with one_thread():
        expected = factors(problem)
    for n, slot, rows in chunks(problem):
        for head in range(heads_v):
            parts = expected[slot, head]
            for found, exact in zip(intra, (parts.aqk, parts.inverse)):
                own = problem.tokens(found, n)[rows, head]
                assert not own.triu(1).any()
                assert relative_rmse(own, exact[: len(own)]) <= ROUNDED_ERROR


@pytest.mark.parametrize("name", WITH_FACTORS)
def test_factors_for_the_caller(emulated, name):
    """w, u, qg and kg by token, of both heads, from what the chunk-parallel kernel wrote."""
    compiled = compiler(emulated, HOPPER, ARCHITECTURE[name])
    problem = PROBLEMS[name]
    shape, dtype = problem.given["v"].shape, problem.given["v"].dtype
    blocks = blocks_of(problem, emulated)
    prepare(compiled, problem, blocks)
    found = [emulated.empty(shape, dtype) for _ in range(4)]
    cu_seqlens = problem.cu_seqlens(torch.int32) if problem.packed else None
    config = FactorsConfig(dtype_name(dtype), problem.operand, "int32" if problem.packed else None)
    compiled(config)(
        blocks, problem.given["v"], *found, cu_seqlens, problem.scale, 0, blocks.shape[0]
    )  # fmt: skip
    x = {name: tensor.double() for name, tensor in problem.given.items() if tensor is not None}
    options = problem.options
    offsets = problem.cu_seqlens(torch.int64) if problem.packed else None
    with one_thread():
        expected = reference.intermediates(
            *(x.get(name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), offsets, **options
        )  # fmt: skip
    for own, exact in zip(found, expected[2:]):
        assert relative_rmse(own, exact) <= ROUNDED_ERROR


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_wait_of_the_factors_matters(emulated, arch):
    compiled = compiler(emulated, HOPPER, arch)
    problem = make_problem((100,))
    blocks, v = blocks_of(problem, emulated), problem.given["v"]
    prepare(compiled, problem, blocks)
    kernel = compiled(FactorsConfig("bfloat16", problem.operand))

    def run(**changes) -> list[Tensor]:
        found = [emulated.empty(v.shape, v.dtype) for _ in range(4)]
        kernel(blocks, v, *found, None, problem.scale, 0, blocks.shape[0], **changes)
        return found

    before = run()

    def check(changes) -> None:
        for one, other in zip(run(**vars(changes)), before):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))

    report = mutation.run(check, kernel, schedules=mutation.SCHEDULES[:3])
    assert report.noticed and not report.not_reached and not report.unnoticed, str(report)
