"""wgmma against float64: every format, width, layout and source, and its asynchrony."""

import re

import pytest
import torch
from matrix_launches import build, check, check_all, run_body
from tables_wgmma import WGMMA, layout, wgmma_case

import cula_emulator as emulator


def test_every_variant(schedule):
    check_all(WGMMA, schedule)


def test_table_covers_what_it_claims():
    names = " ".join(WGMMA)
    assert {int(n) for n in re.findall(r"wgmma_n(\d+)_bf16_bf16_f32_kk128\b", names)} == set(
        range(8, 257, 8)
    )
    for majors in ("kk", "mk", "kn", "mn"):
        for swizzle in (0, 32, 64, 128):
            assert f"_f16_f16_f32_{majors}{swizzle} " in names + " "


def test_layout_of_the_table_is_a_permutation():
    """The oracle's own layouts place every element somewhere else."""
    for mn_major, swizzle in [(m, s) for m in (False, True) for s in (0, 32, 64, 128)]:
        at = layout(64, 2, mn_major, swizzle)
        mn, k = torch.arange(64).view(-1, 1), torch.arange(16)
        places = torch.cat(
            [at.swizzled(start + at.offset(mn, k, 2)).flatten() for start in at.block_starts]
        )
        assert len(set(places.tolist())) == 64 * 32 and int(places.max()) < at.size


def _without(case, pattern):
    changed = re.sub(pattern, "", case.body)
    assert changed != case.body
    return changed


def test_missing_wait_is_reported():
    case = wgmma_case(16, "bf16", "bf16", "f32")
    problem = case.problem("exact", 0)
    body = _without(case, r"wgmma\.wait_group\.sync\.aligned 0;")
    for mode in ("random", "lazy"):
        with pytest.raises(emulator.RaceSuspected, match="wait_group"):
            for seed in range(8):
                options = emulator.Options(async_mode=mode, seed=seed)
                run_body(
                    body, problem.words, case.out_words, 128, shared=case.shared, options=options
                )


def test_missing_proxy_fence_is_reported(schedule):
    case = wgmma_case(16, "bf16", "bf16", "f32")
    body = _without(case, r"fence\.proxy\.async\.shared::cta;")
    with pytest.raises(emulator.RaceSuspected, match="fence.proxy.async"):
        run_body(
            body,
            case.problem("exact", 0).words,
            case.out_words,
            128,
            shared=case.shared,
            options=schedule,
        )


def test_operands_are_read_when_the_operation_runs():
    """Shared memory that is overwritten before the wait is seen overwritten by the lazy schedule."""
    case = wgmma_case(16, "bf16", "bf16", "f32", use_c=False)
    spoil = "bar.sync 0; mov.u32 %r30, 0; mov.u32 %r20, %r2;"
    spoil += "Z: shl.b32 %r21, %r20, 4; add.u32 %r23, %r10, %r21; st.shared.v4.b32 [%r23], {%r30, %r30, %r30, %r30};"
    spoil += f"add.u32 %r20, %r20, 128; setp.lt.u32 %p1, %r20, {case.shared // 16}; @%p1 bra Z;"
    commit = "wgmma.commit_group.sync.aligned;"
    body = case.body.replace(commit, commit + spoil + "fence.proxy.async.shared::cta; bar.sync 0;")
    problem = case.problem("exact", 0)

    def run(mode):
        options = emulator.Options(async_mode=mode)
        return problem.decode(
            run_body(body, problem.words, case.out_words, 128, case.shared, options=options)
        )

    assert torch.equal(run("immediate").double(), problem.expected)
    assert (run("lazy") == 0).all()


def test_wait_group_counts_groups(schedule):
    """wait_group 1 completes all groups but the last."""
    case = wgmma_case(8, "bf16", "bf16", "f32", use_c=False)
    first, second = re.findall(r"wgmma\.mma_async[^;]*;", case.body)
    body = case.body.replace(first, first + "wgmma.commit_group.sync.aligned;")
    body = body.replace(
        "wait_group.sync.aligned 0;", "wait_group.sync.aligned 1; wgmma.wait_group.sync.aligned 0;"
    )
    problem = case.problem("random", 1)
    out = run_body(body, problem.words, case.out_words, 128, shared=case.shared, options=schedule)
    assert problem.mismatch(out) is None


def test_special_values():
    """The NaN of the padding between operands must not leak, that of an operand must."""
    case = wgmma_case(24, "bf16", "bf16", "f32", use_c=False)
    problem = case.problem("exact", 0)
    words = problem.words.clone()
    at = layout(64, 2, False, 128)
    place = int(
        at.swizzled(
            torch.tensor(at.block_starts[0]) + at.offset(torch.tensor(5), torch.tensor(4), 2)
        )
    )
    words[place // 4] = 0x7F80 << 16 * (place // 2 % 2)  # infinity in row 5, and zero beside it
    got = problem.decode(run_body(case.body, words, case.out_words, 128, shared=case.shared))
    assert not got[5].isfinite().any() and got[:5].isfinite().all() and got[6:].isfinite().all()


REFUSED = {
    "m64n16k16.f32.f16.bf16": ", 1, 1, 0, 0",
    "m64n16k16.bf16.bf16.bf16": ", 1, 1, 0, 0",
    "m64n12k16.f32.bf16.bf16": ", 1, 1, 0, 0",
    "m64n264k16.f32.bf16.bf16": ", 1, 1, 0, 0",
    "m64n16k32.f32.bf16.bf16": ", 1, 1, 0, 0",
    "m64n16k16.f32.bf16.bf16.satfinite": ", 1, 1, 0, 0",
    "m64n16k16.f32.bf16.bf16": ", 1, 1, 0",
    "m64n16k8.f32.tf32.tf32": ", 1, 2",
    "m64n40k32.s32.s8.s8": "",
    "m64n16k256.s32.b1.b1.and.popc": "",
}


@pytest.mark.parametrize("suffix", REFUSED)
def test_other_variants_are_refused(suffix):
    registers = ", ".join(f"%r{20 + i}" for i in range(8))
    text = (
        f"wgmma.mma_async.sync.aligned.{suffix} {{{registers}}}, %rd7, %rd8, %p1{REFUSED[suffix]};"
    )
    with pytest.raises(emulator.UnsupportedInstruction, match="wgmma"):
        run_body(text, torch.zeros(1), 1, 128)


def test_sparse_is_refused():
    text = "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, %rd7, %rd8, %r9, 0, %p1, 1, 1;"
    with pytest.raises(emulator.UnsupportedInstruction, match="mma_async.sp"):
        run_body(text, torch.zeros(1), 1, 128)


def test_descriptors_are_checked():
    case = wgmma_case(16, "bf16", "bf16", "f32")
    problem = case.problem("exact", 0)

    def run(old, new):
        assert old in case.body
        run_body(
            case.body.replace(old, new, 1), problem.words, case.out_words, 128, shared=case.shared
        )

    start = re.search(r"or\.b64 %rd10, %rd10, 0x([0-9a-f]+);", case.body)
    fields = int(start[1], 16)
    with pytest.raises(emulator.InvalidOperation, match="base offset"):
        run(start[0], start[0].replace(start[1], f"{fields | 1 << 49:x}"))
    with pytest.raises(emulator.OutOfBounds, match="wgmma reads its operand"):
        run(start[0], start[0].replace(start[1], f"{fields | 0x3FFF << 32:x}"))
    with pytest.raises(emulator.InvalidOperation, match="differ between the lanes"):
        run(
            start[0],
            start[0]
            + "cvt.u64.u32 %rd20, %r2; shl.b64 %rd20, %rd20, 16; xor.b64 %rd10, %rd10, %rd20;",
        )


def test_copied_and_overlapping_accumulators(schedule):
    """Accumulators that share registers are copied; mov keeps what is pending."""
    case = wgmma_case(16, "bf16", "bf16", "f32", use_c=False)
    wide = "{" + ", ".join(f"%d{i}" for i in range(8)) + "}"
    first, second = re.findall(r"wgmma\.mma_async[^;]*;", case.body)
    moved = "{" + ", ".join([f"%e{i}" for i in range(4)] + [f"%d{i}" for i in range(4, 8)]) + "}"
    body = ".reg .b32 %e<4>;" + case.body.replace(
        second,
        "".join(f"mov.b32 %e{i}, %d{i};" for i in range(4))
        + second.replace(wide, moved)
        + "".join(f"mov.b32 %d{i}, %e{i};" for i in range(4)),
    )
    problem = case.problem("exact", 2)
    out = run_body(body, problem.words, case.out_words, 128, shared=case.shared, options=schedule)
    assert problem.mismatch(out) is None


def test_one_build_serves_all_schedules():
    case = wgmma_case(32, "f16", "f16", "f32")
    module = build({case.name: case})
    for mode in ("immediate", "random", "lazy"):
        for seed in range(4):
            check(module, case, "random", emulator.Options(async_mode=mode, seed=seed))
