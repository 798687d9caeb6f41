"""How one row of the scalar tables becomes a PTX entry, its inputs, and a verdict on its outputs."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from softfloat import FORMATS

HEADER = ".version 8.4\n.target sm_90a\n.address_size 64\n"
_BITS = {"pred": 32, "tf32": 32, "f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32, "bf16": 16}
_BITS |= {"e4m3x2": 16, "e5m2x2": 16, "e4m3": 8, "e5m2": 8}


@dataclass(frozen=True)
class Approximate:
    """The result may differ from the oracle's by `relative` of it, or by `absolute`."""

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Case:
    """One instruction variant.

    `ptx` names its operands a, b, c, g (in that order of `inputs`) and d, e (of `outputs`); `inputs` and `outputs` are
    PTX types, "type:N" for inputs below N. `oracle` takes one bit pattern per input and gives one per output, a tuple
    if there are two. With `warp` it takes and gives lists of 32 of those, one per lane; None means undefined.
    `kind` is None where every bit must agree (any NaN equals any NaN), or an Approximate.
    """

    name: str
    ptx: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    oracle: Callable
    kind: Approximate | None = None
    warp: bool = False
    domain: Callable[[random.Random], tuple[int, ...]] | None = None

    @cached_property
    def words_in(self) -> int:
        return unit(self.inputs) * len(self.inputs)

    @cached_property
    def words_out(self) -> int:
        return unit(self.outputs) * len(self.outputs)


@cache
def bits(kind: str) -> int:
    kind = kind.partition(":")[0]
    return _BITS.get(kind) or int(kind.lstrip("busf"))


@cache
def unit(kinds: tuple[str, ...]) -> int:
    """Words per value: two for all values if one has 64 bits, so that it is aligned."""
    return 2 if any(bits(k) == 64 for k in kinds) else 1


def entry(case: Case) -> str:
    """A kernel (in, out): thread t reads its inputs from `words_in` words at 4 * t * words_in, writes alike."""
    lines = [
        f".visible .entry {case.name}(.param .u64 in, .param .u64 out)\n{{",
        ".reg .b32 t, n, w; .reg .b64 p, q, s; .reg .pred z;",
        "ld.param.u64 p, [in]; ld.param.u64 q, [out];",
        "mov.u32 t, %ctaid.x; mov.u32 n, %ntid.x; mov.u32 w, %tid.x; mad.lo.u32 t, t, n, w;",
        f"mul.wide.u32 s, t, {4 * case.words_in}; add.s64 p, p, s;",
        f"mul.wide.u32 s, t, {4 * case.words_out}; add.s64 q, q, s;",
    ]
    offset = 0
    for name, kind in zip("abcg", case.inputs):
        lines.append(f".reg .{'pred' if kind == 'pred' else f'b{max(bits(kind), 16)}'} {name};")
        if kind == "pred":
            lines.append(f"ld.global.b32 w, [p+{offset}]; setp.ne.b32 {name}, w, 0;")
        else:
            lines.append(f"ld.global.b{bits(kind)} {name}, [p+{offset}];")
        offset += 4 * unit(case.inputs)
    lines += [
        f".reg .{'pred' if k == 'pred' else f'b{bits(k)}'} {n};" for n, k in zip("de", case.outputs)
    ]
    lines.append(case.ptx)
    offset = 0
    for name, kind in zip("de", case.outputs):
        if kind == "pred":
            lines.append(f"selp.b32 w, 1, 0, {name}; st.global.b32 [q+{offset}], w;")
        else:
            lines.append(f"st.global.b{bits(kind)} [q+{offset}], {name};")
        offset += 4 * unit(case.outputs)
    return "\n".join([*lines, "ret;\n}"])


@cache
def _edges(kind: str) -> list[int]:
    base, _, limit = kind.partition(":")
    if limit:
        return [int(limit) - 1, 0]
    if base == "pred":
        return [0, 1]
    if base in FORMATS:
        f = FORMATS[base]
        one = f.bias << f.mantissa_bits
        positive = [
            0,
            1,
            f.smallest_normal - 1,
            f.smallest_normal,
            one,
            one + 1,
            one - 1,
            one + (1 << f.mantissa_bits),
        ]
        positive += [
            f.largest,
            f.infinity,
            f.nan,
            one + (1 << f.mantissa_bits - 1),
            (f.bias + f.mantissa_bits) << f.mantissa_bits,
        ]
        return [p | s for p in positive for s in (0, f.sign)]
    n = bits(base)
    return [
        x & ((1 << n) - 1)
        for x in (
            0,
            1,
            2,
            -1,
            -2,
            1 << n - 1,
            (1 << n - 1) - 1,
            (1 << n - 1) + 1,
            0x55,
            1 << n // 2,
        )
    ]


def _tie(base: str, source: random.Random) -> int:
    """A number half way between two of a shorter format, or next to half way."""
    off = source.choice((-1, 0, 0, 1))
    if base not in FORMATS:
        n = bits(base)
        shift = source.randrange(n)
        return (source.getrandbits(12) << shift) + off & ((1 << n) - 1)
    f = FORMATS[base]
    kept = source.choice([k for k in (1, 2, 3, 7, 10, 23) if k < f.mantissa_bits])
    mantissa = (source.getrandbits(kept) * 2 + 1 << f.mantissa_bits - kept - 1) + off
    exponent = min(max(f.bias + source.randint(-12, 12), 0), (1 << f.exponent_bits) - 2)
    return source.randrange(2) * f.sign | (exponent << f.mantissa_bits) + mantissa


def _random(kind: str, source: random.Random) -> int:
    base, _, limit = kind.partition(":")
    if limit:
        return source.randrange(int(limit))
    if base.endswith("x2") and base[:-2] in FORMATS:
        half = FORMATS[base[:-2]].bits
        return _random(base[:-2], source) << half | _random(base[:-2], source)
    choice = source.random()
    if base == "pred" or choice < 0.2:
        return source.choice(_edges(base))
    if choice < 0.4:
        return _tie(base, source)
    if base in FORMATS and choice < 0.8:  # exponents near each other, so that sums round
        f = FORMATS[base]
        exponent = min(max(f.bias + source.randint(-12, 12), 0), (1 << f.exponent_bits) - 2)
        sign, mantissa = source.randrange(2) * f.sign, source.randrange(f.smallest_normal)
        return sign | exponent << f.mantissa_bits | mantissa
    n = bits(base)
    return source.getrandbits(n) >> source.choice((0, 0, 0, n // 4, n // 2, 3 * n // 4))


def _edge(kind: str, source: random.Random) -> int:
    if kind[:-2] in FORMATS:
        return _edge(kind[:-2], source) << FORMATS[kind[:-2]].bits | _edge(kind[:-2], source)
    return source.choice(_edges(kind))


def _equal(case: Case, source: random.Random) -> tuple[int, ...]:
    """One edge for every input, some with the sign bit turned."""
    value = _edge(case.inputs[0], source)
    signs = {"f16x2": 0x80008000, "bf16x2": 0x80008000}.get(case.inputs[0])
    signs = 1 << bits(case.inputs[0]) - 1 if signs is None else signs
    return tuple(value ^ source.randrange(2) * signs for _ in case.inputs)


def samples(case: Case, count: int = 256) -> list[tuple[int, ...]]:
    """Inputs of `count` threads (a multiple of 32), always the same: edges against edges, then random ones."""
    source = random.Random(zlib.crc32(case.name.encode()))
    if case.domain:
        return [case.domain(source) for _ in range(count)]
    chosen: list[tuple[int, ...]] = []
    if not case.warp:
        chosen = [tuple(_edge(t, source) for t in case.inputs) for _ in range(count // 3)]
        if len(set(case.inputs)) == 1 and ":" not in case.inputs[0] and case.inputs[0] != "pred":
            chosen += [_equal(case, source) for _ in range(count // 8)]
    rest = count - len(chosen)
    return chosen + [tuple(_random(t, source) for t in case.inputs) for _ in range(rest)]


def pack(case: Case, inputs: list[tuple[int, ...]]) -> list[int]:
    """The input buffer: 32-bit words, thread after thread; 64-bit values low word first."""
    out = []
    for values in inputs:
        for value in values:
            out += [value & 0xFFFFFFFF, value >> 32] if unit(case.inputs) == 2 else [value]
    return out


def expected(case: Case, inputs: list[tuple[int, ...]]) -> list[tuple[int | None, ...]]:
    """What the oracle says, one tuple per thread."""
    if case.warp:
        flat = [r for k in range(0, len(inputs), 32) for r in case.oracle(inputs[k : k + 32])]
    else:
        flat = [case.oracle(*values) for values in inputs]
    return [r if isinstance(r, tuple) else (r,) for r in flat]


def _number(kind: str, x: int) -> float:
    f = FORMATS[kind]
    return math.nan if f.is_nan(x) else float(f.value(x))


def _agrees(kind: str, tolerance: Approximate | None, got: int, want: int) -> bool:
    if kind.endswith("x2") and kind[:-2] in FORMATS:
        n = FORMATS[kind[:-2]].bits
        mask = (1 << n) - 1
        return all(_agrees(kind[:-2], tolerance, got >> s & mask, want >> s & mask) for s in (0, n))
    if kind not in FORMATS or got == want:
        return got == want
    f = FORMATS[kind]
    if f.is_nan(got) or f.is_nan(want):
        return f.is_nan(got) and f.is_nan(want)
    if tolerance is None or f.is_infinite(got) or f.is_infinite(want):
        return False
    x, y = _number(kind, got), _number(kind, want)
    return abs(x - y) <= max(tolerance.absolute, tolerance.relative * abs(y))


def mismatches(case: Case, inputs: list[tuple[int, ...]], output: Sequence[int]) -> list[str]:
    """One line per thread whose words (32-bit, `words_out` each) are not what the oracle allows."""
    wrong = []
    for thread, want in enumerate(expected(case, inputs)):
        step, got = unit(case.outputs), []
        for n in range(len(case.outputs)):
            position = thread * case.words_out + n * step
            got.append(sum((output[position + k] & 0xFFFFFFFF) << 32 * k for k in range(step)))
        for kind, g, w in zip(case.outputs, got, want):
            if w is not None and not _agrees(kind, case.kind, g, w):
                a = " ".join(f"{x:#x}" for x in inputs[thread])
                wrong.append(
                    f"{case.name}: {case.ptx}  thread {thread} inputs {a}: got {g:#x}, expected {w:#x}"
                )
    return wrong
