"""Problems, inputs, oracle, check and byte counts of KDA prefill.

    S'_t = diag(exp(g_t)) S_(t-1)
    S_t  = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T          o_t = scale * S_t^T q_t

The call normalizes q and k itself, and computes log decays from raw gates x: g = -5 sigmoid(exp(A_log) (x + bias)).
x is standard normal. The bias, in another order in every head, spreads the mean log decays of the channels from -1e-3
to -4, and A_log lowers the smallest to -1e-5 in the last head. beta is sigmoid(x - c), computed before the call, in the
dtype of q; c runs from 0 in the first head to 6 in the last, where new tokens erase next to nothing. So an error in a
state that a call or a segment hands on shows in the last head thousands of tokens later. With `raw_beta` the call gets
x - c and takes the sigmoid itself. Every setting returns final states.

`ops/sequences.py` describes the lengths of packed sequences and the features gva, state and pool. A problem has at most
one feature, whose name follows a "+" in the name of the setting. Other features:
    fp16          tensors are float16 instead of bfloat16
    fp32gate      raw gates are float32
    unbounded     log decays are -exp(A_log) softplus(x + bias), which have no lower bound; exp(A_log) runs from 1 to 16
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.registry import Setting
from benchmarks.ops import checks
from benchmarks.ops import sequences as seq
from benchmarks.ops.kda import FIRST

DIM = 128
L2_EPS = 1e-6
LOWER_BOUND = -5.0
BIASES = (-9.0, 1.5)
BOUNDED_RATES = (-0.5, 0.5)
UNBOUNDED_RATES = (0.0, math.log(16))
FORGETTING = (0.0, -6.0)

FEATURES = ("gva", "fp16", "state", "pool", "fp32gate", "unbounded")

# How many tokens the oracle computes at once.
ORACLE_CHUNK = 64
LIMIT = 3e-3

Result = tuple[Tensor, Tensor]


@dataclass
class Inputs:
    """One buffer set: q, k [B,T,H,K], v [B,T,HV,V], gate [B,T,HV,K] and beta [B,T,HV]; A_log [HV], dt_bias [HV K] fp32.

    state fp32 [N or rows of the pool,HV,K,V] and indices int32 [N] are None where there is no initial state, or no
    pool. raw_beta: beta holds logits, whose sigmoid the call takes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    offsets: seq.Offsets | None
    state: Tensor | None
    indices: Tensor | None
    raw_beta: bool = False


def setting(
    tokens: int,
    batch: int = 1,
    heads: int = 64,
    sequences: int | None = None,
    lengths: str = "uniform",
    feature: str | None = None,
) -> Setting:
    """A dense problem of B x T tokens, or with `sequences` a packed one of T tokens in all.

    Named like B2-T4096-H64, N10-T8192-skewed-H64, N2-T33792-long-H8 and B1-T4096-H64+pool.
    """
    if lengths not in seq.KINDS or feature not in (None, *FEATURES):
        raise ValueError(f"setting: unknown lengths or feature: {lengths}, {feature}")
    return seq.named(tokens, batch, heads, sequences, lengths, feature)


def is_bounded(problem: Setting) -> bool:
    """Whether the log decays have a lower bound."""
    return not seq.has(problem, "unbounded")


def longest(problem: Setting) -> int:
    """Tokens of the longest sequence."""
    return max(end - start for _, start, end in seq.spans(problem))


def make_inputs(problem: Setting, device: Any, seed: int, raw_beta: bool = False) -> Inputs:
    """Fresh random data of one buffer set; with `raw_beta` all of it but beta is the same as without."""
    p = problem.params
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float16 if seq.has(problem, "fp16") else torch.bfloat16
    gate_dtype = torch.float32 if seq.has(problem, "fp32gate") else dtype

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def spread(ends: tuple[float, float], steps: int) -> Tensor:
        return torch.linspace(*ends, steps, device=device)

    heads, tokens, query = p["H"], (seq.batch_of(problem), p["T"]), seq.query_heads(problem)

    def strength() -> Tensor:
        logits = randn(*tokens, heads) + spread(FORGETTING, heads)
        return (logits if raw_beta else logits.sigmoid()).to(dtype)

    order = torch.rand(heads, DIM, generator=generator, device=device).argsort(-1)
    state, indices = seq.initial_states(problem, DIM, generator)
    return Inputs(
        q=randn(*tokens, query, DIM),
        k=randn(*tokens, query, DIM),
        v=randn(*tokens, heads, DIM),
        gate=randn(*tokens, heads, DIM, dtype=gate_dtype),
        beta=strength(),
        A_log=spread(BOUNDED_RATES if is_bounded(problem) else UNBOUNDED_RATES, heads),
        dt_bias=spread(BIASES, DIM)[order].flatten(),
        offsets=seq.offsets_of(problem, device),
        state=state,
        indices=indices,
        raw_beta=raw_beta,
    )


def read(problem: Setting) -> int:
    """Bytes of all inputs but the workspace, each once."""
    heads, tokens = problem.params["H"], seq.batch_of(problem) * problem.params["T"]
    gates = tokens * heads * (DIM * (4 if seq.has(problem, "fp32gate") else 2) + 2)
    parameters = 4 * heads * (1 + DIM)
    return seq.input_bytes(problem, DIM) + gates + parameters


def moved(problem: Setting) -> int:
    """The fewest bytes of a call."""
    return read(problem) + seq.output_bytes(problem, DIM)


def log_decays(problem: Setting, x: Inputs, heads: list[int]) -> Tensor:
    """fp64 log decays [B,T,heads,K] of the raw gates."""
    shifted = x.gate[:, :, heads].double() + x.dt_bias.view(-1, DIM)[heads].double()
    rate = x.A_log[heads].double().exp()[:, None]
    if is_bounded(problem):
        return LOWER_BOUND * torch.sigmoid(rate * shifted)
    # Above a threshold torch's softplus is the identity; no value reaches this threshold.
    return -rate * F.softplus(shifted, threshold=1e3)


def oracle(problem: Setting, x: Inputs, heads: list[int]) -> Result:
    """fp64 outputs [B,T,heads,V] and final states [N,heads,K,V] of value heads `heads`, chunk by chunk."""
    group = problem.params["H"] // seq.query_heads(problem)
    q, k = (t[:, :, [h // group for h in heads]].double() for t in (x.q, x.k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + L2_EPS).sqrt() for t in (q, k))
    v, beta = x.v[:, :, heads].double(), x.beta[:, :, heads, None].double()
    if x.raw_beta:
        beta = beta.sigmoid()
    log_decay = log_decays(problem, x, heads)
    output, final = torch.empty_like(v), []
    for n, (b, start, end) in enumerate(seq.spans(problem)):
        state = seq.initial_state_of(n, x.state, x.indices, v, heads)
        for a in range(start, end, ORACLE_CHUNK):
            part = slice(a, min(a + ORACLE_CHUNK, end))
            chunk = (t[b, part].transpose(0, 1) for t in (q, k, v, beta, log_decay))
            o, state = _chunk(*chunk, state)
            output[b, part] = o.transpose(0, 1)
        final.append(state)
    return output, torch.stack(final)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> Result:
    """Outputs and the state after a chunk; all [heads,L,D] but beta [heads,L,1].

    Token i adds k_i u_i^T to the state, where u_i depends on the tokens before it:
    u_i + beta_i sum over j < i of (k_i . k_j decayed from j to i) u_j = beta_i (v_i - state^T (k_i decayed)).
    """
    since = log_decay.cumsum(-2)
    causal = torch.ones(2 * since.shape[-2:-1], dtype=torch.bool, device=q.device).tril()
    # Masked before exp, which would overflow above the diagonal.
    between = (since[:, :, None] - since[:, None]).masked_fill(~causal[..., None], -torch.inf)
    decayed = between.exp() * k[:, None]
    overlap, scores = ((decayed @ t[..., None])[..., 0] for t in (k, q))
    # The solver assumes ones on the diagonal, and does not read what is above it.
    added = torch.linalg.solve_triangular(
        beta * overlap,
        beta * (v - (since.exp() * k) @ state),
        upper=False,
        unitriangular=True,
    )
    output = (since.exp() * q) @ state + scores @ added
    kept = since[:, -1:].exp().mT * state
    fed = ((since[:, -1:] - since).exp() * k).mT @ added
    return output * q.shape[-1] ** -0.5, kept + fed


# The oracle's results of the last setting, because providers are checked one after the other on the same inputs.
_expected: dict[tuple[str, str, bool], Result] = {}


def check_kda(
    run: Callable[[Setting, Inputs], Result],
    problem: Setting,
    device: Any,
    limit: float = LIMIT,
    raw_beta: bool = False,
    first_limit: float | None = None,
) -> dict[str, float]:
    """Compares `run(setting, inputs) -> (o, final states [N,HV,K,V])` with the fp64 oracle, on fresh data.

    `run` fills outputs and workspaces that it allocates itself with NaN first. Where `first_limit` is given, the first
    head has errors of its own, with that limit.
    """
    x = make_inputs(problem, device, checks.SEED, raw_beta)
    heads = checks.checked_heads(problem.params["H"])
    known = (problem.name, str(device), raw_beta)
    if known not in _expected:
        _expected.clear()
        _expected[known] = oracle(problem, x, heads)
    output, state = _expected[known]
    spare = checks.SpareRows(x.state, x.indices)
    o, final = run(problem, x)
    checks.require_finite(problem, output=o, final_state=final)
    spare.require_unchanged(problem)
    errors = _worst(o[:, :, heads], final[:, heads], output, state)
    limits = dict.fromkeys(errors, limit)
    if first_limit is not None:
        first = _worst(o[:, :, :1], final[:, :1], output[:, :, :1], state[:, :1])
        errors |= {FIRST[kind]: error for kind, error in first.items()}
        limits |= dict.fromkeys(FIRST.values(), first_limit)
    checks.require_within(problem, errors, limits)
    return errors


def _worst(o: Tensor, final: Tensor, output: Tensor, state: Tensor) -> dict[str, float]:
    """The errors of the worst head."""
    return {
        "output": checks.worst_head(o, output, 2),
        "state": checks.worst_head(final, state, 1),
    }
