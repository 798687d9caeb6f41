"""Every wait, fence and barrier of the kernel is taken out in turn."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "liteattention-sm89/tests"))
import lite_launch
import pytest
import torch
from lite_helpers import Call, make_inputs

from cula_emulator import mutation
from cula_testing.compiled import emulated_kernel
from liteattention_sm90 import launch


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_matters(emulated, monkeypatch):
    def forward(q, k, v, out, lse, read, held, write, starts_q, starts_k, most, **settings):
        launch.forward(q, k, v, out, lse, read, held, write, **settings)

    monkeypatch.setattr(lite_launch.launch, "forward", forward)
    call = Call(420, 700, listed=0.8, dim=64, heads=1, threshold=-1.0)
    x = make_inputs(call)
    seen = {}

    def run(**changes):
        def kernels(config):
            seen["kernel"] = emulated_kernel(emulated, launch.unit(config))
            return lambda *given: seen["kernel"](*given, **changes)

        return lite_launch.forward(call, x, emulated.empty, kernels=kernels, multiprocessors=1)

    want = run()

    def check(options):
        for a, b in zip(run(**vars(options)), want):
            assert torch.equal(a, b), "another result"

    report = mutation.run(check, seen["kernel"], schedules=mutation.SCHEDULES[:3])
    # The last turn leaves no barrier half full; and the emulator keeps shared memory longer than its CTA, so that nobody
    # need wait for the last outputs.
    unnoticed = sorted(m.text for m in report.unnoticed)
    assert unnoticed == ["bar.sync 1, 256", "cp.async.bulk.wait_group 0"], str(report)
    assert not report.not_reached, str(report)
