"""tcgen05.mma with tcgen05.st and ld as data, in the form of tables_matrix.py, for sm_100a.

Like tables_wgmma.py: two instructions over neighbouring k blocks, the second accumulating. C is stored to tensor memory
first, D is loaded from it, all 128 lanes of both.
"""

from __future__ import annotations

import torch
from tables_matrix import (
    ACCUMULATORS,
    ROUNDING,
    Case,
    Problem,
    accumulator,
    allowed,
    at_thread,
    finish,
    operand,
    raw,
    vector,
    width,
    words_of,
)
from tables_wgmma import Layout, layout

HEADER = ".version 8.7\n.target sm_100a\n.address_size 64\n"
_SWIZZLE_CODE = {0: 0, 128: 2, 64: 4, 32: 6}
_KINDS = {  # format -> (kind, code in the instruction descriptor)
    "f16": ("f16", 0), "bf16": ("f16", 1), "tf32": ("tf32", 2),
    "e4m3": ("f8f6f4", 0), "e5m2": ("f8f6f4", 1), "u8": ("i8", 0), "s8": ("i8", 1),
}  # fmt: skip
COLUMNS = 512
_A_COLUMN = 256  # of A in tensor memory, behind D


def instruction(
    m: int,
    n: int,
    a: str,
    b: str,
    majors: str = "kk",
    signs: tuple[int, int] = (1, 1),
    sat: bool = False,
) -> int:
    """The instruction descriptor."""
    d_code = 2 if _KINDS[a][0] == "i8" else 1
    return (
        sat << 3 | d_code << 4 | _KINDS[a][1] << 7 | _KINDS[b][1] << 10
        | (signs[0] < 0) << 13 | (signs[1] < 0) << 14
        | (majors[0] == "m") << 15 | (majors[1] == "n") << 16 | n >> 3 << 17 | m >> 4 << 24
    )  # fmt: skip


def descriptor(register: str, at: Layout, start: int) -> str:
    fields = (
        at.leading >> 4 << 16 | at.stride >> 4 << 32 | 1 << 46 | _SWIZZLE_CODE[at.swizzle] << 61
    )
    return (
        f"add.u32 %r24, %r10, {start}; shr.u32 %r24, %r24, 4; cvt.u64.u32 {register}, %r24;"
        f"or.b64 {register}, {register}, 0x{fields:x};"
    )


def lanes_of(m: int) -> torch.Tensor:
    """Tensor memory lane of each row of D."""
    row = torch.arange(m)
    return row if m == 128 else row // 16 * 32 + row % 16


def _columns(move: str, base: int, registers: list[str]) -> str:
    """tcgen05.ld or st of this warp's 32 lanes, eight columns at a time."""
    pieces = []
    for first in range(0, len(registers), 8):
        chunk = registers[first : first + 8]
        cells = f"add.u32 %r41, %r40, {base + first}; tcgen05.{move}.sync.aligned.32x32b.x{len(chunk)}.b32 "
        cells += f"{vector(chunk)}, [%r41];" if move == "ld" else f"[%r41], {vector(chunk)};"
        pieces.append(cells)
    return "".join(pieces) + f"tcgen05.wait::{move}.sync.aligned;"


def tcgen05_case(
    m: int,
    n: int,
    a: str,
    b: str,
    swizzle: int = 128,
    majors: str = "kk",
    a_in_tmem: bool = False,
    signs: tuple[int, int] = (1, 1),
    use_c: bool = True,
    saturate: bool = False,
    disabled: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> Case:
    element = width(a)
    k, acc = 32 // element, "s32" if a in ("s8", "u8") else "f32"
    at_a, at_b = (
        layout(m, element, majors[0] == "m", swizzle),
        layout(n, element, majors[1] == "n", swizzle),
    )
    b_start = 0 if a_in_tmem else -(-at_a.size // 1024) * 1024
    image_bytes = -(-(b_start + at_b.size) // 1024) * 1024
    d, fragment = [f"%d{i}" for i in range(n)], [f"%a{i}" for i in range(16 if a_in_tmem else 0)]
    per_thread = n + len(fragment)
    load = " ".join(f"ld.global.b32 {r}, [%rd9+{4 * i}];" for i, r in enumerate(d + fragment))
    allocate = (
        "mov.u32 %r10, tile; shr.u32 %r42, %r2, 5; setp.ne.u32 %p4, %r42, 0; mov.u32 %r43, place; mov.u32 %r44, bar;"
        f"@%p4 bra A; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r43], {COLUMNS};"
        "A: setp.ne.u32 %p5, %r2, 0; @%p5 bra B; mbarrier.init.shared.b64 [%r44], 1; B:"
    )
    fill = (
        "mov.u32 %r20, %r2; F: shl.b32 %r21, %r20, 4; cvt.u64.u32 %rd6, %r21; add.s64 %rd6, %rd6, %rd1;"
        "ld.global.v4.b32 {%r30, %r31, %r32, %r33}, [%rd6]; add.u32 %r23, %r10, %r21;"
        "st.shared.v4.b32 [%r23], {%r30, %r31, %r32, %r33}; add.u32 %r20, %r20, 128;"
        f"setp.lt.u32 %p1, %r20, {image_bytes // 16}; @%p1 bra F; fence.proxy.async.shared::cta; bar.sync 0;"
        "tcgen05.fence::after_thread_sync; ld.shared.b32 %r45, [%r43];"
        "shl.b32 %r40, %r42, 21; add.u32 %r40, %r40, %r45;"
    )
    multiply = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; @%p5 bra M;"
    masks = ", ".join(f"%q{i}" for i in range(4))
    multiply += "".join(f"mov.b32 %q{i}, {mask};" for i, mask in enumerate(disabled))
    code = instruction(m, n, a, b, majors, signs, saturate)
    multiply += f"mov.b32 %r46, {code}; setp.ne.b32 %p2, {int(use_c)}, 0; setp.eq.b32 %p3, 0, 0;"
    for block in (0, 1):
        multiply += (
            "" if a_in_tmem else descriptor(f"%rd{10 + block}", at_a, at_a.block_starts[block])
        )
        multiply += descriptor(f"%rd{12 + block}", at_b, b_start + at_b.block_starts[block])
        multiply += f"add.u32 %r47, %r45, {_A_COLUMN + 8 * block};"
        left = "[%r47]" if a_in_tmem else f"%rd{10 + block}"
        arguments = f"[%r45], {left}, %rd{12 + block}, %r46, {{{masks}}}, %p{2 + block}"
        multiply += f"tcgen05.mma.cta_group::1.kind::{_KINDS[a][0]} {arguments};"
    multiply += "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r44]; M:"
    multiply += "W: mbarrier.try_wait.parity.shared.b64 %p6, [%r44], 0; @!%p6 bra W; tcgen05.fence::after_thread_sync;"
    store = " ".join(f"st.global.b32 [%rd14+{4 * i}], {r};" for i, r in enumerate(d))
    free = f"bar.sync 0; @%p4 bra D; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r45, {COLUMNS};"
    free += "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; D:"
    body = (
        f".shared .align 8 .b8 bar[8]; .shared .align 4 .b8 place[4]; .reg .b32 %d<{n}>; .reg .b32 %a<16>;"
        f".reg .b32 %q<4>; add.s64 %rd8, %rd1, {image_bytes}; {at_thread('%rd9', '%rd8', 4 * per_thread)}"
        f"{at_thread('%rd14', '%rd2', 4 * n)} {load} {allocate} {fill} {_columns('st', 0, d)}"
        f"{_columns('st', _A_COLUMN, fragment) if fragment else ''} {multiply} {_columns('ld', 0, d)} {store} {free}"
    )

    def problem(kind: str, seed: int) -> Problem:
        g = torch.Generator().manual_seed(seed)
        left, right = operand(kind, a, (m, 2 * k), g), operand(kind, b, (n, 2 * k), g)
        c = accumulator(kind, acc, (128, n), g)
        image = torch.full((image_bytes,), 0xFF, dtype=torch.uint8)
        lanes = lanes_of(m)
        total = c[lanes] if use_c else torch.zeros(m, n).double()
        for block in (0, 1):
            left_block, right_block = (x[:, block * k : block * k + k] for x in (left, right))
            if not a_in_tmem:
                at_a.place(image, 0, block, left_block, a)
            at_b.place(image, b_start, block, right_block, b)
            total = finish(
                total + signs[0] * signs[1] * left_block @ right_block.t(), acc, saturate
            ).double()
        expected, scale = c.clone(), c.abs()
        enabled = torch.tensor(
            [not disabled[lane // 32] >> lane % 32 & 1 for lane in lanes.tolist()]
        )
        expected[lanes[enabled]] = total[enabled]
        scale[lanes] += left.abs() @ right.abs().t()
        words = [raw(c, acc).reshape(128, 4 * n)]
        if a_in_tmem:
            rows = torch.zeros(128, 64, dtype=torch.uint8)
            rows[lanes] = raw(left, a).reshape(m, 64)
            words.append(rows)
        return Problem(
            words_of(image, torch.cat(words, 1)),
            lambda out: out.view(ACCUMULATORS[acc]).view(128, n),
            expected.long() if acc == "s32" else expected,
            allowed(kind, acc, scale, ROUNDING),
        )

    name = (
        f"tcgen05_m{m}n{n}_{a}_{b}_{majors}{swizzle}" + "_ts" * a_in_tmem + "_satfinite" * saturate
    )
    name += "_overwrite" * (not use_c) + "_disabled" * any(disabled)
    name += "".join("_plus" if s > 0 else "_minus" for s in signs) if signs != (1, 1) else ""
    kinds = ("exact",) if acc == "s32" else ("exact", "random")
    return Case(name, body, 128 * n, problem, image_bytes, 128, kinds)


def _cases() -> list[Case]:
    every = [
        tcgen05_case(m, n, "bf16", "bf16") for m, n in ((64, 8), (64, 136), (128, 16), (128, 112))
    ]
    for swizzle in (0, 32, 64, 128):
        every += [
            tcgen05_case(128, 64, "f16", "f16", swizzle, majors)
            for majors in ("kk", "mk", "kn", "mn")
        ]
        every += [
            tcgen05_case(64, 24, "tf32", "tf32", swizzle),
            tcgen05_case(128, 32, "e4m3", "e5m2", swizzle),
        ]
        every += [tcgen05_case(64, 64, "bf16", "f16", swizzle, "kn", a_in_tmem=True)]
    for a in ("e4m3", "e5m2"):
        every += [tcgen05_case(64, 40, a, b) for b in ("e4m3", "e5m2")]
        every.append(tcgen05_case(128, 16, a, "e4m3", a_in_tmem=True))
    for a in ("s8", "u8"):
        every += [
            tcgen05_case(128, 32, a, b, 64, saturate=s) for b in ("s8", "u8") for s in (False, True)
        ]
        every.append(tcgen05_case(64, 24, a, "s8", a_in_tmem=True, use_c=False))
    every += [
        tcgen05_case(128, 16, "tf32", "tf32", a_in_tmem=True),
        tcgen05_case(128, 128, "f16", "f16", use_c=False),
    ]
    every += [
        tcgen05_case(64, 8, x, x, signs=s)
        for x in ("bf16", "e4m3")
        for s in ((-1, 1), (1, -1), (-1, -1))
    ]
    masks = (0x80000001, 0xFFFFFFFF, 0x0000FFFF, 0x12345678)
    every += [tcgen05_case(m, 32, x, x, disabled=masks) for m in (64, 128) for x in ("f16", "s8")]
    return every


TCGEN05 = {c.name: c for c in _cases()}
