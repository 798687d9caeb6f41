"""Problems, inputs, oracle, check and byte counts of Lightning and simple GLA prefill.

    S_t = exp(d_t) S_(t-1) + k_t v_t^T          o_t = scale * S_t^T q_t

Mode "decay": d_t = -(8 / H) (1 - 10 / 32) h for head h, the decays of layer 10 of 32. Mode "gate":
d_t = logsigmoid(x) / 16 with standard normal x, float32 per token and head. Every setting returns final states.

`ops/sequences.py` describes the lengths of packed sequences and the features gva, state and pool. A problem has at most
one feature, whose name follows a "+" in the name of the setting. Other features:
    fp16          activations are float16
    l2norm        the call normalizes q and k itself
    exact         the call splits the operands of state updates into two 16-bit terms
    checkpoints   the call also writes the state after every 1024 tokens of a sequence
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Setting
from benchmarks.ops import checks
from benchmarks.ops import sequences as seq

DIM = 128
LAYER, LAYERS = 10, 32
EVERY = 1024
L2_EPS = 1e-6

MODES = ("decay", "gate")
FEATURES = ("gva", "fp16", "state", "pool", "l2norm", "exact", "checkpoints")

# How many tokens the oracle computes at once; it divides EVERY.
ORACLE_CHUNK = 256
OUTPUT_LIMIT = 5e-3
STATE_LIMIT = 3e-3
EXACT_STATE_LIMIT = 1e-4

Result = tuple[Tensor, Tensor]


@dataclass
class Inputs:
    """One buffer set: q, k [B,T,H,K], v [B,T,HV,V]; decay [HV] or gate [B,T,HV] fp32.

    state fp32 [N or rows of the pool,HV,K,V] and indices int32 [N] are None where there is no initial state, or no
    pool; checkpoints [B,T // EVERY,HV,K,V] is None where none are written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    gate: Tensor | None
    offsets: seq.Offsets | None
    state: Tensor | None
    indices: Tensor | None
    checkpoints: Tensor | None


def setting(
    tokens: int,
    batch: int = 1,
    heads: int = 64,
    mode: str = "decay",
    sequences: int | None = None,
    lengths: str = "uniform",
    feature: str | None = None,
) -> Setting:
    """A dense problem of B x T tokens, or with `sequences` a packed one of T tokens in all.

    Named like B2-T4096-H64, B1-T65536-H8-gate, N10-T8192-skewed-H64 and N10-T8192-random-H64+pool.
    """
    if mode not in MODES or lengths not in seq.KINDS or feature not in (None, *FEATURES):
        raise ValueError(f"setting: unknown mode, lengths or feature: {mode}, {lengths}, {feature}")
    suffix = "-gate" if mode == "gate" else ""
    return seq.named(tokens, batch, heads, sequences, lengths, feature, suffix, mode=mode)


def decays(heads: int, device: Any) -> Tensor:
    """Log decays per token, [H] fp32: from 0, a head that forgets nothing, to 5.4."""
    return torch.arange(heads, device=device, dtype=torch.float32) * (
        8 / heads * (1 - LAYER / LAYERS)
    )


def make_inputs(problem: Setting, device: Any, seed: int) -> Inputs:
    """Fresh random data of one buffer set."""
    p, batch = problem.params, seq.batch_of(problem)
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float16 if seq.has(problem, "fp16") else torch.bfloat16

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    tokens, heads = (batch, p["T"]), p["H"]
    state, indices = seq.initial_states(problem, DIM, generator)
    gated = p["mode"] == "gate"
    return Inputs(
        q=randn(*tokens, seq.query_heads(problem), DIM, dtype=dtype),
        k=randn(*tokens, seq.query_heads(problem), DIM, dtype=dtype) * DIM**-0.5,
        v=randn(*tokens, heads, DIM, dtype=dtype),
        decay=None if gated else decays(heads, device),
        gate=torch.nn.functional.logsigmoid(randn(*tokens, heads)) / 16 if gated else None,
        offsets=seq.offsets_of(problem, device),
        state=state,
        indices=indices,
        checkpoints=torch.full((batch, p["T"] // EVERY, heads, DIM, DIM), torch.nan, device=device)
        if seq.has(problem, "checkpoints")
        else None,
    )


def read(problem: Setting) -> int:
    """Bytes of q, k, v, gate or decay, initial states, and the small integers, each once."""
    p = problem.params
    gates = 4 * p["H"] * (seq.batch_of(problem) * p["T"] if p["mode"] == "gate" else 1)
    return seq.input_bytes(problem, DIM) + gates


def written(problem: Setting) -> int:
    """Bytes of o, final states and checkpoints, each once."""
    saved = 0
    if seq.has(problem, "checkpoints"):
        saved = sum((end - start) // EVERY for _, start, end in seq.spans(problem))
    return seq.output_bytes(problem, DIM) + saved * problem.params["H"] * DIM * DIM * 4


def moved(problem: Setting) -> int:
    """The fewest bytes of a call."""
    return read(problem) + written(problem)


@dataclass
class Expected:
    """fp64 results of some heads: output [B,T,heads,V], state [N,heads,K,V], checkpoints by row of the flat buffer."""

    output: Tensor
    state: Tensor
    checkpoints: dict[int, Tensor]


def oracle(problem: Setting, x: Inputs, heads: list[int]) -> Expected:
    """fp64 results of value heads `heads`, sequence by sequence, chunk by chunk."""
    group = problem.params["H"] // seq.query_heads(problem)
    q, k = (t[:, :, [h // group for h in heads]].double() for t in (x.q, x.k))
    v = x.v[:, :, heads].double()
    if seq.has(problem, "l2norm"):
        q, k = (t / (t.square().sum(-1, keepdim=True) + L2_EPS).sqrt() for t in (q, k))
    if x.gate is not None:
        log_decay = x.gate[:, :, heads].double()
    else:
        log_decay = -x.decay[heads].double().expand(v.shape[:3])
    output, final, saved = torch.empty_like(v), [], {}
    for n, (b, start, end) in enumerate(seq.spans(problem)):
        state = seq.initial_state_of(n, x.state, x.indices, v, heads)
        for a in range(start, end, ORACLE_CHUNK):
            part = slice(a, min(a + ORACLE_CHUNK, end))
            chunk = (t[b, part].transpose(0, 1) for t in (q, k, v, log_decay))
            o, state = advance(*chunk, state)
            output[b, part] = o.transpose(0, 1)
            if x.checkpoints is not None and (part.stop - start) % EVERY == 0:
                row = b * (problem.params["T"] // EVERY) + start // EVERY
                saved[row + (part.stop - start) // EVERY - 1] = state
        final.append(state)
    return Expected(output, torch.stack(final), saved)


def advance(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Result:
    """Outputs and the state after a chunk; q, k, v are [heads,L,D], log_decay is [heads,L]."""
    since = log_decay.cumsum(-1)
    # Masked before exp, which would overflow above the diagonal.
    causal = torch.ones(2 * since.shape[-1:], dtype=torch.bool, device=q.device).tril()
    weights = (since[:, :, None] - since[:, None, :]).masked_fill(~causal, -torch.inf).exp()
    within = (q @ k.mT * weights) @ v
    before = since.exp()[..., None] * (q @ state)
    fed = (k * (since[:, -1:] - since).exp()[..., None]).mT @ v
    return (within + before) * q.shape[-1] ** -0.5, since[:, -1, None, None].exp() * state + fed


def check_prefill(
    run: Callable[[Setting, Inputs], Result],
    problem: Setting,
    device: Any,
    state_heads: int | None = None,
) -> dict[str, float]:
    """Compares `run(setting, inputs) -> (o, final states [N,HV,K,V])` with the fp64 oracle, on fresh data.

    `run` fills outputs that it allocates itself with NaN first. With `state_heads`, only the final states of that many
    first heads are compared.
    """
    x = make_inputs(problem, device, seed=checks.SEED)
    state_heads = problem.params["H"] if state_heads is None else state_heads
    heads = sorted({*checks.checked_heads(problem.params["H"]), state_heads - 1})
    with_state = [i for i, head in enumerate(heads) if head < state_heads]
    want, spare = oracle(problem, x, heads), checks.SpareRows(x.state, x.indices)
    o, final = run(problem, x)
    final = final[:, :state_heads]
    checks.require_finite(problem, output=o, final_state=final)
    spare.require_unchanged(problem)
    errors = {
        "output": checks.worst_head(o[:, :, heads], want.output, 2),
        "state": checks.worst_head(
            final[:, [heads[i] for i in with_state]], want.state[:, with_state], 1
        ),
    }
    if want.checkpoints:
        rows = list(want.checkpoints)
        got = x.checkpoints.flatten(0, 1)[rows][:, heads]
        errors["checkpoints"] = checks.worst_head(
            got, torch.stack(list(want.checkpoints.values())), 1
        )
    state_limit = EXACT_STATE_LIMIT if seq.has(problem, "exact") else STATE_LIMIT
    limits = {"output": OUTPUT_LIMIT, "state": state_limit, "checkpoints": state_limit}
    checks.require_within(problem, errors, limits)
    return errors
