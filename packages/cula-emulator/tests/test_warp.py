"""Warp collectives under every schedule, in warps that are not full, and used wrongly. Numbers: tables_warp.py."""

import pytest
import torch
from ptx_module import build
from scalar_rows import HEADER, entry, mismatches, pack, samples
from tables_warp import CASES
from test_scalar import words

import cula_emulator as emulator


@pytest.fixture(scope="module")
def collectives():
    return emulator.emulate(HEADER + "\n".join(entry(case) for case in CASES))


def test_every_schedule_gives_the_same_answer(collectives, schedule):
    wrong = []
    for case in CASES:
        inputs = samples(case, 64)
        out = torch.zeros(64 * case.words_out, dtype=torch.int32)
        collectives.launch(
            case.name, (2,), (32,), (words(pack(case, inputs)), out), options=schedule
        )
        wrong += mismatches(case, inputs, out.tolist())
    assert not wrong, "\n".join(wrong[:20])


PARTIAL = {  # PTX of %r11 and the value of lane l of a warp with 20 lanes
    "all": (
        "setp.lt.u32 %p1, %r2, 100; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r11, 1, 0, %p2;",
        lambda lane: 1,
    ),
    "not_all": (
        "setp.lt.u32 %p1, %r2, 50; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r11, 1, 0, %p2;",
        lambda lane: 0,
    ),
    "uni": (
        "setp.lt.u32 %p1, %r2, 100; vote.sync.uni.pred %p2, %p1, -1; selp.b32 %r11, 1, 0, %p2;",
        lambda lane: 1,
    ),
    "ballot": (
        "setp.ne.u32 %p1, %r2, 33; vote.sync.ballot.b32 %r11, %p1, -1;",
        lambda lane: (1 << 20) - 1 - 2,
    ),
    "active": ("activemask.b32 %r11;", lambda lane: (1 << 20) - 1),
    "match": ("match.all.sync.b32 %r11|%p1, %r3, -1;", lambda lane: (1 << 20) - 1),
    "redux": ("redux.sync.add.s32 %r11, 1, -1;", lambda lane: 20),
    "elect": (
        "elect.sync %r11|%p1, -1; selp.b32 %r11, 7, 9, %p1;",
        lambda lane: 7 if lane == 0 else 9,
    ),
    "down": ("shfl.sync.up.b32 %r11, %r2, 1, 0, -1;", lambda lane: 32 + max(lane - 1, 0)),
}


def test_the_last_warp_may_be_partial(schedule):
    """52 threads: lanes that do not exist neither vote nor hold up the others."""
    module = build(
        {name: f"{ptx} st.global.b32 [%rd5], %r11;" for name, (ptx, _) in PARTIAL.items()}
    )
    for name, (_, value) in PARTIAL.items():
        out = torch.zeros(52, dtype=torch.int32)
        module.launch(name, (1,), (52,), (out, out, 0), options=schedule)
        assert out.tolist()[32:] == [value(lane) for lane in range(20)], name


def test_wrong_use_is_reported():
    module = build(
        {
            "outside": "setp.eq.u32 %p1, %r2, 5; @%p1 bra S; bra E; S: vote.sync.any.pred %p2, %p1, 0xf; E:",
            "unread": "setp.gt.u32 %p1, %r2, 1; @%p1 bra E; shfl.sync.idx.b32 %r11, %r2, 9, 31, 0x3; E:",
            "divergent": "setp.lt.u32 %p1, %r2, 16; @%p1 bra A; vote.sync.any.pred %p2, %p1, -1; bra E;"
            "A: redux.sync.add.s32 %r10, 1, -1; E:",
            "missing": "setp.eq.u32 %p1, %r2, 3; @%p1 bra E; vote.sync.any.pred %p2, %p1, -1; E:",
        }
    )
    out = torch.zeros(32, dtype=torch.int32)
    errors = {
        "outside": (
            emulator.InvalidOperation,
            "lane 5 executes a warp collective whose member mask is 0xf",
        ),
        "unread": (
            emulator.InvalidOperation,
            "shfl reads lane 9, which is outside the member mask 0x3",
        ),
        "divergent": (
            emulator.InvalidOperation,
            r"(?s)vote.sync.*redux.sync|redux.sync.*vote.sync",
        ),
        "missing": (emulator.Deadlock, r"vote.sync.any"),
    }
    for name, (error, text) in errors.items():
        with pytest.raises(error, match=text):
            module.launch(name, (1,), (32,), (out, out, 0))
