"""Indexed branches, loops with divergence, and the instructions that only steer the machine."""

from __future__ import annotations

import torch

from cases.case import Case, random_words

FAMILY = "control"
_X = random_words(256, 60)


def _cases() -> list[Case]:
    load, store = "ld.global.b32 %r10, [%rd4];", "st.global.b32 [%rd5], %r11;"
    table = (
        "T: .branchtargets A, B, C, D; and.b32 %r12, %r10, 3; brx.idx %r12, T; A: mov.u32 %r11, 10; bra E;"
        "B: mov.u32 %r11, 21; bra E; C: mov.u32 %r11, 32; bra E; D: mov.u32 %r11, 43; E:"
    )
    collatz = (
        "and.b32 %r10, %r10, 1023; add.u32 %r10, %r10, 1; mov.u32 %r11, 0; L: setp.eq.u32 %p1, %r10, 1; @%p1 bra E;"
        "and.b32 %r12, %r10, 1; setp.eq.u32 %p2, %r12, 0; @%p2 shr.u32 %r10, %r10, 1; @%p2 bra N;"
        "mad.lo.u32 %r10, %r10, 3, 1; N: add.u32 %r11, %r11, 1; bra.uni L; E:"
    )

    def steps(x: int) -> int:
        count = 0
        while x != 1:
            x, count = (x // 2 if x % 2 == 0 else 3 * x + 1), count + 1
        return count

    choice = (_X[:64] & 3) * 11 + 10
    lengths = torch.tensor([steps((x & 1023) + 1) for x in _X[:64].tolist()], dtype=torch.int32)
    registers = "setp.lt.u32 %p1, %r2, 128; @%p1 bra D; setmaxnreg.inc.sync.aligned.u32 208; bra M;"
    registers += "D: setmaxnreg.dec.sync.aligned.u32 40; M: xor.b32 %r11, %r10, 1;"
    dependent = "griddepcontrol.wait; xor.b32 %r11, %r10, 1; griddepcontrol.launch_dependents;"
    hints = "nanosleep.u32 20; pmevent 1; xor.b32 %r11, %r10, 1;"
    flipped = _X ^ 1
    early = "and.b32 %r12, %r2, 1; setp.eq.u32 %p1, %r12, 1; @%p1 ret; xor.b32 %r11, %r10, 1;"
    odd = torch.where(torch.arange(64) % 2 == 1, -1, flipped[:64]).to(torch.int32)
    return [
        Case(FAMILY, "brx_idx", load + table + store, choice, _X, block=64),
        Case(FAMILY, "divergent_loop", load + collatz + store, lengths, _X, block=64),
        Case(
            FAMILY,
            "setmaxnreg",
            load + registers + store,
            flipped,
            _X,
            block=256,
            directives=".reqntid 256,1,1 .maxnreg 128",
        ),
        Case(FAMILY, "griddepcontrol", load + dependent + store, flipped[:64], _X, block=64),
        Case(FAMILY, "hints", load + hints + store, flipped[:64], _X, block=64),
        Case(FAMILY, "early_return", load + early + store, odd, _X, block=64),
    ]


CASES = _cases()
