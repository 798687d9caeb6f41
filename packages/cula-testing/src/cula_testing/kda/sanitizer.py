"""Tiny problems of every mode for compute-sanitizer, on a GPU.

`tests/sanitizer.py` of a package runs them and prints a line per problem; its status is 1 if a number is wrong.
`tools/sanitizer.py` runs that under compute-sanitizer.
Inputs and expectations are made on the CPU, so that hardly anything but the kernels runs under the tool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from cula_core.delta_rule.launch import scheduled

from ..sanitizing import run_checks
from .checks import MAX_BFLOAT16_ERROR, check
from .gradient_cases import UNBOUNDED, gradient_case, through_autograd
from .gradient_cases import check as check_gradients
from .inputs import inputs

LENGTHS = [70, 0, 1, 130, 64]
FP16, BF16 = torch.float16, torch.bfloat16
LOGITS = {"use_beta_sigmoid_in_kernel": True}
PLAIN = {"use_qk_l2norm_in_kernel": False, "bound": MAX_BFLOAT16_ERROR}
BOTH = {"initial": True, "dht": True}
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


# Those of the problems above that are run with both kernels beside each other too, with gates of 16 bits.
BESIDE = (
    "dense", "one token, no states", "V first, fp16", "two tiles", "many items", "equal keys", "no rate, no bias",
    "logits", "operands bf16", "views", "packed, pool", "packed, pool read", "packed, two tiles", "packed, many",
)  # fmt: skip


def run_beside(
    chunk_kda: Callable[..., tuple], problem: Problem, seed: int, device: str
) -> dict[str, float]:
    """Returns the errors of one problem, whose kernels run beside each other."""
    given = {"gate_dtype": BF16} | problem.given
    with scheduled("on") as plans:
        errors = run(chunk_kda, problem._replace(given=given), seed, device)
    assert plans and all(plan.beside for plan in plans)
    return errors


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


# Cases of gradients, for packages that train: kind, what the case has, options. Their reference runs on the GPU too.
TRAINED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gradients, packed": ("mixed", {"size": tuple(LENGTHS), "heads": (1, 2), **BOTH}, {}),
    "gradients, dense": ("moderate", {"size": (2, 70), "packed": False, "l2norm": False}, {}),
    "gradients, any decay": (
        UNBOUNDED, {"size": (130,), "gate": "softplus", "gate_dtype": BF16}, {},
    ),
    "gradients, one token": (
        "strong", {"size": (1,), "gate": "log", "state_v_first": True, **BOTH}, {},
    ),
    "gradients, cut": (
        "near_zero", {"size": (3100, 0, 70), "heads": (1, 1), **BOTH}, {"segment_tokens": 1024},
    ),
}  # fmt: skip


def gradient_errors(
    chunk_kda: Callable[..., tuple],
    kind: str,
    given: dict[str, Any],
    options: dict[str, Any],
    device: str,
) -> str:
    """Raises where a gradient is wrong."""
    case = gradient_case(kind, device=device, **given)
    check_gradients(through_autograd(chunk_kda, case, **options), case)
    return "gradients within their bars"


def run_here(
    chunk_kda: Callable[..., tuple],
    first: int = 0,
    step: int = 1,
    device: str = "cuda",
    trains: bool = False,
    beside: bool = False,
) -> int:
    """Runs every problem, or every `step`-th from the `first` on, in this process; returns how many are wrong.

    trains: gradients too. beside: also with kernels beside each other.
    """

    def errors_of(runs: Callable[..., dict[str, float]], seed: int, problem: Problem) -> str:
        errors = runs(chunk_kda, problem, seed, device)
        return "  ".join(f"{what} {error:.1e}" for what, error in errors.items())

    checks = [(p.name, partial(errors_of, run, seed, p)) for seed, p in enumerate(PROBLEMS)]
    if beside:
        checks += [
            (f"{p.name}, beside", partial(errors_of, run_beside, seed, p))
            for seed, p in enumerate(PROBLEMS)
            if p.name in BESIDE
        ]
    if trains:
        checks += [
            (name, partial(gradient_errors, chunk_kda, *case, device))
            for name, case in TRAINED.items()
        ]
    return run_checks((f"{name:28}", check) for name, check in checks[first::step])


def main(
    chunk_kda: Callable[..., tuple],
    arguments: list[str],
    trains: bool = False,
    beside: bool = False,
) -> int:
    """Runs the problems that `tools/sanitizer.py` names, as [first, step]; returns the exit status."""
    return int(run_here(chunk_kda, *map(int, arguments), trains=trains, beside=beside) > 0)
