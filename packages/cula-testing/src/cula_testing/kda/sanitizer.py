"""Tiny problems of every mode for compute-sanitizer, on a GPU.

`tests/sanitizer.py` of a package runs them and prints a line per problem; its status is 1 if a number is wrong.
`tools/sanitizer.py` runs that under compute-sanitizer.
Inputs and expectations are made on the CPU, so that hardly anything but the kernels runs under the tool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from .checks import MAX_BFLOAT16_ERROR, check
from .inputs import inputs

LENGTHS = [70, 0, 1, 130, 64]
FP16, BF16 = torch.float16, torch.bfloat16
LOGITS = {"use_beta_sigmoid_in_kernel": True}
PLAIN = {"use_qk_l2norm_in_kernel": False, "bound": MAX_BFLOAT16_ERROR}
KEPT = {"return_intra": True, "disable_recompute": True}


class Problem(NamedTuple):
    """A call: `tokens` for a dense batch, `lengths` for packed sequences; `given` is for `inputs`, `options` for
    `check`. without: arguments that are left out."""

    name: str
    given: dict
    options: dict
    tokens: int = 0
    lengths: list[int] | None = None
    batch: int = 1
    heads: tuple[int, int] = (1, 2)
    gate: str = "safe"
    kind: str = "moderate"
    without: tuple[str, ...] = ()


PROBLEMS = (
    Problem("dense", {}, {}, 130, batch=2),
    Problem("one token, no states", {}, {"state": "none"}, 1),
    Problem("V first, fp16", {"dtype": FP16}, {"v_first": True}, 200),
    Problem("two tiles", {}, {"state": "final"}, 70, heads=(7, 70)),
    Problem("many items", {}, {"state": "initial"}, 70, batch=3, heads=(2, 60)),
    Problem("equal keys", {"gate_dtype": BF16}, {}, 150, kind="equal_keys"),
    Problem("log gate", {"normalized": True, "gate_dtype": FP16}, PLAIN, 100, gate="log"),
    Problem("log gate, any", {}, {}, 150, gate="log", kind="resets"),
    Problem("softplus gate", {"gate_dtype": BF16}, {}, 150, gate="softplus", kind="resets"),
    Problem("safe gate, any", {}, {"lower_bound": -8.0, "safe_gate": False}, 130),
    Problem("no rate, no bias", {}, {}, 100, without=("A_log", "dt_bias")),
    Problem("logits", {"logits": True, "beta_dtype": BF16}, LOGITS, 100),
    Problem("twice the strength", {"logits": True}, LOGITS | {"allow_neg_eigval": True}, 100),
    Problem(
        "operands bf16", {}, {"operand_dtype": BF16, "bound": MAX_BFLOAT16_ERROR}, 150, batch=2,
    ),
    Problem("views", {}, {"gaps": True}, 130, batch=2),
    Problem("pieces", {}, {"chunks": 2}, 200, batch=2),
    Problem("pieces, no states", {}, {"chunks": 1, "state": "none"}, 130),
    Problem("segments", {}, {"use_intracard_cp": True}, 3100, heads=(1, 1), kind="near_zero"),
    Problem(
        "segments, V first", {}, {"use_intracard_cp": True, "v_first": True, "state": "final"}, 3072,
        kind="moderate",
    ),
    Problem("packed, pool", {}, {"state": "pool"}, lengths=LENGTHS),
    Problem("packed, pool read", {}, {"state": "read", "v_first": True}, lengths=LENGTHS),
    Problem("packed, any gate", {}, {}, lengths=LENGTHS, gate="log", kind="resets"),
    Problem("packed, two tiles", {}, {"state": "pool"}, lengths=LENGTHS, heads=(4, 16)),
    Problem("packed, many", {}, {"state": "pool"}, lengths=[3, 0, 70, 1] * 10, heads=(1, 1)),
    Problem("packed, pieces", {}, {"chunks": 3, "state": "read"}, lengths=LENGTHS),
    Problem("packed, pieces, pool", {}, {"chunks": 1, "state": "pool"}, lengths=LENGTHS),
    Problem(
        "packed, segments", {}, {"use_intracard_cp": True, "state": "pool"}, lengths=[3100, 0, 70, 1],
        heads=(1, 1), kind="near_zero",
    ),
    Problem("for a backward pass", {}, KEPT, 130, batch=2),
    Problem("packed, for a backward pass", {}, KEPT | {"chunks": 3}, lengths=LENGTHS),
)  # fmt: skip


def run(
    chunk_kda: Callable[..., tuple], problem: Problem, seed: int, device: str
) -> dict[str, float]:
    """Returns the errors of one problem."""
    x = inputs(
        problem.batch, problem.tokens or sum(problem.lengths or ()), *problem.heads, problem.kind,
        gate=problem.gate, seed=seed, lengths=problem.lengths, initial=True, **problem.given,
    )  # fmt: skip
    x |= dict.fromkeys(problem.without)
    return check(chunk_kda, x, problem.gate, problem.kind, device=device, **problem.options)


def run_here(
    chunk_kda: Callable[..., tuple], first: int = 0, step: int = 1, device: str = "cuda"
) -> int:
    """Runs every problem, or every `step`-th from the `first` on, in this process; returns how many are wrong."""
    wrong = 0
    for seed, problem in list(enumerate(PROBLEMS))[first::step]:
        try:
            errors = run(chunk_kda, problem, seed, device)
            result = "  ".join(f"{what} {error:.1e}" for what, error in errors.items())
        except AssertionError as error:
            wrong += 1
            result = f"WRONG {error}"
        sys.stdout.write(f"{problem.name:24} {result}\n")
        sys.stdout.flush()
    return wrong


def main(chunk_kda: Callable[..., tuple], arguments: list[str]) -> int:
    """Runs the problems that `tools/sanitizer.py` names, as [first, step]; returns the exit status."""
    return int(run_here(chunk_kda, *map(int, arguments)) > 0)
