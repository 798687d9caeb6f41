"""Bits, shifts, permutations, comparisons and selections."""

from __future__ import annotations

import operator

import softfloat as sf
from scalar_rows import Case
from tables_integer import M32, mask, number, signed

CASES: list[Case] = []


def case(name: str, ptx: str, outputs: str, inputs: str, oracle) -> None:
    CASES.append(Case(name, ptx, tuple(outputs.split()), tuple(inputs.split()), oracle))


_LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
for _t in ("pred", "b16", "b32", "b64"):
    _m = 1 if _t == "pred" else mask(int(_t[1:]))
    for _op, _f in _LOGIC.items():
        case(f"{_op}_{_t}", f"{_op}.{_t} d, a, b;", _t, f"{_t} {_t}", _f)
    case(f"not_{_t}", f"not.{_t} d, a;", _t, _t, lambda a, m=_m: ~a & m)
    if _t != "pred":
        case(f"cnot_{_t}", f"cnot.{_t} d, a;", _t, _t, lambda a: int(a == 0))
        _n = int(_t[1:])
        case(f"shl_{_t}", f"shl.{_t} d, a, b;", _t, f"{_t} u32:80", lambda a, b, m=_m: a << b & m)
        case(
            f"shl_far_{_t}",
            f"shl.{_t} d, a, b;",
            _t,
            f"{_t} u32",
            lambda a, b, m=_m, n=_n: a << min(b, n) & m,
        )
        case(f"shr_{_t}", f"shr.{_t} d, a, b;", _t, f"{_t} u32:80", lambda a, b: a >> b)
        for _k in "us":
            case(f"shr_{_k}{_n}", f"shr.{_k}{_n} d, a, b;", _t, f"{_t} u32:80",
                 lambda a, b, t=f"{_k}{_n}", m=_m: number(a, t) >> b & m)  # fmt: skip
            case(f"shr_far_{_k}{_n}", f"shr.{_k}{_n} d, a, b;", _t, f"{_t} u32",
                 lambda a, b, t=f"{_k}{_n}", m=_m, n=_n: number(a, t) >> min(b, n) & m)  # fmt: skip

for _direction in "lr":
    for _mode in ("clamp", "wrap"):

        def _funnel(a, b, c, left=_direction == "l", clamp=_mode == "clamp"):
            amount = min(c, 32) if clamp else c & 31
            both = b << 32 | a
            return (both << amount >> 32 if left else both >> amount) & M32

        _op = f"shf.{_direction}.{_mode}.b32"
        case(_op.replace(".", "_"), f"{_op} d, a, b, c;", "b32", "b32 b32 u32:70", _funnel)
        case(_op.replace(".", "_") + "_far", f"{_op} d, a, b, c;", "b32", "b32 b32 u32", _funnel)


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum(
        (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
    )


for _table in (0x00, 0x01, 0x1E, 0x40, 0x80, 0x96, 0xAC, 0xCA, 0xE8, 0xF8, 0xFE, 0xFF):
    case(f"lop3_{_table:02x}", f"lop3.b32 d, a, b, c, {_table:#x};", "b32", "b32 b32 b32",
         lambda a, b, c, t=_table: lop3(a, b, c, t))  # fmt: skip
for _op in ("or", "and"):
    case(f"lop3_{_op}", f"lop3.{_op}.b32 d|e, a, b, c, 0x78, g;", "b32 pred", "b32 b32 b32 pred",
         lambda a, b, c, p, f=_LOGIC[_op]: (lop3(a, b, c, 0x78), f(int(lop3(a, b, c, 0x78) != 0), p)))  # fmt: skip


def prmt(a: int, b: int, selector: int, mode: str = "") -> int:
    source, low = b << 32 | a, selector & 3
    byte = lambda n: source >> 8 * n & 255  # noqa: E731
    if not mode:
        nibbles = [selector >> 4 * i & 15 for i in range(4)]
        return sum(
            (255 * (byte(n & 7) >> 7) if n & 8 else byte(n & 7)) << 8 * i
            for i, n in enumerate(nibbles)
        )
    positions = {
        "f4e": [low + i for i in range(4)],
        "b4e": [(low - i) % 8 for i in range(4)],
        "rc8": [low] * 4,
        "ecl": [max(low, i) for i in range(4)],
        "ecr": [min(low, i) for i in range(4)],
        "rc16": [2 * (low & 1) + (i & 1) for i in range(4)],
    }[mode]
    return sum(byte(p) << 8 * i for i, p in enumerate(positions))


case("prmt", "prmt.b32 d, a, b, c;", "b32", "b32 b32 b32", prmt)
case(
    "prmt_immediate", "prmt.b32 d, a, b, 0x8765;", "b32", "b32 b32", lambda a, b: prmt(a, b, 0x8765)
)
case("prmt_5410", "prmt.b32 d, a, b, 0x5410U;", "b32", "b32 b32", lambda a, b: prmt(a, b, 0x5410))
for _mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
    case(f"prmt_{_mode}", f"prmt.b32.{_mode} d, a, b, c;", "b32", "b32 b32 b32",
         lambda a, b, c, m=_mode: prmt(a, b, c, m))  # fmt: skip


def _field_operands(position: int, length: int, n: int) -> tuple[int, int]:
    """The manual defines 0 to 255; beyond, an H200 takes the low byte for 32-bit operands and all for 64-bit ones."""
    return (position & 255, length & 255) if n == 32 else (position, length)


def extract(a: int, position: int, length: int, kind: str) -> int:
    n = int(kind[1:])
    position, length = _field_operands(position, length, n)
    sign = 0 if kind[0] == "u" or length == 0 else a >> min(position + length - 1, n - 1) & 1
    return sum(
        (a >> position + i & 1 if i < length and position + i < n else sign) << i for i in range(n)
    )


def insert(a: int, b: int, position: int, length: int, n: int) -> int:
    position, length = _field_operands(position, length, n)
    for i in range(min(length, max(n - position, 0))):
        b = b & ~(1 << position + i) | (a >> i & 1) << position + i
    return b


for _n in (32, 64):
    for _t in (f"u{_n}", f"s{_n}"):
        case(
            f"bfe_{_t}",
            f"bfe.{_t} d, a, b, c;",
            _t,
            f"{_t} u32:70 u32:70",
            lambda a, b, c, t=_t: extract(a, b, c, t),
        )
        case(
            f"bfe_far_{_t}",
            f"bfe.{_t} d, a, b, c;",
            _t,
            f"{_t} u32 u32",
            lambda a, b, c, t=_t: extract(a, b, c, t),
        )

        def _find(a, signed_type=_t[0] == "s", n=_n):
            return (~a & mask(n) if signed_type and a >> n - 1 else a).bit_length() - 1

        case(f"bfind_{_t}", f"bfind.{_t} d, a;", "u32", _t, lambda a, f=_find: f(a) & M32)
        case(f"bfind_shiftamt_{_t}", f"bfind.shiftamt.{_t} d, a;", "u32", _t,
             lambda a, f=_find, n=_n: M32 if f(a) < 0 else n - 1 - f(a))  # fmt: skip
    _t = f"b{_n}"
    case(f"bfi_{_t}", f"bfi.{_t} d, a, b, c, g;", _t, f"{_t} {_t} u32:70 u32:70",
         lambda a, b, c, g, n=_n: insert(a, b, c, g, n))  # fmt: skip
    case(f"bfi_far_{_t}", f"bfi.{_t} d, a, b, c, g;", _t, f"{_t} {_t} u32 u32",
         lambda a, b, c, g, n=_n: insert(a, b, c, g, n))  # fmt: skip
    case(f"brev_{_t}", f"brev.{_t} d, a;", _t, _t, lambda a, n=_n: int(f"{a:0{n}b}"[::-1], 2))
    case(f"popc_{_t}", f"popc.{_t} d, a;", "u32", _t, lambda a: a.bit_count())
    case(f"clz_{_t}", f"clz.{_t} d, a;", "u32", _t, lambda a, n=_n: n - a.bit_length())


def fns(a: int, base: int, offset: int) -> int:
    """The position of the offset-th set bit counted from `base`, upwards (offset > 0) or downwards."""
    offset = signed(offset, 32)
    if offset == 0:
        return base if a >> base & 1 else M32
    step, count = (1, offset) if offset > 0 else (-1, -offset)
    while 0 <= base < 32:
        count -= a >> base & 1
        if count == 0:
            return base
        base += step
    return M32


case("fns", "fns.b32 d, a, b, c;", "b32", "b32 u32:32 u32:9", fns)
case(
    "fns_down",
    "neg.s32 c, c; fns.b32 d, a, b, c;",
    "b32",
    "b32 u32:32 u32:9",
    lambda a, b, c: fns(a, b, -c & M32),
)
for _mode in ("clamp", "wrap"):
    _wrap = _mode == "wrap"
    case(f"bmsk_{_mode}", f"bmsk.{_mode}.b32 d, a, b;", "b32", "u32:70 u32:70",
         lambda a, b, w=_wrap: (mask(b & 31) << (a & 31) if w else mask(min(b, 32)) << min(a, 32)) & M32)  # fmt: skip
    for _t in ("u32", "s32"):

        def _szext(a, b, wrap=_wrap, t=_t):
            n = b & 31 if wrap else min(b, 32)
            return 0 if n == 0 else (signed(a & mask(n), n) if t == "s32" else a & mask(n)) & M32

        case(f"szext_{_mode}_{_t}", f"szext.{_mode}.{_t} d, a, b;", _t, f"{_t} u32:70", _szext)

# ---- comparisons
_ORDER = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
}
_ORDER |= {
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}


def ordered(name: str, f: sf.Format, a: int, b: int) -> int:
    nan = f.is_nan(a) or f.is_nan(b)
    if name in ("num", "nan"):
        return int(nan == (name == "nan"))
    if nan:
        return int(len(name) == 3)
    return int(_ORDER[name[:2]](f.value(a), f.value(b)))


def _both(result: bool) -> tuple[int, int]:
    """What setp writes to p|q."""
    return int(result), int(not result)


for _t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    for _op in ("eq", "ne", "lt", "le", "gt", "ge") + (
        ("lo", "ls", "hi", "hs") if _t[0] == "u" else ()
    ):
        case(f"setp_{_op}_{_t}", f"setp.{_op}.{_t} d|e, a, b;", "pred pred", f"{_t} {_t}",
             lambda a, b, t=_t, f=_ORDER[_op]: _both(f(number(a, t), number(b, t))))  # fmt: skip
for _t in ("b16", "b32", "b64"):
    case(f"setp_ne_{_t}", f"setp.ne.{_t} d, a, b;", "pred", f"{_t} {_t}", lambda a, b: int(a != b))
_FLOAT_COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "equ",
    "neu",
    "ltu",
    "leu",
    "gtu",
    "geu",
    "num",
    "nan",
)
for _t in ("f16", "bf16", "f32", "f64"):
    _f = sf.FORMATS[_t]
    for _op in _FLOAT_COMPARISONS:
        if _t in ("f32", "f64"):
            case(f"setp_pair_{_op}_{_t}", f"setp.{_op}.{_t} d|e, a, b;", "pred pred", f"{_t} {_t}",
                 lambda a, b, o=_op, f=_f: (ordered(o, f, a, b), 1 - ordered(o, f, a, b)))  # fmt: skip
        case(f"setp_{_op}_{_t}", f"setp.{_op}.{_t} d, a, b;", "pred", f"{_t} {_t}",
             lambda a, b, o=_op, f=_f: ordered(o, f, a, b))  # fmt: skip
for _t in ("f16", "f32"):
    _f = sf.FORMATS[_t]
    for _op in ("eq", "lt", "neu"):
        case(f"setp_{_op}_ftz_{_t}", f"setp.{_op}.ftz.{_t} d, a, b;", "pred", f"{_t} {_t}",
             lambda a, b, o=_op, f=_f: ordered(o, f, f.flush(a), f.flush(b)))  # fmt: skip
for _op, _g in _LOGIC.items():
    case(f"setp_{_op}", f"setp.lt.{_op}.s32 d|e, a, b, c;", "pred pred", "s32 s32 pred",
         lambda a, b, p, g=_g: tuple(g(c, p) for c in _both(signed(a, 32) < signed(b, 32))))  # fmt: skip
    case(f"setp_{_op}_not", f"setp.gt.{_op}.f32 d|e, a, b, !c;", "pred pred", "f32 f32 pred",
         lambda a, b, p, g=_g: tuple(g(c, 1 - p) for c in _both(ordered("gt", sf.F32, a, b))))  # fmt: skip
for _x2, _f in {"f16x2": sf.F16, "bf16x2": sf.BF16}.items():
    for _op in ("lt", "neu", "nan"):
        case(f"setp_{_op}_{_x2}", f"setp.{_op}.{_x2} d|e, a, b;", "pred pred", f"{_x2} {_x2}",
             lambda a, b, o=_op, f=_f: (
                 ordered(o, f, a & 0xFFFF, b & 0xFFFF), ordered(o, f, a >> 16, b >> 16)))  # fmt: skip
        case(f"set_{_op}_{_x2}", f"set.{_op}.{_x2}.{_x2} d, a, b;", _x2, f"{_x2} {_x2}",
             lambda a, b, o=_op, f=_f: (f.bias << f.mantissa_bits) * (
                 ordered(o, f, a & 0xFFFF, b & 0xFFFF) | ordered(o, f, a >> 16, b >> 16) << 16))  # fmt: skip
for _d in ("u32", "s32", "f32"):
    _true = 0x3F800000 if _d == "f32" else M32
    case(f"set_{_d}_s32", f"set.lt.{_d}.s32 d, a, b;", "b32", "s32 s32",
         lambda a, b, v=_true: v if signed(a, 32) < signed(b, 32) else 0)  # fmt: skip
    case(f"set_{_d}_f32", f"set.geu.ftz.{_d}.f32 d, a, b;", "b32", "f32 f32",
         lambda a, b, v=_true: v if ordered("geu", sf.F32, sf.F32.flush(a), sf.F32.flush(b)) else 0)  # fmt: skip
case("set_f32_u64_and", "set.hi.and.f32.u64 d, a, b, c;", "b32", "u64 u64 pred",
     lambda a, b, p: 0x3F800000 if a > b and p else 0)  # fmt: skip
case(
    "set_u32_f16",
    "set.le.u32.f16 d, a, b;",
    "b32",
    "f16 f16",
    lambda a, b: M32 * ordered("le", sf.F16, a, b),
)
case(
    "set_f16_f16",
    "set.le.f16.f16 d, a, b;",
    "f16",
    "f16 f16",
    lambda a, b: 0x3C00 * ordered("le", sf.F16, a, b),
)
case(
    "set_u16_f16",
    "set.le.u16.f16 d, a, b;",
    "u16",
    "f16 f16",
    lambda a, b: 0xFFFF * ordered("le", sf.F16, a, b),
)
case(
    "set_bf16_bf16",
    "set.gt.bf16.bf16 d, a, b;",
    "bf16",
    "bf16 bf16",
    lambda a, b: 0x3F80 * ordered("gt", sf.BF16, a, b),
)

# ---- selections and moves
for _t in ("b16", "b32", "b64", "u32", "s64", "f32", "f64"):
    case(
        f"selp_{_t}", f"selp.{_t} d, a, b, c;", _t, f"{_t} {_t} pred", lambda a, b, p: a if p else b
    )
    case(
        f"slct_{_t}_s32",
        f"slct.{_t}.s32 d, a, b, c;",
        _t,
        f"{_t} {_t} s32",
        lambda a, b, c: a if c < 1 << 31 else b,
    )
for _ftz in ("", ".ftz"):
    case(f"slct_u32_f32{_ftz[1:]}", f"slct{_ftz}.u32.f32 d, a, b, c;", "u32", "u32 u32 f32",
         lambda a, b, c, z=_ftz: a if ordered("ge", sf.F32, sf.F32.flush(c) if z else c, 0) else b)  # fmt: skip
case(
    "mov_pack16",
    ".reg .b16 x, y; mov.b32 {x, y}, a; mov.b32 d, {y, x};",
    "b32",
    "b32",
    lambda a: a >> 16 | a << 16 & M32,
)
case("mov_pack32", ".reg .b32 x, y; mov.b64 {x, y}, a; mov.b64 d, {y, x};", "b64", "b64",
     lambda a: a >> 32 | (a & M32) << 32)  # fmt: skip
case("mov_pack4", ".reg .b16 x<4>; mov.b64 {x0, x1, x2, x3}, a; mov.b64 d, {x3, x2, x1, x0};", "b64", "b64",
     lambda a: sum((a >> 48 - 16 * i & 0xFFFF) << 16 * i for i in range(4)))  # fmt: skip
case(
    "mov_pack128",
    ".reg .b128 x; mov.b128 x, {b, a}; mov.b128 {d, e}, x;",
    "b64 b64",
    "b64 b64",
    lambda a, b: (b, a),
)
case("mov_sink", "mov.b32 {_, d}, a;", "b16", "b32", lambda a: a >> 16)
case("mov_pred", "mov.pred d, a;", "pred", "pred", lambda a: a)
case("mov_f32_literal", "mov.f32 d, 0fBF000000;", "f32", "f32", lambda a: 0xBF000000)
case(
    "mov_f64_literal", "mov.f64 d, 0dC000000000000001;", "f64", "f64", lambda a: 0xC000000000000001
)
case(
    "mov_decimal",
    "mov.f32 d, 0.1; add.f32 d, d, a;",
    "f32",
    "f32",
    lambda a: sf.add(sf.F32, a, 0x3DCCCCCD),
)
case("guard", "mov.b32 d, a; @c mov.b32 d, b; @!c add.u32 d, d, 1;", "b32", "b32 b32 pred",
     lambda a, b, p: b if p else a + 1 & M32)  # fmt: skip
case("branch", "mov.b32 d, 0; setp.gt.s32 e, a, 0; @!e bra L1; add.u32 d, d, 1; bra.uni L2; L1: add.u32 d, d, 2; L2:",
     "b32 pred", "b32", lambda a: (1, 1) if 0 < a < 1 << 31 else (2, 0))  # fmt: skip
case("loop", "mov.b32 d, 0; L: add.u32 d, d, a; sub.u32 b, b, 1; setp.lt.s32 e, b, 0; @!e bra L;", "b32 pred",
     "b32 u32:9", lambda a, b: (a * (b + 1) & M32, 1))  # fmt: skip
case("brx", "T: .branchtargets L0, L1, L2; brx.idx a, T; L0: mov.b32 d, 10; bra E; L1: mov.b32 d, 11; bra E;"
     "L2: mov.b32 d, 12; E:", "b32", "u32:3", lambda a: 10 + a)  # fmt: skip
