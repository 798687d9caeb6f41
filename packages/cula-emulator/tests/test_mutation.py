"""The mutation harness, on kernels with a wait too many and on the Hopper GEMM."""

import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch

import cula_emulator as emulator
from cula_emulator import mutation, verdicts
from cula_emulator.emit.registry import Order, order_of

IMMEDIATE = (emulator.Options(detect_races=True),)


@pytest.fixture(autouse=True)
def no_kept_verdicts():
    """The harness itself is tested here, so that its mutants run every time."""
    with verdicts.kept_for(None):
        yield


# Turns the words of a CTA round through shared memory. Its second barrier guards nothing.
ROTATE = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry rotate(.param .u64 from, .param .u64 to, .param .u32 never)
{
    .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
    .shared .align 16 .b8 tile[256];
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.param.u32 %r1, [never];
    griddepcontrol.wait;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.u32 %r3, [%rd4];
    mov.u32 %r4, tile;
    shl.b32 %r5, %r2, 2;
    add.u32 %r6, %r4, %r5;
    st.shared.u32 [%r6], %r3;
    bar.sync 0;
    xor.b32 %r7, %r5, 128;
    add.u32 %r8, %r4, %r7;
    ld.shared.u32 %r9, [%r8];
    bar.sync 0;
    st.global.u32 [%rd5], %r9;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra END;
    bar.sync 1;
END:
    ret;
}
"""


@pytest.fixture(scope="module")
def rotate():
    return emulator.EmulatedModule(ROTATE)


def line_of(ptx, text, occurrence=0):
    return [n for n, line in enumerate(ptx.splitlines(), 1) if text in line][occurrence]


def rotation_check(module):
    x = torch.arange(64, dtype=torch.float32)
    expected = x.view(2, 32).flip(0).reshape(-1)

    def check(options):
        out = torch.full((64,), float("nan"))
        module.launch("rotate", (1,), (64,), (x, out, 0), options=options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)

    return check


def test_planted_redundant_wait_is_unnoticed(rotate):
    report = mutation.run(rotation_check(rotate), rotate)
    needed, redundant = (line_of(ROTATE, "bar.sync 0", n) for n in (0, 1))
    assert [m.line for m in report.noticed] == [needed]
    assert [m.line for m in report.unnoticed] == [redundant]
    assert [m.line for m in report.not_reached] == [line_of(ROTATE, "bar.sync 1")]
    assert [m.line for m in report.not_modelled] == [line_of(ROTATE, "griddepcontrol.wait")]
    assert [m.executions for m in report.mutants] == [64 * 7, 64 * 7, 64 * 7, 0]
    (finding,) = report.noticed[0].findings
    assert (
        finding.schedule == "immediate"
        and finding.how == "DataRace"
        and "st.shared" in finding.detail
    )
    assert report.table() == "\n".join(
        [
            "| line | instruction | threads | noticed by |",
            "|---:|---|---:|---|",
            f"| {needed - 10} | `griddepcontrol.wait` | 448 | not modelled |",
            f"| {needed} | `bar.sync 0` | 448 | immediate: DataRace |",
            f"| {redundant} | `bar.sync 0` | 448 | **UNNOTICED** |",
            f"| {redundant + 4} | `bar.sync 1` | 0 | not reached |",
        ]
    )
    assert str(report).startswith(
        "1 not modelled, 1 not reached, 1 noticed, 1 unnoticed (immediate, lazy-0,"
    )
    assert pickle.loads(pickle.dumps(report)) == report


def test_poison_is_told_from_other_wrong_results(rotate):
    """Without the race detector the same mutant shows in the numbers."""
    needed = line_of(ROTATE, "bar.sync 0")
    schedules = (emulator.Options(), emulator.Options(async_mode="random", seed=1))
    report = mutation.run(rotation_check(rotate), rotate, [needed], schedules, exhaustive=True)
    assert [f.how for f in report.mutants[0].findings] == ["NaN", "NaN"]
    assert [f.schedule for f in report.mutants[0].findings] == ["immediate", "random-1"]


@pytest.mark.parametrize(
    ("misbehave", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9"),
        (lambda: time.sleep(60), "hangs"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: pytest.fail("bad"), "wrong result"),
        (lambda: pytest.fail("7 of 64 values are not finite"), "NaN"),
        (lambda: False, "wrong result"),
    ],
    ids=["crash", "hang", "exception", "pytest.fail", "not finite", "returns False"],
)
def test_whatever_goes_wrong_in_a_mutant_is_noticed(rotate, monkeypatch, misbehave, how):
    if how == "hangs":
        monkeypatch.setattr(mutation, "_GRACE_SECONDS", 0.1)
    check = rotation_check(rotate)

    def wrapped(options):
        check(options)
        return misbehave() if options.ignore_line else None

    redundant = line_of(ROTATE, "bar.sync 0", 1)
    report = mutation.run(wrapped, rotate, [redundant], IMMEDIATE, time_limit=0.5)
    assert [f.how for f in report.mutants[0].findings] == [how]


# Thread 1 clears a flag and polls it after the barrier; thread 0 sets it.
POLL = """
.version 8.6
.target sm_80
.address_size 64
.visible .entry poll()
{
    .reg .pred %p<4>; .reg .b32 %r<8>;
    .shared .align 8 .b8 flag[16];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, flag;
    setp.eq.u32 %p1, %r1, 1;
    @%p1 bra OTHER;
    bar.sync 0;
    st.volatile.shared.u32 [%r2], 1;
    ret;
OTHER:
    st.volatile.shared.u32 [%r2], 0;
    bar.sync 0;
WAIT:
    ld.volatile.shared.u32 %r5, [%r2];
    bar.warp.sync 2;
    setp.ne.u32 %p2, %r5, 1;
    @%p2 bra WAIT;
    ret;
}
"""


def test_an_endless_mutant_meets_the_time_limit():
    """Without its barrier thread 0 sets the flag too early, and thread 1 goes round for ever."""
    module = emulator.EmulatedModule(POLL)

    def check(options):
        module.launch("poll", (1,), (2,), options=options)

    first = line_of(POLL, "bar.sync")
    report = mutation.run(check, module, [first], (emulator.Options(),), time_limit=0.5)
    assert [f.how for f in report.mutants[0].findings] == ["TimeLimitExceeded"]


def test_mutants_run_side_by_side_and_keep_their_order(rotate):
    check = rotation_check(rotate)
    meeting = multiprocessing.get_context("fork").Barrier(4)

    def meet(options):
        check(options)
        if options.ignore_line:
            meeting.wait(60)  # raises unless four mutants are here at once

    lines = [line_of(ROTATE, text) for text in ("st.shared", "xor.b32", "ld.shared", "shl.b32")]
    report = mutation.run(meet, rotate, lines, IMMEDIATE, processes=4)
    assert [m.line for m in report.mutants] == lines and not report.noticed


def test_check_must_hold_on_the_unchanged_kernel(rotate):
    def broken(options):
        assert options.async_mode == "immediate", "broken"

    with pytest.raises(RuntimeError, match="fails on the unchanged kernel under lazy-0: broken"):
        mutation.run(broken, rotate)
    with pytest.raises(RuntimeError, match="fails on the unchanged kernel under immediate"):
        mutation.run(lambda options: False, rotate)
    with pytest.raises(RuntimeError, match="never launched"):
        mutation.run(lambda options: None, rotate)


def test_synchronisation_lists_every_kind():
    header = ".version 8.6\n.target sm_100a\n.address_size 64\n"
    wanted = [
        "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2",
        "mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1",
        "mbarrier.arrive.shared.b64 _, [%r1]",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16",
        "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 16",
        "cp.async.commit_group",
        "cp.async.wait_group 0",
        "cp.async.wait_all",
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group.read 0",
        "wgmma.fence.sync.aligned",
        "wgmma.commit_group.sync.aligned",
        "wgmma.wait_group.sync.aligned 0",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd1]",
        "tcgen05.wait::st.sync.aligned",
        "tcgen05.wait::ld.sync.aligned",
        "tcgen05.fence::before_thread_sync",
        "fence.proxy.async.shared::cta",
        "fence.mbarrier_init.release.cluster",
        "fence.acq_rel.cta",
        "membar.gl",
        "bar.sync 0",
        "bar.arrive 1, 64",
        "@%p1 barrier.sync.aligned 2, 128",
        "bar.warp.sync -1",
        "barrier.cluster.arrive.release.aligned",
        "barrier.cluster.wait.acquire.aligned",
        "griddepcontrol.wait",
    ]
    others = [
        "mbarrier.init.shared.b64 [%r1], 1",
        "add.u32 %r1, %r1, %r2",
        "griddepcontrol.launch_dependents",
    ]
    body = "".join(f"{i};\n" for i in wanted + others)
    registers = ".reg .pred %p<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>;\n"
    ptx = f"{header}.visible .entry k()\n{{\n{registers}{body}ret;\n}}\n"
    found = mutation.synchronisation(ptx)
    assert list(found.values()) == wanted
    assert list(found) == list(range(7, 7 + len(wanted)))


@pytest.mark.parametrize(
    ("opcode", "order"),
    [
        ("bar.red.popc.u32", Order.MODELLED),
        ("mbarrier.arrive_drop.shared.b64", Order.MODELLED),
        ("fence.proxy.async", Order.MODELLED),
        ("fence.proxy.async.global", Order.ABSENT),
        ("fence.proxy.tensormap::generic.acquire.gpu", Order.ABSENT),
        ("fence.acquire.gpu", Order.FENCE),
        ("mbarrier.init.shared.b64", None),
        ("no.such.instruction", None),
    ],
)
def test_what_an_instruction_orders_is_where_it_is_registered(opcode, order):
    assert order_of(opcode) is order


# ---- pipelines of the DSL ------------------------------------------------------------------------


@pytest.fixture
def mutate_gemm(emulated, fake):
    """Mutates C = A B^T in bfloat16: two CTAs (or one cluster), five tiles in a ring of two stages."""

    def mutate(kernel):
        tensors = [fake(dtype, (None, None)) for dtype in ("bfloat16", "bfloat16", "float32")]
        compiled = emulated(kernel, *tensors).kernel
        a, b = torch.randn(128, 320).bfloat16(), torch.randn(64, 320).bfloat16()
        expected = a.float() @ b.float().t()

        def check(options):
            c = emulated.empty((128, 64))
            compiled(a, b, c, options=options)
            torch.testing.assert_close(c, expected, rtol=1e-2, atol=1e-2)

        report = mutation.run(check, compiled)
        assert not report.not_reached, str(report)
        return report

    return mutate


def opcodes(mutants):
    """ "mbarrier.try_wait" and the like."""
    return [".".join(m.text.split()[0].split(".")[:2]) for m in mutants]


@pytest.mark.emulated(schedules="immediate", arch="sm_89")
def test_ampere_gemm(mutate_gemm):
    pytest.importorskip("cutlass")
    from kernels.ampere_gemm import ampere_gemm

    report = mutate_gemm(ampere_gemm)
    assert opcodes(report.noticed) == ["cp.async"] * 3 + ["bar.sync"] * 2, str(report)
    assert len(report.mutants) == 5


@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.emulated(schedules="immediate", arch="sm_90a")
def test_hopper_gemm(mutate_gemm, cluster_m):
    pytest.importorskip("cutlass")
    from kernels.hopper_gemm import HopperGemm

    report = mutate_gemm(HopperGemm(cluster_m=cluster_m))
    assert opcodes(report.not_modelled) == ["fence.mbarrier_init", "wgmma.fence"]
    # The producer's last two waits keep its CTA alive while the other one still signals its slots. The cluster barrier
    # at the end does so too, hence either is redundant; without a cluster there is nobody to wait for.
    waits = [m for m in report.mutants if "try_wait" in m.text]
    ends = [m for m in report.mutants if m.text.startswith("barrier.cluster")][-2:]
    assert report.unnoticed == tuple(waits[1:3] + ends), str(report)
    assert len(report.noticed) == (7 if cluster_m == 1 else 8)


@pytest.mark.emulated(schedules="immediate", arch="sm_100a")
def test_blackwell_gemm(mutate_gemm):
    pytest.importorskip("cutlass")
    from kernels.blackwell_gemm import blackwell_gemm

    report = mutate_gemm(blackwell_gemm)
    ring = ["mbarrier.try_wait", "mbarrier.arrive", "mbarrier.try_wait", "tcgen05.commit"]
    accumulator = ["tcgen05.commit", "mbarrier.try_wait"]
    assert opcodes(report.noticed)[:6] == ring + accumulator, str(report)
    # Each of the three barriers of the set-up stands in for the other two, the only accumulator is free from the start,
    # and nobody waits for its release.
    assert opcodes(report.unnoticed) == ["bar.sync"] * 3 + ["mbarrier.try_wait", "mbarrier.arrive"]
    # Without the barrier in front of tcgen05.dealloc a slow warp reads what is no longer allocated.
    assert report.noticed[-1].text == "bar.sync 1" and len(report.noticed) == 7
