"""Integer arithmetic: (name, PTX, outputs, inputs, formula on unsigned bit patterns)."""

from __future__ import annotations

from scalar_rows import Case

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def mask(bits: int) -> int:
    return (1 << bits) - 1


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> bits - 1 & 1 else x


def number(x: int, kind: str) -> int:
    """The bit pattern as a number of type u16, s32 ..."""
    n = int(kind[1:])
    return signed(x & mask(n), n) if kind[0] == "s" else x & mask(n)


def clamp(v: int, kind: str) -> int:
    n = int(kind[1:])
    low, high = (-(1 << n - 1), mask(n - 1)) if kind[0] == "s" else (0, mask(n))
    return min(max(v, low), high) & mask(n)


CASES: list[Case] = []


def case(name: str, ptx: str, outputs: str, inputs: str, oracle) -> None:
    CASES.append(Case(name, ptx, tuple(outputs.split()), tuple(inputs.split()), oracle))


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _arithmetic(t: str) -> None:
    n = int(t[1:])
    m, v = mask(n), lambda x: number(x, t)
    case(f"add_{t}", f"add.{t} d, a, b;", t, f"{t} {t}", lambda a, b: a + b & m)
    case(f"sub_{t}", f"sub.{t} d, a, b;", t, f"{t} {t}", lambda a, b: a - b & m)
    case(f"mul_lo_{t}", f"mul.lo.{t} d, a, b;", t, f"{t} {t}", lambda a, b: a * b & m)
    case(f"mul_hi_{t}", f"mul.hi.{t} d, a, b;", t, f"{t} {t}", lambda a, b: v(a) * v(b) >> n & m)
    case(f"mad_lo_{t}", f"mad.lo.{t} d, a, b, c;", t, f"{t} {t} {t}", lambda a, b, c: a * b + c & m)
    case(
        f"mad_hi_{t}",
        f"mad.hi.{t} d, a, b, c;",
        t,
        f"{t} {t} {t}",
        lambda a, b, c: (v(a) * v(b) >> n) + c & m,
    )
    if n < 64:
        w = f"{t[0]}{2 * n}"
        wide = mask(2 * n)
        case(
            f"mul_wide_{t}",
            f"mul.wide.{t} d, a, b;",
            w,
            f"{t} {t}",
            lambda a, b: v(a) * v(b) & wide,
        )
        case(
            f"mad_wide_{t}",
            f"mad.wide.{t} d, a, b, c;",
            w,
            f"{t} {t} {w}",
            lambda a, b, c: v(a) * v(b) + c & wide,
        )
    case(
        f"sad_{t}",
        f"sad.{t} d, a, b, c;",
        t,
        f"{t} {t} {t}",
        lambda a, b, c: abs(v(a) - v(b)) + c & m,
    )
    # Division by zero and INT_MIN / -1 are left to test_scalar.py: PTX does not define them.
    overflow = lambda a, b: b == 0 or (t[0] == "s" and a == 1 << n - 1 and b == m)  # noqa: E731
    case(f"div_{t}", f"div.{t} d, a, b;", t, f"{t} {t}",
         lambda a, b: None if overflow(a, b) else _quotient(v(a), v(b)) & m)  # fmt: skip
    case(f"rem_{t}", f"rem.{t} d, a, b;", t, f"{t} {t}",
         lambda a, b: None if overflow(a, b) else v(a) - v(b) * _quotient(v(a), v(b)) & m)  # fmt: skip
    case(f"min_{t}", f"min.{t} d, a, b;", t, f"{t} {t}", lambda a, b: min(v(a), v(b)) & m)
    case(f"max_{t}", f"max.{t} d, a, b;", t, f"{t} {t}", lambda a, b: max(v(a), v(b)) & m)
    if t[0] == "s":
        case(f"abs_{t}", f"abs.{t} d, a;", t, t, lambda a: abs(v(a)) & m)
        case(f"neg_{t}", f"neg.{t} d, a;", t, t, lambda a: -a & m)


for _t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    _arithmetic(_t)

case(
    "add_sat_s32",
    "add.sat.s32 d, a, b;",
    "s32",
    "s32 s32",
    lambda a, b: clamp(signed(a, 32) + signed(b, 32), "s32"),
)
case(
    "sub_sat_s32",
    "sub.sat.s32 d, a, b;",
    "s32",
    "s32 s32",
    lambda a, b: clamp(signed(a, 32) - signed(b, 32), "s32"),
)
case("mad_hi_sat_s32", "mad.hi.sat.s32 d, a, b, c;", "s32", "s32 s32 s32",
     lambda a, b, c: clamp((signed(a, 32) * signed(b, 32) >> 32) + signed(c, 32), "s32"))  # fmt: skip
case(
    "min_relu_s32",
    "min.relu.s32 d, a, b;",
    "s32",
    "s32 s32",
    lambda a, b: max(min(signed(a, 32), signed(b, 32)), 0),
)
case(
    "max_relu_s32",
    "max.relu.s32 d, a, b;",
    "s32",
    "s32 s32",
    lambda a, b: max(signed(a, 32), signed(b, 32), 0),
)
case("add_immediate", "add.s32 d, a, -7;", "s32", "s32", lambda a: a - 7 & M32)
case("add_immediate64", "add.s64 d, a, -4096;", "s64", "s64", lambda a: a - 4096 & M64)
case(
    "mul_wide_immediate", "mul.wide.s32 d, a, -3;", "s64", "s32", lambda a: signed(a, 32) * -3 & M64
)
case("literals", "add.u32 d, a, 0b1011; add.u32 d, d, 0777; add.u32 d, d, 0xFFU; add.u32 d, d, 12U;", "u32", "u32",
     lambda a: a + 0b1011 + 0o777 + 255 + 12 & M32)  # fmt: skip


def _halves(f):
    """Applies f to the two 16-bit halves of each input."""
    return lambda *x: (
        (f(*(v >> 16 for v in x)) & 0xFFFF) << 16 | f(*(v & 0xFFFF for v in x)) & 0xFFFF
    )


for _t in ("u16", "s16"):
    _v = lambda x, t=_t: number(x, t)  # noqa: E731
    _x2 = f"{_t}x2"
    case(f"add_{_x2}", f"add.{_x2} d, a, b;", _x2, "b32 b32", _halves(lambda a, b: a + b))
    case(
        f"min_{_x2}",
        f"min.{_x2} d, a, b;",
        _x2,
        "b32 b32",
        _halves(lambda a, b, v=_v: min(v(a), v(b))),
    )
    case(
        f"max_{_x2}",
        f"max.{_x2} d, a, b;",
        _x2,
        "b32 b32",
        _halves(lambda a, b, v=_v: max(v(a), v(b))),
    )
case("min_relu_s16x2", "min.relu.s16x2 d, a, b;", "s16x2", "b32 b32",
     _halves(lambda a, b: max(min(signed(a, 16), signed(b, 16)), 0)))  # fmt: skip
case("max_relu_s16x2", "max.relu.s16x2 d, a, b;", "s16x2", "b32 b32",
     _halves(lambda a, b: max(signed(a, 16), signed(b, 16), 0)))  # fmt: skip


# Carries: e tells the flag that the chain leaves behind.
def _carry(t: str) -> None:
    n = int(t[1:])
    m = mask(n)
    tail = f"addc.{t} e, 0, 0;"
    case(
        f"add_cc_{t}",
        f"add.cc.{t} d, a, b; {tail}",
        f"{t} {t}",
        f"{t} {t}",
        lambda a, b: (a + b & m, a + b >> n),
    )
    case(f"addc_{t}", f"add.cc.{t} d, a, b; addc.cc.{t} d, c, b; {tail}", f"{t} {t}", f"{t} {t} {t}",
         lambda a, b, c: (c + b + (a + b >> n) & m, c + b + (a + b >> n) >> n))  # fmt: skip
    borrow = f"subc.{t} e, 0, 0;"
    case(
        f"sub_cc_{t}",
        f"sub.cc.{t} d, a, b; {borrow}",
        f"{t} {t}",
        f"{t} {t}",
        lambda a, b: (a - b & m, -(a < b) & m),
    )
    case(f"subc_{t}", f"sub.cc.{t} d, a, b; subc.cc.{t} d, c, b; {borrow}", f"{t} {t}", f"{t} {t} {t}",
         lambda a, b, c: (c - b - (a < b) & m, -(c - b - (a < b) < 0) & m))  # fmt: skip
    v = lambda x: number(x, t)  # noqa: E731
    for part, f in {"lo": lambda a, b: a * b & m, "hi": lambda a, b: v(a) * v(b) >> n & m}.items():
        case(f"mad_cc_{part}_{t}", f"mad.{part}.cc.{t} d, a, b, c; {tail}", f"{t} {t}", f"{t} {t} {t}",
             lambda a, b, c, f=f: (f(a, b) + c & m, f(a, b) + c >> n))  # fmt: skip
        case(f"madc_{part}_{t}", f"add.cc.{t} d, a, b; madc.{part}.cc.{t} d, a, b, c; {tail}", f"{t} {t}",
             f"{t} {t} {t}", lambda a, b, c, f=f: _sum(f(a, b) + c + (a + b >> n), n))  # fmt: skip


def _sum(total: int, n: int) -> tuple[int, int]:
    return total & mask(n), total >> n


for _t in ("u32", "s32", "u64", "s64"):
    _carry(_t)

for _t in ("u32", "s32"):
    _24 = lambda x, t=_t: number(x, t[0] + "24")  # noqa: E731
    case(
        f"mul24_lo_{_t}",
        f"mul24.lo.{_t} d, a, b;",
        _t,
        f"{_t} {_t}",
        lambda a, b, v=_24: v(a) * v(b) & M32,
    )
    case(
        f"mul24_hi_{_t}",
        f"mul24.hi.{_t} d, a, b;",
        _t,
        f"{_t} {_t}",
        lambda a, b, v=_24: v(a) * v(b) >> 16 & M32,
    )
    case(f"mad24_lo_{_t}", f"mad24.lo.{_t} d, a, b, c;", _t, f"{_t} {_t} {_t}",
         lambda a, b, c, v=_24: v(a) * v(b) + c & M32)  # fmt: skip
    case(f"mad24_hi_{_t}", f"mad24.hi.{_t} d, a, b, c;", _t, f"{_t} {_t} {_t}",
         lambda a, b, c, v=_24: (v(a) * v(b) >> 16) + c & M32)  # fmt: skip
case("mad24_hi_sat_s32", "mad24.hi.sat.s32 d, a, b, c;", "s32", "s32 s32 s32",
     lambda a, b, c: clamp((number(a, "s24") * number(b, "s24") >> 16) + signed(c, 32), "s32"))  # fmt: skip

for _a in "us":
    for _b in "us":
        _d = "s32" if "s" in _a + _b else "u32"
        case(f"dp4a_{_a}_{_b}", f"dp4a.{_a}32.{_b}32 d, a, b, c;", _d, "b32 b32 b32",
             lambda a, b, c, p=_a, q=_b: c + sum(
                 number(a >> 8 * i, p + "8") * number(b >> 8 * i, q + "8") for i in range(4)) & M32)  # fmt: skip
        for _half, _shift in (("lo", 0), ("hi", 16)):
            case(f"dp2a_{_half}_{_a}_{_b}", f"dp2a.{_half}.{_a}32.{_b}32 d, a, b, c;", _d, "b32 b32 b32",
                 lambda a, b, c, p=_a + "16", q=_b + "8", s=_shift: c + sum(
                     number(a >> 16 * i, p) * number(b >> s + 8 * i, q) for i in range(2)) & M32)  # fmt: skip
