"""Tiny problems of every mode for compute-sanitizer, on a Hopper GPU; needs torch, pytest, this package,
cula-emulator and cula-testing.

Prints a line per problem; status 1 if a number is wrong. `tools/sanitizer.py` runs it under compute-sanitizer.
racecheck reports races of tables that a warp hands over by one arriving thread, which it does not follow;
docs/lightning-prefill.md says more. Inputs and expectations are made on the CPU, so that hardly anything but the
kernels runs under the tool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from gated_gradients import check as check_gradients
from gated_gradients import differentiate, gradient_case
from gpu_oracle import check, make
from test_gated_slices import assert_right, forced
from test_slices import assert_gradients_right, assert_slices_right

from cula_core.reference.gated_delta_rule import gated_delta_rule
from cula_lightning_sm90 import chunk_gated_delta_rule, plan
from cula_testing.comparing import relative_rmse
from cula_testing.gated.cases import Case, arguments
from cula_testing.gated.contract import good_arguments
from cula_testing.sanitizing import run_checks
from cula_testing.slices import BOUNDS

LENGTHS = [70, 0, 1, 130, 64]


class Problem(NamedTuple):
    """A call: `tokens` for a dense batch, `lengths` for packed sequences; `options` are those of `check`."""

    name: str
    options: dict
    batch: int = 1
    tokens: int = 0
    lengths: list[int] | None = None
    heads: int = 2
    heads_v: int = 2
    dims: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"
    gate: str | None = None
    decay: bool = True


PROBLEMS = (
    Problem("decay", {}, batch=2, tokens=130),
    Problem("decay, one token, no states", {"state": "none"}, tokens=1),
    Problem("decay, V first", {"v_first": True}, tokens=200, dims=(64, 128), dtype="float16"),
    Problem("decay, two tiles", {"state": "final"}, tokens=100, heads=10, heads_v=140),
    Problem("decay, many items", {"state": "initial"}, 3, 70, heads_v=60, dims=(128, 64)),
    Problem("no decay", {}, tokens=150, decay=False),
    Problem("gate", {}, tokens=500, gate="float32", decay=False),
    Problem("gate and decay", {}, batch=2, tokens=65, heads=1, gate="bfloat16", dims=(64, 64)),
    Problem("norm, checkpoints", {"l2norm": True, "every": 64}, tokens=260),
    Problem("exact state", {"exact": True}, tokens=260),
    Problem("segments", {"splits": 3}, batch=2, tokens=400, heads=1),
    Problem("gate, segments, exact", {"splits": 4, "exact": True}, tokens=330, gate="float16"),
    Problem("packed, pool", {"state": "pool"}, lengths=LENGTHS),
    Problem("packed, pool read", {"state": "read", "v_first": True}, lengths=LENGTHS),
    Problem("packed, segments", {"state": "pool", "splits": 3, "every": 64}, lengths=LENGTHS),
    Problem("packed, gate, two tiles", {}, lengths=LENGTHS, heads=4, heads_v=16, gate="float32"),
    Problem("packed, many items", {"state": "pool", "l2norm": True}, lengths=[3, 0, 70, 1] * 10),
)

NORM = {"use_qk_l2norm_in_kernel": True}
GATED_LIMIT = 3e-3
# Arguments of chunk_gated_delta_rule, on the CPU.
GATED: dict[str, Callable[[], dict[str, Any]]] = {
    "gated, dense": lambda: good_arguments("dense"),
    "gated, pool, checkpoints": lambda: good_arguments("packed") | NORM,
    "gated, V first": lambda: good_arguments("packed") | NORM | {"state_v_first": True},
    "gated, log decays": lambda: arguments(Case((1, 1, 2), tuple(LENGTHS), True, True, None)),
    "gated, cut": lambda: (
        arguments(Case((1, 1, 2), (2100, 64), True, True, None)) | {"use_intracard_cp": True}
    ),
    "gated, nothing optional": lambda: arguments(Case((2, 1, 1), (130,), False, False, None)),
}


def gated_errors(make_arguments: Callable[[], dict[str, Any]]) -> str:
    """Errors of outputs and of states; raises where one is too large."""
    a = make_arguments()
    left_out = ("out", "output_final_state", "use_intracard_cp")
    want = gated_delta_rule(**{name: x for name, x in a.items() if name not in left_out})
    there = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in a.items()}
    if there.get("out") is None:
        # What TMA writes to memory that nothing was written to before is not initialised for initcheck.
        there["out"] = torch.full_like(want.out, float("nan"), dtype=a["v"].dtype, device="cuda")
    o, state = chunk_gated_delta_rule(**there)
    errors = {"output": relative_rmse(o.cpu(), want.out)}
    if state is not None:
        expected = want.states if want.pool is None else want.pool
        errors["state"] = relative_rmse(state.cpu(), expected)
    assert max(errors.values()) <= GATED_LIMIT, errors
    return "  ".join(f"{what} {error:.1e}" for what, error in errors.items())


# Kinds and options of cases of gradients, whose reference runs on the GPU too.
TRAINED: dict[str, dict[str, Any]] = {
    "gated training, packed": {
        "size": tuple(LENGTHS),
        "heads": (1, 2),
        "initial": True,
        "dht": True,
    },
    "gated training, dense": {"size": (2, 70), "packed": False, "l2norm": False},
}


def gradient_errors(options: dict[str, Any]) -> str:
    """Raises where a gradient is wrong."""
    case = gradient_case("mixed", device=torch.device("cuda"), **options)
    check_gradients(differentiate(case), case)
    return "gradients within their bars"


# Ranks that hold slices of sequences.
SLICES: dict[str, Callable[[pytest.MonkeyPatch, torch.device], None]] = {
    "gated slices": lambda patch, cuda: assert_right(patch, BOUNDS["in a chunk"], cuda),
    "gated slices, cut": lambda patch, cuda: assert_right(
        patch, BOUNDS["in a chunk"], cuda, planner=forced(5, 1)
    ),
    "slices": lambda _, cuda: assert_slices_right("gates", BOUNDS["three"], cuda),
    "slices, training": lambda _, cuda: assert_gradients_right("gates", True, cuda),
}


def slice_errors(check_slices: Callable[[pytest.MonkeyPatch, torch.device], None]) -> str:
    """Raises where ranks do not have what whole sequences give."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_MIN_SEGMENT", 64)
        check_slices(patch, torch.device("cuda"))
    return "as whole sequences"


def run_here(first: int = 0, step: int = 1) -> int:
    """Every problem, or every `step`-th from the `first` on, in this process; returns how many are wrong."""

    def errors_of(seed: int, problem: Problem) -> str:
        inputs = make(
            "cpu", problem.lengths or problem.batch, problem.tokens, problem.heads, problem.heads_v,
            problem.dims, dtype=getattr(torch, problem.dtype),
            gate=getattr(torch, problem.gate) if problem.gate else None, decay=problem.decay, seed=seed,
        )  # fmt: skip
        errors = check(inputs, **problem.options, device="cuda")
        return "  ".join(f"{what} {error:.1e}" for what, error in errors.items())

    checks = [(f"{p.name:28}", partial(errors_of, seed, p)) for seed, p in enumerate(PROBLEMS)]
    checks += [(f"{name:28}", partial(gated_errors, made)) for name, made in GATED.items()]
    checks += [(f"{name:28}", partial(gradient_errors, more)) for name, more in TRAINED.items()]
    checks += [(f"{name:28}", partial(slice_errors, made)) for name, made in SLICES.items()]
    return run_checks(checks[first::step])


if __name__ == "__main__":
    sys.exit(int(run_here(*map(int, sys.argv[1:])) > 0))
