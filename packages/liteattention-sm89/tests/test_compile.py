"""Every config cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cutlass.cute as cute
import pytest
from cutlass.base_dsl.compiler import DumpDir

from cula_emulator import resources
from liteattention_sm89 import launch
from liteattention_sm89.config import (
    BLOCK_M,
    BLOCK_N,
    DTYPES,
    HEAD_DIMS,
    SHARED_MEMORY,
    ForwardConfig,
    Problem,
    select,
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


def label(case: tuple[Problem, str]) -> str:
    p, arch = case
    flags = [
        name for name in ("causal", "skip", "must_do", "packed", "on_device") if getattr(p, name)
    ]
    return "-".join([arch, p.dtype, f"D{p.head_dim}", f"N{p.block_n}", *flags])


@dataclass(frozen=True)
class Build:
    kernel: resources.KernelResources
    ptx: str


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Build]:
    def make(config: ForwardConfig, arch: str) -> Build:
        compiled = launch.compile_forward(
            config, arch, cute.KeepCUBIN, cute.KeepPTX, DumpDir(str(tmp_path))
        )
        return Build(resources.report(compiled).kernel, compiled.artifacts.PTX)

    return make


@pytest.mark.parametrize("case", CASES, ids=label)
def test_machine_code(build, case):
    problem, arch = case
    config = select(problem, arch)
    made = build(config, arch)
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


def test_ampere(build):
    """One value of the list kernel does not fit into the registers of sm_80."""
    kernel = build(select(PROBLEMS[5], "sm_80"), "sm_80").kernel
    assert kernel.count("HMMA") == 256
    assert kernel.count("STL") <= 2 and kernel.count("LDL") <= 2


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


def test_every_legal_problem_has_a_config():
    for dtype in DTYPES:
        for dim in range(8, HEAD_DIMS[-1] + 8, 8):
            for skip in (False, True):
                for block_n, arch in itertools.product(BLOCK_N, ("sm_89", "sm_90a")):
                    config = select(Problem(dtype, dim, skip=skip, block_n=block_n), arch)
                    assert config.illegal() is None and config.width >= dim
                    assert block_n % config.step == 0
