"""The torch operators: schema, CPU and CUDA implementations, fake. The kernel is imported when a CUDA tensor comes."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_decode.contract import (
    check_commit,
    check_decode,
    check_flush,
    check_new_replay,
)
from cula_core.delta_decode.slots import Limits
from cula_core.operators import register_fake
from cula_core.reference import delta_decode as reference
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution, fused_decode
from cula_core.reference.delta_decode import Replay
from cula_core.shortcuts import shortcut
from cula_core.tensors import as_stored, is_plain_cuda_call

from .config import HEAD_DIMS, MAX_GRID, MAX_TOKENS

LIMITS = Limits(HEAD_DIMS, MAX_GRID)
_NO_NORM = (None, None, 0.0, None)

GATES = (
    "float? lower_bound, float softplus_beta, float softplus_threshold, bool use_gate_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool use_qk_l2norm_in_kernel, bool state_v_first"
)
# Without token_states, token_state_indices are slots of `state`.
torch.library.define(
    "cula_delta_decode::decode",
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor(a!) state, "
    "Tensor? state_indices, Tensor? output_state_indices, Tensor? num_accepted, Tensor(b!)? token_states, "
    "Tensor? token_state_indices, Tensor? cu_seqlens, Tensor(c!)? ring_k, Tensor(d!)? ring_u, Tensor(e!)? ring_decay, "
    "Tensor(f!)? cursor, Tensor(g!)? inputs, Tensor? positions, Tensor? taps, Tensor? tap_bias, Tensor? gate, "
    "Tensor? norm_weight, float norm_eps, str? norm_activation, "
    f"float scale, {GATES}, bool commit, int max_tokens, int? null_slot, Tensor(h!) out) -> ()",
)
torch.library.define(
    "cula_delta_decode::commit",
    "(Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor(a!) state, "
    f"Tensor num_accepted, Tensor? state_indices, Tensor? cu_seqlens, {GATES}, int max_tokens, int? null_slot) -> ()",
)
torch.library.define(
    "cula_delta_decode::flush",
    "(Tensor(a!) state, Tensor ring_k, Tensor ring_u, Tensor ring_decay, Tensor(b!) cursor, Tensor? num_accepted, "
    "Tensor? state_indices, bool state_v_first, int? null_slot) -> ()",
)


def _decode_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, state: Tensor, state_indices: Tensor | None, output_state_indices: Tensor | None,
    num_accepted: Tensor | None, token_states: Tensor | None, token_state_indices: Tensor | None,
    cu_seqlens: Tensor | None, ring_k: Tensor | None, ring_u: Tensor | None, ring_decay: Tensor | None,
    cursor: Tensor | None, inputs: Tensor | None, positions: Tensor | None, taps: Tensor | None,
    tap_bias: Tensor | None, gate: Tensor | None, norm_weight: Tensor | None, norm_eps: float,
    norm_activation: str | None, scale: float, *rest: Any,
) -> None:  # fmt: skip
    *flags, commit, max_tokens, null_slot, out = rest
    replay = convolution = norm = None
    if ring_k is not None and ring_u is not None and ring_decay is not None and cursor is not None:
        replay = Replay(ring_k, ring_u, ring_decay, cursor)
    if inputs is not None and positions is not None and taps is not None:
        convolution = ShortConvolution(inputs, positions, taps, tap_bias)
    if gate is not None and norm_weight is not None and norm_activation is not None:
        norm = GatedNorm(gate, norm_weight, norm_eps, norm_activation)
    fused_decode(
        q, k, v, g, beta, state, state_indices=state_indices, output_state_indices=output_state_indices, scale=scale,
        A_log=A_log, dt_bias=dt_bias, commit=commit, replay=replay, num_accepted=num_accepted,
        token_states=token_states, token_state_indices=token_state_indices, cu_seqlens=cu_seqlens,
        max_tokens=max_tokens, null_slot=null_slot, convolution=convolution, norm=norm, out=out,
        **reference.options(*flags),
    )  # fmt: skip


def _decode_cuda(*arguments: object) -> None:
    _launch().decode(*arguments)


def _commit_cpu(
    k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
    state: Tensor, num_accepted: Tensor, state_indices: Tensor | None, cu_seqlens: Tensor | None, *rest: Any,
) -> None:  # fmt: skip
    *flags, max_tokens, null_slot = rest
    reference.delta_rule_commit(
        k, v, g, beta, state, num_accepted, state_indices=state_indices, A_log=A_log, dt_bias=dt_bias,
        cu_seqlens=cu_seqlens, max_tokens=max_tokens, null_slot=null_slot, **reference.options(*flags),
    )  # fmt: skip


def _commit_cuda(*arguments: object) -> None:
    _launch().commit(*arguments)


def _flush_cpu(
    state: Tensor, ring_k: Tensor, ring_u: Tensor, ring_decay: Tensor, cursor: Tensor, num_accepted: Tensor | None,
    state_indices: Tensor | None, state_v_first: bool, null_slot: int | None,
) -> None:  # fmt: skip
    replay = Replay(ring_k, ring_u, ring_decay, cursor)
    reference.delta_rule_flush(
        state, replay, num_accepted, state_indices=state_indices, state_v_first=state_v_first, null_slot=null_slot
    )  # fmt: skip


def _flush_cuda(*arguments: object) -> None:
    _launch().flush(*arguments)


for _name, _cpu, _cuda in (
    ("decode", _decode_cpu, _decode_cuda),
    ("commit", _commit_cpu, _commit_cuda),
    ("flush", _flush_cpu, _flush_cuda),
):
    torch.library.impl(f"cula_delta_decode::{_name}", "CPU", _cpu)
    torch.library.impl(f"cula_delta_decode::{_name}", "CUDA", _cuda)
    register_fake(f"cula_delta_decode::{_name}")


@shortcut
def delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    state_v_first: bool = True,
    commit: bool = True,
    replay: Replay | None = None,
    num_accepted: Tensor | None = None,
    token_states: Tensor | None = None,
    token_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
    convolution: ShortConvolution | None = None,
    norm: GatedNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gated delta rule, or KDA, for 1 to 8 new tokens per row, on a pool of states that is updated in place.

    For every row n, value head h and token t in turn, with S [K, V] the state of the row:
    `S' = diag(exp(d)) S`, `u = b (v - S'^T k)`, `S = S' + k u^T`, then `out = scale * S^T q`; d is one log decay per
    head (GDN) or one per channel of K (KDA). The state is read and written once, however many tokens there are.
    Sources: Gated DeltaNet, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692.

    Args:
        q, k: `[B, T, H, K]`, T = 1..8, K in {64, 128}, bfloat16 or float16. Any strides whose last one is 1, so slices
            of a fused projection are taken without a copy. On the CPU K and V are free, and float32 and float64 are
            taken.
        v: `[B, T, HV, V]`, V in {64, 128}, the dtype of q; HV is a multiple of H, and value head h reads head
            h // (HV // H) of q and k.
        g: `[B, T, HV]` (GDN), or `[B, T, HV, K]` or `[B, T, HV * K]` (KDA); float32, bfloat16 or float16: a raw gate,
            or with `use_gate_in_kernel=False` the log decay itself (natural log, <= 0). None: no decay.
        beta: `[B, T, HV]`, the dtypes of g: logits of the write strength, or with `use_beta_sigmoid_in_kernel=False`
            the strength itself. None: 1.
        state: `[pool, HV, V, K]`, or `[pool, HV, K, V]` with `state_v_first=False`; float32, bfloat16 or float16, the
            arithmetic is float32. Dense matrices, 16-byte aligned; pool and head strides are free. A transposed view of
            the other layout is used without a copy.
        state_indices: `[B]` int32, any stride, the slot of every row. Negative, or equal to `null_slot`: padding, the
            output is zero and no state changes. None: row n uses slot n. Or `[B, slots]` with `num_accepted`: a row
            begins at slot number `num_accepted[n] - 1` of its own.
        output_state_indices: `[B]` int32, any stride, where the states go, if not where they came from.
        scale: factor of the output; None: K ** -0.5.
        A_log: `[HV]`, the logarithm of the gate's rate; None: 0. dt_bias: `[HV]`, or `[HV * K]` or `[HV, K]` for KDA.
        lower_bound: None: the gate is `-exp(A_log) * softplus(g + dt_bias)`. Else, below 0:
            `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        softplus_beta, softplus_threshold: as of `torch.nn.functional.softplus`.
        allow_neg_eigval: twice the sigmoid of beta, with `use_beta_sigmoid_in_kernel`.
        use_qk_l2norm_in_kernel: q and k are divided by `sqrt(sum(x^2) + 1e-6)`.
        commit: False stores no state at the end (speculative verification). `delta_rule_commit` then advances every
            row by the tokens that were accepted, or `token_states` have kept all of them.
        replay: what `new_replay` made. The pool then stays behind: the call first applies those tokens of earlier calls
            that were accepted (`num_accepted`), and keeps what its own tokens add until a later call. The state is
            stored only when the rings are more than half full. Needs a slot per row, and no other way to store states.
        num_accepted: `[B]` int32, any stride: with `replay` how many tokens of the row's last call are certain (None:
            all), with `[B, slots]` state_indices which slot a row begins at.
        token_states: `[rows, HV, V, K]` in the dtype and layout of state, where the state after every token goes, at
            `token_state_indices` `[B, T]` int32 (negative or `null_slot`: nowhere). None with indices: state itself.
        cu_seqlens: `[N + 1]` int32 on the device: B is 1, and T holds N rows of 0 to 8 tokens; "B" of the vectors above
            is N then. Tokens of no row have output zero on the CPU, and are not written on a GPU.
        max_tokens: with cu_seqlens, the most tokens of a row, 1..8; None: 8. A longer row is refused on the CPU and
            cut off on a GPU, where looking would need a synchronisation.
        null_slot: a slot that means padding, as negative ones do.
        convolution: q, k and v are the inputs of a short convolution, which is computed first, SiLU included; its
            result is rounded to the dtype of q. Its rings belong to the slots that state_indices name, so it goes with
            `commit=True` and with `replay`, and not with states in other slots.
        norm: the output is normalized over V, and multiplied by a weight and an activated gate.
        out: `[B, T, HV, V]` to write to; None: allocated.

    Returns:
        `[B, T, HV, V]`, the dtype of v.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        RuntimeError: the GPU is older than compute capability 8.0.

    Example:
        >>> import torch
        >>> from cula_delta_decode import delta_rule_decode
        >>> q, k = torch.randn(2, 2, 1, 4, 16)  # each [B, T, H, K]
        >>> v, a, b = torch.randn(2, 1, 8, 16), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        >>> state = torch.zeros(5, 8, 16, 16)  # [pool, HV, V, K]
        >>> slots = torch.tensor([3, -1], dtype=torch.int32)
        >>> out = delta_rule_decode(q, k, v, a, b, state, state_indices=slots)
        >>> out.shape, out[1].any().item(), state[3].any().item(), state[0].any().item()
        (torch.Size([2, 1, 8, 16]), False, True, False)
    """
    state, state_v_first, token_states = _stored(state, state_v_first, token_states)
    if token_states is state and token_state_indices is not None:
        token_states = None
    check_decode(
        q, k, v, g, beta, state, state_indices, output_state_indices, scale, A_log, dt_bias, lower_bound, softplus_beta,
        softplus_threshold, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
        state_v_first, commit, replay, num_accepted, token_states, token_state_indices, cu_seqlens, max_tokens,
        null_slot, convolution, norm, out, LIMITS,
    )  # fmt: skip
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    rings = (None,) * 4 if replay is None else replay
    fused: tuple = (None,) * 4 if convolution is None else convolution
    fused += _NO_NORM if norm is None else norm._replace(eps=float(norm.eps))
    run = _decode_cuda if is_plain_cuda_call(k) else torch.ops.cula_delta_decode.decode.default
    run(
        q, k, v, g, beta, A_log, dt_bias, state, state_indices, output_state_indices, num_accepted, token_states,
        token_state_indices, cu_seqlens, *rings, *fused, k.shape[3] ** -0.5 if scale is None else float(scale),
        None if lower_bound is None else float(lower_bound), float(softplus_beta), float(softplus_threshold),
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel, state_v_first,
        commit, _tokens(k, cu_seqlens, max_tokens), null_slot, out,
    )  # fmt: skip
    return out


@shortcut
def delta_rule_commit(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    state_v_first: bool = True,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
) -> None:
    """Advances the state of row n by its first `num_accepted[n]` tokens, in place.

    The second half of speculative decoding: after `delta_rule_decode(..., commit=False)` on T draft tokens, keep the
    accepted ones. num_accepted: `[B]` int32, any stride, 0..T (larger values count as T, negative ones as 0).
    state_indices: `[B]`. The other arguments, the errors and the formula are those of `delta_rule_decode`.

    Example:
        >>> import torch
        >>> from cula_delta_decode import delta_rule_commit
        >>> k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 8, 16)  # two rows of three draft tokens
        >>> a, b = torch.randn(2, 2, 3, 8)
        >>> state, accepted = torch.zeros(2, 8, 16, 16), torch.tensor([2, 0], dtype=torch.int32)
        >>> delta_rule_commit(k, v, a, b, state, accepted)
        >>> state[0].any().item(), state[1].any().item()
        (True, False)
    """
    state, state_v_first, _ = _stored(state, state_v_first, None)
    check_commit(
        k, v, g, beta, state, num_accepted, state_indices, A_log, dt_bias, lower_bound, softplus_beta,
        softplus_threshold, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
        state_v_first, cu_seqlens, max_tokens, null_slot, LIMITS,
    )  # fmt: skip
    run = _commit_cuda if is_plain_cuda_call(k) else torch.ops.cula_delta_decode.commit.default
    run(
        k, v, g, beta, A_log, dt_bias, state, num_accepted, state_indices, cu_seqlens, lower_bound, softplus_beta,
        softplus_threshold, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
        state_v_first, _tokens(k, cu_seqlens, max_tokens), null_slot,
    )  # fmt: skip


def new_replay(
    state: Tensor,
    heads: int,
    *,
    max_tokens: int = 1,
    channels: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    records: int | None = None,
    state_v_first: bool = True,
) -> Replay:
    """Returns empty rings of records for a pool of states, for `delta_rule_decode(..., replay=)`.

    Args:
        state: the pool.
        heads: H, heads of q and k. dtype: that of q and k. channels: whether g has a gate per channel (KDA).
        max_tokens: the most tokens that a call will have, 1..8.
        records: how many a ring holds, a power of two from 2 * max_tokens to 64. None: the smallest; the state is then
            stored by every call that accepts a token. With more, for max_tokens=1, states are stored every
            `records / 2` tokens, which for large batches saves most of the writes.

    Example:
        >>> import torch
        >>> from cula_delta_decode import delta_rule_decode, new_replay
        >>> state = torch.zeros(2, 8, 16, 16)
        >>> replay = new_replay(state, 4, max_tokens=3, dtype=torch.float32)
        >>> q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4, 16), torch.randn(2, 3, 8, 16)
        >>> a, b = torch.randn(2, 2, 3, 8)
        >>> drafts = delta_rule_decode(q, k, v, a, b, state, replay=replay)
        >>> state.any().item(), replay.k.shape
        (False, torch.Size([2, 8, 4, 16]))
    """
    check_new_replay(state, heads, max_tokens, channels, dtype, records, state_v_first, LIMITS)
    return reference.empty_replay(
        state, heads, max_tokens=max_tokens, channels=channels, dtype=dtype, records=records,
        state_v_first=state_v_first,
    )  # fmt: skip


@shortcut
def delta_rule_flush(
    state: Tensor,
    replay: Replay,
    num_accepted: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    state_v_first: bool = True,
    null_slot: int | None = None,
) -> None:
    """Applies the certain records of a replay to the states, in place, and forgets the others.

    Before somebody else reads the pool: a prefix cache, a prefill that continues, a call without `replay`.
    num_accepted: `[B]` int32, any stride, how many tokens of the row's last call are certain; None: all. state_indices:
    `[B]` int32, any stride, the slots; None: the whole pool.

    Example:
        >>> import torch
        >>> from cula_delta_decode import delta_rule_decode, delta_rule_flush, new_replay
        >>> state = torch.zeros(2, 8, 16, 16)
        >>> replay = new_replay(state, 4, dtype=torch.float32)
        >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 4, 16), torch.randn(2, 1, 8, 16)
        >>> out = delta_rule_decode(q, k, v, None, None, state, replay=replay)
        >>> delta_rule_flush(state, replay)
        >>> state.any().item()
        True
    """
    state, state_v_first, _ = _stored(state, state_v_first, None)
    check_flush(state, replay, num_accepted, state_indices, state_v_first, null_slot, LIMITS)
    run = _flush_cuda if is_plain_cuda_call(state) else torch.ops.cula_delta_decode.flush.default
    run(state, *replay, num_accepted, state_indices, state_v_first, null_slot)


def _stored(
    state: Tensor, state_v_first: bool, token_states: Tensor | None
) -> tuple[Tensor, bool, Tensor | None]:
    """States in the order of their memory, and which layout that is; those of tokens in the same one."""
    if not isinstance(state, Tensor) or state.dim() != 4 or type(state_v_first) is not bool:
        return state, state_v_first, token_states
    found, swapped = as_stored(state)
    if found is None or not swapped:
        return state, state_v_first, token_states
    if token_states is state:
        token_states = found
    elif isinstance(token_states, Tensor) and token_states.dim() == 4:
        token_states = token_states.transpose(2, 3)
    return found, not state_v_first, token_states


def _tokens(k: Tensor, cu_seqlens: Tensor | None, max_tokens: int | None) -> int:
    """The most tokens of a row."""
    if cu_seqlens is None:
        return k.shape[1]
    return MAX_TOKENS if max_tokens is None else max_tokens


@functools.cache
def _launch() -> ModuleType:
    from . import launch

    return launch
