"""Every wait, fence and barrier of the kernel is taken out in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cula_emulator import mutation
from cula_testing.compiled import emulated_kernel
from cula_testing.lite import Call, Subject, make_inputs
from liteattention_sm89 import reference
from liteattention_sm90 import launch

SUBJECT = Subject(launch.forward, reference.lite_attention)


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_matters(emulated):
    call = Call(420, 700, listed=0.8, dim=64, heads=1, threshold=-1.0)
    x = make_inputs(call)
    # Scores grow on the way, so that what was added up shrinks.
    x = replace(x, k=(x.k * torch.linspace(0.2, 6, call.keys)[:, None, None]).to(x.k.dtype))
    seen = {}

    def run(**changes):
        def kernels(config):
            seen["kernel"] = emulated_kernel(emulated, launch.unit(config))
            return lambda *given: seen["kernel"](*given, **changes)

        return SUBJECT.forward(call, x, emulated.empty, kernels=kernels, multiprocessors=1)

    want = run()

    def check(options):
        for a, b in zip(run(**vars(options)), want):
            assert torch.equal(a, b), "another result"

    report = mutation.run(check, seen["kernel"], schedules=mutation.SCHEDULES[:3])
    # The emulator keeps shared memory longer than its CTA, so that nobody need wait for the last outputs.
    unnoticed = sorted(m.text for m in report.unnoticed)
    assert unnoticed == ["cp.async.bulk.wait_group 0"], str(report)
    assert not report.not_reached, str(report)
