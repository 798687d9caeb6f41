"""Gradients of the prefill operator: the operator itself, three times (docs/lightning-prefill.md derives it).

With f(q, k, v, S0) the prefill, f' the prefill against time, and what comes in for the gradients of its results, do of
the outputs and dS of the final state,

    dq = f(do, v, k, S0^T)      dk = f'(v, do, q, dS^T)      dv = f'(k, q, do, dS), whose final state is that of S0

so that a backward needs the inputs of its forward alone, and has the forward's options and precision. Where decays want
gradients, the passes of dq and dk also give the sums and states that these are made from (decays.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cula_core.operators import register_fake
from cula_core.reference.common import work_dtype
from cula_core.tensors import DENSE, live_rows, new_states

from . import decays
from .call import Call

_NAME = "cula_lightning_sm90::prefill_backward"
_SCHEMA = (
    "(Tensor? do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? head_decay, Tensor? initial_state, "
    "Tensor? state_indices, Tensor? cu_seqlens, float scale, int decay_sign, bool state_v_first, bool l2norm, "
    "bool exact_state, int? num_splits, int segment_tokens, bool of_decays) -> Tensor[]"
)
Run = Callable[[Call], None]


class Where(NamedTuple):
    """What does the work on a kind of device: runs calls of which none reads what another one writes, and makes
    gradients of decays."""

    run: Callable[[Sequence[Call]], None]
    decays: Callable[[decays.Sums], decays.Found]


def register(on_cpu: Where, on_gpu: Where) -> None:
    """Defines the operator of the gradients."""
    torch.library.define(_NAME, _SCHEMA)
    torch.library.impl(_NAME, "CPU", lambda *values: gradients(on_cpu, *values))
    torch.library.impl(_NAME, "CUDA", lambda *values: gradients(on_gpu, *values))

    def fake(
        do: Any, dht: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, decay: Any, initial: Any, *rest: Any
    ) -> list[Tensor]:  # fmt: skip
        wanted = (q, k, v, initial, *((g, decay) if rest[-1] else ()))
        return [torch.empty_like(x, memory_format=DENSE) for x in wanted if x is not None]

    register_fake(_NAME, fake)


class Prefill(torch.autograd.Function):
    """The prefill of tensors that want gradients; it keeps its inputs alone.

    run: runs a call. The other arguments, and the order of `settings`, are those of the operator of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Run, output_final_state: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
        head_decay: Tensor | None, initial: Tensor | None, indices: Tensor | None, cu_seqlens: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        scale, decay_sign, v_first, l2norm, exact_state, num_splits, segment_tokens, _ = settings
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        out = torch.empty_like(v, memory_format=DENSE)
        final = new_states(sequences, q, v, v_first, initial) if output_final_state else None
        run(
            Call(
                q, k, v, g, head_decay, initial, None, indices, final, None, cu_seqlens, out, scale, decay_sign,
                v_first, l2norm, exact_state, 0, num_splits, segment_tokens=segment_tokens,
            )
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, g, head_decay, initial, indices, cu_seqlens)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, of_decays = ctx.saved_tensors, ctx.settings[-1]
        operator = torch.ops.cula_lightning_sm90.prefill_backward.default
        found = iter(operator(do, dht, *saved, *ctx.settings))
        q, k, v, g, head_decay, initial, *_ = saved
        wanted = (q, k, v, initial, *((g, head_decay) if of_decays else (None, None)))
        dq, dk, dv, dh0, dg, dd = (None if x is None else next(found) for x in wanted)
        return None, None, dq, dk, dv, dg, dd, dh0, None, None, *(None,) * len(ctx.settings)


def gradients(
    where: Where,
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    head_decay: Tensor | None,
    initial_state: Tensor | None,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    decay_sign: int,
    state_v_first: bool,
    l2norm: bool,
    exact_state: bool,
    num_splits: int | None,
    segment_tokens: int,
    of_decays: bool,
) -> list[Tensor]:
    """Returns the gradients of q, k, v and, if there is one, of initial_state, in their dtypes, contiguous.

    With of_decays those of g and head_decay follow, if they are there. do [B, T, HV, V], dht [N, HV, K, V] (or V, K):
    gradients of the results, None for zero. The others: as in `Call`.
    With float16 they are computed from do and dht times a power of two, which brings the largest of them near to 1.
    With of_decays, batches of more than 512 tokens take memory for states, 128 KiB per value head and 512 tokens with
    K = V = 128.
    """
    heads, work = v.shape[2], work_dtype(q)
    given = (q, k)
    normal: tuple[tuple[Tensor, Tensor | None], ...] = ((q, None), (k, None))
    if l2norm:
        normal = tuple(_normalised(x) for x in given)
    (q, _), (k, _) = normal
    ends = dht is not None
    do, dht, scale, unit = _as_inputs(do, dht, q, v, scale)
    if dht is None and state_indices is not None and initial_state is not None:
        dht = torch.zeros_like(initial_state, dtype=work, memory_format=DENSE)
    dh0 = None
    if initial_state is not None:
        dh0 = torch.empty_like(initial_state, dtype=work, memory_format=DENSE)

    def result(x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:2], heads, x.shape[3])

    def attend(
        a: Tensor, b: Tensor, c: Tensor, out: Tensor, start: Tensor | None, end: Tensor | None, turned: bool,
        reverse: bool, of: Tensor | None = None, dots: Tensor | None = None, states: Tensor | None = None,
    ) -> Call:  # fmt: skip
        indices = None if start is None else state_indices
        return Call(
            a, b, c, g, head_decay, start, None, indices, end, states, cu_seqlens, out, scale, decay_sign,
            state_v_first != turned, False, exact_state, 0 if states is None else decays.EVERY, num_splits,
            segment_tokens=segment_tokens, reverse=reverse, dot_with=None if dots is None else of, dots=dots,
        )  # fmt: skip

    dots_q = dots_k = states = d_states = final = None
    start = initial_state
    if of_decays:
        padded = state_indices is not None
        dots_q, dots_k = (decays.new_dots(x, v, work, padded) for x in (q, k))
        states, d_states = (decays.new_states(q, v, work, state_v_first, padded) for _ in range(2))
        start = None if initial_state is None else initial_state.to(work)  # as all states of a call
        if ends and dht is not None:
            final = (torch.zeros_like if padded else torch.empty_like)(dht)
    dq, dk, dv = result(q), result(k), result(v)
    where.run(
        (
            attend(do, v, k, dq, start, final, True, False, q, dots_q, states),
            attend(v, do, q, dk, dht, None, True, True, k, dots_k, d_states),
            attend(k, q, do, dv, dht, dh0, False, True),
        )
    )
    if unit is not None:
        for each in (dq, dk, dv):
            torch.div(each, unit, out=each)
    found = [
        _before_norm(_of_group(d, x), y, inverse)
        for d, x, (y, inverse) in zip((dq, dk), given, normal)
    ]
    found.append(dv)
    started = None
    if dh0 is not None and initial_state is not None:
        dh0 *= scale
        started = (dh0 * initial_state).sum((2, 3))
        found.append((dh0 if unit is None else dh0 / unit).to(initial_state.dtype))
    if dots_q is not None and dots_k is not None:
        ended = None
        if final is not None and dht is not None:
            ended = scale * (final * dht).sum((2, 3))
        of_tokens, of_heads = where.decays(
            decays.Sums(
                dots_q, dots_k, states, d_states, started, ended, g, head_decay, decay_sign, cu_seqlens, scale
            )
        )  # fmt: skip
        for x, d in ((g, of_tokens), (head_decay, of_heads)):
            if x is not None and d is not None:
                d = d if unit is None else d / unit.flatten()
                found.append(d.to(x.dtype).contiguous())
    return found


def of_states_in_front(
    run: Callable[[Call], None],
    do: Tensor,
    dht: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    head_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    l2norm: bool,
    exact_state: bool,
) -> Tensor:
    """Returns the gradients of initial states [N, HV, K, V] alone, in the dtype of dht. run: computes final states.

    The others: as in `gradients`, where the log decay per token is g plus head_decay.
    """
    if l2norm:
        q = _normalised(q)[0]
    do, start, scale, unit = _as_inputs(do, dht, q, v, scale)
    assert start is not None
    found = torch.empty_like(start)
    run(
        Call(
            k, q, do, g, head_decay, start, None, None, found, None, cu_seqlens, torch.empty_like(do), scale, 1, False,
            False, exact_state, 0, None, reverse=True,
        )
    )  # fmt: skip
    found *= scale
    return (found if unit is None else found / unit).to(dht.dtype)


def _as_inputs(
    do: Tensor | None, dht: Tensor | None, q: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor | None, float, Tensor | None]:
    """Returns gradients of the results as the passes take them, the passes' scale, and the power of two by which the
    gradients are multiplied beside float16, else None."""
    if do is None or scale == 0:
        do, scale = torch.zeros_like(v, memory_format=DENSE), scale or 1.0
    do, unit = do.contiguous(), None
    if dht is not None:
        dht = dht.to(work_dtype(q)).contiguous()
    if q.dtype == torch.float16:
        unit = _unit(do, dht)
        do = torch.mul(do, unit, out=torch.empty_like(do))
        dht = None if dht is None else dht * unit
    if dht is not None:
        dht = dht / scale  # the kernel multiplies what it reads from a state by it
    return do, dht, scale, unit


def read_pool(
    pool: Tensor,
    indices: Tensor | None,
    null_slot: int | None,
    known: Tensor | None,
    sequences: int,
) -> tuple[Tensor, Tensor | None]:
    """Returns the states that sequences begin from, [N, HV, K, V] (or V, K), by functions that have gradients.

    indices, null_slot, known: as in `Call`, where known is has_initial_state. The second result is what takes the place
    of indices: the numbers of the sequences, or -1 for padding; None if there is none.
    """
    read, numbers = known, None
    if indices is None:
        states = pool[:sequences]
    else:
        live = live_rows(indices, null_slot)
        numbers = torch.where(live, torch.arange(sequences, device=pool.device), -1).to(torch.int32)
        read = live if known is None else live & known
        wide = pool if pool.shape[0] else pool.new_zeros(1, *pool.shape[1:])
        states = wide.index_select(0, torch.where(live, indices, 0).long())
    if read is not None:
        states = torch.where(read[:, None, None, None], states, 0.0)
    return states, numbers


def _unit(do: Tensor, dht: Tensor | None) -> Tensor:
    """Returns a power of two [1, 1, 1, 1] in fp32 that brings the largest element to 1 .. 2; 1 for 0, inf and NaN."""
    largest = do.new_zeros(1, 1, 1, 1, dtype=torch.float32)
    for x in (do, dht):
        if x is not None and x.numel():
            found = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
            largest = torch.maximum(largest, found)
    usual = (largest > 0) & (largest < torch.inf)
    return torch.where(usual, torch.exp2(-largest.log2().floor()), 1.0)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x / sqrt(sum(x^2) + 1e-6) over the last dimension in the dtype of x, and the factor."""
    work = work_dtype(x)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=work).square()
    inverse = (squares + 1e-6).rsqrt()
    return torch.mul(x, inverse, out=torch.empty_like(x, memory_format=DENSE)), inverse


def _before_norm(d: Tensor, y: Tensor, inverse: Tensor | None) -> Tensor:
    """Returns the gradient of x from that of y = inverse x, the normalised x."""
    if inverse is None:
        return d
    along = (d * y).sum(-1, keepdim=True, dtype=inverse.dtype)
    return torch.mul(torch.addcmul(d.to(inverse.dtype), y, along, value=-1), inverse).to(d.dtype)


def _of_group(d: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x [B, T, H, K] from those of the value heads that read it [B, T, HV, K]."""
    return d if d.shape == x.shape else d.unflatten(2, (x.shape[2], -1)).sum(3)
