"""Barriers within a CTA: named barriers with reductions, warp barriers, and mbarrier with everything it can tell."""

from __future__ import annotations

import torch

from cases.case import Case, random_words

FAMILY = "barriers"
_X = random_words(256, 30)
_TILE = ".shared .align 16 .b8 tile[1024];\n"
_MINE = "mov.u32 %r30, tile; mad.lo.u32 %r31, %r2, 4, %r30; ld.global.b32 %r10, [%rd4]; st.shared.b32 [%r31], %r10;"


def _word(index: str) -> str:
    """%r11 = word `index` of the tile."""
    return f"mad.lo.u32 %r32, {index}, 4, %r30; ld.shared.b32 %r11, [%r32]; st.global.b32 [%rd5], %r11;"


def _named() -> list[Case]:
    cases = []
    reverse = "sub.u32 %r12, 127, %r2;" + _word("%r12")
    all_threads = {
        "bar_sync": "bar.sync 0;",
        "bar_cta_sync": "bar.cta.sync 0;",
        "barrier_sync": "barrier.sync 3;",
        "barrier_aligned": "barrier.sync.aligned 15;",
        "barrier_cta_count": "barrier.cta.sync 7, 128;",
        "barrier_register": "mov.u32 %r13, 5; mov.u32 %r14, 128; barrier.sync %r13, %r14;",
    }
    for name, wait in all_threads.items():
        cases.append(
            Case(
                FAMILY, name, _MINE + wait + reverse, _X[:128].flip(0), _X, block=128, shared=_TILE
            )
        )
    halves = (
        "shr.u32 %r13, %r2, 6; add.u32 %r13, %r13, 1; bar.sync %r13, 64; xor.b32 %r12, %r2, 63;"
        + _word("%r12")
    )
    swapped = _X[torch.arange(128) ^ 63]
    cases.append(Case(FAMILY, "two_groups", _MINE + halves, swapped, _X, block=128, shared=_TILE))
    one_way = (
        "setp.ge.u32 %p1, %r2, 32; @%p1 bra C; bar.arrive 1, 64; st.global.b32 [%rd5], %r10; bra E;"
        "C: bar.sync 1, 64; sub.u32 %r12, 63, %r2;" + _word("%r12") + "E:"
    )
    passed = torch.cat([_X[:32], _X[:32].flip(0)])
    cases.append(
        Case(FAMILY, "arrive_then_sync", _MINE + one_way, passed, _X, block=64, shared=_TILE)
    )
    pipeline = (  # two slots between two warps, four times
        "mov.u32 %r30, tile; mov.u32 %r20, 0; and.b32 %r21, %r2, 31; setp.ge.u32 %p1, %r2, 32; @%p1 bra C;"
        "P: and.b32 %r22, %r20, 1; add.u32 %r23, %r22, 3; setp.lt.u32 %p2, %r20, 2; @%p2 bra F; bar.sync %r23, 64;"
        "F: mad.lo.u32 %r24, %r20, 32, %r21; mul.wide.u32 %rd7, %r24, 4; add.s64 %rd7, %rd7, %rd1;"
        "ld.global.b32 %r10, [%rd7]; mad.lo.u32 %r25, %r22, 32, %r21; mad.lo.u32 %r25, %r25, 4, %r30;"
        "st.shared.b32 [%r25], %r10; add.u32 %r26, %r22, 1; bar.arrive %r26, 64;"
        "add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 4; @%p3 bra P; bra E;"
        "C: and.b32 %r22, %r20, 1; add.u32 %r26, %r22, 1; bar.sync %r26, 64; xor.b32 %r24, %r21, 31;"
        "mad.lo.u32 %r25, %r22, 32, %r24; mad.lo.u32 %r25, %r25, 4, %r30; ld.shared.b32 %r10, [%r25];"
        "mad.lo.u32 %r24, %r20, 32, %r21; mul.wide.u32 %rd7, %r24, 4; add.s64 %rd7, %rd7, %rd2;"
        "st.global.b32 [%rd7], %r10; add.u32 %r23, %r22, 3; setp.ge.u32 %p2, %r20, 2; @%p2 bra G;"
        "bar.arrive %r23, 64; G: add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 4; @%p3 bra C; E:"
    )
    expected = _X[:128].view(4, 32).flip(1).flatten()
    cases.append(
        Case(FAMILY, "ring_of_named_barriers", pipeline, expected, _X, block=64, shared=_TILE)
    )
    return cases


def _reductions() -> list[Case]:
    cases = []
    start = (
        "ld.global.b32 %r10, [%rd4]; and.b32 %r11, %r10, {mask}; setp.eq.u32 %p1, %r11, {value};"
    )
    some = ((_X[:96] & 3) == 1).sum().item()
    kinds = {
        "popc": ("bar.red.popc.u32 %r12, 0, %p1;", some),
        "popc_not": ("bar.red.popc.u32 %r12, 0, !%p1;", 96 - some),
        "popc_count": ("barrier.red.popc.aligned.u32 %r12, 2, 96, %p1;", some),
        "and": ("bar.red.and.pred %p2, 0, %p1; selp.b32 %r12, 1, 0, %p2;", 0),
        "or": ("bar.red.or.pred %p2, 0, %p1; selp.b32 %r12, 1, 0, %p2;", 1),
        "or_count": (
            "barrier.cta.red.or.aligned.pred %p2, 9, 96, !%p1; selp.b32 %r12, 1, 0, %p2;",
            1,
        ),
    }
    for name, (code, value) in kinds.items():
        body = start.format(mask=3, value=1) + code + "st.global.b32 [%rd5], %r12;"
        expected = torch.full((96,), value, dtype=torch.int32)
        cases.append(Case(FAMILY, f"red_{name}", body, expected, _X, block=96))
    for name, value, result in (("all", 0, 1), ("none", 1, 0)):
        body = start.format(mask=0, value=value)
        body += (
            "bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 1, %p1; selp.b32 %r12, 1, 0, %p2;"
        )
        body += "selp.b32 %r13, 2, 0, %p3; add.u32 %r12, %r12, %r13; st.global.b32 [%rd5], %r12;"
        expected = torch.full((96,), 3 * result, dtype=torch.int32)
        cases.append(Case(FAMILY, f"red_{name}", body, expected, _X, block=96))
    return cases


def _warps() -> list[Case]:
    halves = (
        "and.b32 %r13, %r2, 1; setp.eq.u32 %p1, %r13, 0; selp.b32 %r14, 0x55555555, 0xaaaaaaaa, %p1;"
        "bar.warp.sync %r14; xor.b32 %r12, %r2, 6;" + _word("%r12")
    )
    swapped = _X[torch.arange(32) ^ 6]
    some = "setp.lt.u32 %p3, %r2, 4; mov.u32 %r11, 9; @%p3 bra E;"
    some += "elect.sync %r12|%p2, 0xfffffff0; selp.b32 %r13, 100, 0, %p2; add.u32 %r11, %r12, %r13;"
    leader = torch.full((32,), 4, dtype=torch.int32)
    leader[:4], leader[4] = 9, 104
    return [
        Case(FAMILY, "bar_warp_halves", _MINE + halves, swapped, _X, shared=_TILE),
        Case(FAMILY, "elect_of_some", some + "E: st.global.b32 [%rd5], %r11;", leader),
    ]


_BAR = ".shared .align 8 .b8 bar[32];\n"


def _alone(name: str, steps: str, seen: list[int], first: str = "") -> Case:
    """One thread; `record N` lines of `steps` write %r10 to the next word."""
    body = "mov.u32 %r20, bar; setp.ne.u32 %p9, %r2, 0; @%p9 bra E;" + first
    count = 0
    for step in filter(None, (s.strip() for s in steps.split(";"))):
        if step == "record":
            body += f"st.global.b32 [%rd2+{4 * count}], %r10;"
            count += 1
        elif step.startswith("see "):
            body += f"selp.b32 %r10, 1, 0, {step[4:]}; st.global.b32 [%rd2+{4 * count}], %r10;"
            count += 1
        else:
            body += step + ";"
    assert count == len(seen), name
    return Case(FAMILY, name, body + "E:", torch.tensor(seen, dtype=torch.int32), shared=_BAR)


def _mbarriers() -> list[Case]:
    test = "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r20], {}; see %p1;"
    zero, one = test.format(0), test.format(1)
    count = "mbarrier.pending_count.b64 %r10, %rd10; record;"
    arrive = "mbarrier.arrive.shared.b64 %rd10, [%r20];"
    init = "mbarrier.init.shared.b64 [%r20], {};"
    cases = [
        _alone(
            "mbarrier_parity",
            init.format(1) + zero + one + arrive + zero + one + arrive + zero + one,
            [0, 1, 1, 0, 0, 1],
        ),
        _alone(
            "mbarrier_counts",
            init.format(6) + arrive + count + "mbarrier.arrive.shared.b64 %rd10, [%r20], 2;" + count
            + "mbarrier.arrive.noComplete.shared.b64 %rd10, [%r20], 2;" + count + zero + arrive + count + zero
            + arrive + count,
            [6, 5, 3, 0, 1, 1, 6],
        ),
        _alone(
            "mbarrier_token",
            init.format(2) + arrive + "mbarrier.test_wait.shared.b64 %p1, [%r20], %rd10; see %p1;"
            + "mbarrier.arrive.shared.b64 %rd11, [%r20]; mbarrier.test_wait.shared.b64 %p1, [%r20], %rd10; see %p1;"
            + "mbarrier.try_wait.shared.b64 %p2, [%r20], %rd11, 1000; see %p2;",
            [0, 1, 1],
        ),
        _alone(
            "mbarrier_transactions",
            init.format(1) + "mbarrier.arrive.expect_tx.shared.b64 %rd10, [%r20], 96;" + count + zero
            + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], 64;" + zero
            + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], 32;" + zero
            + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r20], 16; mbarrier.arrive.shared.b64 _, [%r20];" + one
            + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], 16;" + one,
            [1, 0, 0, 1, 0, 1],
        ),
        _alone(
            "mbarrier_drop",
            init.format(3) + "mbarrier.arrive_drop.shared.b64 %rd10, [%r20];" + count + arrive + arrive + zero
            + arrive + one + count + arrive + one + count
            + "mbarrier.arrive_drop.noComplete.shared.b64 %rd10, [%r20], 1;"
            + count + zero + arrive + zero + arrive + one,
            [3, 1, 0, 2, 1, 1, 2, 0, 1, 1],
        ),
        _alone(
            "mbarrier_drop_expect",
            init.format(2) + "mbarrier.arrive_drop.expect_tx.release.cta.shared::cta.b64 %rd10, [%r20], 8;" + count
            + arrive + zero + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], 8;" + zero + arrive + one,
            [2, 0, 1, 1],
        ),
        _alone(
            "mbarrier_inval",
            init.format(1) + arrive + zero + "mbarrier.inval.shared.b64 [%r20]; st.shared.b32 [%r20], 77;"
            + "ld.shared.b32 %r10, [%r20]; record;" + init.format(2) + zero + one + arrive + count,
            [1, 77, 0, 1, 2],
        ),
    ]  # fmt: skip
    rounds = (
        "mov.u32 %r20, bar; mov.u32 %r30, tile; setp.ne.u32 %p1, %r2, 0; @%p1 bra I;"
        "mbarrier.init.shared.b64 [%r20], 96; mbarrier.init.shared.b64 [%r20+8], 96; I: bar.sync 0; mov.u32 %r21, 0;"
        "ld.global.b32 %r10, [%rd4]; mad.lo.u32 %r31, %r2, 4, %r30; add.u32 %r12, %r2, 1; setp.eq.u32 %p2, %r12, 96;"
        "selp.b32 %r12, 0, %r12, %p2; mad.lo.u32 %r32, %r12, 4, %r30;"
        "L: st.shared.b32 [%r31], %r10; and.b32 %r22, %r21, 1; {arrive}"
        "W: {wait} @!%p3 bra W; ld.shared.b32 %r13, [%r32]; add.u32 %r10, %r13, %r21; {second}"
        "V: mbarrier.try_wait.parity.shared.b64 %p3, [%r20+8], %r22; @!%p3 bra V;"
        "add.u32 %r21, %r21, 1; setp.lt.u32 %p4, %r21, 5; @%p4 bra L; st.global.b32 [%rd5], %r10;"
    )
    kinds = {
        "parity": (
            "mbarrier.arrive.shared.b64 _, [%r20];",
            "mbarrier.try_wait.parity.shared.b64 %p3, [%r20], %r22;",
        ),
        "token": (
            "mbarrier.arrive.shared.b64 %rd10, [%r20];",
            "mbarrier.try_wait.shared.b64 %p3, [%r20], %rd10;",
        ),
        "test": (
            "mbarrier.arrive.release.cta.shared::cta.b64 %rd10, [%r20];",
            "mbarrier.test_wait.acquire.cta.shared::cta.b64 %p3, [%r20], %rd10;",
        ),
        "hint": (
            "mbarrier.arrive.release.cluster.shared::cta.b64 _, [%r20];",
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r20], %r22, 100;",
        ),
    }
    expected = torch.roll(_X[:96], -5) + sum(range(5))
    for name, (arrive_, wait) in kinds.items():
        body = rounds.format(
            arrive=arrive_, wait=wait, second="mbarrier.arrive.shared.b64 _, [%r20+8];"
        )
        cases.append(
            Case(
                FAMILY, f"mbarrier_rounds_{name}", body, expected, _X, block=96, shared=_BAR + _TILE
            )
        )
    return cases


CASES = [*_named(), *_reductions(), *_warps(), *_mbarriers()]
