"""Tiny problems of every mode for compute-sanitizer, on a GPU; needs this package, cula-testing and torch, no pytest.

Prints a line per problem; status 1 if a number is wrong. `tools/sanitizer.py` runs it under compute-sanitizer. Inputs
and expectations are made on the CPU, so that hardly anything but the kernels runs under the tool.
"""

from __future__ import annotations

import sys
from functools import partial

import lite_int8
from lite_gradients import problem

from cula_testing.lite import Call, Subject, empty_on, make_inputs
from cula_testing.lite.gradients import Backward, assert_gradients
from cula_testing.sanitizing import run_checks
from liteattention_sm89 import launch, reference

SUBJECT = Subject(launch.forward, reference.lite_attention)

PACKED = ((100, 170), (0, 5), (200, 300), (7, 0))
FORWARD = [
    Call(130, 200),
    Call(200, 130, dim=80, causal=True, dtype="float16"),
    Call(64, 130, dim=256, heads=1),
    Call(200, 600, listed=0.6, heads=4, heads_k=2),
    Call(200, 600, listed=0.6, direction=-1, threshold=-2.0, held=True, on_device=True, dim=64),
    Call(130, 300, listed=0.8, threshold=-4.0, causal=True, block_n=128, dim=96),
    Call(100, 300, listed=0.7, threshold=-2.0, dim=192, heads=1),
    Call(130, 200, listed=0.0, dim=64),
    Call(dim=64, listed=0.7, threshold=-1.0, lengths=PACKED),
]
INT8 = [
    Call(130, 200),
    Call(130, 300, listed=0.6, threshold=-2.0, causal=True, dim=72),
    Call(dim=64, listed=0.7, threshold=-1.0, lengths=PACKED),
]
BACKWARD = [
    Backward(150, 200, dim=64, listed=0.6),
    Backward(200, 70, heads=4, heads_k=2, causal=True, dlse=True, dim=64),
    Backward(130, 140, listed=0.8, block_n=128, heads=1),
    Backward(70, 130, dim=192, heads=1),
    Backward(100, 70, dim=256, heads=1, dtype="float16"),
    Backward(dim=72, causal=True, listed=0.7, lengths=((70, 200), (0, 30), (130, 64), (5, 0))),
]


empty = empty_on("cuda")


def check_forward(call: Call) -> str:
    x = make_inputs(call)
    y = x.to("cuda")
    out, lse, write = SUBJECT.forward(call, y, empty)
    lse = lse.squeeze(0).cpu() if call.lengths else lse.cpu()
    SUBJECT.assert_right(call, x, out.cpu(), lse, None if write is None else write.cpu())
    return "right"


def check_int8(call: Call) -> str:
    y = lite_int8.with_offsets(make_inputs(call), 3.0).to("cuda")
    got = lite_int8.launched(call, y, empty, kernel_for=launch.compile_forward)
    lite_int8.assert_right(call, y, got)
    return "right"


def check_backward(call: Backward) -> str:
    p = problem(call)
    y, (out, lse, dout) = p.inputs.to("cuda"), (t.cuda() for t in (p.out, p.lse, p.dout))
    lse = lse.view(y.q[..., 0].mT.shape)
    dlse = None if p.dlse is None else p.dlse.view(lse.shape).cuda()
    for how in call.how:
        found = tuple(empty(t.shape, t.dtype) for t in (y.q, y.k, y.v))
        launch.backward(
            y.q, y.k, y.v, out, lse, dout, dlse, y.read, y.starts_q, y.starts_k, *y.most, *found,
            scale=call.dim**-0.5, causal=call.causal, block_n=call.block_n, deterministic=how == "order",
        )  # fmt: skip
        assert_gradients(tuple(t.cpu() for t in found), p)
    return "right"


def run_here(first: int = 0, step: int = 1) -> int:
    """Every problem, or every `step`-th from the `first` on, in this process; returns how many are wrong."""
    checks = (
        ("forward", check_forward, FORWARD),
        ("8-bit scores", check_int8, INT8),
        ("backward", check_backward, BACKWARD),
    )
    return run_checks(
        (f"{name:12} {call!s:70}", partial(check, call))
        for name, check, calls in checks
        for call in calls[first::step]
    )


if __name__ == "__main__":
    sys.exit(int(run_here(*map(int, sys.argv[1:])) > 0))
