"""mma.sync against float64, and what it refuses."""

import pytest
import torch
from matrix_launches import check_all, run_body
from tables_matrix import MMA, ROUNDING, mma_case, words_of

import cula_emulator as emulator


def test_every_shape_and_type(schedule):
    check_all(MMA, schedule)


def _run(case, a, b, c):
    """Runs a case on given matrices (values) and returns D."""
    from tables_matrix import fragment_a, fragment_b, fragment_c, unfragment_c

    _, _, a_type, b_type, acc = case.name.split("_")[:5]
    lanes = [fragment_a(a, a_type), fragment_b(b, b_type), fragment_c(c, acc)]
    out = run_body(case.body, words_of(torch.cat(lanes, 1)), case.out_words)
    return unfragment_c(out.view(32, -1), 8, acc)


@pytest.mark.parametrize(
    "k, a, b", [(16, "bf16", "bf16"), (8, "tf32", "tf32"), (32, "e5m2", "e5m2")]
)
def test_special_values_stay_special(k, a, b):
    """0 * inf is NaN, inf - inf is NaN, inf stays inf; other rows and columns are not touched."""
    left, right, c = torch.zeros(16, k), torch.ones(k, 8), torch.zeros(16, 8)
    left[0, 3], left[1, 0], left[1, 1], left[2, 5] = (
        float("inf"),
        float("inf"),
        -float("inf"),
        -float("inf"),
    )
    left[4, 2], c[5, 6] = float("nan"), float("nan")
    right[3, 7] = 0
    d = _run(mma_case(k, a, b, "f32"), left, right, c)
    assert (d[0, :7] == float("inf")).all() and d[0, 7].isnan()
    assert d[1].isnan().all() and (d[2] == -float("inf")).all()
    assert d[4].isnan().all() and d[5, 6].isnan()
    assert int(d.isnan().sum()) == 1 + 8 + 8 + 1 and (d[6:] == 0).all()
    assert (d[d.isnan()].view(torch.int32) == 0x7FFFFFFF).all()  # the one NaN of the tensor core


def test_every_value_of_eight_bit_floats():
    """A holds all 256 codes, B is the unit matrix."""
    for name, dtype in [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]:
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float().view(2, 16, 8)
        for half in codes:
            left, right = torch.zeros(16, 32), torch.zeros(32, 8)
            left[:, 8:16], right[8:16] = half, torch.eye(8)
            finite = half.isfinite().all(1)
            d = _run(mma_case(32, name, name, "f32"), left, right, torch.zeros(16, 8))
            assert torch.equal(d[finite], half[finite])
            special = half[~finite]  # infinity times the zeros of B is NaN
            assert torch.equal(d[~finite].isfinite(), torch.zeros_like(special, dtype=torch.bool))


def test_denormal_inputs_count():
    tiny = torch.tensor([2.0**-24, 3 * 2.0**-24, -(2.0**-20)])
    left, right = torch.zeros(16, 16), torch.zeros(16, 8)
    left[0, :3], right[:3, 0] = tiny, torch.tensor([2.0**10, 2.0**9, 1.0])
    d = _run(mma_case(16, "f16", "f16", "f32"), left, right, torch.zeros(16, 8))
    assert d[0, 0] == 2.0**-14 + 3 * 2.0**-15 - 2.0**-20


def test_tf32_ignores_the_low_bits():
    case = mma_case(8, "tf32", "tf32", "f32")
    problem = case.problem("exact", 3)
    words = problem.words.view(32, -1).clone()
    words[:, :6] |= 0x1FFF  # A and B
    out = run_body(case.body, words, case.out_words)
    assert problem.mismatch(out) is None


def test_order_of_summation():
    """Products are added in the order of k, from zero, then the accumulator: documented, and the same everywhere."""
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).bfloat16().float(), torch.randn(16, 8).bfloat16().float()
    c = torch.randn(16, 8)
    total = torch.zeros(16, 8)
    for k in range(16):
        total += a[:, k : k + 1] * b[k]
    assert torch.equal(_run(mma_case(16, "bf16", "bf16", "f32"), a, b, c), total + c)
    assert ROUNDING["f32"] < 2.0**-16


REFUSED = [
    "m16n8k16.row.col.f32.f16.f16.f16",  # C and D differ
    "m16n8k16.row.col.f32.f16.bf16.f32",
    "m16n8k8.row.col.f16.bf16.bf16.f16",
    "m16n8k32.row.col.f32.f16.f16.f32",
    "m16n8k16.row.col.satfinite.f32.f16.f16.f32",
    "m8n8k16.row.col.s32.s8.s8.s32",
    "m16n8k64.row.col.s32.s4.s4.s32",
    "m16n8k256.row.col.s32.b1.b1.s32.xor.popc",
    "m8n8k4.row.col.f64.f64.f64.f64",
    "m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32",
]


@pytest.mark.parametrize("suffix", REFUSED)
def test_other_variants_are_refused(suffix):
    with pytest.raises(emulator.UnsupportedInstruction, match="mma"):
        run_body(
            f"mma.sync.aligned.{suffix} {{%r1}}, {{%r2}}, {{%r3}}, {{%r4}};", torch.zeros(1), 1
        )


def test_sparse_is_refused():
    c = "{%r1, %r2, %r3, %r4}"
    text = f"mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c}, {{%r5, %r6}}, {{%r7, %r8}}, {c}, %r9, 0;"
    with pytest.raises(emulator.UnsupportedInstruction, match="mma.sp"):
        run_body(text, torch.zeros(1), 1)


def test_register_counts_are_checked():
    c = "{%r1, %r2, %r3, %r4}"
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c}, {{%r5, %r6}}, {{%r7, %r8}}, {c};"
    )
    with pytest.raises(emulator.UnsupportedInstruction, match="registers for A"):
        run_body(text, torch.zeros(1), 1)


def test_a_partial_warp_is_an_error():
    case = mma_case(16, "bf16", "bf16", "f32")
    with pytest.raises(emulator.InvalidOperation, match="fewer than 32"):
        run_body(case.body, case.problem("exact", 0).words, case.out_words, threads=16)
