"""tcgen05: multiplication against float64, moves between registers and tensor memory, allocation."""

import pytest
import torch
from matrix_launches import check_all, run_body
from tables_tcgen05 import HEADER, TCGEN05, instruction, tcgen05_case

import cula_emulator as emulator


def test_every_variant(schedule):
    check_all(TCGEN05, schedule, HEADER)


def _run(body, out_words=1, threads=32, options=None, among=()):
    words = torch.zeros(4, dtype=torch.int32)
    return run_body(body, words, out_words, threads, 1024, HEADER, options, among)


def _alloc(columns, place=0):
    return (
        f"mov.u32 %r10, tile; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10+{place}], {columns};"
        f"bar.warp.sync -1; ld.shared.b32 %r{11 + place // 4}, [%r10+{place}];"
    )


def _free(register, columns):
    return f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {register}, {columns};"


# Registers and columns per repetition; cell (lane, column) of thread l and register i, from the figures of the PTX ISA.
SHAPES = {
    "32x32b": (1, 1, lambda lane, i: (lane, i)),
    "16x64b": (1, 2, lambda lane, i: (lane // 4 + 8 * (lane % 2), 2 * i + lane // 2 % 2)),
    "16x128b": (2, 4, lambda lane, i: (lane // 4 + 8 * (i % 2), 4 * (i // 2) + lane % 4)),
    "16x256b": (
        4,
        8,
        lambda lane, i: (lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2),
    ),
}


def _move_and_back(shape, repetitions):
    """Cells of a warp are filled with lane * 1024 + column by 32x32b, then loaded, stored and loaded with `shape`."""
    per, columns, _ = SHAPES[shape]
    count = per * repetitions
    registers = "{" + ", ".join(f"%x{i}" for i in range(count)) + "}"
    pattern = "".join(
        f"add.u32 %r21, %r20, {c}; add.u32 %r22, %r11, {c}; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r22], {{%r21}};"
        for c in range(columns * repetitions)
    )
    load = f"tcgen05.ld.sync.aligned.{shape}.x{repetitions}.b32 {registers}, [%r11]; tcgen05.wait::ld.sync.aligned;"
    back = f"tcgen05.st.sync.aligned.{shape}.x{repetitions}.b32 [%r11], {registers}; tcgen05.wait::st.sync.aligned;"
    store = " ".join(f"st.global.b32 [%rd7+{4 * i}], %x{i};" for i in range(count))
    return (
        f".reg .b32 %x<{count}>; {_alloc(128)} shl.b32 %r20, %r2, 10; {pattern} tcgen05.wait::st.sync.aligned;"
        f"{load} {back} {load} mul.wide.u32 %rd7, %r2, {4 * count}; add.s64 %rd7, %rd7, %rd2; {store}"
        + _free("%r11", 128)
    )


_MOVES = {(shape, n): _move_and_back(shape, n) for shape in SHAPES for n in (1, 2, 16)}


@pytest.mark.parametrize("shape, repetitions", _MOVES)
def test_shapes_of_moves(shape, repetitions, schedule):
    per, _, cell = SHAPES[shape]
    count = per * repetitions
    out = _run(_MOVES[shape, repetitions], 32 * count, options=schedule, among=_MOVES.values())
    expected = [
        [cell(lane, i)[0] * 1024 + cell(lane, i)[1] for i in range(count)] for lane in range(32)
    ]
    assert out.view(32, count).tolist() == expected


def test_store_is_visible_after_its_wait():
    body = (
        f"{_alloc(32)} mov.b32 %r20, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {{%r20}};"
        "tcgen05.wait::st.sync.aligned; mov.b32 %r20, 9; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {%r20};"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r21}, [%r11]; tcgen05.wait::st.sync.aligned;"
        f"mul.wide.u32 %rd7, %r2, 4; add.s64 %rd7, %rd7, %rd2; st.global.b32 [%rd7], %r21; {_free('%r11', 32)}"
    )
    assert (_run(body, 32) == 9).all()
    assert (_run(body, 32, options=emulator.Options(async_mode="lazy")) == 7).all()


def _load_at(address):
    registers = "{" + ", ".join(f"%r{20 + i}" for i in range(8)) + "}"
    load = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers}, [%r12];"
    return f"{_alloc(512)} {address} {load} {_free('%r11', 512)}"


_ADDRESSES = [
    ("add.u32 %r12, %r11, 508;", emulator.OutOfBounds, "columns 508 to 515"),
    ("add.u32 %r12, %r11, 2097152;", emulator.InvalidOperation, "another warp"),
    ("add.u32 %r12, %r11, 1048576;", emulator.InvalidOperation, "another warp"),
    ("add.u32 %r12, %r11, %r2;", emulator.InvalidOperation, "differs between the lanes"),
]


@pytest.mark.parametrize("address, error, text", _ADDRESSES)
def test_addresses_of_moves_are_checked(address, error, text):
    with pytest.raises(error, match=text):
        _run(_load_at(address), among=[_load_at(case[0]) for case in _ADDRESSES])


def test_allocations_do_not_overlap_and_are_reused():
    """64, 128, 64; the middle one is given back and its columns serve two new ones."""
    body = (
        _alloc(64) + _alloc(128, 4) + _alloc(64, 8) + _free("%r12", 128) + _alloc(32, 12) + _alloc(64, 16)
        + "".join(f"st.global.b32 [%rd2+{4 * i}], %r{11 + i};" for i in range(5))
        + "".join(_free(f"%r{r}", n) for r, n in ((15, 64), (11, 64), (14, 32), (13, 64)))
    )  # fmt: skip
    first, second, third, fourth, fifth = _run(body, 5).tolist()
    spans = [(first, 64), (third, 64), (fourth, 32), (fifth, 64)]
    used = [column for start, count in spans for column in range(start, start + count)]
    assert len(set(used)) == len(used) and max(used) < 512 and min(used) >= 0
    assert second not in range(first, first + 64) and fourth == second


_WRONG = [
        (_alloc(48), emulator.InvalidOperation, "48 columns"),
        (_alloc(16), emulator.InvalidOperation, "16 columns"),
        (_alloc(64) + _free("%r11", 32), emulator.InvalidOperation, "dealloc of 32 columns at 0x0; 64"),
        (_alloc(64) + "add.u32 %r11, %r11, 32;" + _free("%r11", 32), emulator.InvalidOperation, "0 are allocated"),
        (_alloc(64) + _free("%r11", 64) * 2, emulator.InvalidOperation, "0 are allocated"),
        (_alloc(64), emulator.BarrierMisuse, "64 tensor memory columns allocated"),
        (_alloc(512) + _alloc(32, 4), emulator.Deadlock, "tcgen05.alloc"),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + _alloc(32), emulator.InvalidOperation, "after"),
    ]  # fmt: skip


@pytest.mark.parametrize("body, error, text", _WRONG)
def test_wrong_use_of_allocation(body, error, text):
    with pytest.raises(error, match=text):
        _run(body, among=[case[0] for case in _WRONG])


def test_alloc_waits_for_another_warp(schedule):
    """Warp 1 wants all columns while warp 0 holds some: it goes on when they are given back."""
    body = (
        "mov.u32 %r10, tile; shr.u32 %r30, %r2, 5; setp.ne.u32 %p1, %r30, 0; @%p1 bra T;"
        + _alloc(256) + "bar.sync 0; mov.u32 %r31, 0; L: add.u32 %r31, %r31, 1; setp.lt.u32 %p2, %r31, 50; @%p2 bra L;"
        + _free("%r11", 256) + "bra E;"
        "T: bar.sync 0; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10+8], 512; bar.warp.sync -1;"
        + "ld.shared.b32 %r12, [%r10+8]; st.global.b32 [%rd2], %r12;" + _free("%r12", 512) + "E:"
    )  # fmt: skip
    assert _run(body, 1, 64, options=schedule).item() == 0


REFUSED = [
    "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
    "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r2], %rd2, %r2, %p1;",
    "tcgen05.mma.cta_group::1.kind::f16.collector::a::use.ashift [%r1], [%r2], %rd2, %r2, %p1;",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 4;",
    "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, %p1;",
    "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
    "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r3, %r4}, [%r2];",
    "tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r2], {%r3, %r4};",
    "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r3}, [%r2], 16;",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r3, %r4}, %r5, [%r2];",
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3}, [%r2];",
    "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
    "tcgen05.shift.cta_group::1.down [%r1];",
    "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;",
]


@pytest.mark.parametrize("text", REFUSED)
def test_other_variants_are_refused(text):
    with pytest.raises(emulator.UnsupportedInstruction, match=r"tcgen05\."):
        _run(text)


_CODES = [
    (0b01 << 4, 0b00 << 4),  # f16 accumulator
    (0, 1 << 2),  # sparse
    (0, 1 << 3),  # saturation of floats
    (1 << 7, 3 << 7),  # unknown type of A
    (0, 1 << 23),  # reserved
    (0, 1 << 30),  # shift of .ws
    (128 >> 4 << 24, 256 >> 4 << 24),  # M
    (32 >> 3 << 17, 24 >> 3 << 17),  # N of M 128
    (32 >> 3 << 17, 0),
]


def _with_code(case, old, new):
    code = instruction(128, 32, "bf16", "bf16")
    assert case.body.count(f"mov.b32 %r46, {code};") == 1
    return case.body.replace(f"mov.b32 %r46, {code};", f"mov.b32 %r46, {code & ~old | new};")


@pytest.mark.parametrize("old, new", _CODES)
def test_instruction_descriptors_are_checked(old, new):
    case = tcgen05_case(128, 32, "bf16", "bf16")
    bodies = [_with_code(case, *code) for code in _CODES]
    words = case.problem("exact", 0).words
    with pytest.raises(emulator.InvalidOperation, match="instruction descriptor"):
        body = _with_code(case, old, new)
        run_body(body, words, case.out_words, 128, case.shared, HEADER, among=bodies)


def test_missing_proxy_fence_is_reported(schedule):
    case = tcgen05_case(128, 16, "bf16", "bf16")
    body = case.body.replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(emulator.RaceSuspected, match="fence.proxy.async"):
        run_body(
            body, case.problem("exact", 0).words, case.out_words, 128, case.shared, HEADER, schedule
        )


def test_missing_wait_for_the_commit_is_reported():
    """The multiplication is still to run when its accumulator is given back."""
    case = tcgen05_case(128, 16, "bf16", "bf16", use_c=False)
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p6, [%r44], 0; @!%p6 bra W;"
    assert wait in case.body
    place = (case.out_words, 128, case.shared, HEADER, emulator.Options(async_mode="lazy"))
    with pytest.raises(emulator.OutOfBounds, match="columns 0 to 15 are not allocated"):
        run_body(case.body.replace(wait, ""), case.problem("exact", 0).words, *place)


def test_tensor_memory_that_is_not_allocated():
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r21}, [%r20];"
    for body in (
        f"mov.u32 %r20, 0; {load}",
        f"{_alloc(32)} add.u32 %r20, %r11, 32; {load} {_free('%r11', 32)}",
        f"{_alloc(32)} mov.u32 %r20, %r11; {_free('%r11', 32)} {load}",
    ):
        with pytest.raises(emulator.OutOfBounds, match="not allocated"):
            _run(body)
