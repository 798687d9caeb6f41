"""The differentiable operator: forward as in `ops`, backward over the tiles of a mask."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from cula_core.operators import register_fake
from cula_core.tensors import DENSE

from . import reference
from .check import is_aligned
from .choice import launcher
from .thresholds import effective

torch.library.define(
    "liteattention_sm89::attend",
    "(Tensor q, Tensor k, Tensor v, Tensor? read_mask, Tensor? must_do, Tensor? grad_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? direction_at, SymInt max_seqlen_q, SymInt max_seqlen_k, float threshold, "
    "str threshold_mode, int direction, float scale, bool causal, int block_m, int block_n, bool deterministic)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "liteattention_sm89::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, bool causal, "
    "int block_m, int block_n, bool deterministic) -> (Tensor, Tensor, Tensor)",
)

TINY = torch.finfo(torch.float32).tiny


def _attend_cpu(
    q: Tensor, k: Tensor, v: Tensor, read_mask: Tensor | None, must_do: Tensor | None,
    grad_mask: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    direction_at: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, threshold: float,
    threshold_mode: str, direction: int, scale: float, causal: bool, block_m: int, block_n: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, write_mask = reference.lite_attention(
        q, k, v, read_mask, threshold=effective(threshold, threshold_mode, max_seqlen_k),
        direction=direction if direction_at is None else int(direction_at), scale=scale, causal=causal,
        must_do=must_do, block_m=block_m, block_n=block_n, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    none = q.new_empty(0, dtype=torch.int32)
    return out, lse.reshape(_rows(q)), none if read_mask is None else write_mask


def _attend_cuda(
    q: Tensor, k: Tensor, v: Tensor, read_mask: Tensor | None, must_do: Tensor | None,
    grad_mask: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    direction_at: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, threshold: float,
    threshold_mode: str, direction: int, scale: float, causal: bool, block_m: int, block_n: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, write_mask = _results(q, read_mask)
    if q.numel() > 0 and max_seqlen_q > 0:
        torch.ops.liteattention_sm89.forward.default(
            q, k, v, read_mask, must_do, cu_seqlens_q, cu_seqlens_k, direction_at, out, lse,
            None if read_mask is None else write_mask, max_seqlen_q, max_seqlen_k, threshold, threshold_mode,
            direction, scale, causal, block_n, False,
        )  # fmt: skip
    else:
        write_mask.zero_()
    return out, lse, write_mask


def _rows(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _results(q: Tensor, read_mask: Tensor | None, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=DENSE)
    lse = q.new_empty(_rows(q), dtype=torch.float32)
    if read_mask is None:
        return out, lse, q.new_empty(0, dtype=torch.int32)
    return out, lse, torch.empty_like(read_mask, memory_format=DENSE)


def _fake_attend(
    q: Tensor, k: Tensor, v: Tensor, read_mask: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, write_mask = _results(q, read_mask)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out.new_empty((*q.shape[:3], v.shape[3])), lse.to(wide), write_mask


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    (q, k, v, read_mask, _, grad_mask, cu_seqlens_q, cu_seqlens_k, _, max_seqlen_q, max_seqlen_k, *_, scale, causal,
     block_m, block_n, deterministic) = inputs  # fmt: skip
    out, lse, write_mask = output
    mask = read_mask
    if grad_mask is not None:
        mask = grad_mask if read_mask is None else grad_mask & read_mask
    elif read_mask is not None:
        mask = read_mask.clone()  # the caller may reuse it before the backward pass
    ctx.save_for_backward(q, k, v, out, lse, mask, cu_seqlens_q, cu_seqlens_k)
    ctx.rest = max_seqlen_q, max_seqlen_k, scale, causal, block_m, block_n, deterministic
    ctx.mark_non_differentiable(write_mask)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple:
    if dout is None and dlse is None:
        return (None,) * 19
    q, k, v, out, lse, *masks_and_starts = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = torch.ops.liteattention_sm89.backward.default(
        dout, dlse, q, k, v, out, lse, *masks_and_starts, *ctx.rest
    )
    return (*gradients, *(None,) * 16)


def _backward_cpu(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, scale: float, causal: bool, block_m: int, block_n: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return reference.masked_gradients(
        q, k, v, dout, mask, out=out, lse=lse, dlse=dlse, scale=scale, causal=causal, block_m=block_m,
        block_n=block_n, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip


def _backward_cuda(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, scale: float, causal: bool, block_m: int, block_n: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _like(q, k, v)
    if 0 in (q.numel(), k.numel(), max_seqlen_q, max_seqlen_k):
        for x in gradients:
            x.zero_()
        return gradients
    sign = -1 if scale < 0 else 1
    no_scores = abs(scale) < TINY  # as in the forward: all scores are zero
    if no_scores:
        q, scale = torch.zeros_like(q), 1.0
    elif scale < 0:
        q, scale = q * -1, -scale
    q, k, v, out, dout = (
        x if x.stride(3) == 1 and is_aligned(x) else x.clone(memory_format=DENSE)
        for x in (q, k, v, out, dout)
    )
    if dlse is not None and dlse.stride(2) != 1:
        dlse = dlse.clone(memory_format=DENSE)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    packed = cu_seqlens_q is not None
    run = launcher("backward", q, block_n, max_seqlen_k, packed, deterministic=deterministic)
    run(
        q, k, v, out, lse, dout, dlse, mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *gradients,
        scale=scale, causal=causal, block_n=block_n, deterministic=deterministic,
    )  # fmt: skip
    if no_scores:
        gradients[0].zero_()
    elif sign < 0:
        gradients[0].neg_()
    return gradients


def _no_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError("liteattention_sm89: the derivative of a gradient is not implemented")


def _like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=DENSE) for x in (q, k, v))
    return dq, dk, dv


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q, k, v)


torch.library.impl("liteattention_sm89::attend", "CPU", _attend_cpu)
torch.library.impl("liteattention_sm89::attend", "CUDA", _attend_cuda)
register_fake("liteattention_sm89::attend", _fake_attend)
torch.library.register_autograd("liteattention_sm89::attend", _backward, setup_context=_setup)
torch.library.impl("liteattention_sm89::backward", "CPU", _backward_cpu)
torch.library.impl("liteattention_sm89::backward", "CUDA", _backward_cuda)
register_fake("liteattention_sm89::backward", _fake_backward)
torch.library.register_autograd("liteattention_sm89::backward", _no_second_derivative)
