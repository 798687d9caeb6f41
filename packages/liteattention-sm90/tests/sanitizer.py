"""Tiny problems of every mode for compute-sanitizer, on a Hopper GPU; needs torch, this package and cula-testing.

Prints a line per problem; status 1 if a number is wrong. `tools/sanitizer.py` runs it under compute-sanitizer. By hand,
`python sanitizer.py [FIRST STEP] [forward | backward]` runs every STEP-th problem from the FIRST on, of one pass or of
both. Inputs and expectations are made on the CPU, so that hardly anything but the kernels runs under the tool.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from hopper_gradients import per_row, problem

from cula_testing.lite import Call, Subject, empty_on, make_inputs
from cula_testing.lite.gradients import Backward, assert_gradients
from cula_testing.sanitizing import run_checks
from liteattention_sm89 import reference
from liteattention_sm90 import launch

SUBJECT = Subject(launch.forward, reference.lite_attention)


class Forward(NamedTuple):
    """A call, and arguments of the launcher that are for tests: two CTAs draw several query tiles each, and an order
    comes first where there are fewer than it is worth."""

    call: Call
    options: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return "-".join([str(self.call), *(f"{name}={x}" for name, x in self.options.items())])


PACKED = (100, 170), (0, 5), (200, 300), (7, 0), (64, 65)
FEW, ORDERED = {"multiprocessors": 2}, {"multiprocessors": 2, "ordered_from": 1}
FORWARD = [
    Forward(Call(130, 200)),
    Forward(Call(200, 130, dim=80, causal=True, dtype="float16"), FEW),
    Forward(Call(300, 200, heads=4, heads_k=2, causal=True, views=True)),
    Forward(Call(200, 600, listed=0.6, threshold=-2.0), FEW),
    Forward(Call(200, 500, listed=0.6, threshold=-1.0, block_n=128, dim=64)),
    Forward(Call(200, 300, listed=0.8, threshold=-4.0, causal=True, heads=4, heads_k=2), FEW),
    Forward(Call(130, 300, listed=0.8, threshold=-4.0, causal=True, block_n=128, dim=96)),
    Forward(Call(200, 600, listed=0.6, direction=-1, threshold=-2.0, held=True, dim=64)),
    Forward(Call(200, 600, listed=0.6, direction=-1, threshold=-2.0, held=True, on_device=True), FEW),
    Forward(Call(64, 4400, listed=0.9, threshold=-0.5, dim=64, heads=1)),
    Forward(Call(130, 200, listed=0.0, dim=64)),
    Forward(Call(400, 600, listed=0.5, threshold=-2.0, heads=4), ORDERED),
    Forward(Call(400, 400, listed=0.6, threshold=-2.0, causal=True, dim=64, block_n=128), ORDERED),
    Forward(Call(lengths=PACKED), FEW),
    Forward(Call(lengths=PACKED, causal=True, dim=64, heads=4, heads_k=2, index_dtype="int64", views=True)),
    Forward(Call(lengths=PACKED, listed=0.7, threshold=-2.0, dim=80), FEW),
    Forward(Call(lengths=PACKED, listed=0.7, threshold=-2.0, direction=-1, causal=True, block_n=128), ORDERED),
]  # fmt: skip
WIDE = Backward(150, 200, dim=128, how=("atomics",), arch="sm_90a")
GROUPS = replace(WIDE, rows=200, keys=300, heads=4, heads_k=2, causal=True)
BACKWARD = [
    WIDE,
    replace(WIDE, dim=64),
    replace(GROUPS, keys=130, dim=80, dtype="float16", dlse=True),
    replace(WIDE, rows=300, keys=300, listed=0.5, views=True),
    replace(WIDE, rows=200, keys=300, dim=64, batch=2, listed=0.6, tiles="by turns"),
    replace(WIDE, rows=260, keys=400, dim=96, listed=0.6, block_n=128),
    replace(GROUPS, listed=0.7, dlse=True),
    replace(GROUPS, listed=0.7, dim=64, block_n=128),
    replace(WIDE, lengths=PACKED, heads=4, heads_k=2, dlse=True, index_dtype="int64"),
    replace(WIDE, lengths=PACKED, causal=True, dim=64, listed=0.7, views=True),
    replace(WIDE, lengths=PACKED, dim=80, listed=0.7, block_n=128),
]
# The same bits every time: each mode of both kernels once more.
ORDER = {"how": ("order",)}
BACKWARD += [
    replace(WIDE, **ORDER),
    replace(GROUPS, keys=130, dim=80, dtype="float16", dlse=True, **ORDER),
    replace(WIDE, rows=300, keys=300, listed=0.5, views=True, **ORDER),
    replace(WIDE, rows=200, keys=300, dim=64, batch=2, listed=0.6, tiles="no first row", **ORDER),
    replace(WIDE, rows=260, keys=400, dim=96, listed=0.6, block_n=128, **ORDER),
    replace(GROUPS, listed=0.7, dlse=True, **ORDER),
]

empty = empty_on("cuda")


def check_forward(given: Forward) -> str:
    call = given.call
    x = make_inputs(call)
    out, lse, write = SUBJECT.forward(call, x.to("cuda"), empty, **given.options)
    lse = lse.cpu() if call.lengths is None else lse[0].cpu()
    SUBJECT.assert_right(call, x, out.cpu(), lse, None if write is None else write.cpu())
    return "right"


def check_backward(call: Backward) -> str:
    p = problem(call)
    y, (out, lse, dout) = p.inputs.to("cuda"), (t.cuda() for t in (p.out, per_row(p.lse), p.dout))
    dlse = None if p.dlse is None else per_row(p.dlse.cuda())
    found = tuple(empty(t.shape, t.dtype) for t in (y.q, y.k, y.v))
    launch.backward(
        y.q, y.k, y.v, out, lse, dout, dlse, y.read, y.starts_q, y.starts_k, *y.most, *found,
        scale=call.dim**-0.5, causal=call.causal, block_n=call.block_n,
        deterministic="order" in call.how, apart="order" in call.how, **(FEW if "order" in call.how else {}),
    )  # fmt: skip
    assert_gradients(tuple(t.cpu() for t in found), p)
    return "right"


CHECKS = {"forward": (check_forward, FORWARD), "backward": (check_backward, BACKWARD)}


def run_here(first: int = 0, step: int = 1, *passes: str) -> int:
    """Every `step`-th problem of some passes from the `first` on, in this process; returns how many are wrong."""
    return run_checks(
        (f"{name:9} {call!s:90}", partial(check, call))
        for name, (check, calls) in CHECKS.items()
        if not passes or name in passes
        for call in calls[first::step]
    )


def main(arguments: list[str]) -> int:
    """Status of the program; numbers are FIRST and STEP, and words are passes."""
    numbers = [int(word) for word in arguments if word.isdigit()]
    passes = [word for word in arguments if not word.isdigit()]
    if len(numbers) not in (0, 2) or not CHECKS.keys() >= set(passes):
        sys.stderr.write(f"expected [FIRST STEP] and passes of {', '.join(CHECKS)}\n")
        return 2
    return int(run_here(*(numbers or (0, 1)), *passes) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
