"""Floating-point arithmetic: exact rounding in every mode, and the approximate functions with the manual's bounds."""

from __future__ import annotations

import math

import softfloat as sf
from scalar_rows import Approximate, Case
from softfloat import BF16, F16, F32, F64, FORMATS

CASES: list[Case] = []


def case(name: str, ptx: str, outputs: str, inputs: str, oracle, kind=None, domain=None) -> None:
    CASES.append(
        Case(name, ptx, tuple(outputs.split()), tuple(inputs.split()), oracle, kind, domain=domain)
    )


def _finish(f: sf.Format, x: int, suffix: str) -> int:
    x = f.flush(x) if ".ftz" in suffix else x
    return sf.saturate(f, x) if ".sat" in suffix else sf.relu(f, x) if ".relu" in suffix else x


def _applied(f: sf.Format, op, suffix: str):
    """op(format, ...) on inputs that .ftz flushed, then .ftz, .sat or .relu on the result."""
    if ".ftz" not in suffix:
        return lambda *x: _finish(f, op(f, *x), suffix)
    return lambda *x: _finish(f, op(f.flushing, *map(f.flush, x)), suffix)


def _packed(g, bits: int = 16):
    m = (1 << bits) - 1
    return lambda *x: g(*(v >> bits for v in x)) << bits | g(*(v & m for v in x))


_BINARY = {"add": sf.add, "sub": sf.subtract, "mul": sf.multiply}
for _mode in ("rn", "rz", "rm", "rp"):
    for _t in ("f32", "f64"):
        _f = FORMATS[_t]
        for _op, _g in {**_BINARY, "div": sf.divide, "fma": sf.fused}.items():
            _inputs = f"{_t} {_t} {_t}" if _op == "fma" else f"{_t} {_t}"
            _args = "d, a, b, c" if _op == "fma" else "d, a, b"
            for _suffix in ("", ".ftz", ".sat", ".ftz.sat") if _t == "f32" else ("",):
                if _op == "div" and ".sat" in _suffix:
                    continue
                _o = f"{_op}.{_mode}{_suffix}.{_t}"
                case(_o.replace(".", "_"), f"{_o} {_args};", _t, _inputs,
                     _applied(_f, lambda f, *x, g=_g, m=_mode: g(f, *x, m), _suffix))  # fmt: skip
        for _op in ("sqrt", "rcp"):
            _g = (
                sf.square_root
                if _op == "sqrt"
                else (lambda f, x, m: sf.divide(f, f.bias << f.mantissa_bits, x, m))
            )
            for _suffix in ("", ".ftz") if _t == "f32" else ("",):
                _o = f"{_op}.{_mode}{_suffix}.{_t}"
                case(_o.replace(".", "_"), f"{_o} d, a;", _t, _t,
                     _applied(_f, lambda f, x, g=_g, m=_mode: g(f, x, m), _suffix))  # fmt: skip
for _t in ("f32", "f64"):
    _f = FORMATS[_t]
    for _op, _g in _BINARY.items():
        case(
            f"{_op}_{_t}",
            f"{_op}.{_t} d, a, b;",
            _t,
            f"{_t} {_t}",
            lambda a, b, f=_f, g=_g: g(f, a, b),
        )
    case(
        f"mad_rn_{_t}",
        f"mad.rn.{_t} d, a, b, c;",
        _t,
        f"{_t} {_t} {_t}",
        lambda a, b, c, f=_f: sf.fused(f, a, b, c),
    )
case("mad_rz_ftz_sat_f32", "mad.rz.ftz.sat.f32 d, a, b, c;", "f32", "f32 f32 f32",
     _applied(F32, lambda f, a, b, c: sf.fused(f, a, b, c, "rz"), ".ftz.sat"))  # fmt: skip
case(
    "add_immediate_f32",
    "add.f32 d, a, 0fBF800000;",
    "f32",
    "f32",
    lambda a: sf.add(F32, a, 0xBF800000),
)
case("round_down_trick", "add.rm.ftz.f32 d, a, 0f4B400000; sub.rn.ftz.f32 d, d, 0f4B400000;", "f32", "f32",
     lambda a: F32.flush(sf.subtract(F32, sf.add(F32, F32.flush(a), 0x4B400000, "rm"), 0x4B400000)))  # fmt: skip

for _t, _f in {"f16": F16, "bf16": BF16}.items():
    for _x2 in ("", "x2"):
        _k = _t + _x2
        _wrap = _packed if _x2 else (lambda g: g)
        for _op, _g in {**_BINARY, "fma": sf.fused}.items():
            _suffixes = [".rn"] if _t == "bf16" or _op == "fma" else ["", ".rn"]
            if _t == "f16":
                _suffixes += [".rn.ftz", ".rn.sat", ".rn.ftz.sat"]
            if _op == "fma":
                _suffixes += [".rn.relu"] + ([".rn.ftz.relu"] if _t == "f16" else [])
            for _suffix in _suffixes:
                _o = f"{_op}{_suffix}.{_k}"
                _n = 3 if _op == "fma" else 2
                case(_o.replace(".", "_"), f"{_o} d, {', '.join('abc'[:_n])};", _k, " ".join([_k] * _n),
                     _wrap(_applied(_f, _g, _suffix)))  # fmt: skip


def _near_smallest(f: sf.Format):
    """a * b next to the smallest normal number: a little more than a power of two times a little less than one."""

    def domain(source) -> tuple[int, int, int]:
        exponent = f.bias // 2 << f.mantissa_bits
        a = exponent + source.choice((0, 1, 2, 3, source.randrange(64)))
        b = (
            (f.bias + 1 << f.mantissa_bits)
            - exponent
            - source.choice((0, 1, 2, 3, source.randrange(64)))
        )
        return a, b | source.randrange(2) * f.sign, 0

    return domain


for _t, _f in {"f32": F32, "f16": F16}.items():
    for _mode in ("rn", "rz", "rm", "rp") if _t == "f32" else ("rn",):
        case(f"fma_near_smallest_{_mode}_{_t}", f"fma.{_mode}.ftz.{_t} d, a, b, c;", _t, f"{_t} {_t} {_t}",
             lambda a, b, c, f=_f, m=_mode: sf.fused(f.flushing, a, b, c, m), domain=_near_smallest(_f))  # fmt: skip


def _near_ties(f: sf.Format):
    """a * b half way between two numbers and c far below: rounding twice would lose c."""

    def domain(source) -> tuple[int, ...]:
        odd = source.randrange(f.smallest_normal) | 1
        while (odd + f.smallest_normal) * 3 >= 4 * f.smallest_normal and (
            odd + f.smallest_normal
        ) * 3 % 4 != 2:
            odd = source.randrange(f.smallest_normal)
        a, b = f.bias << f.mantissa_bits | odd, f.bias << f.mantissa_bits | 1 << f.mantissa_bits - 1
        c = source.choice((1, 5, f.smallest_normal, f.smallest_normal * 3))
        return a, b | source.randrange(2) * f.sign, c | source.randrange(2) * f.sign

    return domain


for _t, _f in {"f16": F16, "bf16": BF16}.items():
    case(f"fma_near_ties_{_t}", f"fma.rn.{_t} d, a, b, c;", _t, f"{_t} {_t} {_t}",
         lambda a, b, c, f=_f: sf.fused(f, a, b, c), domain=_near_ties(_f))  # fmt: skip


def _extreme(f: sf.Format, largest: bool, suffix: str):
    def choose(a: int, b: int) -> int:
        if ".ftz" in suffix:
            a, b = f.flush(a), f.flush(b)
        sign = (a ^ b) & f.sign
        if ".abs" in suffix:
            a, b = a & ~f.sign, b & ~f.sign
        d = sf.minimum(f, a, b, ".NaN" in suffix, largest)
        return d | sign if ".xorsign" in suffix and not f.is_nan(d) else d

    return choose


for _op in ("min", "max"):
    for _t, _f in {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}.items():
        _suffixes = [""] if _t == "f64" else ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"]
        if _t in ("f32", "f16"):
            _suffixes += [".ftz", ".ftz.NaN", ".ftz.xorsign.abs"]
        for _suffix in _suffixes:
            for _x2 in ("", "x2") if _t in ("f16", "bf16") else ("",):
                _o, _g = f"{_op}{_suffix}.{_t}{_x2}", _extreme(_f, _op == "max", _suffix)
                case(_o.replace(".", "_"), f"{_o} d, a, b;", _t + _x2, f"{_t}{_x2} {_t}{_x2}",
                     _packed(_g) if _x2 else _g)  # fmt: skip

for _t, _f in FORMATS.items():
    if _t in ("f16", "bf16", "f32", "f64"):
        for _suffix in ("", ".ftz") if _t in ("f32", "f16") else ("",):
            for _op, _g in {
                "neg": lambda f, x: x ^ f.sign,
                "abs": lambda f, x: x & ~f.sign,
            }.items():
                for _x2 in ("", "x2") if _t in ("f16", "bf16") else ("",):
                    _o, _h = f"{_op}{_suffix}.{_t}{_x2}", _applied(_f, _g, _suffix)
                    case(
                        _o.replace(".", "_"),
                        f"{_o} d, a;",
                        _t + _x2,
                        _t + _x2,
                        _packed(_h) if _x2 else _h,
                    )
for _t in ("f32", "f64"):
    _f = FORMATS[_t]
    case(
        f"copysign_{_t}",
        f"copysign.{_t} d, a, b;",
        _t,
        f"{_t} {_t}",
        lambda a, b, f=_f: a & f.sign | b & ~f.sign,
    )
    _tests = {
        "finite": lambda x, f: not f.is_nan(x) and not f.is_infinite(x),
        "infinite": lambda x, f: f.is_infinite(x),
        "number": lambda x, f: not f.is_nan(x),
        "notanumber": lambda x, f: f.is_nan(x),
        "normal": lambda x, f: f.smallest_normal <= x & ~f.sign < f.infinity,
        "subnormal": lambda x, f: f.is_subnormal(x),
    }
    for _op, _g in _tests.items():
        # Zero is neither here: the manual does not say which of normal and subnormal holds it.
        _zero = _op in ("normal", "subnormal")
        case(f"testp_{_op}_{_t}", f"testp.{_op}.{_t} d, a;", "pred", _t,
             lambda a, f=_f, g=_g, z=_zero: None if z and a & ~f.sign == 0 else int(g(a, f)))  # fmt: skip


# ---- approximate functions: the oracle is the double result, rounded
def _function(f: sf.Format, g, suffix: str):
    def apply(x: int) -> int:
        x = f.flush(x) if ".ftz" in suffix else x
        if f.is_nan(x):
            return f.nan
        r = g(float(f.value(x)) if x & ~f.sign else math.copysign(0.0, -1 if x else 1))
        if math.isnan(r):
            return f.nan
        r = f.encode(r if math.isinf(r) else _exactly(r), "rn", math.copysign(1, r) < 0)
        return f.flush(r) if ".ftz" in suffix else r

    return apply


def _exactly(r: float):
    from fractions import Fraction

    return Fraction(r)


def _exp2(x: float) -> float:
    return math.inf if x > 1000 else 0.0 if x < -1000 else 2.0**x


def _log2(x: float) -> float:
    return math.nan if x < 0 else -math.inf if x == 0 else math.log2(x)


def _reciprocal(x: float) -> float:
    return 1 / x if x else math.copysign(math.inf, x)


def _root(x: float) -> float:
    return math.nan if x < 0 else math.sqrt(x)


def _inverse_root(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else math.nan if x < 0 else 1 / math.sqrt(x)


def _floats(low: float, high: float):
    return lambda source: (F32.encode(_exactly(source.uniform(low, high))),)


_ULP = 2.0**-23
_DENORMAL = 2.0**-126  # results below this lose bits
for _suffix in ("", ".ftz"):
    _s = _suffix[1:]
    for _op, _g, _kind in (
        ("ex2", _exp2, Approximate(2**-22, 2**-149)),
        ("lg2", _log2, Approximate(2**-22, 2**-22)),
        ("rcp", _reciprocal, Approximate(_ULP, 2**-149)),
        ("rsqrt", _inverse_root, Approximate(2**-22)),
        ("sqrt", _root, Approximate(2**-22, 2**-149)),
    ):
        case(
            f"{_op}_approx{_s}",
            f"{_op}.approx{_suffix}.f32 d, a;",
            "f32",
            "f32",
            _function(F32, _g, _suffix),
            _kind,
        )
    for _op, _g in (("sin", math.sin), ("cos", math.cos)):
        case(f"{_op}_approx{_s}", f"{_op}.approx{_suffix}.f32 d, a;", "f32", "f32", _function(F32, _g, _suffix),
             Approximate(0, 2**-20.5), _floats(-math.pi, math.pi))  # fmt: skip
    for _kind in ("approx", "full"):
        case(f"div_{_kind}{_s}", f"div.{_kind}{_suffix}.f32 d, a, b;", "f32", "f32 f32",
             _applied(F32, sf.divide, _suffix), Approximate(2 * _ULP, _DENORMAL),
             lambda source: tuple(F32.encode(_exactly(source.uniform(-1, 1) * 2.0 ** source.randint(-40, 40)))
                                  for _ in "ab"))  # fmt: skip
case("tanh_approx_f32", "tanh.approx.f32 d, a;", "f32", "f32",
     _function(F32, math.tanh, ""), Approximate(2**-10.9, 2**-126), _floats(-5, 5))  # fmt: skip
case("rsqrt_approx_f64", "rsqrt.approx.f64 d, a;", "f64", "f64", _function(F64, _inverse_root, ""),
     Approximate(2**-22), lambda source: (F64.encode(_exactly(source.uniform(1e-3, 1e3))),))  # fmt: skip
for _t, _f in {"f16": F16, "bf16": BF16}.items():
    _ftz = ".ftz" if _t == "bf16" else ""

    def _near(source, f=_f):
        return (f.encode(_exactly(source.uniform(-8, 8))),)

    def _near2(source, near=_near):
        return (near(source)[0] << 16 | near(source)[0],)

    _error = 2**-9.9 if _t == "f16" else 2**-7
    case(
        f"ex2_{_t}",
        f"ex2.approx{_ftz}.{_t} d, a;",
        _t,
        _t,
        _function(_f, _exp2, _ftz),
        Approximate(_error),
        _near,
    )
    case(f"ex2_{_t}x2", f"ex2.approx{_ftz}.{_t}x2 d, a;", f"{_t}x2", f"{_t}x2", _packed(_function(_f, _exp2, _ftz)),
         Approximate(_error), _near2)  # fmt: skip
    _error = Approximate(2**-10, 2**-10.987) if _t == "f16" else Approximate(2**-7)
    case(
        f"tanh_{_t}", f"tanh.approx.{_t} d, a;", _t, _t, _function(_f, math.tanh, ""), _error, _near
    )
    case(f"tanh_{_t}x2", f"tanh.approx.{_t}x2 d, a;", f"{_t}x2", f"{_t}x2", _packed(_function(_f, math.tanh, "")),
         _error, _near2)  # fmt: skip
