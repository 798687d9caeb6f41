"""The torch operators: schema, CPU and CUDA implementations, fake. The kernel is imported when a CUDA tensor comes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from cula_core.operators import register_fake
from cula_core.reference import lightning_decode as reference
from cula_core.shortcuts import shortcut
from cula_core.tensors import is_plain_cuda_call

from .check import check_commit, check_decode

torch.library.define(
    "cula_lightning_decode::decode",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor decay, Tensor? state_indices, Tensor? rounding_seed, "
    "float scale, bool state_v_first, bool commit, Tensor(b!) out, int? null_slot=None) -> ()",
)
torch.library.define(
    "cula_lightning_decode::commit",
    "(Tensor k, Tensor v, Tensor(a!) state, Tensor decay, Tensor num_accepted, Tensor? state_indices, "
    "Tensor? rounding_seed, bool state_v_first, int? null_slot=None) -> ()",
)


def _decode_cpu(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor, state_indices: Tensor | None,
    rounding_seed: Tensor | None, scale: float, state_v_first: bool, commit: bool, out: Tensor,
    null_slot: int | None = None,
) -> None:  # fmt: skip
    reference.linear_attention_decode(
        q, k, v, state, decay, state_indices=state_indices, scale=scale, state_v_first=state_v_first,
        out=out, commit=commit, rounding_seed=rounding_seed, null_slot=null_slot,
    )  # fmt: skip


def _decode_cuda(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor, state_indices: Tensor | None,
    rounding_seed: Tensor | None, scale: float, state_v_first: bool, commit: bool, out: Tensor,
    null_slot: int | None = None,
) -> None:  # fmt: skip
    mode = "decode" if commit else "verify"
    seed = rounding_seed if commit else None
    _launch()(
        q, k, v, state, decay, state_indices, None, seed, out, scale, state_v_first, mode, null_slot
    )


def _commit_cpu(
    k: Tensor, v: Tensor, state: Tensor, decay: Tensor, num_accepted: Tensor, state_indices: Tensor | None,
    rounding_seed: Tensor | None, state_v_first: bool, null_slot: int | None = None,
) -> None:  # fmt: skip
    reference.linear_attention_commit(
        k, v, state, decay, num_accepted, state_indices=state_indices, state_v_first=state_v_first,
        rounding_seed=rounding_seed, null_slot=null_slot,
    )  # fmt: skip


def _commit_cuda(
    k: Tensor, v: Tensor, state: Tensor, decay: Tensor, num_accepted: Tensor, state_indices: Tensor | None,
    rounding_seed: Tensor | None, state_v_first: bool, null_slot: int | None = None,
) -> None:  # fmt: skip
    _launch()(
        None, k, v, state, decay, state_indices, num_accepted, rounding_seed, None, 1.0, state_v_first, "commit",
        null_slot,
    )  # fmt: skip


for _name, _cpu, _cuda in (
    ("decode", _decode_cpu, _decode_cuda),
    ("commit", _commit_cpu, _commit_cuda),
):
    torch.library.impl(f"cula_lightning_decode::{_name}", "CPU", _cpu)
    torch.library.impl(f"cula_lightning_decode::{_name}", "CUDA", _cuda)
    register_fake(f"cula_lightning_decode::{_name}")

_decode = torch.ops.cula_lightning_decode.decode.default
_commit = torch.ops.cula_lightning_decode.commit.default


@shortcut
def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    *,
    state_indices: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    out: Tensor | None = None,
    commit: bool = True,
    rounding_seed: Tensor | int | None = None,
    null_slot: int | None = None,
) -> Tensor:
    """Lightning attention for 1 to 8 new tokens per row, on a pool of states that is updated in place.

    For every row b, value head h and token t in turn, with lambda = exp(-decay[h]) and S the state of the row:
    `S = lambda * S + k v^T`, then `out = scale * q^T S`. (Lightning Attention-2, arXiv 2401.04658.)
    The state is read and written once, however many tokens there are.

    Args:
        q, k: `[B, T, H, K]`, T = 1..8, K in {64, 128, 256}, bfloat16 or float16. Any strides whose last one is 1.
            On the CPU K and V are free, and float32 and float64 are taken too.
        v: `[B, T, HV, V]`, V in {64, 128, 256}, the dtype of q; HV is a multiple of H, and value head h reads query
            head h // (HV // H).
        state: `[pool, HV, K, V]`, or `[pool, HV, V, K]` with `state_v_first`; float32, bfloat16 or float16, the
            arithmetic is float32. Dense matrices, 16-byte aligned; pool and head strides are free. A `[.., K, V]`
            view of `[.., V, K]` storage (or the other way round) is used without a copy.
        decay: `[HV]` float32, >= 0 (checked on the CPU), in natural log units per token.
        state_indices: `[B]` int32, any stride, the slot of every row. Negative, or `null_slot`: padding, the output
            is zero and no state changes. With `commit` the same slot twice in one call is refused on the CPU and
            undefined on a GPU, where looking would need a synchronisation. None: row b uses slot b.
        scale: factor of the output; None: K ** -0.5.
        out: `[B, T, HV, V]` tensor to write to; None: allocated.
        commit: False leaves all states alone and only returns the outputs (speculative verification);
            `linear_attention_commit` then advances every row by the tokens that were accepted.
        rounding_seed: None rounds to the nearest. An int, or an int64 tensor of one element (which a CUDA graph can
            advance between replays), rounds a bfloat16 state stochastically; use a new seed at every step.
        null_slot: a slot that means padding, as negative ones do.

    Returns:
        `[B, T, HV, V]`, the dtype of v.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        RuntimeError: the GPU is older than compute capability 8.0.

    Example:
        >>> import torch
        >>> from cula_lightning_decode import linear_attention_decode
        >>> q, k, v = torch.ones(3, 2, 1, 4, 64)  # each [B, T, H, D]: one new token for each of two rows
        >>> pool, decay = torch.zeros(8, 4, 64, 64), torch.zeros(4)  # the pool is [pool, HV, K, V]
        >>> rows = torch.tensor([6, -1], dtype=torch.int32)  # the second row is padding
        >>> out = linear_attention_decode(q, k, v, pool, decay, state_indices=rows, scale=1.0)
        >>> out.shape, out[:, 0, 0, 0].tolist()  # the sum over 64 channels, and zero
        (torch.Size([2, 1, 4, 64]), [64.0, 0.0])
        >>> pool[:, 0, 0, 0].tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """
    state, state_v_first = _as_stored(state, state_v_first)
    check_decode(
        q,
        k,
        v,
        state,
        decay,
        state_indices,
        scale,
        state_v_first,
        out,
        commit,
        rounding_seed,
        null_slot,
    )
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if scale is None:
        scale = k.shape[3] ** -0.5
    seed = _seed_tensor(rounding_seed, k)
    run = _decode_cuda if is_plain_cuda_call(k) else _decode
    run(
        q,
        k,
        v,
        state,
        decay,
        state_indices,
        seed,
        float(scale),
        state_v_first,
        commit,
        out,
        null_slot,
    )
    return out


@shortcut
def linear_attention_commit(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None = None,
    state_v_first: bool = False,
    rounding_seed: Tensor | int | None = None,
    null_slot: int | None = None,
) -> None:
    """Advances the state of row b by its first `num_accepted[b]` tokens, in place.

    The second half of speculative decoding: after `linear_attention_decode(..., commit=False)` on T draft tokens, keep
    the accepted ones. num_accepted: `[B]` int32, any stride, 0..T (larger values count as T, negative ones as 0).
    The other arguments, the errors and the formula are those of `linear_attention_decode`.

    Example:
        >>> import torch
        >>> from cula_lightning_decode import linear_attention_commit, linear_attention_decode
        >>> q, k, v = torch.ones(3, 2, 4, 1, 64)  # four tokens proposed for each of two rows
        >>> state, decay = torch.zeros(2, 1, 64, 64), torch.zeros(1)
        >>> draft = linear_attention_decode(q, k, v, state, decay, commit=False)  # the states stay
        >>> linear_attention_commit(k, v, state, decay, torch.tensor([3, 0], dtype=torch.int32))
        >>> state[:, 0, 0, 0].tolist()  # three tokens of the first row were accepted, none of the second
        [3.0, 0.0]
    """
    state, state_v_first = _as_stored(state, state_v_first)
    check_commit(
        k, v, state, decay, num_accepted, state_indices, state_v_first, rounding_seed, null_slot
    )
    seed = _seed_tensor(rounding_seed, k)
    run = _commit_cuda if is_plain_cuda_call(k) else _commit
    run(k, v, state, decay, num_accepted, state_indices, seed, state_v_first, null_slot)


@functools.cache
def _launch() -> Callable[..., None]:
    from .launch import run

    return run


def _as_stored(state: Tensor, state_v_first: bool) -> tuple[Tensor, bool]:
    """A transposed view of a pool is the pool in the other layout."""
    if (
        isinstance(state, Tensor)
        and state.dim() == 4
        and state.stride(3) != 1
        and state.stride(2) == 1
    ):
        return state.transpose(2, 3), not state_v_first
    return state, state_v_first


def _seed_tensor(seed: Tensor | int | None, k: Tensor) -> Tensor | None:
    if seed is None or isinstance(seed, Tensor):
        return seed
    return torch.full((1,), seed, dtype=torch.int64, device=k.device)
