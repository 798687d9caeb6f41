"""What the warps of a warpgroup must do alike, and the registers that setmaxnreg moves."""

import re

import pytest
import torch
from matrix_launches import run_body
from ptx_module import build, text
from tables_wgmma import wgmma_case

import cula_emulator as emulator
from cula_emulator import registers, resources
from cula_emulator.emit import translate
from cula_emulator.ptx import parse

FENCE = "wgmma.fence.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
# %p1 the first warpgroup, %p2 odd warps, %p3 the last warp of each four, %p4 odd lanes.
PROLOGUE = (
    "setp.lt.u32 %p1, %r2, 128; and.b32 %r10, %r2, 32; setp.ne.u32 %p2, %r10, 0;"
    "and.b32 %r10, %r2, 96; setp.eq.u32 %p3, %r10, 96; and.b32 %r10, %r2, 1; setp.ne.u32 %p4, %r10, 0;"
)
STORE = "st.global.b32 [%rd5], 7;"
ALIGNED = {
    "warpgroups part": "@%p1 bra A; " + FENCE + WAIT + "bra E; A: " + WAIT + FENCE + "E:",
    "one wait for both": FENCE + WAIT + "@%p2 bra E; add.u32 %r10, %r10, 1; E:",
    "uniform loop": "mov.u32 %r11, 0; L: " + FENCE + WAIT
    + "add.u32 %r11, %r11, 1; setp.lt.u32 %p5, %r11, 5; @%p5 bra L;",
    "no warp": "setp.gt.u32 %p5, %r2, 999; @!%p5 bra E; " + FENCE + "E:",
}  # fmt: skip
DIFFERENT = (
    r"different instructions: warp \d is at PTX line \d+: .*{0}.*, warp \d at PTX line \d+: .*{1}"
)
MISALIGNED = {
    "a wait of its own": (
        FENCE + "@%p2 bra A; " + WAIT + "bra E; A: " + WAIT + "E:",
        DIFFERENT.format("wgmma.wait_group", "wgmma.wait_group"),
    ),
    "another order": (
        "@%p3 bra A; " + FENCE + WAIT + "bra E; A: " + WAIT + FENCE + "E:",
        DIFFERENT.format("wgmma.", "wgmma."),
    ),
    "one round more": (
        "selp.u32 %r12, 4, 3, %p3; mov.u32 %r11, 0; L: " + FENCE
        + "add.u32 %r11, %r11, 1; setp.lt.u32 %p5, %r11, %r12; @%p5 bra L; wgmma.commit_group.sync.aligned;" + WAIT,
        DIFFERENT.format("wgmma.", "wgmma."),
    ),
    "a warp without": (
        "@%p3 bra E; " + FENCE + "E:",
        r"warp [37] ends without PTX line \d+: wgmma.fence.*, which warp \d of its warpgroup executes",
    ),
    "lanes part": (
        "@%p4 bra A; " + FENCE + "bra E; A: " + FENCE + "E:",
        r"lanes of one warp meet in different collectives.*\(divergence\)",
    ),
    "registers apart": (
        "@%p2 bra A; setmaxnreg.dec.sync.aligned.u32 40; bra E; A: setmaxnreg.dec.sync.aligned.u32 40; E:",
        DIFFERENT.format("setmaxnreg.dec", "setmaxnreg.dec"),
    ),
}  # fmt: skip


def named(bodies):
    return {
        name.replace(" ", "_"): PROLOGUE + (body if isinstance(body, str) else body[0]) + STORE
        for name, body in bodies.items()
    }


@pytest.fixture(scope="module")
def aligned():
    return build(named({**ALIGNED, **MISALIGNED}))


def launch(module, name, threads, options=None):
    out = torch.zeros(threads, dtype=torch.int32)
    module.launch(name.replace(" ", "_"), (1,), (threads,), (out, out, 0), options=options)
    assert (out == 7).all()


@pytest.mark.parametrize("name", ALIGNED)
def test_warps_that_agree(aligned, schedule, name):
    launch(aligned, name, 256, schedule)


@pytest.mark.parametrize("name", MISALIGNED)
def test_warps_that_do_not(aligned, schedule, name):
    with pytest.raises(emulator.InvalidOperation, match=MISALIGNED[name][1]):
        launch(aligned, name, 256, schedule)


def test_wgmma_needs_four_warps(aligned):
    with pytest.raises(emulator.InvalidOperation, match="fewer than four warps: the CTA has 224"):
        launch(aligned, "uniform loop", 224)


def test_each_half_of_a_product_waits_for_itself(schedule):
    """The wait of a real product in both branches of a decision that a warp takes alone."""
    case = wgmma_case(16, "bf16", "bf16", "f32")
    problem = case.problem("exact", 0)

    def run(decision):
        body = case.body.replace(WAIT, f"{decision} @%p9 bra X; {WAIT} bra Y; X: {WAIT} Y:")
        assert body != case.body
        return run_body(
            body, problem.words, case.out_words, 128, shared=case.shared, options=schedule
        )

    assert problem.mismatch(run("setp.lt.u32 %p9, %r2, 128;")) is None
    with pytest.raises(emulator.InvalidOperation, match="the warps of a warpgroup execute"):
        run("setp.lt.u32 %p9, %r2, 64;")


# ---- setmaxnreg

THREE = ".reqntid 384,1,1 .minnctapersm 1"


def moves(fewer, more, before="", behind=""):
    """One warpgroup gives registers away, the others ask for some."""
    return (
        f"@%p1 bra D; setmaxnreg.inc.sync.aligned.u32 {more}; {behind} bra M;"
        f"D: {before} setmaxnreg.dec.sync.aligned.u32 {fewer}; M:"
    )


# body, directives, threads
ENOUGH = {
    "just enough": (moves(24, 240), THREE, 384),
    "in time": (moves(24, 240, before="bar.sync 1, 128;" * 20), THREE, 384),
    "a limit": (moves(40, 168), ".maxnreg 100", 256),
    "less than it has": (moves(24, 160), THREE + " .maxnreg 168", 384),
    "all that there is": (moves(24, 256), "", 256),
    "back again": (
        "setmaxnreg.dec.sync.aligned.u32 24; bar.sync 0; setmaxnreg.inc.sync.aligned.u32 168;",
        THREE,
        384,
    ),
}
LACKING = {  # registers that a warp asks for, those that are free, those of the CTA
    "a few short": (moves(32, 240), THREE, 384, (2304, 1280, 64512)),
    "too late": (
        moves(24, 240, before="bar.sync 1, 384;", behind="bar.sync 1, 384;"),
        THREE,
        384,
        (2304, 0, 64512),
    ),
    "a limit": (moves(40, 176), ".maxnreg 100", 256, (2304, 1280, 26624)),
    "the launch decides": (moves(32, 248), "", 384, (2560, 2048, 64512)),
}


def build_one(name, body, directives):
    return build(named({name: body}), directives=directives)


@pytest.mark.parametrize("name", ENOUGH)
def test_registers_are_there(schedule, name):
    body, directives, threads = ENOUGH[name]
    launch(build_one(name, body, directives), name, threads, schedule)


@pytest.mark.parametrize("name", LACKING)
def test_registers_are_not_there(schedule, name):
    body, directives, threads, amounts = LACKING[name]
    complaint = r"setmaxnreg.inc\S+ \d+; waits for {} more registers; {} of the CTA's {} are free"
    with pytest.raises(emulator.Deadlock, match=complaint.format(*amounts)):
        launch(build_one(name, body, directives), name, threads, schedule)


@pytest.mark.parametrize("count", [16, 28, 264])
def test_registers_come_in_eights(count):
    module = build_one("odd", f"setmaxnreg.dec.sync.aligned.u32 {count};", THREE)
    with pytest.raises(emulator.InvalidOperation, match=f"setmaxnreg: {count} registers"):
        launch(module, "odd", 384)


def test_dec_gives_registers_away():
    module = build_one("more", moves(176, 240), THREE)
    complaint = "setmaxnreg.dec to 176 registers in a warp that has 168"
    with pytest.raises(emulator.InvalidOperation, match=complaint):
        launch(module, "more", 384)


def test_a_cta_must_fit():
    module = build_one("wide", moves(24, 240), ".reqntid 384,1,1 .maxnreg 200")
    with pytest.raises(emulator.LaunchError, match="200 registers for each of 384 threads"):
        launch(module, "wide", 384)


@pytest.mark.parametrize(
    "threads, directives",
    [
        (384, THREE),
        (384, ".maxntid 384,1,1 .minnctapersm 2"),
        (416, ".reqntid 416,1,1 .minnctapersm 1"),
        (512, ".reqntid 512,1,1 .minnctapersm 1"),
        (256, ".reqntid 256,1,1 .maxnreg 100"),
    ],
    ids=str,
)
def test_registers_at_launch_are_those_of_the_assembler(threads, directives):
    ptx = text(named({"all": "setmaxnreg.inc.sync.aligned.u32 248;"}), directives=directives)
    assembled = resources.report(ptx).kernel.registers
    with pytest.raises(emulator.Deadlock) as found:
        launch(emulator.EmulatedModule(ptx), "all", threads)
    whole = int(re.search(r"of the CTA's (\d+) are free", str(found.value))[1])
    assert whole == -(-assembled // 8) * 8 * threads


def test_registers_of_machine_code():
    """A cubin in the host code says what the assembler did."""
    body = named({"three": moves(24, 240)})
    cubin, _ = resources.compile_ptx(text(body, directives=THREE))
    host = b"\x7fELF\x02 no cubin" + bytes(100) + cubin + bytes(100)
    assert registers.in_machine_code(host) == {"three": 168}
    assert registers.in_machine_code(host[:400]) == registers.in_machine_code(None) == {}
    without, log = resources.compile_ptx(text(body))
    assert "ignored" in log
    assert registers.in_machine_code(without) == {"three": registers.LEFT_OUT}

    module = parse(text(body, directives=".reqntid 16,8,3 .minnctapersm 1 .maxnreg 152"))
    for known, written in ({}, 152), ({"three": 168}, 168), ({"three": registers.LEFT_OUT}, -1):
        assert f"{{{written}, 240, 384, 1}}" in translate(module, known)


def test_what_the_assembler_left_out_does_nothing(monkeypatch):
    monkeypatch.setattr(registers, "in_machine_code", lambda _: {"few": registers.LEFT_OUT})
    launch(build_one("few", "add.u32 %r10, %r10, 3;" + moves(32, 240), THREE), "few", 384)
