"""Machine code and configs of the kernels with 8-bit scores, cross-compiled without a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from cula_core.compiled.artifacts import artifacts
from cula_emulator import resources
from cula_testing.compiled import report
from liteattention_sm89 import launch
from liteattention_sm89.config import (
    DTYPES,
    HEAD_DIMS,
    SHARED_MEMORY,
    ForwardConfig,
    Problem,
    candidates,
    select,
)

PROBLEMS = [
    Problem("bfloat16", dim, skip=skip, int8=True) for dim in HEAD_DIMS for skip in (False, True)
]
CASES = [(problem, "sm_89") for problem in PROBLEMS]
CASES += [(PROBLEMS[5], "sm_90a"), (PROBLEMS[0], "sm_90a"), (PROBLEMS[5], "sm_120a")]
MOST_SPILLED = 32  # bytes of a thread
CASES.append((Problem("float16", 72, True, True, 128, True, True, "int64", True, True), "sm_89"))


def label(case: tuple[Problem, str]) -> str:
    problem, arch = case
    return "-".join([arch, problem.dtype, f"D{problem.head_dim}", *["listed"] * problem.skip])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_machine_code(case):
    problem, arch = case
    config = select(problem, arch)
    unit = launch.forward_unit(config, arch)
    kernel, ptx = report(unit).kernel, artifacts(unit).ptx
    strict = arch != "sm_90a"  # whose compiler runs out of registers
    expected = ("IMMA", "HMMA", "LDSM", "LDGSTS")
    resources.check(kernel, expect=expected, spills=not strict, stack=not strict)
    assert max(kernel.spill_stores, kernel.spill_loads) <= (0 if strict else MOST_SPILLED)
    if strict:
        assert kernel.count("LDL") == kernel.count("STL") == 0
    assert not re.search(r"\b(ld|st)\.local|\.local \.", ptx)
    assert kernel.threads == (32 * config.warps, 1, 1) and kernel.shared_bytes == 0
    assert kernel.dynamic_shared_bytes <= config.shared_bytes <= SHARED_MEMORY

    step, width, blocks = config.step, config.width, config.rows // 16
    row = next(d for d in (64, 128, 192, 256) if d >= problem.head_dim)  # bytes of q or k
    products = blocks * (step // 8) * (row // 32)
    assert (
        kernel.count("IMMA")
        == products
        == len(re.findall(r"mma\.sync\S*m16n8k32\S*\.s32\.s8\.s8\.s32", ptx))
    )
    assert not re.search(r"mma\.sync\S*\.u8", ptx)
    assert kernel.count("HMMA") == blocks * (step // 16) * (width // 8)
    assert kernel.count("LDSM") == (step // 16) * (row // 32 + width // 16) + blocks * (row // 32)
    # Sums of products are floats without being converted.
    assert kernel.count("I2F") <= 4
    scores = 128 * step // (32 * config.warps)
    assert scores < ptx.count("ex2.approx") <= scores + 2 * 2 * blocks


@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_machine_code_of_the_means(dim):
    kernel = report(launch.means_unit(Problem("bfloat16", dim), "sm_89")).kernel
    resources.check(kernel, expect=("LDG.128", "STS.128"))
    assert kernel.registers <= 64 and kernel.count("BAR") == 1


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_machine_code_of_the_kernel_that_rounds(dim, of_keys):
    kernel = report(launch.quantize_unit(Problem("bfloat16", dim), of_keys, "sm_89")).kernel
    resources.check(kernel, expect=("LDG.128", "STG.64", "SHFL"))
    assert kernel.registers <= 160 and kernel.count("BAR") == of_keys
    # Heads are divided by heads; values are rounded without being converted.
    assert kernel.count("F2I") == kernel.count("I2F") == (0 if of_keys else 2)


def test_configs():
    columns_of = {8: 32, 64: 32, 72: 64, 96: 64, 128: 64, 136: 96, 192: 96, 200: 128, 256: 128}
    for dim, columns in columns_of.items():
        for arch, skip, dtype in itertools.product(
            ("sm_80", "sm_89", "sm_90a", "sm_120a"), (False, True), DTYPES
        ):
            problem = Problem(dtype, dim, skip=skip, int8=True)
            assert problem.illegal() is None
            for config in (select(problem, arch), *candidates(problem, arch)):
                assert config.illegal() is None and not config.query_in_registers
                assert config.score_columns == columns
                # Half of what 16-bit scores need for q and k.
                plain = replace(config, problem=replace(problem, int8=False))
                assert plain.score_columns == plain.width and config.place <= plain.place
    for rows, dim in itertools.product((16, 32), HEAD_DIMS):
        config = ForwardConfig(Problem("bfloat16", dim, int8=True), rows, True)
        assert config.illegal() == "8-bit queries stay in shared memory"
    assert "bfloat16 or float16" in Problem("float32", 64, int8=True).illegal()
