"""Every config cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import pytest

from cula_core.compiled.artifacts import Unit, artifacts
from cula_emulator import resources
from cula_testing.compiled import assert_closed, report
from liteattention_sm89 import launch
from liteattention_sm89.config import (
    BLOCK_M,
    BLOCK_N,
    DTYPES,
    HEAD_DIMS,
    ROLES,
    SHARED_MEMORY,
    BackwardConfig,
    ForwardConfig,
    Problem,
    select,
    select_backward,
)

PROBLEMS = [Problem("bfloat16", dim, skip=skip) for dim in HEAD_DIMS for skip in (False, True)]
PROBLEMS += [
    Problem("float16", 128, True),
    Problem("bfloat16", 128, True, True, 128, True, True, "int64", True),
    Problem("float16", 80, True, True, 64, True, True),
    Problem("bfloat16", 256, True, True, 128, True, True, "int32", True),
    Problem("bfloat16", 200, skip=True, block_n=128),
    Problem("bfloat16", 8, packed=True),
]
CASES = [(problem, "sm_89") for problem in PROBLEMS]
CASES += [(problem, "sm_90a") for problem in PROBLEMS[4:6] + PROBLEMS[11:12]]
CASES += [(problem, "sm_120a") for problem in PROBLEMS[4:6]]

BACKWARD = [
    (Problem("bfloat16", dim, True, True), role, "sm_89") for dim in HEAD_DIMS for role in ROLES
]
BACKWARD += [(Problem("bfloat16", dim), "both", "sm_89") for dim in (64, 128, 256)]
BACKWARD += [
    (Problem("float16", 80, True, packed=True, index_dtype="int64"), "keys", "sm_89"),
    (Problem("float16", 200, skip=True, block_n=128, packed=True), "queries", "sm_89"),
    (Problem("bfloat16", 8, skip=True), "both", "sm_90a"),
    (Problem("bfloat16", 128, True, True), "both", "sm_90a"),
    (Problem("bfloat16", 128), "queries", "sm_90a"),
    (Problem("bfloat16", 128), "both", "sm_120a"),
]
# Bytes of a thread, where other compilers than that of sm_89 run out of registers.
MOST_SPILLED = 32


def label(case: tuple) -> str:
    p, *more = case
    flags = [
        name for name in ("causal", "skip", "must_do", "packed", "on_device") if getattr(p, name)
    ]
    return "-".join([*reversed(more), p.dtype, f"D{p.head_dim}", f"N{p.block_n}", *flags])


@dataclass(frozen=True)
class Build:
    kernel: resources.KernelResources
    ptx: str


def build(unit: Unit) -> Build:
    return Build(report(unit).kernel, artifacts(unit).ptx)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_machine_code(case):
    problem, arch = case
    config = select(problem, arch)
    made = build(launch.forward_unit(config, arch))
    kernel = made.kernel
    resources.check(kernel, expect=("HMMA", "LDSM", "LDGSTS"))
    spilled = (kernel.spill_stores, kernel.spill_loads, kernel.count("LDL"), kernel.count("STL"))
    assert spilled == (0, 0, 0, 0)
    assert not re.search(r"\b(ld|st)\.local|\.local \.", made.ptx)
    assert kernel.threads == (32 * config.warps, 1, 1)
    assert kernel.shared_bytes == 0
    assert kernel.dynamic_shared_bytes <= config.shared_bytes <= SHARED_MEMORY

    # Every product of a step once: no loop that the compiler doubled, nothing that it found to be dead.
    step, width, blocks = config.step, config.width, config.rows // 16
    assert kernel.count("HMMA") == 2 * blocks * (step // 8) * (width // 16)
    # Loads of k and v by 16 rows or columns, of q for every 16 columns.
    loads = 2 * (step // 16) * (width // 16) + blocks * (width // 16)
    assert kernel.count("LDSM") == loads
    # One exponential per score, beside those that rescale rows.
    scores = BLOCK_M * step // (32 * config.warps)
    assert scores < made.ptx.count("ex2.approx") <= scores + 2 * 2 * blocks


@pytest.mark.parametrize("case", BACKWARD, ids=label)
def test_machine_code_of_the_backward_pass(case):
    problem, role, arch = case
    config = select_backward(problem, role, arch)
    made = build(launch.backward_unit(config, arch))
    kernel = made.kernel
    strict = arch == "sm_89"
    resources.check(kernel, expect=("HMMA", "LDSM", "LDGSTS"), spills=not strict, stack=not strict)
    assert max(kernel.spill_stores, kernel.spill_loads) <= (0 if strict else MOST_SPILLED)
    if strict:
        assert kernel.count("LDL") == kernel.count("STL") == 0
    assert not re.search(r"\b(ld|st)\.local|\.local \.", made.ptx)
    threads = 32 * config.warps
    assert kernel.threads == (threads, 1, 1) and kernel.shared_bytes == 0
    assert kernel.dynamic_shared_bytes <= config.shared_bytes <= SHARED_MEMORY

    # All products of a step have the same size; each is there once.
    products = {"both": 5, "keys": 4, "queries": 3}[role]
    rows, keys, width = config.rows, config.keys, config.width
    assert kernel.count("HMMA") == products * (rows * keys * width // (16 * 8 * 16)) // config.warps
    assert made.ptx.count("ex2.approx") == rows * keys // threads
    assert kernel.count("RED") == (rows * width // threads if role == "both" else 0)
    assert kernel.count("BAR") == 5


@pytest.mark.parametrize("dim, role, arch", [
    (64, "both", "sm_89"), (256, "keys", "sm_89"), (72, "both", "sm_90a"),
])  # fmt: skip
def test_machine_code_around_the_backward_pass(dim, role, arch):
    config = select_backward(Problem("bfloat16", dim, packed=dim == 72), role, arch)
    kernel = build(launch.sums_unit(config, dim == 64, arch)).kernel
    resources.check(kernel, expect=("SHFL",))
    assert kernel.dynamic_shared_bytes == 0 and kernel.count("BAR") == 0
    assert kernel.registers <= 64
    if role == "both":
        kernel = build(launch.gather_unit(config, arch)).kernel
        resources.check(kernel, expect=("LDG", "STG.128"))
        assert kernel.dynamic_shared_bytes <= 2 * config.rows * (config.width + 8)
        assert kernel.count("BAR") == 1 and kernel.registers <= 64


def test_ampere():
    """One value of the list kernel does not fit into the registers of sm_80."""
    kernel = build(launch.forward_unit(select(PROBLEMS[5], "sm_80"), "sm_80")).kernel
    assert kernel.count("HMMA") == 256
    assert kernel.count("STL") <= 2 and kernel.count("LDL") <= 2


@pytest.mark.parametrize(
    "unit",
    [
        launch.gather_unit(select_backward(Problem("bfloat16", 64), "both", "sm_89"), "sm_89"),
        launch.means_unit(Problem("bfloat16", 64), "sm_89"),
        launch.quantize_unit(Problem("bfloat16", 64), True, "sm_89"),
    ],
    ids=["gather", "means", "quantize"],
)
def test_a_kernel_depends_on_no_source_that_its_key_misses(unit):
    assert_closed(unit)


def test_problems_that_no_kernel_serves():
    for problem, message in (
        (Problem("float32", 64), "bfloat16 or float16"),
        (Problem("bfloat16", 60), "multiple of 8"),
        (Problem("bfloat16", 264), "up to 256"),
        (Problem("bfloat16", 0), "multiple of 8"),
        (Problem("bfloat16", 64, block_n=32), "64 or 128 keys"),
        (Problem("bfloat16", 64, must_do=True), "on a list"),
    ):
        assert message in problem.illegal()
        assert message in ForwardConfig(problem, 16, True).illegal()
    legal = Problem("bfloat16", 128)
    assert "16 or 32 rows" in ForwardConfig(legal, 64, False).illegal()
    assert "registers" in ForwardConfig(Problem("bfloat16", 256), 32, False).illegal()
    assert (
        "shared memory" in ForwardConfig(Problem("bfloat16", 256, skip=True), 16, False).illegal()
    )


def test_configs_that_no_backward_kernel_serves():
    legal = Problem("bfloat16", 128)
    for config, message in (
        (BackwardConfig(Problem("float32", 64), "both", 64, 64, 4), "bfloat16 or float16"),
        (BackwardConfig(Problem("bfloat16", 60), "both", 64, 64, 4), "multiple of 8"),
        (BackwardConfig(legal, "values", 64, 64, 4), "both, keys, queries, not values"),
        (BackwardConfig(legal, "both", 64, 64, 16), "16 warps do not share 64 rows"),
        (BackwardConfig(legal, "both", 48, 64, 4), "4 warps do not share 48 rows"),
        (BackwardConfig(legal, "both", 64, 32, 8), "8 warps do not share 32 columns"),
        (BackwardConfig(Problem("bfloat16", 96), "both", 64, 64, 8), "8 warps do not share 96"),
        (BackwardConfig(legal, "both", 96, 64, 4), "96 x 64 does not divide a tile"),
        (BackwardConfig(legal, "both", 64, 128, 4), "64 x 128 does not divide a tile"),
        (BackwardConfig(legal, "both", 128, 64, 8), "bytes of shared memory are more than 101376"),
    ):
        assert message in config.illegal()


def test_every_legal_problem_has_a_backward_config():
    for dim, block_n, skip in itertools.product(range(8, 264, 8), BLOCK_N, (False, True)):
        for role, arch in itertools.product(ROLES, ("sm_80", "sm_89", "sm_90a", "sm_120a")):
            config = select_backward(
                Problem("bfloat16", dim, skip=skip, block_n=block_n), role, arch
            )
            assert config.illegal() is None and config.width >= dim and config.role == role
            assert config.warps == 4 or arch in ("sm_89", "sm_120a")
            # What one kernel leaves is read by the others.
            both = select_backward(config.problem, "both", arch)
            assert (config.rows, config.warps) == (both.rows, both.warps)


def test_every_legal_problem_has_a_config():
    for dtype in DTYPES:
        for dim in range(8, HEAD_DIMS[-1] + 8, 8):
            for skip in (False, True):
                for block_n, arch in itertools.product(BLOCK_N, ("sm_89", "sm_90a")):
                    config = select(Problem(dtype, dim, skip=skip, block_n=block_n), arch)
                    assert config.illegal() is None and config.width >= dim
                    assert block_n % config.step == 0
