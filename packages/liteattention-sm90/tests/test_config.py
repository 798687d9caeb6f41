"""Which problems have a kernel."""

from __future__ import annotations

import pytest

from liteattention_sm90.config import MAX_TILES, ForwardConfig


@pytest.mark.parametrize(
    "config, message",
    [
        (ForwardConfig("float32", 64), "bfloat16 or float16, not float32"),
        (ForwardConfig("bfloat16", 60), "multiple of 8 up to 128, not 60"),
        (ForwardConfig("bfloat16", 136), "multiple of 8 up to 128, not 136"),
        (ForwardConfig("bfloat16", 0), "multiple of 8"),
        (ForwardConfig("bfloat16", 64, block_n=32), "64 or 128 keys, not 32"),
        (ForwardConfig("bfloat16", 64, must_do=True), "on a list"),
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
