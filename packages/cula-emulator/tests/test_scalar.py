"""Scalar instructions on the emulator: every row of the tables, what PTX leaves open, and what must be refused."""

import random
import struct

import numpy
import pytest
import softfloat as sf
import torch
from ptx_module import build
from tables_scalar import CASES, FAMILIES, HEADER, entry, mismatches, pack, samples

import cula_emulator as emulator
from cula_emulator.emit.registry import Unsupported, find


def words(values: list[int]) -> torch.Tensor:
    return torch.tensor([v - (1 << 32) if v >> 31 else v for v in values], dtype=torch.int32)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    cases = FAMILIES[family]
    module = emulator.emulate(HEADER + "\n".join(entry(case) for case in cases))
    wrong = []
    for case in cases:
        inputs = samples(case)
        source = words(pack(case, inputs))
        out = torch.zeros(len(inputs) * case.words_out, dtype=torch.int32)
        module.launch(case.name, (len(inputs) // 32,), (32,), (source, out))
        wrong += mismatches(case, inputs, out.tolist())[:2]
    assert not wrong, "\n".join([f"{len(wrong)} wrong:", *wrong[:60]])


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


# ---- the oracle against numpy and struct, which round to nearest
def _patterns(f: sf.Format, count: int):
    source = random.Random(f.bits)
    edges = [0, 1, f.smallest_normal - 1, f.smallest_normal, f.largest, f.infinity, f.nan]
    values = [e | s for e in edges for s in (0, f.sign)]
    return values + [source.getrandbits(f.bits) for _ in range(count)]


@pytest.mark.parametrize(
    "f, number, word",
    [
        (sf.F16, numpy.float16, numpy.uint16),
        (sf.F32, numpy.float32, numpy.uint32),
        (sf.F64, numpy.float64, numpy.uint64),
    ],
)
def test_the_oracle_agrees_with_numpy(f, number, word):
    a = numpy.array(_patterns(f, 2000), dtype=word)
    b = numpy.random.default_rng(0).permutation(a)
    operations = {
        sf.add: lambda x, y: x + y,
        sf.subtract: lambda x, y: x - y,
        sf.multiply: lambda x, y: x * y,
        sf.divide: lambda x, y: x / y,
        lambda f, x, y: sf.square_root(f, x): lambda x, y: numpy.sqrt(x),
    }
    for ours, theirs in operations.items():
        with numpy.errstate(all="ignore"):
            want = theirs(a.view(number), b.view(number)).view(word).tolist()
        for x, y, w in zip(a.tolist(), b.tolist(), want):
            got = ours(f, x, y)
            assert got == w or (f.is_nan(got) and f.is_nan(w)), (hex(x), hex(y), hex(got), hex(w))


def test_the_oracle_rounds_in_the_direction_it_says():
    """Rounding down and up encloses the exact value; towards zero and to nearest are one of the two."""
    source = random.Random(3)
    for _ in range(500):
        exact = sf.F64.value(source.getrandbits(62))
        down, up = (sf.F16.encode(exact, m) for m in ("rm", "rp"))
        assert sf.F16.value(down) <= exact <= sf.F16.value(up) and up - down in (0, 1)
        assert sf.F16.encode(exact, "rz") == down and sf.F16.encode(exact, "rn") in (down, up)


def test_the_oracle_converts_like_struct_and_torch():
    for x in _patterns(sf.F64, 500):
        if sf.F64.is_nan(x) or abs(sf.F64.value(x)) > 1e38 and not sf.F64.is_infinite(x):
            continue
        want = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", x))[0]))[
            0
        ]
        assert sf.convert(sf.F64, sf.F32, x) == want
    for f, dtype in (
        (sf.BF16, torch.bfloat16),
        (sf.F16, torch.float16),
        (sf.E4M3, torch.float8_e4m3fn),
    ):
        patterns = [
            p for p in _patterns(sf.F32, 2000) if sf.F32.is_nan(p) or abs(sf.F32.value(p)) < 448
        ]
        floats = torch.tensor(
            [p - (1 << 32) if p >> 31 else p for p in patterns], dtype=torch.int32
        ).view(torch.float32)
        unsigned = floats.to(dtype).view(torch.uint8 if f.bits == 8 else torch.int16).tolist()
        for x, w in zip(patterns, unsigned):
            got = sf.convert(sf.F32, f, x)
            assert got == w & (2 * f.sign - 1) or (f.is_nan(got) and f.is_nan(w & (2 * f.sign - 1)))


# ---- what PTX leaves open, and what the GPU does
def test_division_by_zero_and_overflow():
    bodies = {
        "udiv": "div.u32 %r11, %r10, 0;",
        "urem": "rem.u32 %r11, %r10, 0;",
        "sdiv": "div.s32 %r11, %r10, 0;",
        "over": "div.s32 %r11, 0x80000000, -1;",
        "over_rem": "rem.s32 %r11, 0x80000000, -1;",
    }
    module = build(
        {
            n: f"ld.global.b32 %r10, [%rd4]; {b} st.global.b32 [%rd5], %r11;"
            for n, b in bodies.items()
        }
    )
    x = words([5, 0, 0xFFFFFFFB, 7])
    want = {
        "udiv": [-1] * 4,
        "urem": x.tolist(),
        "sdiv": [-1] * 4,
        "over": [-(2**31)] * 4,
        "over_rem": [0] * 4,
    }
    for name in bodies:
        out = torch.zeros_like(x)
        module.launch(name, (1,), (4,), (x, out, 4))
        assert out.tolist() == want[name], name


def test_registers_of_one_spelling_do_not_meet():
    """%r and r are two registers, and so are $a and _a; names of the generated code are free for kernels to use."""
    body = (
        ".reg .b32 self, %self, p_, $a, _a, machine, r_, R0_x; mov.b32 self, %r2; mov.b32 %self, 100; mov.b32 p_, 1000;"
        "mov.b32 $a, 10000; mov.b32 _a, 20000; mov.b32 machine, 100000; mov.b32 r_, 0; mov.b32 R0_x, 0;"
        "shfl.sync.idx.b32 r_, self, 3, 31, -1;"
        "add.u32 self, self, %self; add.u32 self, self, p_; add.u32 self, self, $a; add.u32 self, self, _a;"
        "add.u32 self, self, machine; add.u32 self, self, r_; st.global.b32 [%rd5], self;"
    )
    out = torch.zeros(32, dtype=torch.int32)
    build({"k": body}).launch("k", (1,), (32,), (out, out, 0))
    assert out.tolist() == [131103 + i for i in range(32)]


def test_shared_memory_sizes():
    sizes = "mov.u32 %r10, %dynamic_smem_size; mov.u32 %r11, %total_smem_size; mov.u32 %r12, %aggr_smem_size;"
    body = f"{sizes} st.global.b32 [%rd2], %r10; st.global.b32 [%rd2+4], %r11; st.global.b32 [%rd2+8], %r12;"
    out = torch.zeros(3, dtype=torch.int32)
    build({"k": body}, ".shared .b8 s[100];\n").launch(
        "k", (1,), (1,), (out, out, 0), shared_bytes=300
    )
    assert out.tolist() == [300, 512, 1536]


# ---- refusals
REFUSED = [
    "add.sat.u32 %r1, %r2, %r3;",
    "add.rna.f32 %f1, %f2, %f3;",
    "add.rz.f16 %h1, %h2, %h3;",
    "add.ftz.f64 %rd6, %rd7, %rd8;",
    "add.ftz.bf16 %h1, %h2, %h3;",
    "mul.lo.sat.s32 %r1, %r2, %r3;",
    "mad.lo.sat.s32 %r1, %r2, %r3, %r4;",
    "fma.rn.sat.relu.f16 %h1, %h2, %h3, %h4;",
    "fma.rn.oob.f16 %h1, %h2, %h3, %h4;",
    "fma.rn.oob.relu.bf16x2 %r1, %r2, %r3, %r4;",
    "min.xorsign.f32 %f1, %f2, %f3;",
    "min.abs.f32 %f1, %f2, %f3;",
    "rcp.approx.ftz.f64 %rd6, %rd7;",
    "rsqrt.approx.ftz.f64 %rd6, %rd7;",
    "ex2.approx.ftz.f16 %h1, %h2;",
    "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;",
    "cvt.rn.satfinite.e2m1x2.f32 %h1, %f1, %f2;",
    "cvt.rn.satfinite.e2m3x2.f32 %h1, %f1, %f2;",
    "cvt.rn.satfinite.e3m2x2.f32 %h1, %f1, %f2;",
    "cvt.rz.satfinite.ue8m0x2.f32 %h1, %f1, %f2;",
    "cvt.rn.bf16x2.ue8m0x2 %r1, %h1;",
    "cvt.rn.e4m3x2.f32 %h1, %f1, %f2;",
    "cvt.rz.satfinite.e4m3x2.f32 %h1, %f1, %f2;",
    "cvt.rn.f16x2.e2m1x2 %r1, %h1;",
    "cvt.rn.satfinite.s2f6x2.f32 %h1, %f1, %f2;",
    "prmt.b32.f4 %r1, %r2, %r3, %r4;",
    "shl.wrap.b32 %r1, %r2, %r3;",
    "selp.f16 %h1, %h2, %h3, %p1;",
    "setp.lt.f16x2 %p1, %r1, %r2;",
    "setp.lo.s32 %p1, %r1, %r2;",
    "lop3.xor.b32 %r1|%p1, %r2, %r3, %r4, 0x80, %p2;",
    "vadd.s32.s32.s32 %r1, %r2, %r3;",
    "add.f32 %f1, %f2, 1;",
    "add.s32 %r1, %r2;",
    "add.s32 %r1, %r2, %r3, %r4;",
    "shfl.idx.b32 %r1, %r2, %r3, %r4;",
    "vote.all.pred %p1, %p2;",
    "vote.sync.most.pred %p1, %p2, -1;",
    "match.any.sync.b32 %r1|%p1, %r2, -1;",
    "redux.sync.mul.s32 %r1, %r2, -1;",
    "mov.b32 %r1, %pm0;",
    "mov.u64 %rd6, nowhere;",
    "call somewhere;",
]


@pytest.mark.parametrize("statement", REFUSED, ids=lambda s: s.split()[0])
def test_variants_without_an_implementation_are_refused(statement):
    with pytest.raises(
        emulator.UnsupportedInstruction, match=statement.split()[0].replace(".", r"\.")
    ):
        build({"k": statement})


def test_a_modifier_that_nobody_knows_is_refused_everywhere():
    opcodes = {
        s.split()[0].rstrip(";")
        for c in CASES
        for s in c.ptx.split(";")
        if s.split() and s.split()[0][0].islower()
    }
    opcodes = {o for o in opcodes if not o.startswith(("bar", "st", "ld")) and ":" not in o}
    assert len(opcodes) > 700
    for opcode in opcodes:
        find(opcode)
        for wrong in (opcode + ".novel", ".novel.".join(opcode.split(".", 1))):
            with pytest.raises(Unsupported):
                find(wrong if "." in opcode else opcode + ".novel")


def test_rounding_is_back_to_nearest_after_a_directed_operation():
    body = "add.rp.f32 %f2, %f1, 0f2B000000; add.f32 %f3, %f1, 0f2B000000;"
    body = f"ld.global.f32 %f1, [%rd4]; {body} st.global.f32 [%rd5], %f3;"
    x, out = torch.ones(4), torch.zeros(4)
    build({"k": body}).launch("k", (1,), (4,), (x, out, 4))
    assert out.tolist() == [1.0] * 4
