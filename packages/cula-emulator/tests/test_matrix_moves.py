"""ldmatrix, stmatrix, movmatrix."""

import pytest
import torch
from matrix_launches import check_all, run_body
from tables_matrix import MOVES

import cula_emulator as emulator


def test_every_count_and_order(schedule):
    check_all(MOVES, schedule)


GENERIC = """
    mov.u32 %r12, tile; shl.b32 %r11, %r2, 4; add.u32 %r11, %r11, %r12; mul.wide.u32 %rd6, %r2, 4;
    add.s64 %rd7, %rd6, %rd2; add.s64 %rd6, %rd6, %rd1; ld.global.b32 %r20, [%rd6];
    mov.u64 %rd8, tile; cvta.shared.u64 %rd8, %rd8; mul.wide.u32 %rd9, %r2, 16; add.s64 %rd8, %rd8, %rd9;
    stmatrix.sync.aligned.m8n8.x1.b16 [%rd8], {%r20}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x1.trans.b16 {%r21}, [%rd8]; st.global.b32 [%rd7], %r21;
"""


def test_generic_addresses():
    x = torch.arange(64, dtype=torch.int16)
    out = run_body(GENERIC, x.view(torch.int32), 32, shared=512)
    assert torch.equal(out.view(torch.int16).view(8, 8), x.view(8, 8).t())


@pytest.mark.parametrize(
    "text",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r20, %r21}, [%r2];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32 {%r20}, [%r2];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r2], {%r20};",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r20}, [%r2];",
    ],
)
def test_other_variants_are_refused(text):
    with pytest.raises(emulator.UnsupportedInstruction, match="matrix"):
        run_body(text, torch.zeros(1), 1)


def test_addresses_are_checked():
    move = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r11];"
    with pytest.raises(emulator.OutOfBounds, match="outside the window"):
        run_body("mov.u32 %r11, 16;" + move, torch.zeros(1), 1)
    with pytest.raises(emulator.OutOfBounds, match="aligned to 16"):
        run_body("mov.u32 %r11, tile; add.u32 %r11, %r11, 8;" + move, torch.zeros(1), 1, shared=512)


def test_only_the_lanes_that_name_rows_need_addresses():
    """x1 uses the addresses of lanes 0 to 7; the others may hold anything."""
    body = """
        mov.u32 %r12, tile; shl.b32 %r11, %r2, 4; setp.ge.u32 %p1, %r2, 8; add.u32 %r11, %r11, %r12;
        @%p1 mov.u32 %r11, 3; mov.u32 %r20, 65537;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r11], {%r20};
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r21}, [%r11];
        mul.wide.u32 %rd6, %r2, 4; add.s64 %rd6, %rd6, %rd2; st.global.b32 [%rd6], %r21;
    """
    assert (run_body(body, torch.zeros(1), 32, shared=512) == 65537).all()
