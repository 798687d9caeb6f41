"""Lightning attention decode in plain torch: the oracle of the kernel and the implementation on a CPU.

    state <- exp(-decay) * state + k v^T          out = scale * q^T state          (the token itself is included)

Runs on any device without reading a tensor back to the host. Arguments are taken as checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensors import live_rows
from .common import work_dtype

_MASK = 0xFFFFFFFF


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
    """Runs the T tokens of every row through its state, one after another.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. state: [pool, HV, K, V], or [pool, HV, V, K] with `state_v_first`; updated in
    place unless `commit` is false. decay: [HV], natural log units, >= 0. state_indices: int32 [B]; a negative index,
    or null_slot, is padding: its output is zero and no state changes. Arithmetic is fp32, or fp64 when an input is
    fp64. Returns the outputs [B, T, HV, V].

    Example:
        >>> import torch
        >>> from cula_core.reference.lightning_decode import linear_attention_decode
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)  # each [B, T, H, D]
        >>> state = torch.zeros(2, 4, 16, 16)
        >>> linear_attention_decode(q, k, v, state, torch.full((4,), 0.1)).shape, state.any().item()
        (torch.Size([2, 1, 4, 16]), True)
    """
    batch, tokens, heads, dim_k = q.shape
    group = v.shape[2] // heads
    work = work_dtype(q, v, state)
    slots, valid = pool_slots(state_indices, batch, state, null_slot)
    scale = dim_k**-0.5 if scale is None else scale
    current = _read(state, slots, state_v_first, work)
    factor = torch.exp(-decay.to(work))[None, :, None, None]
    outputs = []
    for t in range(tokens):
        q_t = q[:, t].to(work).repeat_interleave(group, 1) * scale
        current = factor * current + _outer(k, v, t, group, work)
        outputs.append((q_t[..., None] * current).sum(-2))
    result = torch.stack(outputs, 1)
    result = torch.where(valid[:, None, None, None], result, torch.zeros_like(result))
    if commit:
        _write(state, current, slots, valid, state_v_first, rounding_seed)
    if out is None:
        return result.to(v.dtype)
    return out.copy_(result)


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
    """Advances the state of row b by its first `num_accepted[b]` tokens (int32 [B], 0..T).

    Example:
        >>> import torch
        >>> from cula_core.reference.lightning_decode import linear_attention_commit
        >>> k, v = torch.randn(2, 2, 3, 4, 16)  # each [B, T, H, D]
        >>> state, accepted = torch.zeros(2, 4, 16, 16), torch.tensor([2, 0], dtype=torch.int32)
        >>> linear_attention_commit(k, v, state, torch.full((4,), 0.1), accepted)
        >>> state[0].any().item(), state[1].any().item()
        (True, False)
    """
    batch, tokens, heads, _ = k.shape
    group = v.shape[2] // heads
    work = work_dtype(k, v, state)
    slots, valid = pool_slots(state_indices, batch, state, null_slot)
    current = _read(state, slots, state_v_first, work)
    factor = torch.exp(-decay.to(work))[None, :, None, None]
    for t in range(tokens):
        accepted = (t < num_accepted)[:, None, None, None]
        current = torch.where(accepted, factor * current + _outer(k, v, t, group, work), current)
    _write(state, current, slots, valid, state_v_first, rounding_seed)


def stochastic_round_bf16(value: Tensor, seed: Tensor | int, heads: Tensor) -> Tensor:
    """Rounds fp32 `value` [..., rows, cols] to bf16, up with the probability of the distance to the lower neighbour.

    The random bits are a hash of (seed, head number, position), so a step can be repeated exactly. heads: integers
    [...], the running number slot * HV + head of every matrix. Two neighbouring columns share one 32-bit hash.
    Infinities and NaN pass through.
    """
    rows, cols = value.shape[-2:]
    seed = torch.as_tensor(seed, dtype=torch.int64, device=value.device).reshape(())
    base = _mix(
        (seed & _MASK) ^ _mix((heads.to(torch.int64) + ((seed >> 32) & _MASK) * 0x9E3779B1) & _MASK)
    )
    pairs = (cols + 1) // 2
    pair = torch.arange(rows * pairs, device=value.device).reshape(rows, pairs)
    noise = _mix((base[..., None, None] + pair) & _MASK)
    noise = torch.stack((noise & 0xFFFF, noise >> 16), -1).flatten(-2)[..., :cols]
    bits = value.float().contiguous().view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = ((bits.to(torch.int64) & _MASK) + noise) & 0xFFFF0000
    rounded = torch.where(rounded > 0x7FFFFFFF, rounded - (1 << 32), rounded).to(torch.int32)
    return torch.where(finite, rounded.view(torch.float32), value.float()).to(torch.bfloat16)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with good avalanche (xor-shift-multiply), on int64 tensors holding 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _MASK
    return x ^ (x >> 15)


def pool_slots(
    indices: Tensor | None, count: int, pool: Tensor, null_slot: int | None = None
) -> tuple[Tensor, Tensor]:
    """The pool row of each of `count` rows, with 0 for padding, and which rows are no padding: neither negative nor
    null_slot."""
    if indices is None:
        indices = torch.arange(count, device=pool.device)
    live = live_rows(indices, null_slot)
    return torch.where(live, indices, 0).to(torch.int64), live


def store_live(pool: Tensor, states: Tensor, slots: Tensor, live: Tensor) -> None:
    """`pool[slots] = states` for the live rows, without asking the host which those are; see pool_slots.

    A padding row repeats the write of the first live one, which leaves the same value whatever the order of writes;
    with no live row at all every write puts row 0 back as it is.
    """
    if len(slots) == 0 or len(pool) == 0:
        return
    source = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    target = slots[source]
    pool[target] = torch.where(live.any(), states[source].to(pool.dtype), pool[target])


def _read(state: Tensor, slots: Tensor, state_v_first: bool, work: torch.dtype) -> Tensor:
    """The rows' states as [B, HV, K, V] in the working precision; zeros from an empty pool, whose rows are padding."""
    if len(state) == 0:
        current = state.new_zeros(len(slots), *state.shape[1:], dtype=work)
    else:
        current = state[slots].to(work)
    return current.transpose(-1, -2) if state_v_first else current


def _outer(k: Tensor, v: Tensor, t: int, group: int, work: torch.dtype) -> Tensor:
    return k[:, t].to(work).repeat_interleave(group, 1)[..., None] * v[:, t].to(work)[..., None, :]


def _write(
    state: Tensor,
    current: Tensor,
    slots: Tensor,
    valid: Tensor,
    state_v_first: bool,
    seed: Tensor | int | None,
) -> None:
    if state_v_first:
        current = current.transpose(-1, -2)
    if seed is not None:
        hv = state.shape[1]
        numbers = slots[:, None] * hv + torch.arange(hv, device=state.device)
        current = stochastic_round_bf16(current, seed, numbers)
    store_live(state, current, slots, valid)
