"""What turns a model's raw projections into log decays and write strengths; differentiable.

Sources: Kimi Linear, arXiv 2510.26692; Mamba-2 for the softplus form, arXiv 2405.21060.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gate_kind(given: bool, raw: bool, bounded: bool) -> str:
    """Returns what g is: "none", the "log" decay itself, or a raw gate of the "softplus" or of the "safe" form."""
    if not given:
        return "none"
    if not raw:
        return "log"
    return "safe" if bounded else "softplus"


def strength_kind(given: bool, raw: bool) -> str:
    """Returns what beta is: "one" where there is none, the strength as "given", or its "logits"."""
    if not given:
        return "one"
    return "logits" if raw else "given"


def log_decay(
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    softplus: tuple[float, float] | None = None,
) -> Tensor:
    """Returns the log decay (natural log, <= 0) of a raw gate x [..., HV, K], or [..., HV, 1] for one gate per head.

    The softplus form, without `lower_bound`, is `-exp(A_log) * softplus(x + dt_bias)`; the safe form, with
    `lower_bound < 0`, is `lower_bound * sigmoid(exp(A_log) * (x + dt_bias))`, in (lower_bound, 0). A_log has HV entries
    (None: 0), dt_bias as many as x has per token (None: 0). softplus: beta and threshold, `log(1 + exp(beta x)) / beta`
    up to `beta x = threshold` and x above; None: beta 1, and no threshold.
    """
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).reshape(x.shape[-2:])
    rate = 1.0 if A_log is None else A_log.to(x.dtype).exp()[:, None]
    if lower_bound is not None:
        return lower_bound * (rate * x).sigmoid()
    if softplus is not None:
        return -rate * F.softplus(x, *softplus)
    # logaddexp has no linear piece for large x, so that it stays exact in fp64.
    return -rate * torch.logaddexp(x, torch.zeros_like(x))


def write_strength(logits: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """Returns `sigmoid(logits)`, or twice that, which lets `I - beta k k^T` have a negative eigenvalue."""
    beta = logits.sigmoid()
    return 2 * beta if allow_neg_eigval else beta
