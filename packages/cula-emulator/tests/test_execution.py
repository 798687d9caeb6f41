"""How launches run: schedules, limits, statistics, skipped lines, barriers whose threads leave."""

import time

import pytest
import torch
from ptx_module import build

import cula_emulator as emulator

SHARED = ".shared .align 16 .b8 tile[256];\n.shared .align 8 .b8 bar[8];\n"
BODIES = {
    "endless": "W: st.global.b32 [%rd5], %r2; bra W;",
    "loop": "mov.u32 %r10, 0;"
    "L: add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 5; @%p1 bra L; st.global.b32 [%rd5], %r10;",
    "half": "setp.lt.u32 %p1, %r2, 16; @!%p1 bra E; st.global.b32 [%rd5], 1; E:",
    # The second warp leaves; the barrier of the whole CTA is then complete without it.
    "leavers": "setp.ge.u32 %p1, %r2, 32; @%p1 bra E; bar.sync 0; st.global.b32 [%rd5], 1; E:",
    "red": "setp.ge.u32 %p1, %r2, 64; @%p1 bra E; setp.lt.u32 %p2, %r2, 7; bar.red.popc.u32 %r10, 0, %p2;"
    "bar.red.and.pred %p3, 0, %p2; bar.red.or.pred %p4, 0, %p2;"
    "selp.u32 %r11, 100, 0, %p3; selp.u32 %r12, 1000, 0, %p4;"
    "add.u32 %r10, %r10, %r11; add.u32 %r10, %r10, %r12; st.global.b32 [%rd5], %r10; E:",
    "arrive": "mov.u32 %r20, bar;"
    " setp.ne.u32 %p1, %r2, 0; @%p1 bra I; mbarrier.init.shared.b64 [%r20], 64; I: bar.sync 0;"
    "mbarrier.arrive.shared.b64 _, [%r20]; W: mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra W;"
    "st.global.b32 [%rd5], 1;",
    "attempts": "mov.u32 %r20, bar; mov.u32 %r10, 0;"
    " setp.ne.u32 %p1, %r2, 0; @%p1 bra I; mbarrier.init.shared.b64 [%r20], 1;"
    "I: bar.sync 0; setp.eq.u32 %p3, %r2, 63; @%p3 mbarrier.arrive.shared.b64 _, [%r20];"
    "W: add.u32 %r10, %r10, 1; mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra W;"
    "st.global.b32 [%rd5], %r10;",
    # The second warp waits for a phase of a barrier that the first one completes twice; between, that meets the third.
    "aliased": "mov.u32 %r20, bar; setp.lt.u32 %p1, %r2, 32; setp.lt.u32 %p2, %r2, 64;"
    "setp.ne.u32 %p3, %r2, 0; @%p3 bra I; mbarrier.init.shared.b64 [%r20], 32; I: bar.sync 0;"
    "@%p1 bra A; @!%p2 bra M; W: mbarrier.try_wait.parity.shared.b64 %p4, [%r20], 0; @!%p4 bra W; bra E;"
    "A: mbarrier.arrive.shared.b64 _, [%r20]; M: bar.sync 1, 64; bar.sync 1, 64; @!%p1 bra E;"
    "mbarrier.arrive.shared.b64 _, [%r20]; E: st.global.b32 [%rd5], 1;",
    "commit": "mov.u32 %r11, tile; shl.b32 %r10, %r2, 2; add.u32 %r11, %r11, %r10; cvt.u64.u32 %rd6, %r10;"
    "add.s64 %rd7, %rd1, %rd6; cp.async.ca.shared.global [%r11], [%rd7], 4; cp.async.commit_group;"
    "cp.async.wait_group 0; ld.shared.b32 %r13, [%r11]; st.global.b32 [%rd5], %r13;",
}  # fmt: skip


@pytest.fixture(scope="module")
def module():
    return build(BODIES, SHARED)


def launch(module, name, threads=64, **options):
    out = torch.zeros(max(threads, 64), dtype=torch.int32)
    source = torch.arange(1, out.numel() + 1, dtype=torch.int32)
    module.launch(name, (1,), (threads,), (source, out, 0), options=emulator.Options(**options))
    return out


def line_of(module, text, after):
    """The first PTX line with `text` behind the entry `after`."""
    start = next(n for n, line in enumerate(module.ptx_lines) if f".entry {after}(" in line)
    return next(n for n, line in enumerate(module.ptx_lines[start:], start + 1) if text in line)


def test_time_limit(module):
    start = time.monotonic()
    with pytest.raises(
        emulator.TimeLimitExceeded, match=r"(?s)after 0\.\d+ seconds.*warp 1 lane 0: PTX line \d+: "
    ):
        launch(module, "endless", time_limit=0.2)
    assert time.monotonic() - start < 5
    assert launch(module, "half")[0] == 1  # the module is usable afterwards


def test_statistics_count_threads_per_line(module):
    launch(module, "loop", threads=33)
    counts = module.statistics.executions
    assert counts[line_of(module, "mov.u32 %r10, 0", "loop")] == 33
    assert counts[line_of(module, "add.u32 %r10", "loop")] == 33 * 5
    assert counts[line_of(module, "st.global", "loop")] == 33
    assert counts[line_of(module, "mov.u32 %r10, 0", "attempts")] == 0
    prologue, loop, tail = 10, 3, 2
    assert module.statistics.instructions == 33 * (prologue + 1 + 5 * loop + tail)
    assert 0 < module.statistics.seconds < 60
    launch(module, "half")
    counts = module.statistics.executions
    assert counts[line_of(module, "st.global.b32 [%rd5], 1", "half")] == 16
    assert counts[line_of(module, "add.u32 %r10", "loop")] == 0  # of the last run only


@pytest.mark.parametrize("threads", [64, 96])
def test_threads_that_exit_leave_the_barrier_of_the_cta(module, schedule, threads):
    out = launch(module, "leavers", threads, async_mode=schedule.async_mode, seed=schedule.seed)
    assert out[:32].eq(1).all() and out[32:].eq(0).all()


def test_barrier_reductions_count_the_threads_that_are_left(module, schedule):
    out = launch(module, "red", 96, async_mode=schedule.async_mode, seed=schedule.seed)
    assert out[:64].eq(1007).all() and out[64:].eq(0).all()


def test_a_time_limit_of_try_wait_may_run_out(module):
    """Kernels must loop around try_wait; random schedules let some attempts fail."""
    assert launch(module, "attempts").eq(1).all()
    assert (
        max(launch(module, "attempts", async_mode="random", seed=s).max().item() for s in range(8))
        > 1
    )


def test_a_skipped_arrive_is_missed(module):
    line = line_of(module, "mbarrier.arrive", "arrive")
    with pytest.raises(emulator.Deadlock, match="mbarrier.try_wait"):
        launch(module, "arrive", ignore_line=line)


def test_a_skipped_commit_is_missed(module):
    line = line_of(module, "cp.async.commit_group", "commit")
    assert launch(module, "commit", async_mode="lazy").tolist() == list(range(1, 65))
    assert launch(module, "commit", async_mode="lazy", ignore_line=line).eq(-1).all()  # poison


def test_a_slow_warp_comes_too_late(module):
    """It looks at a barrier that has completed two phases, which looks as if it had completed none."""
    for slow in (None, 0, 2):
        assert launch(module, "aliased", threads=96, slow_warp=slow).eq(1).all()
    with pytest.raises(emulator.Deadlock, match="mbarrier.try_wait"):
        launch(module, "aliased", threads=96, slow_warp=1)


def test_a_seed_fixes_the_run(module):
    runs = []
    for _ in range(2):
        out = launch(module, "attempts", async_mode="random", seed=5)
        runs.append((out.tolist(), module.statistics.executions))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "named",
    [
        {"async_mode": "eager"},
        {"concurrent_ctas": 0},
        {"slow_warp": -1},
        {"time_limit": 0},
        {"time_limit": -1.0},
    ],
    ids=str,
)
def test_options_are_checked(named):
    with pytest.raises(ValueError, match=next(iter(named))):
        emulator.Options(**named)
