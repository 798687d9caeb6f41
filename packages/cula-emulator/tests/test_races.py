"""The happens-before check on shared memory: every kind of order, with it and without."""

import random
import re

import pytest
import torch
from ptx_module import build

import cula_emulator as emulator

SHARED = """.shared .align 128 .b8 tile[1024];
.shared .align 8 .b8 bar[8];
.shared .align 8 .b8 other[8];
"""
# %r12 the tile, %r11 this thread's word of it, %r20 the mbarrier, %p1 all threads but the first, %p7 the second warp.
PROLOGUE = (
    "mov.u32 %r12, tile; shl.b32 %r10, %r2, 2; add.u32 %r11, %r12, %r10; mov.u32 %r20, bar; mov.u32 %r21, other;"
    "setp.ne.u32 %p1, %r2, 0; setp.ge.u32 %p7, %r2, 32;"
)
INIT = "@%p1 bra I; mbarrier.init.shared.b64 [%r20], {count}; I: bar.sync 0;"
WRITE_FIRST = "@%p1 bra S; st.shared.b32 [%r12], 7; S:"
READ_FIRST = "ld.shared.b32 %r13, [%r12]; st.global.b32 [%rd5], %r13;"
WAIT = "W{n}: mbarrier.try_wait.parity{how}.shared.b64 %p2, [%r20], {parity}; @!%p2 bra W{n};"


def wait(parity=0, n=0, how=""):
    return WAIT.format(parity=parity, n=n, how=how)


# name -> (body with {x} for the synchronisation, the synchronisation that orders, one that does not)
CASES = {
    "cta barrier": (WRITE_FIRST + "{x}" + READ_FIRST, "bar.sync 0;", "bar.warp.sync -1;"),
    "write after read": (
        "bar.sync 0;"
        + READ_FIRST
        + "{x} setp.ne.u32 %p3, %r2, 33; @%p3 bra S; st.shared.b32 [%r12], 7; S:",
        "bar.sync 0;",
        "",
    ),
    "write after write": (
        "@%p7 bra A; st.shared.b32 [%r11], 1; A: {x} @!%p7 bra B; st.shared.b32 [%r11+-128], 2; B:",
        "bar.sync 0;",
        "bar.warp.sync -1;",
    ),
    "warp barrier": (
        "st.shared.b32 [%r11], %r2; {x} xor.b32 %r14, %r10, 4; add.u32 %r14, %r14, %r12;"
        "ld.shared.b32 %r13, [%r14]; st.global.b32 [%rd5], %r13;",
        "bar.warp.sync -1;",
        "shfl.sync.bfly.b32 %r15, %r10, 1, 31, -1;",
    ),
    "arrive and sync": (
        "@%p7 bra C; st.shared.b32 [%r11], 1; {x} bra E; C: bar.sync 1, 64; ld.shared.b32 %r13, [%r12]; E:",
        "bar.arrive 1, 64;",
        "bar.arrive 1, 64; st.shared.b32 [%r11], 2;",
    ),
    "mbarrier arrivals": (
        INIT.format(count=64)
        + "st.shared.b32 [%r11], %r2; {x}"
        + wait()
        + "ld.shared.b32 %r13, [%r12+252];",
        "mbarrier.arrive.shared.b64 _, [%r20];",
        "mbarrier.arrive.relaxed.cluster.shared.b64 _, [%r20];",
    ),
    "relaxed arrival behind a fence": (
        INIT.format(count=64)
        + "st.shared.b32 [%r11], %r2; {x} mbarrier.arrive.relaxed.cluster.shared.b64 _, [%r20];"
        + wait()
        + "ld.shared.b32 %r13, [%r12+252];",
        "fence.acq_rel.cluster;",
        "",
    ),
    "relaxed wait before a fence": (
        INIT.format(count=64)
        + "st.shared.b32 [%r11], %r2; mbarrier.arrive.shared.b64 _, [%r20];"
        + wait(how=".relaxed.cluster")
        + "{x} ld.shared.b32 %r13, [%r12+252];",
        "fence.acq_rel.cluster;",
        "",
    ),
    "mbarrier init": (
        "@%p1 bra I; mbarrier.init.shared.b64 [%r20], 64; I: {x} @%p7 bra L; bar.warp.sync -1; L:"
        "mbarrier.arrive.shared.b64 _, [%r20];" + wait(),
        "bar.sync 0;",
        "bar.warp.sync -1;",
    ),
    "release and acquire": (
        "@!%p1 st.shared.b32 [%r21], 0; bar.sync 0; @%p1 bra R; st.shared.b32 [%r12], 7; {x} R:"
        "P: ld.acquire.cta.shared.b32 %r14, [%r21]; setp.eq.u32 %p2, %r14, 0; @%p2 bra P;" + READ_FIRST,
        "st.release.cta.shared.b32 [%r21], 1;",
        "st.relaxed.cta.shared.b32 [%r21], 1;",
    ),
    "volatile flag behind a fence": (
        "@!%p1 st.shared.b32 [%r21], 0; bar.sync 0; @%p1 bra R; st.shared.b32 [%r12], 7; {x}"
        "st.volatile.shared.b32 [%r21], 1;"
        "R: P: ld.volatile.shared.b32 %r14, [%r21]; setp.eq.u32 %p2, %r14, 0; @%p2 bra P; membar.cta;" + READ_FIRST,
        "membar.cta;",
        "",
    ),
    "atomics": (
        "@%p1 bra Z; st.shared.b32 [%r12], 0; Z: bar.sync 0; atom.shared.add.u32 %r13, [%r12], 1; {x}" + READ_FIRST,
        "bar.sync 0;",
        "",
    ),
    "cp.async": (
        "cvt.u64.u32 %rd6, %r10; add.s64 %rd7, %rd1, %rd6; cp.async.ca.shared.global [%r11], [%rd7], 4;"
        "cp.async.commit_group; {x} bar.sync 0; ld.shared.b32 %r13, [%r12+252];",
        "cp.async.wait_group 0;",
        "cp.async.wait_group 1;",
    ),
    "cp.async.mbarrier.arrive": (
        INIT.format(count=64)
        + "cvt.u64.u32 %rd6, %r10; add.s64 %rd7, %rd1, %rd6; cp.async.ca.shared.global [%r11], [%rd7], 4; {x}"
        + wait()
        + "ld.shared.b32 %r13, [%r12+252];",
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r20];",
        "mbarrier.arrive.shared.b64 _, [%r20];",
    ),
    "bulk load": (
        INIT.format(count=1)
        + "@%p1 bra V; mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 256;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%rd1], 256, [%r20]; V: {x}"
        "ld.shared.b32 %r13, [%r11]; bar.sync 0;" + wait(n=9),
        wait(),
        "",
    ),
    "bulk load over what is still read": (
        INIT.format(count=1)
        + "ld.shared.b32 %r13, [%r11]; {x} @%p1 bra V; mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 256;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%rd1], 256, [%r20]; V:"
        + wait(),
        "bar.sync 0;",
        "bar.warp.sync -1;",
    ),
    "bulk store": (
        "st.shared.b32 [%r11], %r2; fence.proxy.async.shared::cta; bar.sync 0; @%p1 bra V;"
        "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r12], 256; cp.async.bulk.commit_group; {x}"
        "st.shared.b32 [%r11], 9; cp.async.bulk.wait_group 0; V:",
        "cp.async.bulk.wait_group.read 0;",
        "cp.async.bulk.wait_group.read 1;",
    ),
    "ldmatrix": (
        "st.shared.b32 [%r11], %r2; and.b32 %r14, %r2, 7; shl.b32 %r14, %r14, 4; add.u32 %r14, %r14, %r12; {x}"
        "@%p7 bra V; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r15}}, [%r14]; V:",
        "bar.sync 0;",
        "",
    ),
    "write after ldmatrix": (
        "st.shared.b32 [%r11], %r2; and.b32 %r14, %r2, 7; shl.b32 %r14, %r14, 4; add.u32 %r14, %r14, %r12; bar.sync 0;"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r15}}, [%r14]; {x} @!%p7 bra V; st.shared.b32 [%r11+-128], 3; V:",
        "bar.sync 0;",
        "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def module():
    bodies = {}
    for name, (body, good, bad) in CASES.items():
        entry = re.sub(r"\W", "_", name)
        bodies[f"{entry}_good"] = PROLOGUE + body.replace("{{", "{").replace("}}", "}").replace(
            "{x}", good
        )
        bodies[f"{entry}_bad"] = PROLOGUE + body.replace("{{", "{").replace("}}", "}").replace(
            "{x}", bad
        )
    return build(bodies, SHARED)


def run(module, entry, schedule, **named):
    out = torch.zeros(256, dtype=torch.int32)
    options = emulator.Options(schedule.async_mode, schedule.seed, detect_races=True, **named)
    module.launch(
        entry, (1,), (64,), (torch.zeros(256, dtype=torch.int32), out, 0), options=options
    )


@pytest.mark.parametrize("name", CASES)
def test_order_is_accepted(module, schedule, name):
    run(module, re.sub(r"\W", "_", name) + "_good", schedule)


@pytest.mark.parametrize("name", CASES)
def test_missing_order_is_reported_in_every_schedule(module, schedule, name):
    # A schedule that uses an mbarrier before its init says so in other words.
    early = (
        (emulator.BarrierMisuse,)
        if name == "mbarrier init" and schedule.async_mode != "immediate"
        else ()
    )
    with pytest.raises(
        (emulator.DataRace, *early), match=r"(?s)shared byte|mbarrier 0x\w+ is used"
    ):
        run(module, re.sub(r"\W", "_", name) + "_bad", schedule)


def test_the_message_names_both_instructions(module):
    with pytest.raises(emulator.DataRace) as caught:
        run(module, "cta_barrier_bad", emulator.Options())
    text = str(caught.value)
    assert "this read by thread 63 of CTA rank 0 is not ordered after the write by thread 0" in text
    assert "st.shared.b32 [%r12], 7" in text and "ld.shared.b32 %r13, [%r12]" in text


def test_races_are_looked_for_on_request_only(module):
    out = torch.zeros(256, dtype=torch.int32)
    module.launch("cta_barrier_bad", (1,), (64,), (out, out, 0))


def test_each_byte_has_its_own_past(schedule):
    """Two threads that write neighbouring bytes of one word do not conflict; overlapping words do."""
    module = build(
        {
            "bytes": "mov.u32 %r12, tile; add.u32 %r12, %r12, %r2; st.shared.b8 [%r12], %r2;",
            "words": "mov.u32 %r12, tile; and.b32 %r13, %r2, 1; shl.b32 %r13, %r13, 1;"
            "setp.gt.u32 %p1, %r2, 1; @%p1 bra E;"
            "add.u32 %r12, %r12, %r13; setp.eq.u32 %p2, %r2, 0; @%p2 st.shared.b32 [%r12], 1;"
            "@!%p2 st.shared.b16 [%r12], %h1; E:",
        },
        SHARED,
    )  # fmt: skip
    run(module, "bytes", schedule)
    with pytest.raises(emulator.DataRace):
        run(module, "words", schedule)


def test_a_byte_that_was_read_is_not_its_neighbour(schedule):
    """Only the byte that was read conflicts with a write, also in a word that was written as a whole before."""
    body = (
        PROLOGUE
        + "setp.eq.u32 %p3, %r2, 0; setp.eq.u32 %p4, %r2, 33; @%p3 st.shared.b32 [%r12], 7;"
        "bar.sync 0; @%p3 ld.shared.u8 %r13, [%r12+1]; @%p4 st.shared.b8 [%r12+{byte}], %r2;"
        "bar.sync 0; @%p3 st.shared.b32 [%r12], 7; bar.sync 0; @%p4 st.shared.b16 [%r12+2], %h1;"
    )
    module = build({f"byte{n}": body.format(byte=n) for n in range(4)}, SHARED)
    for byte in (0, 2, 3):
        run(module, f"byte{byte}", schedule)
    with pytest.raises(emulator.DataRace, match="shared byte 0x401 "):
        run(module, "byte1", schedule)


def test_a_strong_read_does_not_excuse_an_ordinary_one(schedule):
    """A strong write may meet strong reads only, whatever the reader did besides."""
    write = "@%p7 st.volatile.shared.b32 [%r12], 1;"
    strong = "@!%p7 ld.volatile.shared.b32 %r13, [%r12];"
    module = build(
        {
            "strong": PROLOGUE + strong + strong + write,
            "ordinary": PROLOGUE + "@!%p7 ld.shared.b32 %r13, [%r12];" + strong + write,
        },
        SHARED,
    )
    run(module, "strong", schedule)
    with pytest.raises(emulator.DataRace):
        run(module, "ordinary", schedule)


# ---- random programs -----------------------------------------------------------------------------


class Program:
    """A random kernel of two warps, and whether it races, found by comparing all its accesses with each other."""

    def __init__(self, seed):
        choose = random.Random(seed)
        self.lines, self.races = [], False
        # What each thread knows of the others, and the accesses to each byte: (thread, its clock, whether it writes).
        self.known = [[int(t == other) for other in range(64)] for t in range(64)]
        self.bytes = {}
        for _ in range(choose.randint(4, 24)):
            step = choose.choice(("lane", "lane", "lanes", "lanes", "warp", "warp", "cta"))
            getattr(self, step)(choose)

    def meet(self, threads):
        all_known = [max(column) for column in zip(*(self.known[t] for t in threads))]
        for t in threads:
            self.known[t] = [*all_known]
            self.known[t][t] += 1

    def cta(self, choose):
        self.lines.append("bar.sync 0;")
        self.meet(range(64))

    def warp(self, choose):
        self.lines.append("bar.warp.sync -1;")
        self.meet(range(32))
        self.meet(range(32, 64))

    def access(self, thread, begin, size, write):
        for byte in range(begin, begin + size):
            before = self.bytes.setdefault(byte, [])
            self.races |= any(
                (write or wrote) and self.known[thread][other] < clock
                for other, clock, wrote in before
            )
            before.append((thread, self.known[thread][thread], write))

    def lane(self, choose):
        """One thread touches a few bytes at the start of the tile."""
        thread, size = choose.randrange(64), choose.choice((1, 2, 4, 8))
        write = choose.random() < 0.4
        begin = choose.randrange(0, 16, size)
        kind = f"st.shared.b{8 * size}" if write else f"ld.shared.b{8 * size}"
        register = "%rd6" if size == 8 else "%r14"
        operands = f"[%r12+{begin}], {register}" if write else f"{register}, [%r12+{begin}]"
        self.lines.append(f"setp.eq.u32 %p3, %r2, {thread}; @%p3 {kind} {operands};")
        self.access(thread, begin, size, write)

    def lanes(self, choose):
        """The lanes of one warp or both touch a word each, or all read the same ones."""
        threads = choose.choice((range(32), range(32, 64), range(64)))
        write, same = choose.random() < 0.3, choose.random() < 0.5
        first, last = threads[0], threads[-1]
        condition = f"setp.ge.u32 %p3, %r2, {first}; setp.le.and.u32 %p3, %r2, {last}, %p3;"
        if write:
            self.lines.append(f"{condition} @%p3 st.shared.b32 [%r11], %r2;")
        else:
            address = "%r12" if same else "%r11"
            self.lines.append(f"{condition} @%p3 ld.shared.b32 %r14, [{address}];")
        for t in threads:
            self.access(t, 4 * t if write or not same else 0, 4, write)


PROGRAMS = [Program(seed) for seed in range(120)]


@pytest.fixture(scope="module")
def programs():
    return build({f"p{n}": PROLOGUE + " ".join(p.lines) for n, p in enumerate(PROGRAMS)}, SHARED)


def test_random_programs_of_both_kinds():
    assert 20 <= sum(p.races for p in PROGRAMS) <= 100


def test_verdicts_of_random_programs(programs, schedule):
    wrong = []
    for n, program in enumerate(PROGRAMS):
        try:
            run(programs, f"p{n}", schedule)
            found = False
        except emulator.DataRace:
            found = True
        if found != program.races:
            wrong.append((n, found, program.lines))
    assert not wrong, wrong


def test_lanes_may_write_one_place_together(schedule):
    """One store instruction of a warp: one lane wins. Two warps, or two instructions, have no such promise."""
    store = "mov.u32 %r12, tile; st.shared.b32 [%r12], 7;"
    module = build(
        {"one": store, "two": f"{store} xor.b32 %r2, %r2, 1; st.shared.b32 [%r12], 8;"}, SHARED
    )
    out = torch.zeros(64, dtype=torch.int32)
    options = emulator.Options(schedule.async_mode, schedule.seed, detect_races=True)
    module.launch("one", (1,), (32,), (out, out, 0), options=options)
    for entry, threads in (("one", 64), ("two", 32)):
        with pytest.raises(emulator.DataRace):
            module.launch(entry, (1,), (threads,), (out, out, 0), options=options)


CLUSTER = (
    "mov.u32 %r13, %cluster_ctarank; xor.b32 %r14, %r13, 1; mapa.shared::cluster.u32 %r15, %r11, %r14;"
    "st.shared::cluster.b32 [%r15], %r2; {x} ld.shared.b32 %r16, [%r12+128]; st.global.b32 [%rd5], %r16;"
    "barrier.cluster.arrive; barrier.cluster.wait;"
)
BARRIERS = {
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;": True,
    "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;": True,
    "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;": False,
    "bar.sync 0;": False,
}


def test_order_in_a_cluster(schedule):
    module = build(
        {f"k{n}": PROLOGUE + CLUSTER.format(x=x) for n, x in enumerate(BARRIERS)}, SHARED
    )
    for n, ordered in enumerate(BARRIERS.values()):
        out = torch.zeros(128, dtype=torch.int32)
        options = emulator.Options(schedule.async_mode, schedule.seed, detect_races=True)

        def launch(n=n, out=out, options=options):
            module.launch(f"k{n}", (2,), (64,), (out, out, 0), cluster=(2,), options=options)

        if ordered:
            launch()
        else:
            with pytest.raises((emulator.DataRace, emulator.RaceSuspected)):
                launch()


def test_many_phases_do_not_exhaust_the_books():
    """Reader sets are collected; every barrier starts new ones."""
    body = (
        PROLOGUE
        + "mov.u32 %r30, 0; L: ld.shared.b32 %r13, [%r12]; ld.shared.b32 %r14, [%r11]; bar.sync 0;"
        "st.shared.b32 [%r11], %r30; bar.sync 0; add.u32 %r30, %r30, 1; setp.lt.u32 %p2, %r30, 3000; @%p2 bra L;"
    )
    module = build({"k": body}, SHARED)
    run(module, "k", emulator.Options())
