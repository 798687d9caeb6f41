"""Clusters: barriers, addresses in other CTAs, remote stores, atomics and arrivals, st.async and red.async."""

from __future__ import annotations

import torch

from cases.case import Case, random_words

FAMILY = "clusters"
_X = random_words(256, 40)
_M32 = (1 << 32) - 1
_TILE = ".shared .align 16 .b8 tile[1024];\n.shared .align 8 .b8 bar[16];\n"
_MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
_START = (
    "mov.u32 %r30, tile; mov.u32 %r20, bar; mov.u32 %r21, %cluster_ctarank; mov.u32 %r22, %cluster_nctarank;"
    "ld.global.b32 %r10, [%rd4]; mad.lo.u32 %r31, %r2, 4, %r30;"
)
_NEXT = (
    "add.u32 %r23, %r21, 1; rem.u32 %r23, %r23, %r22; mapa.shared::cluster.u32 %r24, %r30, %r23;"
)
_NEXT += "mapa.shared::cluster.u32 %r25, %r20, %r23; mad.lo.u32 %r26, %r2, 4, %r24;"


def _case(name: str, body: str, expected: torch.Tensor, cluster: int, **more) -> Case:
    """Threads 0-31 of each CTA of one cluster."""
    return Case(
        FAMILY,
        name,
        _START + body,
        expected,
        _X,
        grid=more.pop("grid", cluster),
        cluster=cluster,
        shared=_TILE,
        **more,
    )


def _rotated(cluster: int, by: int = 1) -> torch.Tensor:
    """What a thread sees in the CTA `by` ranks further."""
    return torch.roll(_X[: 32 * cluster], -32 * by)


def _addresses() -> list[Case]:
    own = "st.shared.b32 [%r31], %r10;"
    end = f"st.global.b32 [%rd5], %r11; {_MEET}"
    cases = []
    for cluster in (2, 4, 8):
        body = own + _MEET + _NEXT + "ld.shared::cluster.b32 %r11, [%r26];" + end
        cases.append(_case(f"ld_neighbour_{cluster}", body, _rotated(cluster), cluster))
        body = (
            _MEET
            + _NEXT
            + "st.shared::cluster.b32 [%r26], %r10;"
            + _MEET
            + "ld.shared.b32 %r11, [%r31];"
            + end
        )
        cases.append(_case(f"st_neighbour_{cluster}", body, _rotated(cluster, -1), cluster))
    generic = own + _MEET + _NEXT
    generic += "cvt.u64.u32 %rd7, %r31; cvta.shared.u64 %rd8, %rd7; mapa.u64 %rd9, %rd8, %r23; ld.b32 %r11, [%rd9];"
    generic += "isspacep.shared::cluster %p1, %rd9; isspacep.shared::cta %p2, %rd9; isspacep.shared::cta %p3, %rd8;"
    generic += "selp.b32 %r12, 1, 0, %p1; selp.b32 %r13, 2, 0, %p2; selp.b32 %r14, 4, 0, %p3; add.u32 %r12, %r12, %r13;"
    generic += "add.u32 %r12, %r12, %r14; xor.b32 %r11, %r11, %r12;"
    cases.append(_case("generic_neighbour", generic + end, _rotated(4) ^ 5, 4))
    rank = (
        _NEXT
        + "getctarank.shared::cluster.u32 %r11, %r26; cvt.u64.u32 %rd7, %r31; cvta.shared.u64 %rd8, %rd7;"
    )
    rank += (
        "mapa.u64 %rd9, %rd8, %r23; getctarank.u64 %r12, %rd9; mad.lo.u32 %r11, %r11, 10, %r12;"
        + _MEET
    )
    ranks = (torch.arange(128) // 32 + 1) % 4
    cases.append(_case("getctarank", rank + end, (ranks * 11).to(torch.int32), 4))
    numbers = (
        "mov.u32 %r11, %clusterid.x; mov.u32 %r12, %nclusterid.x; mad.lo.u32 %r11, %r11, 10, %r12;"
    )
    numbers += "mov.u32 %r12, %cluster_ctaid.x; mad.lo.u32 %r11, %r11, 10, %r12; mad.lo.u32 %r11, %r11, 10, %r22;"
    numbers += "mov.u32 %r12, %cluster_nctaid.x; mad.lo.u32 %r11, %r11, 10, %r12; mad.lo.u32 %r11, %r11, 10, %r21;"
    numbers += "mov.pred %p1, %is_explicit_cluster; selp.b32 %r12, 1, 0, %p1; mad.lo.u32 %r11, %r11, 10, %r12;"
    cta = torch.arange(6 * 32) // 32
    expected = (
        (((((cta // 2) * 10 + 3) * 10 + cta % 2) * 10 + 2) * 10 + 2) * 10 + cta % 2
    ) * 10 + 1
    cases.append(_case("cluster_registers", numbers + end, expected.to(torch.int32), 2, grid=6))
    return cases


def _barriers() -> list[Case]:
    rounds = (
        "mov.u32 %r27, 0;"
        + _NEXT
        + "L: st.shared.b32 [%r31], %r10; {first} ld.shared::cluster.b32 %r10, [%r26];"
    )
    rounds += "{second} add.u32 %r27, %r27, 1; setp.lt.u32 %p1, %r27, 3; @%p1 bra L; st.global.b32 [%rd5], %r10;"
    meetings = {
        "aligned": _MEET,
        "plain": "barrier.cluster.arrive; barrier.cluster.wait;",
        "relaxed": "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;",
        "acquire": "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
    }
    return [
        _case(f"cluster_rounds_{name}", rounds.format(first=meet, second=meet), _rotated(4, 3), 4)
        for name, meet in meetings.items()
    ]


def _remote() -> list[Case]:
    zero = f"st.shared.b32 [%r31], 0; {_MEET}"
    read = f"{_MEET} ld.shared.b32 %r11, [%r31]; st.global.b32 [%rd5], %r11;"
    to_first = (
        "mov.u32 %r23, 0; mapa.shared::cluster.u32 %r24, %r30, %r23; mad.lo.u32 %r26, %r2, 4, %r24;"
    )
    total = torch.zeros(128, dtype=torch.int32)
    total[:32] = _X[:128].view(4, 32).sum(0).to(torch.int32)
    atom = "atom.relaxed.cluster.shared::cluster.add.u32 %r12, [%r26], %r10;"
    cases = [
        _case("remote_red", zero + to_first + "red.shared::cluster.add.u32 [%r26], %r10;" + read, total, 4),
        _case("remote_atom", zero + to_first + atom + read, total, 4),
    ]  # fmt: skip
    barrier = "setp.ne.u32 %p9, %r2, 0; @%p9 bra I; mbarrier.init.shared.b64 [%r20], {count};"
    barrier += "fence.mbarrier_init.release.cluster; I:" + _MEET + _NEXT
    wait = (
        "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r20], 0; @!%p2 bra W;"
    )
    end = f"ld.shared.b32 %r11, [%r31]; st.global.b32 [%rd5], %r11; {_MEET}"
    send = "st.shared::cluster.b32 [%r26], %r10;"
    one = (
        barrier.format(count=32)
        + send
        + "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r25];"
        + wait
        + end
    )
    cases.append(_case("remote_arrive", one, _rotated(2), 2))
    two = (
        barrier.format(count=64)
        + send
        + "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r25], 2;"
        + wait
        + end
    )
    cases.append(_case("remote_arrive_count", two, _rotated(4, -1), 4))
    each = "mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {bytes};"
    store = (
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} [%r26], {value}, [%r25];"
    )
    body = (
        barrier.format(count=32)
        + each.format(bytes=4)
        + store.format(kind="b32", value="%r10")
        + wait
        + end
    )
    cases.append(_case("st_async_b32", body, _rotated(4, -1), 4))
    wide = "mad.lo.u32 %r26, %r2, {bytes}, %r24; mad.lo.u32 %r31, %r2, {bytes}, %r30; add.u32 %r11, %r10, 1;"
    wide += "add.u32 %r12, %r10, 2; add.u32 %r13, %r10, 3;"
    wide += "mov.b64 %rd10, {{%r10, %r11}}; mov.b64 %rd11, {{%r12, %r13}};"
    last = "ld.shared.b32 %r11, [%r31+{at}]; st.global.b32 [%rd5], %r11;" + _MEET
    for kind, bytes_, value in (
        ("b64", 8, "%rd10"),
        ("v2.b32", 8, "{%r10, %r11}"),
        ("v4.b32", 16, "{%r10, %r11, %r12, %r13}"),
        ("v2.b64", 16, "{%rd10, %rd11}"),
        ("s64", 8, "%rd10"),
    ):
        body = barrier.format(count=32) + wide.format(bytes=bytes_) + each.format(bytes=bytes_)
        body += store.format(kind=kind, value=value) + wait + last.format(at=bytes_ - 4)
        name = f"st_async_{kind.replace('.', '_')}"
        cases.append(_case(name, body, _rotated(2) + (bytes_ // 4 - 1), 2))
    return cases + _reductions(barrier, wait, end)


def _reductions(barrier: str, wait: str, end: str) -> list[Case]:
    """red.async into the neighbour's words, which hold the neighbour's input xor 0x5a5a5a5a."""
    signed = lambda x: x - (1 << 32) if x >> 31 else x  # noqa: E731
    operations = {
        ("add", "u32"): lambda old, x: old + x,
        ("add", "s32"): lambda old, x: old + x,
        ("inc", "u32"): lambda old, x: 0 if old >= x else old + 1,
        ("dec", "u32"): lambda old, x: x if old == 0 or old > x else old - 1,
        ("min", "u32"): min,
        ("max", "u32"): max,
        ("min", "s32"): lambda old, x: min(old, x, key=signed),
        ("max", "s32"): lambda old, x: max(old, x, key=signed),
        ("and", "b32"): lambda old, x: old & x,
        ("or", "b32"): lambda old, x: old | x,
        ("xor", "b32"): lambda old, x: old ^ x,
    }
    cases = []
    fill = "xor.b32 %r12, %r10, 0x5a5a5a5a; st.shared.b32 [%r31], %r12;"
    each = "mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {bytes};"
    word = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{}.{} [%r26], {}, [%r25];"
    sent = [x & _M32 for x in _rotated(2).tolist()]
    held = [(x & _M32) ^ 0x5A5A5A5A for x in _X[:64].tolist()]
    for (operation, kind), formula in operations.items():
        body = (
            fill
            + barrier.format(count=32)
            + each.format(bytes=4)
            + word.format(operation, kind, "%r10")
            + wait
            + end
        )
        results = [formula(old, x) & _M32 for old, x in zip(held, sent)]
        expected = torch.tensor([signed(r) for r in results], dtype=torch.int32)
        cases.append(_case(f"red_async_{operation}_{kind}", body, expected, 2))
    body = (
        "mad.lo.u32 %r31, %r2, 8, %r30; mov.b64 %rd10, {%r10, %r2}; st.shared.b64 [%r31], %rd10;"
        + barrier.format(count=32) + "mad.lo.u32 %r26, %r2, 8, %r24;" + each.format(bytes=8)
        + word.format("add", "u64", "%rd10") + wait
        + "ld.shared.v2.b32 {%r11, %r12}, [%r31]; xor.b32 %r11, %r11, %r12;"
        + "st.global.b32 [%rd5], %r11;" + _MEET
    )  # fmt: skip
    own = [(x & _M32) | (i % 32) << 32 for i, x in enumerate(_X[:64].tolist())]
    other = [(x & _M32) | (i % 32) << 32 for i, x in enumerate(_rotated(2).tolist())]
    sums = [(a + b) & ((1 << 64) - 1) for a, b in zip(own, other)]
    expected = torch.tensor([signed((s ^ s >> 32) & _M32) for s in sums], dtype=torch.int32)
    return [*cases, _case("red_async_add_u64", body, expected, 2)]


CASES = [*_addresses(), *_barriers(), *_remote()]
