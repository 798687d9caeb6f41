"""Every kernel family cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import itertools
import re

import pytest
from decode_helpers import MODES, possible

from cula_core.compiled.artifacts import artifacts
from cula_emulator import resources
from cula_emulator.covering import covering_cases
from cula_lightning_decode import build, launch
from cula_lightning_decode.config import STATE_DTYPES, Config, Problem
from cula_lightning_decode.plan import candidates, select
from cula_testing.compiled import assert_closed, report

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a")
FACTORS = {
    "mode": MODES,
    "dims": ((64, 64), (128, 128), (256, 256), (64, 256), (256, 64)),
    "arch": ARCHS,
    "state_dtype": STATE_DTYPES,
    "tokens": (1, 4, 8),
    "dtype": ("bfloat16", "float16"),
    "state_v_first": (False, True),
    "indexed": (False, True),
    "padded": (False, True),
}
COVERING = covering_cases(FACTORS, possible)


def problem_of(case: dict) -> Problem:
    mode, stochastic = case["mode"]
    flags = (case["state_v_first"], case["indexed"], mode, stochastic, case["padded"])
    return Problem(case["dtype"], case["state_dtype"], *case["dims"], case["tokens"], *flags)


# The tiles that ask most of registers and shared memory: 8 tokens on the largest and the most oblong matrices.
HEAVY = [
    (
        Problem("bfloat16", state, *dims, 8, v_first, True),
        "sm_89" if state == "float32" else "sm_90a",
    )
    for state in ("float32", "bfloat16")
    for dims in ((256, 256), (64, 256))
    for v_first in (False, True)
]
CASES = [(problem_of(case), case["arch"]) for case in COVERING] + HEAVY


def label(case: tuple[Problem, str]) -> str:
    p, arch = case
    order = "VK" if p.state_v_first else "KV"
    flags = "-sr" * p.stochastic + "-indexed" * p.indexed
    kind = f"{p.mode}-{p.dtype}-{p.state_dtype}-{p.head_dim_k}x{p.head_dim_v}-{order}-T{p.tokens}"
    return f"{arch}-{kind}{flags}"


def test_the_cases_cover_every_pair():
    covered = {pair for case in COVERING for pair in itertools.combinations(case.items(), 2)}
    for (name, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for pair in itertools.product([(name, v) for v in values], [(other, v) for v in others]):
            impossible = (
                dict(pair).get("state_dtype", "bfloat16") != "bfloat16"
                and dict(pair).get("mode", MODES[0])[1]
            )
            assert pair in covered or impossible
    assert all(problem.illegal() is None for problem, _ in CASES)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_machine_code(shared_bytes, case):
    problem, arch = case
    config = select(problem, arch)
    unit = launch.unit(config, arch)
    kernel, ptx = report(unit).kernel, artifacts(unit).ptx
    assert re.findall(r"\.target (\w+)", ptx) == [arch]
    assert kernel.threads == (config.threads, 1, 1)
    resources.check(kernel)
    assert (
        kernel.spill_stores == kernel.spill_loads == kernel.count("LDL") == kernel.count("STL") == 0
    )
    assert not re.search(r"\b(ld|st)\.local|\.local \.", ptx)
    assert (kernel.shared_bytes, kernel.dynamic_shared_bytes) == (0, shared_bytes(config))

    accesses = config.rows_per_thread * config.vectors_per_row
    # Tiles that read q, k, v directly do that with wide loads too, where the pointers allow it.
    wide = kernel.count("LDG.128")
    assert wide >= accesses if config.direct else wide == accesses
    assert kernel.count("STG.128") == (0 if problem.mode == "verify" else accesses)
    # Everything comes through registers.
    assert kernel.count("LDGSTS") == kernel.count("LDG.256") == kernel.count("STG.256") == 0
    chained = arch in ("sm_90a", "sm_100a")
    assert ("griddepcontrol" in ptx) == chained
    assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == chained


@pytest.mark.parametrize(
    "state_dtype, v_first, tokens",
    [("float32", False, 1), ("float32", True, 4), ("bfloat16", False, 4), ("bfloat16", True, 1)],
)
def test_every_candidate_compiles(shared_bytes, state_dtype, v_first, tokens):
    """The tiles of one head size, for tuning; a spill or too much shared memory would make their figures worthless."""
    found = candidates(Problem("bfloat16", state_dtype, 128, 128, tokens, v_first, False))
    assert len(found) >= 3
    for config in found[::4]:
        kernel = report(launch.unit(config, "sm_90a")).kernel
        resources.check(kernel)
        assert kernel.threads == (config.threads, 1, 1)
        assert kernel.dynamic_shared_bytes == shared_bytes(config)


def test_a_spill_would_be_seen():
    """The same reader on a tile whose threads hold more state than there are registers for one."""
    oversized = Config(Problem("bfloat16", "float32", 256, 128, 1, True, True), 32, 32)
    assert oversized.illegal() is not None
    kernel = report(launch.unit(oversized, "sm_90a")).kernel
    assert kernel.stack_bytes > 0 and kernel.spill_stores > 0 and kernel.count("STL") > 0
    with pytest.raises(AssertionError, match="spills registers"):
        resources.check(kernel)


@pytest.mark.parametrize("mode", ["decode", "verify", "commit"])
@pytest.mark.parametrize("v_first", [False, True])
def test_sizes_and_strides_are_left_open(mode, v_first):
    problem = Problem("bfloat16", "bfloat16", 64, 256, 3, v_first, True, mode, mode != "verify")
    q, k, v, state, decay, indices, accepted, seed, out, *_ = build.fake_arguments(problem)

    def fixed(tensor) -> list:
        """Extents and strides, None where they are open."""
        both = (tensor.shape, tensor.stride)
        return [tuple(x if isinstance(x, int) else None for x in values) for values in both]

    for tensor, dim in ((q, 64), (k, 64), (v, 256), (out, 256)):
        if tensor is not None:
            assert fixed(tensor) == [(None, 3, None, dim), (None, None, None, 1)]
    assert (q is None) == (out is None) == (mode == "commit")
    matrix = (256, 64) if v_first else (64, 256)
    assert fixed(state) == [(None, None, *matrix), (None, None, matrix[1], 1)]
    assert fixed(decay) == [(None,), (1,)] and fixed(indices) == [(None,), (None,)]
    if mode == "commit":
        assert fixed(accepted) == fixed(indices) and accepted.shape[0] is indices.shape[0]
    assert (accepted is None) == (mode != "commit") and (seed is None) == (mode == "verify")
    # The host code compares what shares a symbol: rows with rows, value heads with value heads.
    assert k.shape[0] is v.shape[0] is indices.shape[0]
    assert v.shape[2] is state.shape[1] is decay.shape[0]
    assert state.shape[0] is not k.shape[0] and k.shape[2] is not v.shape[2]
    if mode != "commit":
        assert q.shape[2] is k.shape[2] and out.shape[2] is v.shape[2]
        assert q.shape[0] is out.shape[0] is k.shape[0]
    strides = [s for t in (q, k, v, out) if t is not None for s in t.stride[:3]]
    assert len({id(s) for s in strides}) == len(strides)


def test_the_key_of_a_kernel_holds_every_source_that_makes_it():
    problem = Problem("bfloat16", "bfloat16", 64, 64, 1, True, False)
    assert_closed(launch.unit(select(problem, "sm_80"), "sm_80"))


def test_one_compile_per_config_and_architecture():
    before = launch.compile.cache_info()
    problems = [Problem("float16", "float16", 64, 64, 2, True, False) for _ in range(2)]
    first, second = (launch.compile(select(p, "sm_90a"), "sm_90a") for p in problems)
    assert first is second
    after = launch.compile.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
