"""The backward of KDA in plain torch, chunk by chunk: the oracle of its kernels, and what serves CPU tensors.

With r_t = sqrt(b_t) KDA is a delta rule of strength one on k~ = r k and v~ = r v; q~ = scale q. In a chunk of 64 tokens
with G the running sum of log decays, L the last token, S [K, V] the state before and D the gradient of the state behind
it,

    qg = exp(G) q~    kh = exp(G) k~    kg = exp(G_L - G) k~    decay = exp(G_L)
    Aqk_ij = sum_c q~_ic k~_jc exp(G_ic - G_jc), j <= i         M_ij the same of k~ and k~, j < i         Q = (I + M)^-1

    forward     z = Q (v~ - kh S)             o = qg S + Aqk z              S <- diag(decay) S + kg^T z
    back        y = Q^T (Aqk^T do + kg D)     dv = r y                      D <- diag(decay) D + qg^T do - kh^T y

and everything else follows from S, z, D, y of the chunk alone. Strengths are not negative.

The steps `prepare`, `walk`, `walk_back`, `gradients` take one sequence, [HV, tokens, channels], already normalised,
scaled and repeated for value heads; `chunk_kda_backward` takes whole calls. Arguments are taken as checked.
Source: Kimi Linear, arXiv 2510.26692, for the operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import EPSILON, normalized, work_dtype
from .gates import log_decay, write_strength

CHUNK = 64


class Gradients(NamedTuple):
    """Gradients of the inputs of a call, each in the shape of its input; None for an input that is None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    dh0: Tensor | None


class Chunk(NamedTuple):
    """A chunk of n tokens without its state. q (scaled), k (times r), sums (G), qg, kh, kg: [HV, n, K]. Aqk, Q:
    [HV, n, n]. decay: [HV, K]."""

    q: Tensor
    k: Tensor
    sums: Tensor
    qg: Tensor
    kh: Tensor
    kg: Tensor
    Aqk: Tensor
    Q: Tensor
    decay: Tensor


def strength_floor(dtype: torch.dtype) -> float:
    """Returns the smallest strength that divides by itself exactly enough; a smaller one is taken as this one."""
    return torch.finfo(dtype).eps ** 2


def prepare(q: Tensor, k: Tensor, decay: Tensor) -> Chunk:
    """q is scaled, k is times r; decay: log decays, [HV, n, K]."""
    sums = decay.cumsum(1)
    last = sums[:, -1:]
    apart = _apart(sums)
    Aqk = torch.einsum("hic,hjc,hijc->hij", q, k, apart)
    M = torch.einsum("hic,hjc,hijc->hij", k, k, apart).tril(-1)
    ones = torch.eye(q.shape[1], dtype=q.dtype, device=q.device).expand_as(M)
    Q = torch.linalg.solve_triangular(ones + M, ones, upper=False, unitriangular=True)
    grown = sums.exp()
    return Chunk(
        q, k, sums, grown * q, grown * k, (last - sums).exp() * k, Aqk, Q, last[:, 0].exp()
    )


def walk(
    chunks: list[Chunk], values: list[Tensor], state: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """From the first chunk to the last: the states [HV, K, V] before them, z [HV, n, V], and the final state.

    values: v times r, [HV, n, V].
    """
    states, zs = [], []
    for chunk, v in zip(chunks, values):
        z = chunk.Q @ (v - chunk.kh @ state)
        states.append(state)
        zs.append(z)
        state = chunk.decay[..., None] * state + chunk.kg.mT @ z
    return states, zs, state


def walk_back(
    chunks: list[Chunk], dos: list[Tensor], d_state: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """From the last chunk to the first: the gradients [HV, K, V] of the states behind them, y [HV, n, V], which is the
    gradient of v times r, and the gradient of the initial state. d_state: of the final state."""
    d_states, ys = [], []
    for chunk, do in zip(reversed(chunks), reversed(dos)):
        y = chunk.Q.mT @ (chunk.Aqk.mT @ do + chunk.kg @ d_state)
        d_states.append(d_state)
        ys.append(y)
        d_state = chunk.decay[..., None] * d_state + chunk.qg.mT @ do - chunk.kh.mT @ y
    return d_states[::-1], ys[::-1], d_state


def gradients(
    chunk: Chunk, do: Tensor, z: Tensor, y: Tensor, state: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a chunk's scaled q, of k times r and of the log decays, [HV, n, K], and y . z [HV, n] of its tokens,
    which is the strength times the gradient of the strength."""
    q, k, sums = chunk.q, chunk.k, chunk.sums
    products = y @ z.mT
    yz = products.diagonal(dim1=1, dim2=2)
    apart = _apart(sums)
    dA = apart * (do @ z.mT)[..., None]
    dM = apart * -products.tril(-1)[..., None]
    dqg, dkh, dkg = do @ state.mT, -y @ state.mT, z @ d_state.mT
    grown, left = sums.exp(), (sums[:, -1:] - sums).exp()
    to_column = dA * q[:, :, None] + dM * k[:, :, None]
    dq = grown * dqg + (dA * k[:, None]).sum(2)
    dk = grown * dkh + (dM * k[:, None]).sum(2) + left * dkg + to_column.sum(1)

    # The decay of token t acts on all that is written before t, or was in the state, and is read from t on, or leaves
    # with the state. Pairs of tokens are summed without a difference, in which strong decays would drown.
    within = torch.ones_like(products[0]).tril()
    pairs = to_column * k[:, None] * within.tril(-1)[..., None]
    written = F.pad(pairs.cumsum(2)[:, :, :-1], (0, 0, 1, 0))
    read = (written * within[..., None]).sum(1)
    from_state = (chunk.qg * dqg + chunk.kh * dkh).flip(1).cumsum(1).flip(1)
    to_state = F.pad((chunk.kg * dkg).cumsum(1)[:, :-1], (0, 0, 1, 0))
    kept = chunk.decay * (state * d_state).sum(-1)
    return dq, dk, read + from_state + to_state + kept[:, None], yz


def chunk_kda_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dht: Tensor | None,
    *,
    scale: float,
    gate: str,
    lower_bound: float,
    l2norm: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    state_v_first: bool,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Returns the gradients of all inputs of `kda.recurrent_prefill`, unrounded, in `dtype`; None: in fp64 if q is fp64
    and in fp32 otherwise.

    do: [B, T, HV, V], of the outputs. dht: [N, HV, K, V] (or V, K), of the final states; None: zero. The other
    arguments are those of the forward. A strength beta that is given is not negative; it may be zero.
    """
    work = dtype or work_dtype(q)
    q, k, v, g, beta = (x.to(work) for x in (q, k, v, g, beta))
    A_log, dt_bias = (None if x is None else x.to(work) for x in (A_log, dt_bias))
    batch, tokens, heads, dim_k = q.shape
    heads_v, dim_v = v.shape[2:]
    decay, strength = g, beta
    if gate != "log":
        decay = log_decay(g, A_log, dt_bias, lower_bound if gate == "safe" else None)
    if beta_sigmoid:
        strength = write_strength(beta, neg_eigval)
    qn, kn = (normalized(q), normalized(k)) if l2norm else (q, k)
    floored = strength.clamp(min=strength_floor(work))
    r = floored.sqrt()[..., None]
    q_all, k_all = (x.repeat_interleave(heads_v // heads, 2) for x in (scale * qn, kn))

    # Heads first, rows of the batch one after another.
    of_tokens = (q_all, r * k_all, decay, r * v, do.to(work))
    given = [x.flatten(0, 1).transpose(0, 1) for x in of_tokens]
    bounds = [n * tokens for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    found = [torch.zeros_like(x) for x in (*given[:4], given[3][..., 0])]
    dh0 = v.new_zeros(len(bounds) - 1, heads_v, dim_k, dim_v)
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        states = (_one_state(x, n, state_v_first, dh0) for x in (initial_state, dht))
        *parts, dh0[n] = _sequence(*(x[:, start:stop] for x in given), *states)
        for whole, part in zip(found, parts):
            whole[:, start:stop] = part
    dq, dk, dg, y, yz = (x.transpose(0, 1).unflatten(0, (batch, tokens)) for x in found)
    dq, dk = (x.unflatten(2, (heads, -1)).sum(3) for x in (scale * dq, r * dk))
    if l2norm:
        dq, dk = _norm_backward(q, qn, dq), _norm_backward(k, kn, dk)
    dbeta = yz / floored
    if beta_sigmoid:
        dbeta = dbeta * strength * (1 - strength / (2 if neg_eigval else 1))
    dg, dA_log, ddt_bias = _gate_backward(g, decay, dg, A_log, dt_bias, gate, lower_bound)
    d_initial = None
    if initial_state is not None:
        d_initial = dh0.mT if state_v_first else dh0
    return Gradients(dq, dk, r * y, dg, dbeta, dA_log, ddt_bias, d_initial)


def _sequence(
    q: Tensor, k: Tensor, decay: Tensor, v: Tensor, do: Tensor, state: Tensor, d_state: Tensor
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, decay and v of one sequence, y . z of its tokens, and that of its initial state.

    q is scaled, k and v are times r. state: the initial one, d_state: the gradient of the final one.
    """
    parts = list(zip(*(x.split(CHUNK, 1) for x in (q, k, decay, v, do)))) if q.shape[1] else []
    chunks = [prepare(*part[:3]) for part in parts]
    dos = [part[4] for part in parts]
    states, zs, _ = walk(chunks, [part[3] for part in parts], state)
    d_states, ys, d_initial = walk_back(chunks, dos, d_state)
    found = [gradients(*of_chunk) for of_chunk in zip(chunks, dos, zs, ys, states, d_states)]
    if not found:
        return q, k, decay, v, v[..., 0], d_initial
    dq, dk, dg, yz = (torch.cat(x, 1) for x in zip(*found))
    return dq, dk, dg, torch.cat(ys, 1), yz, d_initial


def _apart(sums: Tensor) -> Tensor:
    """Returns the decay from token j to token i >= j, [HV, i, j, K], and zero for others."""
    size = sums.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool, device=sums.device).tril()
    return (sums[:, :, None] - sums[:, None]).masked_fill(~seen[..., None], -torch.inf).exp()


def _one_state(states: Tensor | None, n: int, v_first: bool, like: Tensor) -> Tensor:
    if states is None:
        return torch.zeros_like(like[0])
    return (states[n].mT if v_first else states[n]).to(like.dtype)


def _norm_backward(x: Tensor, normed: Tensor, d: Tensor) -> Tensor:
    """Returns the gradient of x / sqrt(sum(x^2) + 1e-6)."""
    norm = (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()
    return (d - normed * (normed * d).sum(-1, keepdim=True)) / norm


def _gate_backward(
    g: Tensor, decay: Tensor, d_decay: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, gate: str, bound: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of g, A_log and dt_bias from that of the log decays."""
    if gate == "log":
        return d_decay, None, None
    shifted = g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])
    rate = g.new_ones(()) if A_log is None else A_log.exp()[:, None]
    if gate == "safe":
        s = (rate * shifted).sigmoid()
        dg = bound * s * (1 - s) * rate * d_decay
        of_rate = dg * shifted
    else:
        dg = -rate * shifted.sigmoid() * d_decay
        of_rate = decay * d_decay
    dA_log = None if A_log is None else of_rate.sum((0, 1, 3))
    return dg, dA_log, None if dt_bias is None else dg.sum((0, 1)).view(dt_bias.shape)
