"""The compiled kernel on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "liteattention-sm89/tests"))
import lite_launch
import pytest
import torch
from lite_helpers import DENSE, LISTED, Call, assert_right, make_inputs

from cula_testing.compiled import emulated_kernel
from liteattention_sm90 import launch

SERVED = [c for c in DENSE + LISTED if c.lengths is None and c.dim <= 128]


@pytest.fixture
def run(emulated, monkeypatch):
    def forward(q, k, v, out, lse, read, held, write, starts_q, starts_k, most, **settings):
        assert starts_q is None
        launch.forward(q, k, v, out, lse, read, held, write, **settings)

    monkeypatch.setattr(lite_launch.launch, "forward", forward)

    def run(call, x, ctas=1, **changes):
        def kernels(config):
            kernel = emulated_kernel(emulated, launch.unit(config))
            return lambda *given: kernel(*given, **changes)

        return lite_launch.forward(call, x, emulated.empty, kernels=kernels, multiprocessors=ctas)

    return run


@pytest.mark.parametrize("call", SERVED, ids=str)
def test_numbers(run, call):
    x = make_inputs(call)
    assert_right(call, x, *run(call, x))
