"""Which problems have a kernel."""

from __future__ import annotations

import pytest

from liteattention_sm90.config import (
    BACKWARD_REGISTERS,
    MAX_TILES,
    REGISTERS,
    THREADS,
    BackwardConfig,
    ConvertConfig,
    ForwardConfig,
    QueriesConfig,
    SumsConfig,
)


@pytest.mark.parametrize(
    "config, message",
    [
        (ForwardConfig("float32", 64), "bfloat16 or float16, not float32"),
        (ForwardConfig("bfloat16", 60), "multiple of 8 up to 128, not 60"),
        (ForwardConfig("bfloat16", 136), "multiple of 8 up to 128, not 136"),
        (ForwardConfig("bfloat16", 0), "multiple of 8"),
        (ForwardConfig("bfloat16", 64, block_n=32), "64 or 128 keys, not 32"),
        (ForwardConfig("bfloat16", 64, must_do=True), "on a list"),
        (ForwardConfig("bfloat16", 64, packed="int16"), "int32 or int64, not int16"),
    ],
)
def test_configs_that_no_kernel_serves(config, message):
    assert message in config.illegal()


@pytest.mark.parametrize("dim", range(8, 136, 8))
def test_every_head_dimension_is_padded_to_boxes(dim):
    for skip, must_do in ((False, False), (True, False), (True, True)):
        config = ForwardConfig("bfloat16", dim, skip=skip, must_do=must_do)
        assert config.illegal() is None and config.width == (64 if dim <= 64 else 128)


def test_votes_hold_the_longest_row():
    assert MAX_TILES == 4096


@pytest.mark.parametrize("config_of", [BackwardConfig, QueriesConfig, SumsConfig, ConvertConfig])
def test_gradients_have_the_widths_of_attention(config_of):
    assert [config_of("float16", dim).width for dim in (8, 64, 72, 128)] == [64, 64, 128, 128]


@pytest.mark.parametrize("load, rows", [REGISTERS, BACKWARD_REGISTERS])
def test_registers_that_warpgroups_ask_for_are_there(load, rows):
    """A CTA is launched with as many for each thread as fit, in eights, and where warpgroups ask for more in all, the
    last one waits for ever on a card, which neither the compiler nor the emulator notices."""
    at_launch = 65536 // THREADS // 8 * 8
    assert at_launch == 168
    assert 128 * load + 256 * rows <= at_launch * THREADS
