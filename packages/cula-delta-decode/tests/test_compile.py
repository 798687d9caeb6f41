"""Every kernel family cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import itertools
import re

import pytest

from cula_core.compiled.artifacts import artifacts
from cula_delta_decode import build, launch
from cula_delta_decode.config import DTYPES, Config, Fused, Gate, Problem
from cula_delta_decode.kernels.records import CHUNK
from cula_delta_decode.plan import candidates, select
from cula_emulator import resources
from cula_emulator.covering import covering_cases
from cula_testing.compiled import assert_closed, report

GDN = Gate("softplus", False, "bfloat16", True, "float32", "logits", "bfloat16")
KDA = Gate("safe", True, "bfloat16", True, "float32", "logits", "bfloat16")
GATES = {
    "gdn": GDN,
    "kda": KDA,
    "given": Gate("log", False, "float32", strength="given"),
    "none": Gate("none"),
}
BOTH = Fused("bfloat16", True, "silu", "bfloat16")
# What a kernel does beside or instead of storing the last state in the slot where it was.
MODES: dict[str, dict] = {
    "decode": {},
    "verify": {"ends": False},
    "redirected": {"redirected": True},
    "every_token": {"ends": False, "every_token": True, "slots": 2, "counted": True},
    "replay": {"ends": False, "replay": True, "counted": True},
    "convolution": {"fused": Fused("float32")},
    "norm": {"ends": False, "fused": Fused(norm="sigmoid")},
    "both": {"fused": BOTH},
    "replay_both": {"ends": False, "replay": True, "counted": True, "fused": BOTH},
    "commit": {"commits": True, "counted": True},
    "flush": {"replay": True, "flushes": True},
}
# What the tiles of a kernel follow from.
FACTORS = {
    "tokens": (1, 4, 8),
    "dims": ((128, 128), (64, 64), (64, 128), (128, 64)),
    "arch": ("sm_80", "sm_89", "sm_90a", "sm_100a"),
    "state_dtype": DTYPES,
    "state_v_first": (False, True),
    "packed": (False, True),
    "dtype": ("bfloat16", "float16"),
    # Many states or few ones have other tiles, and so have GPUs with few multiprocessors.
    "few": (0, 1, 2),
    "multiprocessors": (132, 80),
}
# Every two values meet, each time with the next mode and gate. The emulator, which asks each of its kernels for spills,
# has all modes; those with the most registers of the largest states are asked below.
CASES = [
    {"mode": mode, "gate": gate} | case
    for mode, gate, case in zip(
        itertools.cycle(MODES), itertools.cycle(GATES), covering_cases(FACTORS, lambda case: True)
    )
]


def problem_of(case: dict) -> Problem:
    facts = {"packed": case["packed"]} | MODES[case["mode"]]
    # A flush has no tokens; it is compiled as `launch.flush` asks for it.
    tokens = 1 if case["mode"] == "flush" else case["tokens"]
    return Problem(
        case["dtype"], case["state_dtype"], *case["dims"], tokens, case["state_v_first"], GATES[case["gate"]], **facts,
    )  # fmt: skip


def label(case: dict) -> str:
    order = "VK" if case["state_v_first"] else "KV"
    dims = "x".join(map(str, case["dims"]))
    kind = f"{case['mode']}-{case['gate']}-{case['dtype']}-{case['state_dtype']}-{dims}-{order}"
    return f"{case['arch']}-{kind}-T{case['tokens']}{'-packed' * case['packed']}"


def stores(config: Config) -> int:
    """How often the program text writes the state of a thread: behind a token, or behind the records."""
    problem = config.problem
    tokens = problem.tokens if problem.every_token else 0
    return tokens + (problem.ends and not problem.flushes) + problem.replay


def shared_bytes(config: Config) -> int:
    """Records of a replay, the factors of a single token, staged tokens, before a norm their outputs, activated gates
    and sums of squares, and of [K, V] states the sums of the warps and what each column adds."""
    problem = config.problem
    factors = problem.head_dim_k if problem.gate.channels else 1
    records = 4 * CHUNK * (problem.head_dim_k + config.tile_v + factors) if problem.replay else 0
    if problem.flushes:
        return records
    staged = records
    if problem.direct and problem.gate.channels:
        staged += 4 * problem.head_dim_k
    if not problem.direct:
        rows = [problem.head_dim_k] * 2 + [config.tile_v, factors, 3]
        rows += [config.tile_v] * 2 if problem.fused.norm else []
        rows += [config.cluster] if config.cluster > 1 else []
        staged += sum(-(-4 * problem.tokens * row // 16) * 16 for row in rows)
    sums = 0
    if not problem.state_v_first:
        warps = config.threads // 32
        sums = sum(
            -(-4 * x // 16) * 16 for x in (warps * 2 * config.tile_v, warps * 3, config.tile_v)
        )
    return staged + sums


@pytest.mark.parametrize("case", CASES, ids=label)
def test_machine_code(case):
    assert_machine_code(problem_of(case), case["arch"], case["few"], case["multiprocessors"])


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode, gate", [("both", KDA), ("replay_both", KDA)])
def test_convolution_and_norm_of_the_largest_states_spill_nothing(mode, gate, state_dtype, v_first):
    """A CTA has all of V then, and so the most of a state that any has."""
    problem = Problem("bfloat16", state_dtype, 128, 128, 8, v_first, gate, **MODES[mode])
    for few in {select(problem, "sm_90a", few=few): few for few in (0, 1)}.values():
        assert_machine_code(problem, "sm_90a", few)


@pytest.mark.parametrize("tokens, few", [(1, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("gate", [GDN, KDA])
@pytest.mark.parametrize(
    "state_dtype, v_first", [*((d, True) for d in DTYPES), (DTYPES[0], False), (DTYPES[2], False)]
)
def test_machine_code_for_any_number_of_states(state_dtype, v_first, gate, tokens, few):
    problem = Problem("bfloat16", state_dtype, 128, 128, tokens, v_first, gate)
    if select(problem, "sm_90a", few=few) != select(problem, "sm_90a"):
        assert_machine_code(problem, "sm_90a", few)


def assert_machine_code(
    problem: Problem, arch: str, few: int = 0, multiprocessors: int = 132
) -> None:
    assert problem.illegal() is None
    config = select(problem, arch, multiprocessors, few)
    unit = launch.unit(config, arch)
    kernel, ptx = report(unit).kernel, artifacts(unit).ptx
    if problem.fused.norm:
        assert config.tile_v * config.cluster == problem.head_dim_v
        assert config.cluster == 1 or arch in ("sm_90a", "sm_100a")
        assert ("mapa" in ptx) == (config.cluster > 1)
    assert re.findall(r"\.target (\w+)", ptx) == [arch]
    assert kernel.threads == (config.threads, 1, 1)
    resources.check(kernel)
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.count("LDL") == kernel.count("STL") == 0
    assert not re.search(r"\b(ld|st)\.local|\.local \.", ptx)
    assert abs(kernel.dynamic_shared_bytes - shared_bytes(config)) < 128
    accesses = config.rows_per_thread * config.vectors_per_row
    assert kernel.count("LDG.128") >= accesses
    assert kernel.count("STG.128") == stores(config) * accesses
    chained = arch in ("sm_90a", "sm_100a") and not problem.flushes
    assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == chained


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("v_first", [False, True])
def test_every_candidate_compiles(v_first, tokens):
    """The tiles of one head size, for tuning; a spill or too much shared memory would make their figures worthless."""
    found = candidates(Problem("bfloat16", "float32", 128, 128, tokens, v_first, KDA))
    assert len(found) >= 9
    for config in found[::9]:
        kernel = report(launch.unit(config, "sm_90a")).kernel
        resources.check(kernel)
        assert kernel.threads == (config.threads, 1, 1)


def test_sizes_and_strides_are_left_open():
    problem = Problem("bfloat16", "float16", 64, 128, 3, True, KDA, replay=True, counted=True)
    x = build.fake_arguments(problem)
    for tensor, dim in ((x.q, 64), (x.k, 64), (x.v, 128), (x.g, 64), (x.out, 128)):
        assert (tensor.shape[1], tensor.shape[3], tensor.stride[3]) == (3, dim, 1)
        assert not any(
            isinstance(s, int) for s in (*tensor.stride[:3], tensor.shape[0], tensor.shape[2])
        )
    assert x.state.shape[2:] == (128, 64) and x.state.stride[2:] == (64, 1)
    assert x.k.shape[0] is x.v.shape[0] is x.slots.shape[0] is x.accepted.shape[0]
    assert x.v.shape[2] is x.state.shape[1] is x.A_log.shape[0] is x.ring_u.shape[2]
    assert x.q.shape[2] is x.k.shape[2] is x.ring_k.shape[2]
    assert x.state.shape[0] is x.ring_k.shape[0]
    assert not any(isinstance(v.stride[0], int) for v in (x.slots, x.accepted))
    strides = [s for t in (x.q, x.k, x.v, x.g, x.out) for s in t.stride[:3]]
    assert len({id(s) for s in strides}) == len(strides)


def test_the_cases_cover_every_pair():
    assert {case["mode"] for case in CASES} == set(MODES)
    assert {case["gate"] for case in CASES} == set(GATES)
    covered = {pair for case in CASES for pair in itertools.combinations(case.items(), 2)}
    for (name, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for pair in itertools.product([(name, v) for v in values], [(other, v) for v in others]):
            assert pair in covered


def test_the_key_of_a_kernel_holds_every_source_that_makes_it():
    problem = Problem("bfloat16", "bfloat16", 64, 64, 1, True, GDN)
    assert_closed(launch.unit(select(problem, "sm_80"), "sm_80"))
    flushing = Problem("bfloat16", "float32", 64, 64, 1, False, GDN, replay=True, flushes=True)
    assert_closed(launch.unit(select(flushing, "sm_90a"), "sm_90a"))
