"""Every kernel family cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import itertools
import random
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import cutlass.cute as cute
import pytest
from cutlass.base_dsl.compiler import DumpDir

from cula_lightning_decode import launch
from cula_lightning_decode.config import STATE_DTYPES, Config, Problem, candidates, select

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a")
SHARED_LIMIT = {"sm_80": 166_912, "sm_89": 101_376, "sm_90a": 232_448, "sm_100a": 232_448}
REGISTERS_PER_SM = 65_536
# (mode, stochastic rounding)
MODES = (
    ("decode", False),
    ("verify", False),
    ("commit", False),
    ("decode", True),
    ("commit", True),
)
FACTORS = {
    "mode": MODES,
    "dims": ((64, 64), (128, 128), (256, 256), (64, 256), (256, 64)),
    "arch": ARCHS,
    "state_dtype": STATE_DTYPES,
    "tokens": (1, 4, 8),
    "dtype": ("bfloat16", "float16"),
    "state_v_first": (False, True),
    "indexed": (False, True),
}


def possible(case: dict) -> bool:
    return case["state_dtype"] == "bfloat16" or not case["mode"][1]


def pairs_of(case: dict) -> set:
    return set(itertools.combinations(case.items(), 2))


def covering_cases() -> list[dict]:
    """Few cases that together hold every possible pair of two factors' values."""
    rng = random.Random(0)
    missing = {}
    for (name, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for pair in itertools.product([(name, v) for v in values], [(other, v) for v in others]):
            if possible({"state_dtype": "bfloat16", "mode": MODES[0]} | dict(pair)):
                missing[pair] = None
    cases = []
    while missing:
        fixed = dict(next(iter(missing)))
        tries = []
        while len(tries) < 40:
            case = {name: fixed.get(name, rng.choice(values)) for name, values in FACTORS.items()}
            if possible(case):
                tries.append(case)
        best = max(tries, key=lambda case: sum(pair in missing for pair in pairs_of(case)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        cases.append(best)
    return cases


def problem_of(case: dict) -> Problem:
    mode, stochastic = case["mode"]
    flags = (case["state_v_first"], case["indexed"], mode, stochastic)
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
CASES = [(problem_of(case), case["arch"]) for case in covering_cases()] + HEAVY


def label(case: tuple[Problem, str]) -> str:
    p, arch = case
    order = "VK" if p.state_v_first else "KV"
    flags = "-sr" * p.stochastic + "-indexed" * p.indexed
    kind = f"{p.mode}-{p.dtype}-{p.state_dtype}-{p.head_dim_k}x{p.head_dim_v}-{order}-T{p.tokens}"
    return f"{arch}-{kind}{flags}"


@dataclass(frozen=True)
class Kernel:
    registers: int
    stack_bytes: int
    local_sections: list[str]


def read_cubin(cubin: bytes) -> dict[str, Kernel]:
    """Registers and local memory of every kernel in an ELF file of machine code.

    `.nv.info` is a list of records: format and attribute (1 byte each), size (2), and for the two attributes used here
    a symbol number and a value. Spilled registers live on the stack, so its size is what a spill shows in.
    """
    register_count, frame_size = 0x2F, 0x11
    table, entry_size, count, names_at = (
        struct.unpack_from(kind, cubin, at)[0]
        for kind, at in (("<Q", 40), ("<H", 58), ("<H", 60), ("<H", 62))
    )
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)
    ]

    def text(section: tuple, offset: int) -> str:
        start = section[4] + offset
        return cubin[start : cubin.index(b"\0", start)].decode()

    names = [text(headers[names_at], header[0]) for header in headers]
    symbols = headers[names.index(".symtab")]
    strings = headers[symbols[6]]
    info = headers[names.index(".nv.info")]

    def symbol(number: int) -> str:
        return text(strings, struct.unpack_from("<I", cubin, symbols[4] + 24 * number)[0])

    found: dict[int, dict[str, int]] = {register_count: {}, frame_size: {}}
    at, end = info[4], info[4] + info[5]
    while at < end:
        kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
        # Only format 4 carries `size` bytes behind the record; the others keep their value in that field.
        if kind == 4 and attribute in found:
            number, amount = struct.unpack_from("<II", cubin, at + 4)
            found[attribute][symbol(number)] = amount
        at += 4 + (size if kind == 4 else 0)
    local = [name for name in names if name.startswith(".nv.local")]
    return {
        name: Kernel(registers, found[frame_size][name], local)
        for name, registers in found[register_count].items()
    }


@dataclass(frozen=True)
class Build:
    kernel: Kernel
    ptx: str
    host: str


@pytest.fixture
def build(tmp_path: Path):
    def make(config: Config, arch: str, *options: object) -> Build:
        keep = (cute.KeepCUBIN, cute.KeepPTX, DumpDir(str(tmp_path)))
        compiled = launch.compile(config, arch, *keep, *options)
        kernels = read_cubin(compiled.artifacts.CUBIN)
        assert len(kernels) == 1
        (kernel,) = kernels.values()
        return Build(kernel, compiled.artifacts.PTX, str(compiled.ir_module))

    return make


def test_the_cases_cover_every_pair():
    covered = set().union(*(pairs_of(case) for case in covering_cases()))
    for (name, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for pair in itertools.product([(name, v) for v in values], [(other, v) for v in others]):
            impossible = (
                dict(pair).get("state_dtype", "bfloat16") != "bfloat16"
                and dict(pair).get("mode", MODES[0])[1]
            )
            assert pair in covered or impossible
    assert all(problem.illegal() is None for problem, _ in CASES)


def assert_fits(kernel: Kernel, threads: int) -> None:
    """Nothing spilled, and one CTA finds its registers on an SM."""
    assert kernel.stack_bytes == 0 and not kernel.local_sections
    # Registers are handed out in eights per thread.
    assert 0 < -(-kernel.registers // 8) * 8 * threads <= REGISTERS_PER_SM


@pytest.mark.parametrize("case", CASES, ids=label)
def test_machine_code(build, shared_bytes, case):
    problem, arch = case
    config = select(problem, arch)
    made = build(config, arch)
    ptx = made.ptx
    assert f".target {arch}" in ptx
    assert f".reqntid {config.threads}, 1, 1" in ptx
    assert_fits(made.kernel, config.threads)
    assert not re.search(r"\b(ld|st)\.local|\.local \.", ptx)

    shared = shared_bytes(config)
    assert shared <= SHARED_LIMIT[arch]
    asked = {int(n) for n in re.findall(r"llvm\.mlir\.constant\((\d+) : i64\)", made.host)}
    assert shared in asked, f"the launch should ask for {shared} bytes; constants: {sorted(asked)}"

    accesses = config.rows_per_thread * config.vectors_per_row
    loads, stores = (
        len(re.findall(rf"\b{kind}\.global\.(v4\.b32|v2\.b64)", ptx)) for kind in ("ld", "st")
    )
    # Tiles that read q, k, v directly do that with wide loads too, where the pointers allow it.
    assert loads >= accesses if config.direct else loads == accesses
    assert stores == (0 if problem.mode == "verify" else accesses)
    assert ("griddepcontrol" in ptx) == (arch in ("sm_90a", "sm_100a"))


@pytest.mark.parametrize(
    "state_dtype, v_first, tokens",
    [("float32", False, 1), ("float32", True, 4), ("bfloat16", False, 4), ("bfloat16", True, 1)],
)
def test_every_candidate_compiles(build, shared_bytes, state_dtype, v_first, tokens):
    """The tiles of one head size, for tuning; a spill or too much shared memory would make their figures worthless."""
    found = candidates(Problem("bfloat16", state_dtype, 128, 128, tokens, v_first, False))
    assert len(found) >= 3
    for config in found:
        assert_fits(build(config, "sm_90a").kernel, config.threads)
        assert shared_bytes(config) <= SHARED_LIMIT["sm_90a"]


def test_a_spill_would_be_seen(build):
    """The same reader on a tile whose threads hold more state than there are registers for one."""
    oversized = Config(Problem("bfloat16", "float32", 256, 128, 1, True, True), 32, 32)
    assert oversized.illegal() is not None
    assert build(oversized, "sm_90a").kernel.stack_bytes > 0


@pytest.mark.parametrize("mode", ["decode", "verify", "commit"])
@pytest.mark.parametrize("v_first", [False, True])
def test_sizes_and_strides_are_left_open(mode, v_first):
    problem = Problem("bfloat16", "bfloat16", 64, 256, 3, v_first, True, mode, mode != "verify")
    q, k, v, state, decay, indices, accepted, seed, out, _ = launch.fake_arguments(problem)

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
    assert fixed(decay) == fixed(indices) == [(None,), (1,)]
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


def test_one_compile_per_config_and_architecture():
    before = launch.compile.cache_info()
    problems = [Problem("float16", "float16", 64, 64, 2, True, False) for _ in range(2)]
    first, second = (launch.compile(select(p, "sm_90a"), "sm_90a") for p in problems)
    assert first is second
    after = launch.compile.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
