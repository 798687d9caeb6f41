"""Asynchronous copies: cp.async with its groups, bulk copies in every direction, bulk reductions, multicast."""

from __future__ import annotations

import torch

from cases.case import Case, random_words, words

FAMILY = "copies"
_X = random_words(2048, 50)
_TILE = ".shared .align 128 .b8 tile[4096];\n.shared .align 8 .b8 bar[16];\n"
_MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def _case(name: str, body: str, expected: torch.Tensor, source: torch.Tensor = _X, **more) -> Case:
    return Case(FAMILY, name, body, expected, source, shared=_TILE, **more)


def _cp_async() -> list[Case]:
    cases = []
    address = "mov.u32 %r30, tile; mad.lo.u32 %r31, %r2, 16, %r30; mul.wide.u32 %rd7, %r2, {step};"
    address += "add.s64 %rd7, %rd7, %rd1;"
    clear = "mov.u32 %r9, -1; st.shared.v4.b32 [%r31], {%r9, %r9, %r9, %r9};"
    read = "mul.wide.u32 %rd8, %r2, 16; add.s64 %rd8, %rd8, %rd2; ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r31];"
    read += "st.global.v4.b32 [%rd8], {%r10, %r11, %r12, %r13};"
    done = "cp.async.commit_group; cp.async.wait_group 0;"

    def result(step: int, copied: int, kept: torch.Tensor | int) -> torch.Tensor:
        out = torch.full((32, 16), 0xFF, dtype=torch.uint8)
        out[:, :copied] = 0
        for i in range(32):
            k = kept if isinstance(kept, int) else int(kept[i])
            out[i, :k] = _X.view(torch.uint8)[step * i : step * i + k]
        return words(out)

    for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        start = address.format(step=size) + clear
        copy = f"cp.async.{cache}.shared.global [%r31], [%rd7], {size};"
        cases.append(
            _case(f"cp_async_{cache}_{size}", start + copy + done + read, result(size, size, size))
        )
        fill = f"rem.u32 %r14, %r2, {size + 1}; cp.async.{cache}.shared.global [%r31], [%rd7], {size}, %r14;"
        left = torch.arange(32) % (size + 1)
        cases.append(
            _case(
                f"cp_async_{cache}_{size}_fill",
                start + fill + done + read,
                result(size, size, left),
            )
        )
        skip = "and.b32 %r14, %r2, 1; setp.eq.u32 %p1, %r14, 1;"
        skip += f"cp.async.{cache}.shared.global [%r31], [%rd7], {size}, %p1;"
        left = torch.where(torch.arange(32) % 2 == 1, 0, size)
        cases.append(
            _case(
                f"cp_async_{cache}_{size}_ignore",
                start + skip + done + read,
                result(size, size, left),
            )
        )
    hints = "createpolicy.fractional.L2::evict_last.b64 %rd9, 0.5;"
    hints += "cp.async.cg.shared::cta.global.L2::cache_hint.L2::128B [%r31], [%rd7], 16, %rd9;"
    start = address.format(step=16) + clear
    cases.append(
        _case("cp_async_hint", start + hints + "cp.async.wait_all;" + read, result(16, 16, 16))
    )
    groups = "".join(
        f"cp.async.ca.shared.global [%r31+{4 * g}], [%rd7+{4 * g}], 4; cp.async.commit_group;"
        for g in range(4)
    )
    waits = "".join(
        f"cp.async.wait_group {3 - g}; ld.shared.b32 %r{10 + g}, [%r31+{4 * g}];" for g in range(4)
    )
    store = "mul.wide.u32 %rd8, %r2, 16; add.s64 %rd8, %rd8, %rd2; st.global.v4.b32 [%rd8], {%r10, %r11, %r12, %r13};"
    cases.append(_case("cp_async_groups", start + groups + waits + store, result(16, 16, 16)))
    arrive = (
        "mov.u32 %r20, bar; setp.ne.u32 %p9, %r2, 0; @%p9 bra I; mbarrier.init.shared.b64 [%r20], 32; I: bar.sync 0;"
        "cp.async.ca.shared.global [%r31], [%rd7], 16; {arrive}"
        "W: mbarrier.try_wait.parity.shared.b64 %p1, [%r20], 0; @!%p1 bra W;"
    )
    other = "xor.b32 %r15, %r2, 9; mad.lo.u32 %r31, %r15, 16, %r30;"
    swapped = _X[:128].view(32, 4)[torch.arange(32) ^ 9].flatten()
    kinds = {
        "noinc": "cp.async.mbarrier.arrive.noinc.shared.b64 [%r20];",
        "inc": "cp.async.mbarrier.arrive.shared::cta.b64 [%r20]; mbarrier.arrive.shared.b64 _, [%r20];",
    }
    for name, code in kinds.items():
        body = start + arrive.format(arrive=code) + other + read
        cases.append(_case(f"cp_async_mbarrier_{name}", body, swapped))
    return cases


_LEADER = "mov.u32 %r30, tile; mov.u32 %r20, bar; setp.ne.u32 %p9, %r2, 0;"
_INIT = "@%p9 bra I; mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster; I:"
_WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p1, [%r20], 0; @!%p1 bra W;"


def _read(count: int) -> str:
    """Thread t copies words t, t + 32, ... of the tile to its CTA's part of `out`."""
    body = f"mul.lo.u32 %r40, %r3, {count}; add.u32 %r40, %r40, %r2; mad.lo.u32 %r41, %r2, 4, %r30;"
    body += "mul.wide.u32 %rd8, %r40, 4; add.s64 %rd8, %rd8, %rd2;"
    return body + "".join(
        f"ld.shared.b32 %r42, [%r41+{128 * i}]; st.global.b32 [%rd8+{128 * i}], %r42;"
        for i in range(count // 32)
    )


def _bulk() -> list[Case]:
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r30], [%rd1+{at}], {bytes}, [%r20];"
    expect = "mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {bytes};"
    cases = []
    for bytes_, at in ((128, 0), (384, 16), (1024, 4096), (2048, 48)):
        body = _LEADER + _INIT + "bar.sync 0; @%p9 bra W;" + expect.format(bytes=bytes_)
        body += load.format(at=at, bytes=bytes_) + _WAIT + _read(bytes_ // 4)
        cases.append(_case(f"bulk_load_{bytes_}", body, _X[at // 4 : (at + bytes_) // 4].clone()))
    small = (
        _LEADER
        + "mov.u32 %r9, -1; mad.lo.u32 %r31, %r2, 4, %r30; st.shared.b32 [%r31], %r9;"
        + _INIT
    )
    small += "fence.proxy.async.shared::cta; bar.sync 0; @%p9 bra W;" + expect.format(bytes=48)
    small += load.format(at=32, bytes=16) + load.format(at=96, bytes=32).replace(
        "[%r30]", "[%r30+64]"
    )
    expected = torch.full((32,), -1, dtype=torch.int32)
    expected[:4], expected[16:24] = _X[8:12], _X[24:32]
    cases.append(_case("bulk_load_two", small + _WAIT + _read(32), expected))
    fill = "mov.u32 %r30, tile; mad.lo.u32 %r31, %r2, 16, %r30; mul.wide.u32 %rd7, %r2, 16; add.s64 %rd7, %rd7, %rd1;"
    fill += "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd7]; st.shared.v4.b32 [%r31], {%r10, %r11, %r12, %r13};"
    fill += "fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p9, %r2, 0; @%p9 bra E;"
    done = "cp.async.bulk.commit_group; {wait} E:"
    for name, wait in (
        ("wait", "cp.async.bulk.wait_group 0;"),
        ("wait_read", "cp.async.bulk.wait_group.read 0;"),
    ):
        body = (
            fill
            + "cp.async.bulk.global.shared::cta.bulk_group [%rd2+64], [%r30+32], 256;"
            + done.format(wait=wait)
        )
        expected = torch.full((128,), -1, dtype=torch.int32)
        expected[16:80] = _X[8:72]
        cases.append(_case(f"bulk_store_{name}", body, expected))
    body = (
        fill
        + "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r30], 128; cp.async.bulk.commit_group;"
    )
    body += "cp.async.bulk.global.shared::cta.bulk_group [%rd2+128], [%r30+128], 128; cp.async.bulk.commit_group;"
    cases.append(
        _case(
            "bulk_store_groups",
            body + "cp.async.bulk.wait_group 1; cp.async.bulk.wait_group 0; E:",
            _X[:64].clone(),
        )
    )
    return cases + _reductions(fill, done.format(wait="cp.async.bulk.wait_group 0;"))


def _reductions(fill: str, done: str) -> list[Case]:
    """512 bytes of shared memory reduced into global memory."""
    g = torch.Generator().manual_seed(51)
    cases = []

    def add(name: str, word: str, old: torch.Tensor, x: torch.Tensor, fresh: torch.Tensor) -> None:
        copy = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{word} [%rd2], [%r30], 512;"
        cases.append(
            _case(f"bulk_{name}", fill + copy + done, words(fresh), words(x), start=words(old))
        )

    floats = {
        "f32": torch.float32,
        "f64": torch.float64,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
    }
    for kind, dtype in floats.items():
        n = 512 // dtype.itemsize
        old, x = (
            torch.randn(n, generator=g, dtype=torch.float64).mul(4).to(dtype) for _ in range(2)
        )
        total = old + x if kind == "f64" else (old.double() + x.double()).to(dtype)
        add(f"add_{kind}", f"add{'.noftz' if dtype.itemsize == 2 else ''}.{kind}", old, x, total)
        if dtype.itemsize == 2:
            add(f"min_{kind}", f"min.{kind}", old, x, torch.minimum(old, x))
            add(f"max_{kind}", f"max.{kind}", old, x, torch.maximum(old, x))
    for kind, dtype in (
        ("u32", torch.int32),
        ("s32", torch.int32),
        ("u64", torch.int64),
        ("s64", torch.int64),
    ):
        old, x = random_words(128, 52).view(dtype), random_words(128, 53).view(dtype)
        if kind != "s64":
            add(f"add_{kind}", f"add.{kind}", old, x, old + x)
        top = torch.iinfo(dtype).min if kind[0] == "u" else 0  # order of unsigned patterns
        less = (old ^ top) < (x ^ top)
        add(f"min_{kind}", f"min.{kind}", old, x, torch.where(less, old, x))
        add(f"max_{kind}", f"max.{kind}", old, x, torch.where(less, x, old))
    for bits in (32, 64):
        dtype = torch.int32 if bits == 32 else torch.int64
        old, x = random_words(128, 54).view(dtype), random_words(128, 55).view(dtype)
        add(f"and_b{bits}", f"and.b{bits}", old, x, old & x)
        add(f"or_b{bits}", f"or.b{bits}", old, x, old | x)
        add(f"xor_b{bits}", f"xor.b{bits}", old, x, old ^ x)
    return cases


_NEXT_CTA = (
    "mov.u32 %r21, %cluster_ctarank; mov.u32 %r22, %cluster_nctarank; add.u32 %r23, %r21, 1;"
    "rem.u32 %r23, %r23, %r22; mapa.shared::cluster.u32 %r24, %r30, %r23;"
    "mapa.shared::cluster.u32 %r25, %r20, %r23;"
)


def between_ctas(cluster: int, barrier: str = "%r25") -> Case:
    """Each CTA sends 512 bytes to the next one. barrier: where that is counted; %r20 is the sender's own."""
    fill = "mad.lo.u32 %r31, %r2, 16, %r30; mul.wide.u32 %rd7, %r5, 16; add.s64 %rd7, %rd7, %rd1;"
    fill += "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd7]; st.shared.v4.b32 [%r31], {%r10, %r11, %r12, %r13};"
    body = (
        _LEADER
        + _NEXT_CTA
        + fill
        + _INIT
        + "fence.proxy.async.shared::cta;"
        + _MEET
        + "@%p9 bra W;"
    )
    body += "mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 512;"
    body += "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
    body += f"[%r24+1024], [%r30], 512, [{barrier}];"
    body += _WAIT + "add.u32 %r30, %r30, 1024;" + _read(128) + _MEET
    expected = torch.roll(_X[: 128 * cluster], 128)
    return _case(f"bulk_cta_to_cta_{cluster}", body, expected, grid=cluster, cluster=cluster)


def _clusters() -> list[Case]:
    cases = [between_ctas(cluster) for cluster in (2, 4)]
    # Each CTA loads its part of 512 bytes and sends it to the CTAs of the mask.
    for cluster, mask in ((2, 3), (4, 15), (4, 5)):
        load = _LEADER + _NEXT_CTA + _INIT
        load += "mov.u32 %r9, -1; mad.lo.u32 %r31, %r2, 4, %r30;"
        load += (
            "".join(f"st.shared.b32 [%r31+{128 * i}], %r9;" for i in range(4 * cluster))
            + "fence.proxy.async;"
        )
        load += f"{_MEET} mov.b16 %h1, {mask}; mov.u32 %r27, {mask}; shr.u32 %r27, %r27, %r21; and.b32 %r27, %r27, 1;"
        load += "setp.eq.u32 %p3, %r27, 0; @%p9 bra V; @%p3 bra S;"
        load += f"mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {512 * cluster};"
        load += "S: shl.b32 %r28, %r21, 9; add.u32 %r31, %r30, %r28; cvt.u64.u32 %rd9, %r28; add.s64 %rd9, %rd9, %rd1;"
        load += (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        )
        load += "[%r31], [%rd9], 512,"
        load += "[%r20], %h1; V: @%p3 bra D;" + _WAIT + "D:" + _read(128 * cluster) + _MEET
        whole = _X[: 128 * cluster]
        parts = [whole if mask >> c & 1 else torch.full_like(whole, -1) for c in range(cluster)]
        name = f"bulk_multicast_{cluster}_{mask}"
        cases.append(_case(name, load, torch.cat(parts), grid=cluster, cluster=cluster))
    return cases


CASES = [*_cp_async(), *_bulk(), *_clusters()]
