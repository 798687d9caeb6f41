"""cvt between every pair of types."""

from __future__ import annotations

from fractions import Fraction

import softfloat as sf
from scalar_rows import Case
from softfloat import E4M3, E5M2, F16, F32, FORMATS, TF32
from tables_integer import clamp, mask, number

CASES: list[Case] = []
_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_MODES = ("rn", "rz", "rm", "rp")


def case(opcode: str, ptx: str, outputs: str, inputs: str, oracle) -> None:
    name = opcode.replace(".", "_")
    CASES.append(Case(name, ptx, tuple(outputs.split()), tuple(inputs.split()), oracle))


def _register(kind: str) -> str:
    return "b32" if kind in ("u8", "s8") else kind  # 8-bit results live in wider registers


def _extended(value: int, kind: str) -> int:
    """The pattern of a result in its register: signed 8-bit ones are extended to 32 bits."""
    return number(value, kind) & mask(32) if kind in ("u8", "s8") else value


for _d in _INTEGERS:
    for _s in _INTEGERS:
        if _d == _s:
            continue
        case(f"cvt.{_d}.{_s}", f"cvt.{_d}.{_s} d, a;", _register(_d), _s,
             lambda a, d=_d, s=_s: _extended(number(a, s) & mask(int(d[1:])), d))  # fmt: skip
        _low, _high = clamp(-(1 << 80), _s), clamp(1 << 80, _s)
        if any(
            clamp(number(x, _s), _d) != number(x, _s) & mask(int(_d[1:])) for x in (_low, _high)
        ) or (_s[0] != _d[0] and int(_d[1:]) <= int(_s[1:])):
            case(f"cvt.sat.{_d}.{_s}", f"cvt.sat.{_d}.{_s} d, a;", _register(_d), _s,
                 lambda a, d=_d, s=_s: _extended(clamp(number(a, s), d), d))  # fmt: skip
    for _s in _FLOATS:
        if _s == "bf16" and _d in ("u8", "s8"):
            continue  # ptxas wants 8-bit registers here
        _nan = 1 << int(_d[1:]) - 1 if _s == "f64" or _d in ("u64", "s64") else 0
        for _mode in ("rni", "rzi", "rmi", "rpi"):

            def _g(a, d=_d, f=FORMATS[_s], m=_mode, nan=_nan):
                return _extended(sf.to_integer(f, a, int(d[1:]), d[0] == "s", m, nan), d)

            case(f"cvt.{_mode}.{_d}.{_s}", f"cvt.{_mode}.{_d}.{_s} d, a;", _register(_d), _s, _g)
        if _s == "f32":
            case(f"cvt.rpi.ftz.{_d}.f32", f"cvt.rpi.ftz.{_d}.f32 d, a;", _register(_d), "f32",
                 lambda a, g=_g: g(F32.flush(a)))  # fmt: skip
        for _mode in _MODES:
            _f = FORMATS[_s]
            case(f"cvt.{_mode}.{_s}.{_d}", f"cvt.{_mode}.{_s}.{_d} d, a;", _s, _d,
                 lambda a, d=_d, f=_f, m=_mode: f.encode(Fraction(number(a, d)), m))  # fmt: skip
    case(f"cvt.rn.sat.f32.{_d}", f"cvt.rn.sat.f32.{_d} d, a;", "f32", _d,
         lambda a, d=_d: sf.saturate(F32, F32.encode(Fraction(number(a, d)))))  # fmt: skip

for _d in _FLOATS:
    for _s in _FLOATS:
        _f, _t = FORMATS[_s], FORMATS[_d]
        if _d == _s:
            for _mode in ("rni", "rzi", "rmi", "rpi"):
                case(f"cvt.{_mode}.{_d}.{_s}", f"cvt.{_mode}.{_d}.{_s} d, a;", _d, _s,
                     lambda a, f=_f, m=_mode: sf.integral(f, a, m))  # fmt: skip
            continue
        # Every f16 is an f32; a bf16 is not an f16, nor the other way round.
        widening = (_d in ("f32", "f64") and _s in ("f16", "bf16")) or (_d, _s) == ("f64", "f32")
        for _mode in ("",) if widening else _MODES:
            _o = ".".join(x for x in ("cvt", _mode, _d, _s) if x)
            if _mode in ("rm", "rp") and _d == "bf16" and _s == "f32":
                continue  # the manual has rn and rz only
            case(
                _o,
                f"{_o} d, a;",
                _d,
                _s,
                lambda a, f=_f, t=_t, m=_mode: sf.convert(f, t, a, m or "rn"),
            )
case("cvt.ftz.f32.f16", "cvt.ftz.f32.f16 d, a;", "f32", "f16", lambda a: sf.convert(F16, F32, a))
case(
    "cvt.rn.ftz.f16.f32",
    "cvt.rn.ftz.f16.f32 d, a;",
    "f16",
    "f32",
    lambda a: sf.convert(F32, F16, F32.flush(a)),
)
case(
    "cvt.ftz.f64.f32",
    "cvt.ftz.f64.f32 d, a;",
    "f64",
    "f32",
    lambda a: sf.convert(F32, sf.F64, F32.flush(a)),
)
case(
    "cvt.rn.ftz.f32.f64",
    "cvt.rn.ftz.f32.f64 d, a;",
    "f32",
    "f64",
    lambda a: F32.flush(sf.convert(sf.F64, F32, a)),
)
case("cvt.sat.f32.f32", "cvt.sat.f32.f32 d, a;", "f32", "f32", lambda a: sf.saturate(F32, a))
case(
    "cvt.ftz.sat.f32.f32",
    "cvt.ftz.sat.f32.f32 d, a;",
    "f32",
    "f32",
    lambda a: sf.saturate(F32, F32.flush(a)),
)
case(
    "cvt.rmi.ftz.f32.f32",
    "cvt.rmi.ftz.f32.f32 d, a;",
    "f32",
    "f32",
    lambda a: sf.integral(F32, F32.flush(a), "rmi"),
)
case("cvt.rni.sat.f32.f32", "cvt.rni.sat.f32.f32 d, a;", "f32", "f32",
     lambda a: sf.saturate(F32, sf.integral(F32, a, "rni")))  # fmt: skip
case(
    "cvt.rn.sat.f16.f32",
    "cvt.rn.sat.f16.f32 d, a;",
    "f16",
    "f32",
    lambda a: sf.saturate(F16, sf.convert(F32, F16, a)),
)
case(
    "cvt.sat.f32.f16",
    "cvt.sat.f32.f16 d, a;",
    "f32",
    "f16",
    lambda a: sf.saturate(F32, sf.convert(F16, F32, a)),
)
case(
    "cvt.rn.sat.f32.f64",
    "cvt.rn.sat.f32.f64 d, a;",
    "f32",
    "f64",
    lambda a: sf.saturate(F32, sf.convert(sf.F64, F32, a)),
)
case(
    "cvt.wide_source",
    "cvt.rn.f32.s16 d, a;",
    "f32",
    "b32",
    lambda a: F32.encode(Fraction(number(a, "s16"))),
)
case("cvt.wide_destination", "cvt.rzi.s16.f32 d, a;", "b32", "f32",
     lambda a: number(sf.to_integer(F32, a, 16, True, "rzi"), "s16") & mask(32))  # fmt: skip
case("cvt.wide_integers", "cvt.s64.s8 d, a;", "b64", "b32", lambda a: number(a, "s8") & mask(64))


def _narrow(t: sf.Format, mode: str, suffix: str, source: sf.Format = F32):
    def convert(a: int) -> int:
        r = sf.convert(source, t, a, mode, ".satfinite" in suffix)
        return sf.relu(t, r) if ".relu" in suffix else r

    return convert


for _t in ("f16", "bf16"):
    for _mode in ("rn", "rz"):
        for _suffix in ("", ".relu", ".satfinite", ".relu.satfinite"):
            _g = _narrow(FORMATS[_t], _mode, _suffix)
            _o = f"cvt.{_mode}{_suffix}.{_t}"
            if _suffix:
                case(f"{_o}.f32", f"{_o}.f32 d, a;", _t, "f32", _g)
            case(
                f"{_o}x2.f32",
                f"{_o}x2.f32 d, a, b;",
                f"{_t}x2",
                "f32 f32",
                lambda a, b, g=_g: g(a) << 16 | g(b),
            )


def _tf32(mode: str, suffix: str):
    """The low 13 bits of the register are zero; a NaN stays some NaN."""
    return lambda a: _narrow(TF32, mode, suffix)(a) << 13


case("cvt.rna.tf32.f32", "cvt.rna.tf32.f32 d, a;", "f32", "f32", _tf32("rna", ""))
case(
    "cvt.rna.satfinite.tf32.f32",
    "cvt.rna.satfinite.tf32.f32 d, a;",
    "f32",
    "f32",
    _tf32("rna", ".satfinite"),
)
for _mode in ("rn", "rz"):
    for _suffix in ("", ".relu"):
        _o = f"cvt.{_mode}{_suffix}.tf32.f32"
        case(_o, f"{_o} d, a;", "f32", "f32", _tf32(_mode, _suffix))


def _unpack(f: sf.Format, a: int, suffix: str) -> int:
    g = lambda x: sf.convert(f, F16, x)  # noqa: E731
    g2 = (lambda x: sf.relu(F16, g(x))) if suffix else g
    return g2(a >> 8) << 16 | g2(a & 255)


for _k, _f in {"e4m3": E4M3, "e5m2": E5M2}.items():
    for _suffix in ("", ".relu"):
        _o = f"cvt.rn.satfinite{_suffix}.{_k}x2"
        _g = _narrow(_f, "rn", ".satfinite" + _suffix)
        case(
            f"{_o}.f32",
            f"{_o}.f32 d, a, b;",
            f"{_k}x2",
            "f32 f32",
            lambda a, b, g=_g: g(a) << 8 | g(b),
        )
        _h = _narrow(_f, "rn", ".satfinite" + _suffix, F16)
        case(
            f"{_o}.f16x2",
            f"{_o}.f16x2 d, a;",
            f"{_k}x2",
            "f16x2",
            lambda a, g=_h: g(a >> 16) << 8 | g(a & 0xFFFF),
        )
        _o = f"cvt.rn{_suffix}.f16x2.{_k}x2"
        case(_o, f"{_o} d, a;", "f16x2", f"{_k}x2", lambda a, f=_f, s=_suffix: _unpack(f, a, s))

for _t in ("u16", "s16"):
    case(f"cvt.pack.sat.{_t}", f"cvt.pack.sat.{_t}.s32 d, a, b;", "b32", "s32 s32",
         lambda a, b, t=_t: clamp(number(a, "s32"), t) << 16 | clamp(number(b, "s32"), t))  # fmt: skip
for _n in (8, 4, 2):
    for _t in (f"u{_n}", f"s{_n}"):
        case(f"cvt.pack.sat.{_t}", f"cvt.pack.sat.{_t}.s32.b32 d, a, b, c;", "b32", "s32 s32 b32",
             lambda a, b, c, t=_t, n=_n: (c << 2 * n | clamp(number(a, "s32"), t) << n | clamp(number(b, "s32"), t))
             & mask(32))  # fmt: skip
