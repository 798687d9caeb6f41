"""Loads and stores: every width, vector, qualifier and space; address conversion."""

from __future__ import annotations

import torch

from cases.case import Case, random_words, words

FAMILY = "memory"
_BYTES = random_words(64 * 8, 1)  # enough for 16 bytes of 64 threads
_TYPES = {
    "u8": torch.uint8, "s8": torch.int8, "b8": torch.uint8, "u16": torch.uint16, "s16": torch.int16,
    "b16": torch.uint16, "u32": torch.int32, "s32": torch.int32, "b32": torch.int32, "f32": torch.int32,
}  # fmt: skip
_WIDE = {
    **_TYPES,
    "u32": torch.uint32,
    "b32": torch.uint32,
    "u64": torch.int64,
    "s64": torch.int64,
    "b64": torch.int64,
}


def _elements(kind: str, count: int) -> torch.Tensor:
    return _BYTES.view(_WIDE[kind])[:count].to(torch.int64)


def _at(register: str, base: str, size: int) -> str:
    return f"mul.wide.u32 {register}, %r2, {size}; add.s64 {register}, {register}, {base};"


def _loads() -> list[Case]:
    """Narrow values extend to the register as their type says."""
    cases = []
    for kind, stored in _TYPES.items():
        size, register = stored.itemsize, "%f1" if kind == "f32" else "%r10"
        store = f"st.global.{'f32' if kind == 'f32' else 'b32'} [%rd5], {register};"
        body = f"{_at('%rd7', '%rd1', size)} ld.global.{kind} {register}, [%rd7]; {store}"
        cases.append(
            Case(FAMILY, f"ld_{kind}", body, _BYTES.view(stored)[:32].to(torch.int32), _BYTES)
        )
    for kind in ("u8", "s8", "u16", "s16", "u32", "s32", "b64"):
        size = _WIDE[kind].itemsize
        body = f"{_at('%rd7', '%rd1', size)} {_at('%rd8', '%rd2', 8)}"
        body += f"ld.global.{kind} %rd9, [%rd7]; st.global.b64 [%rd8], %rd9;"
        cases.append(Case(FAMILY, f"ld_{kind}_to_64", body, words(_elements(kind, 32)), _BYTES))
    return cases


def _stores() -> list[Case]:
    cases = []
    for bits, stored in ((8, torch.uint8), (16, torch.int16), (32, torch.int32)):
        body = f"ld.global.b32 %r10, [%rd4]; {_at('%rd7', '%rd2', bits // 8)} st.global.b{bits} [%rd7], %r10;"
        expected = words(_BYTES[:32].to(torch.int64).bitwise_and((1 << bits) - 1).to(torch.int64))
        narrow = expected.view(torch.int64).to(torch.int64)
        cases.append(Case(FAMILY, f"st_b{bits}", body, words(_narrowed(narrow, stored)), _BYTES))
    body = f"{_at('%rd7', '%rd1', 8)} {_at('%rd8', '%rd2', 8)} ld.global.b64 %rd9, [%rd7]; st.global.b64 [%rd8], %rd9;"
    cases.append(Case(FAMILY, "st_b64", body, _BYTES[:64].clone(), _BYTES))
    return cases


def _narrowed(values: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """The low bytes of each value."""
    return values.view(torch.uint8).view(-1, 8)[:, : stored.itemsize].contiguous()


def _vectors() -> list[Case]:
    """v2 and v4 of every width, in and out of global and shared memory; parts come back in reverse order."""
    cases = []
    for kind, register in (
        ("b8", "%r"),
        ("b16", "%h"),
        ("b32", "%r"),
        ("f32", "%f"),
        ("b64", "%rd"),
        ("f64", "%fd"),
    ):
        size = int(kind[1:]) // 8
        for count in (2, 4):
            if size * count > 16:
                continue
            first = 10 if register == "%r" else 20 if register == "%rd" else 1
            names = [f"{register}{first + i}" for i in range(count)]
            forward, backward = ", ".join(names), ", ".join(reversed(names))
            total = size * count
            expected = _BYTES.view(torch.uint8)[: 32 * total].view(32, count, size).flip(1)
            at = f"{_at('%rd7', '%rd1', total)} {_at('%rd8', '%rd2', total)}"
            body = f"{at} ld.global.v{count}.{kind} {{{forward}}}, [%rd7];"
            done = f"st.global.v{count}.{kind} [%rd8], {{{backward}}};"
            cases.append(
                Case(FAMILY, f"ldst_v{count}_{kind}", body + done, words(expected), _BYTES)
            )
            through = (
                f"mov.u32 %r30, tile; mul.lo.u32 %r31, %r2, {total}; add.u32 %r30, %r30, %r31;"
                f"st.shared.v{count}.{kind} [%r30], {{{backward}}}; bar.warp.sync -1;"
                f"ld.shared.v{count}.{kind} {{{forward}}}, [%r30]; st.global.v{count}.{kind} [%rd8], {{{forward}}};"
            )
            shared = ".shared .align 16 .b8 tile[512];\n"
            name = f"shared_v{count}_{kind}"
            cases.append(Case(FAMILY, name, body + through, words(expected), _BYTES, shared=shared))
    return cases


def _qualifiers() -> list[Case]:
    cases = []
    loads = (
        "volatile.global", "relaxed.cta.global", "relaxed.gpu.global", "relaxed.sys.global", "acquire.cta.global",
        "acquire.cluster.global", "acquire.gpu.global", "acquire.sys.global", "weak.global", "global.nc", "global.ca",
        "global.cg", "global.cs", "global.cv", "global.lu", "global.L1::no_allocate", "global.L1::evict_last",
        "global.L2::64B", "global.L2::128B", "global.L2::256B", "global.nc.L1::no_allocate.L2::128B",
    )  # fmt: skip
    for number, qualifier in enumerate(loads):
        body = f"ld.{qualifier}.b32 %r10, [%rd4]; st.global.b32 [%rd5], %r10;"
        cases.append(Case(FAMILY, f"ld_qualifier_{number}", body, _BYTES[:32].clone(), _BYTES))
    stores = (
        "volatile.global", "relaxed.cta.global", "relaxed.gpu.global", "release.cta.global", "release.cluster.global",
        "release.gpu.global", "release.sys.global", "weak.global", "global.wb", "global.cg", "global.cs", "global.wt",
        "global.L1::no_allocate", "global.L1::evict_first",
    )  # fmt: skip
    for number, qualifier in enumerate(stores):
        body = f"ld.global.b32 %r10, [%rd4]; st.{qualifier}.b32 [%rd5], %r10;"
        cases.append(Case(FAMILY, f"st_qualifier_{number}", body, _BYTES[:32].clone(), _BYTES))
    hint = "createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;"
    body = f"{hint} ld.global.L2::cache_hint.b32 %r10, [%rd4], %rd9; st.global.L2::cache_hint.b32 [%rd5], %r10, %rd9;"
    body += "prefetch.global.L2 [%rd4]; prefetchu.L1 [%rd4];"
    cases.append(Case(FAMILY, "cache_hint", body, _BYTES[:32].clone(), _BYTES))
    return cases


def _spaces() -> list[Case]:
    table = [0x11223344, 0x55667788, 0x7ABBCCDD, 0x0EFF0011]
    lookup = "and.b32 %r10, %r2, 3; mul.wide.u32 %rd7, %r10, 4; mov.u64 %rd8, {name}; add.s64 %rd7, %rd7, %rd8;"
    repeated = torch.tensor([table[i % 4] for i in range(32)], dtype=torch.int32)
    cases = []
    for space in ("const", "global"):
        name = f"table_{space}"
        head = f".{space} .align 4 .b32 {name}[4] = {{{', '.join(map(str, table))}}};"
        body = (
            lookup.format(name=name) + f"ld.{space}.b32 %r11, [%rd7]; st.global.b32 [%rd5], %r11;"
        )
        cases.append(Case(FAMILY, f"{space}_table", body, repeated, head=head))
    local = (
        "ld.global.b32 %r10, [%rd4]; mov.u64 %rd7, slots; and.b32 %r11, %r2, 7; mul.wide.u32 %rd8, %r11, 4;"
        "add.s64 %rd8, %rd7, %rd8; st.local.b32 [%rd8], %r10; ld.local.s16 %r12, [%rd8+2]; cvta.local.u64 %rd9, %rd8;"
        "ld.u8 %r13, [%rd9]; mad.lo.u32 %r12, %r12, 256, %r13; st.global.b32 [%rd5], %r12;"
    )
    x = _BYTES[:32].to(torch.int64)
    cases.append(
        Case(
            FAMILY,
            "local_array",
            local,
            words(((x >> 16) * 256 + (x & 255)).to(torch.int32)),
            _BYTES,
            shared=".local .align 16 .b8 slots[32];\n",
        )
    )
    generic = (
        "ld.global.b32 %r10, [%rd4]; mov.u32 %r30, tile; mad.lo.u32 %r31, %r2, 4, %r30; cvt.u64.u32 %rd7, %r31;"
        "cvta.shared.u64 %rd8, %rd7; st.b32 [%rd8], %r10; bar.warp.sync -1; xor.b32 %r32, %r2, 5;"
        "mad.lo.u32 %r33, %r32, 4, %r30; ld.shared.b32 %r11, [%r33]; cvta.to.shared.u64 %rd9, %rd8;"
        "sub.s64 %rd10, %rd9, %rd7; cvt.u32.u64 %r12, %rd10; isspacep.shared %p1, %rd8; isspacep.global %p2, %rd8;"
        "isspacep.global %p3, %rd4; isspacep.shared %p4, %rd4; selp.b32 %r13, 1, 0, %p1; selp.b32 %r14, 2, 0, %p2;"
        "selp.b32 %r15, 4, 0, %p3; selp.b32 %r16, 8, 0, %p4; add.u32 %r13, %r13, %r14; add.u32 %r13, %r13, %r15;"
        "add.u32 %r13, %r13, %r16; add.u32 %r13, %r13, %r12; shl.b32 %r13, %r13, 2; xor.b32 %r11, %r11, %r13;"
        "st.global.b32 [%rd5], %r11;"
    )
    crossed = _BYTES[torch.arange(32) ^ 5] ^ ((1 + 4) << 2)
    cases.append(
        Case(
            FAMILY,
            "generic_shared",
            generic,
            crossed,
            _BYTES,
            shared=".shared .align 16 .b8 tile[128];\n",
        )
    )
    registers = "mov.u32 %r10, %{a}; mov.u32 %r11, %{b}; mad.lo.u32 %r10, %r10, 1000, %r11; st.global.b32 [%rd5], %r10;"
    lanes = torch.arange(96)
    for a, b, expected in (
        ("ntid.x", "nctaid.x", torch.full((192,), 96 * 1000 + 2)),
        ("laneid", "ctaid.x", (torch.arange(192) % 96 % 32) * 1000 + torch.arange(192) // 96),
        ("lanemask_lt", "lanemask_ge", None),
    ):
        if expected is None:
            less = (1 << (lanes.repeat(2) % 32)) - 1
            expected = less * 1000 + (0xFFFFFFFF ^ less)
        narrow = (expected & 0xFFFFFFFF).to(torch.uint32)
        name = f"special_{a.replace('.', '_')}"
        cases.append(
            Case(FAMILY, name, registers.format(a=a, b=b), words(narrow), grid=2, block=96)
        )
    return cases


def discarded(then: str = "", at: int = 0) -> Case:
    """Gives up the second and third 128 bytes of eight, `at` bytes behind where they begin, by a lane each."""
    place = f"setp.gt.u32 %p1, %r2, 1; mul.wide.u32 %rd7, %r2, 128; add.s64 %rd7, %rd7, %rd2; add.s64 %rd7, %rd7, {at};"
    body = f"{place} @!%p1 discard.global.L2 [%rd7+128], 128; {then}"
    start = random_words(8 * 32, 2)
    expected = start.clone()
    expected[32:96] = _BYTES[32:96] if then else -1
    return Case(FAMILY, f"discard_{'rewritten' if then else at}", body, expected, _BYTES, start)


def _discards() -> list[Case]:
    """What is written to a line behind its discard stays."""
    rewritten = "".join(
        f"ld.global.b32 %r10, [%rd4+{at}]; st.global.b32 [%rd5+{at}], %r10;" for at in (128, 256)
    )
    return [discarded(f"bar.warp.sync -1; {rewritten}")]


def _order() -> list[Case]:
    """A flag behind a fence: the reader's CTA sees what was written before it."""
    cases = []
    fences = (
        "fence.acq_rel.gpu",
        "fence.sc.gpu",
        "membar.gl",
        "membar.sys",
        "fence.acq_rel.sys",
        "fence.sc.cluster",
    )
    for number, fence in enumerate(fences):
        body = (
            "setp.ne.u32 %p1, %r2, 0; setp.ne.u32 %p2, %r3, 0; @%p2 bra R; ld.global.b32 %r10, [%rd4];"
            "st.global.b32 [%rd5+256], %r10; bar.sync 0; @%p1 bra E;"
            f"{fence}; st.relaxed.gpu.global.b32 [%rd2], 1; bra E;"
            "R: @%p1 bra S; W: ld.relaxed.gpu.global.b32 %r11, [%rd2]; setp.eq.u32 %p3, %r11, 0; @%p3 bra W;"
            f"{fence}; S: bar.sync 0; ld.global.b32 %r12, [%rd5+128]; add.u32 %r12, %r12, 1;"
            "st.global.b32 [%rd5+256], %r12; E:"
        )
        start = torch.zeros(128, dtype=torch.int32)
        expected = start.clone()
        expected[0], expected[64:96], expected[96:] = 1, _BYTES[:32], _BYTES[:32] + 1
        # two CTAs of 32: the second's words of `out` start 32 words later
        cases.append(Case(FAMILY, f"message_{number}", body, expected, _BYTES, start, grid=2))
    return cases


CASES = [*_loads(), *_stores(), *_vectors(), *_qualifiers(), *_spaces(), *_discards(), *_order()]
