"""Problems, inputs, oracle and check of Lightning prefill beside kernels that solve a gated delta rule.

    simple GLA   S_t = exp(d_t) S_(t-1) + k_t v_t^T
    delta rule   S_t = exp(d_t) S_(t-1) + beta_t k_t (v_t - (exp(d_t) S_(t-1))^T k_t)^T

Both read o_t = scale * S_t^T q_t. A buffer set holds what either needs: q, v and the log decays of `problem.py`, those
of a head and those of a token, and beta = sigmoid(x) with standard normal x, float32 per token and head. Keys have the
norm 1, because the delta rule grows without bound where beta |k|^2 exceeds 2. A kernel that gets no beta uses 1. There
are no initial states, and every setting returns final ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Setting
from benchmarks.ops import checks
from benchmarks.ops import sequences as seq
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning.problem import Result


@dataclass
class Inputs:
    """One buffer set: q, k, v and log decays, of tokens in `gated`, of heads in `decayed`; beta is fp32 [B,T,H].

    The exponentials of the log decays, fp32 [B,T,H], are there for kernels that take those; ends int64 [N+1] on the
    device are the cumulative lengths of all sequences, also of a dense problem.
    """

    gated: lightning.Inputs
    decayed: lightning.Inputs
    beta: Tensor
    kept_gate: Tensor
    kept_decay: Tensor
    ends: Tensor


def setting(
    tokens: int,
    batch: int = 1,
    heads: int = 64,
    sequences: int | None = None,
    lengths: str = "uniform",
    heads_q: int | None = None,
    slow: bool = False,
) -> Setting:
    """A dense problem of B x T tokens, or with `sequences` a packed one of T tokens in all.

    heads_q: heads of q and k where they are fewer than those of v; the name ends in -Q16 then. slow: log decays are a
    hundredth of what they are otherwise, and thousands of tokens do not forget; the name ends in -slow.
    """
    more = {} if heads_q is None else {"HQ": heads_q}
    suffix = "" if heads_q is None else f"-Q{heads_q}"
    if slow:
        more["slow"], suffix = 1, suffix + "-slow"
    return seq.named(tokens, batch, heads, sequences, lengths, None, suffix, **more)


def make_inputs(problem: Setting, device: Any, seed: int) -> Inputs:
    """Fresh random data of one buffer set."""
    p, dim = problem.params, lightning.DIM
    generator = torch.Generator(device).manual_seed(seed)
    tokens = (seq.batch_of(problem), p["T"], p["H"])

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k = (randn(*tokens[:2], seq.query_heads(problem), dim) for _ in range(2))
    v = randn(*tokens, dim)
    shared = {
        "q": q.bfloat16(),
        "k": torch.nn.functional.normalize(k, dim=-1).bfloat16(),
        "v": v.bfloat16(),
        "offsets": seq.offsets_of(problem, device),
        "state": None,
        "indices": None,
        "checkpoints": None,
    }
    gate = torch.nn.functional.logsigmoid(randn(*tokens)) / (1600 if "slow" in p else 16)
    decay = lightning.decays(p["H"], device)
    return Inputs(
        gated=lightning.Inputs(**shared, gate=gate, decay=None),
        decayed=lightning.Inputs(**shared, gate=None, decay=decay),
        beta=randn(*tokens).sigmoid(),
        kept_gate=gate.exp(),
        kept_decay=(-decay).exp().expand(tokens).contiguous(),
        ends=_ends(problem, shared["offsets"], device),
    )


def _ends(problem: Setting, offsets: seq.Offsets | None, device: Any) -> Tensor:
    if offsets is not None:
        return offsets.int64
    p = problem.params
    return torch.arange(p["B"] + 1, device=device) * p["T"]


def moved(problem: Setting, numbers: int) -> int:
    """The fewest bytes of a call: q, k, v, o and final states, and `numbers` fp32 per token and head.

    Where there are none, a head has one.
    """
    per_head = 4 * problem.params["H"]
    gates = per_head * (seq.batch_of(problem) * problem.params["T"] * numbers or 1)
    dim = lightning.DIM
    return seq.input_bytes(problem, dim) + seq.output_bytes(problem, dim) + gates


def read(problem: Setting) -> int:
    """Bytes of the part of a set that every call touches: q, k and v."""
    return seq.input_bytes(problem, lightning.DIM)


def delta_oracle(
    problem: Setting, x: lightning.Inputs, beta: Tensor | None, heads: list[int]
) -> Result:
    """fp64 outputs [B,T,heads,V] and final states [N,heads,K,V] of a delta rule; beta None is 1."""
    group = problem.params["H"] // seq.query_heads(problem)
    q, k = (t[:, :, [h // group for h in heads]].double() for t in (x.q, x.k))
    v = x.v[:, :, heads].double()
    if x.gate is not None:
        log_decay = x.gate[:, :, heads].double()
    else:
        log_decay = -x.decay[heads].double().expand(v.shape[:3])
    weight = torch.ones_like(log_decay) if beta is None else beta[:, :, heads].double()
    output, final = torch.empty_like(v), []
    for n, (b, start, end) in enumerate(seq.spans(problem)):
        state = seq.initial_state_of(n, None, None, v, heads)
        for a in range(start, end, lightning.ORACLE_CHUNK):
            part = slice(a, min(a + lightning.ORACLE_CHUNK, end))
            qs, ks, vs, ds, ws = (t[b, part].transpose(0, 1) for t in (q, k, v, log_decay, weight))
            o, state = lightning.advance(qs, ks, added(ks, vs, ds, ws, state), ds, state)
            output[b, part] = o.transpose(0, 1)
        final.append(state)
    return output, torch.stack(final)


def added(k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """What the tokens of a chunk add to the state in place of v; k, v are [heads,L,D], log_decay, beta [heads,L].

    Token i adds k_i u_i^T, where u_i depends on the tokens before it: u_i + beta_i sum over j < i of
    exp(d_(j+1) + ... + d_i) (k_i . k_j) u_j = beta_i (v_i - exp(d_0 + ... + d_i) state^T k_i).
    """
    since = log_decay.cumsum(-1)
    causal = torch.ones(2 * since.shape[-1:], dtype=torch.bool, device=k.device).tril()
    # Masked before exp, which would overflow above the diagonal.
    between = (since[:, :, None] - since[:, None, :]).masked_fill(~causal, -torch.inf).exp()
    seen = v - since.exp()[..., None] * (k @ state)
    # The solver assumes ones on the diagonal, and does not read what is above it.
    return torch.linalg.solve_triangular(
        beta[..., None] * (k @ k.mT * between),
        beta[..., None] * seen,
        upper=False,
        unitriangular=True,
    )


def check_against(
    want: Callable[[Setting, Inputs, list[int]], Result],
    run: Callable[[Setting, Inputs], Result],
    problem: Setting,
    device: Any,
    limits: Mapping[str, float],
) -> dict[str, float]:
    """Compares `run(setting, inputs) -> (o, final states [N,H,K,V])` with an oracle of some heads, on fresh data.

    `run` fills outputs that it allocates itself with NaN first.
    """
    x = make_inputs(problem, device, seed=checks.SEED)
    heads = checks.checked_heads(problem.params["H"])
    output, state = want(problem, x, heads)
    o, final = run(problem, x)
    checks.require_finite(problem, output=o, final_state=final)
    errors = {
        "output": checks.worst_head(o[:, :, heads], output, 2),
        "state": checks.worst_head(final[:, heads], state, 1),
    }
    checks.require_within(problem, errors, limits)
    return errors
