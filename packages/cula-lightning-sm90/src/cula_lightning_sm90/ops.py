"""The torch operator and the public functions. The kernel is imported when a CUDA tensor comes.

What the functions share. With the state S `[K, V]` of a sequence and value head, and the log decay d_t of a token,

    S_t = exp(d_t) S_(t-1) + k_t v_t^T          o_t = scale * S_t^T q_t          (the token itself is included)

q, k are `[B, T, H, K]`, v and the outputs `[B, T, HV, V]`, all bfloat16 or float16, K and V 64 or 128 (each on its
own); on the CPU any dimensions, and float32 and float64 too. HV is a multiple of H; value head h reads query and key
head h // (HV // H). Views are read without a copy if their last dimension is contiguous; the kernel reads by TMA, so
that on the GPU a view whose address or other strides are no multiples of 16 bytes is copied first. T, B and the lengths
of packed sequences may be 0. States are `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`: dense matrices,
addresses and strides multiples of 16 bytes, row and head strides free; float32, bfloat16 or float16, those of a call
alike, float32 without initial ones (float64 is taken with float64 activations). A `[.., K, V]` view of `[.., V, K]`
storage, or the other way round, is read and written without a copy.

Keywords of all functions:
    use_qk_l2norm_in_kernel: q and k become x / sqrt(sum(x^2) + 1e-6), per token and head.
    exact_state: the kernel adds to the state with two 16-bit terms per decayed value instead of one, which lowers its
        error from about 2e-3 to about 1e-5 (bfloat16).
    state_checkpoints, checkpoint_every_n_tokens: with n, a multiple of 64, the state after every n tokens of each
        sequence goes to `[B, T // n, HV, K, V]` (or V, K; contiguous, dtype of the states), both or neither. Dense: row
        [b, i] holds the state after (i + 1) n tokens. Packed: a sequence at tokens [a, b) writes its i-th checkpoint to
        row a // n + i. Rows that belong to no checkpoint keep their contents; padding slots write none.
    checkpoint_rows: `[N]` int32 or int64: state_checkpoints is `[rows, HV, K, V]` then, dense matrices like states, and
        a sequence writes from this row of it on; negative: nothing.
    checkpoint_offsets: `[N]` int32 or int64, multiples of 64, instead of an interval: one state per sequence, after so
        many tokens, in row n, or in that of checkpoint_rows; 0: none. Where state_checkpoints is None it goes to a row
        of the pool that the call updates, where no sequence of the call begins or ends.
    num_splits: None decides from shapes and the GPU whether to cut sequences into segments that run in parallel.
        1: never, then results do not depend, bit for bit, on how a sequence is cut into calls at multiples of 64
        tokens. n: segments of ceil(T / n) tokens, rounded up to a multiple of 64. No effect on the CPU.
    segment_tokens: cuts every sequence after each so many tokens, a multiple of 64 and at least 1024, whatever the
        batch and the GPU, so that a sequence has the same bits in every call. None: as num_splits says. No effect on
        the CPU.
    out: `[B, T, HV, V]` in the dtype of v, written and returned. None: allocated.

Gradients reach q, k, v, states and decays, by the kernels of the forward. Memory that is written is a ValueError beside
gradients: out, state_checkpoints, a pool that is updated. A backward needs the inputs alone, and its results are
rounded to their dtypes as outputs are.

Errors: TypeError or ValueError for an argument that does not fit, and nothing was changed; RuntimeError on a GPU whose
compute capability is not 9.0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from cula_core.operators import register_fake
from cula_core.shortcuts import shortcut
from cula_core.streams import side_by_side
from cula_core.tensors import (
    DENSE,
    aligned,
    as_stored,
    is_aligned,
    is_plain_cuda_call,
    move_states,
    multiprocessors,
    new_states,
    put_back,
    stored_alike,
)

from . import backward, decays, reference
from .call import SCHEMA, Call
from .check import check_layer, check_packed, check_prefill, wants_gradients

_PREFILL = "cula_lightning_sm90::prefill"
torch.library.define(_PREFILL, SCHEMA)


def _run_on_cpu(call: Call) -> None:
    reference.prefill(
        call.q, call.k, call.v, call.g, call.head_decay, call.initial, call.state_indices, call.final,
        call.kept_in, call.cu_seqlens, call.out, scale=call.scale, decay_sign=call.decay_sign,
        state_v_first=call.state_v_first, l2norm=call.l2norm, checkpoint_every=call.checkpoint_every,
        has_initial_state=call.has_initial_state, null_slot=call.null_slot, checkpoint_rows=call.checkpoint_rows,
        checkpoint_offsets=call.checkpoint_offsets, reverse=call.reverse, dot_with=call.dot_with, dots=call.dots,
    )  # fmt: skip


def _run_on_gpu(call: Call, multiprocessors: int | None = None, ends: bool = False) -> None:
    """multiprocessors: how many there are for the call; None: all. ends: final states alone are wanted."""
    require_hopper(call.q.device)
    if call.out.numel() == 0 or (call.initial is not None and call.initial.shape[0] == 0):
        # No token at all, or nothing but padding.
        call.out.zero_()
        move_states(
            call.initial, call.state_pool, call.final_state, call.state_indices, None, call.null_slot,
            call.has_initial_state, call.sequences,
        )  # fmt: skip
        return
    g, out = call.g, call.out
    changes: dict = {name: aligned(getattr(call, name)) for name in ("q", "k", "v")}
    if call.dot_with is not None:
        changes["dot_with"] = aligned(call.dot_with)
    if g is not None and g.dtype == torch.float64:
        changes["g"] = g.float()
    if call.checkpoints is not None and call.checkpoints.numel() == 0:
        changes |= {"checkpoints": None, "checkpoint_every": 0, "checkpoint_offsets": None}
    for name in ("checkpoint_rows", "checkpoint_offsets"):
        x = getattr(call, name)
        if x is not None and name not in changes:
            changes[name] = x.to(torch.int32)
    if not is_aligned(out):
        changes["out"] = torch.empty_like(out, memory_format=DENSE)
    call = call._replace(**changes)
    _launch().run(call, multiprocessors=multiprocessors, ends=ends)
    if call.out is not out:
        out.copy_(call.out)


def run_for_states(call: Call) -> None:
    """Computes final states alone; the outputs are memory that the kernels may write to."""
    _run_on_gpu(call, ends=True)


def _run_all_on_cpu(calls: Sequence[Call]) -> None:
    for call in calls:
        _run_on_cpu(call)


def _run_all_on_gpu(calls: Sequence[Call]) -> None:
    """Side by side, where a part of the multiprocessors is enough for each of them."""
    device = calls[0].q.device
    part = multiprocessors(device) // len(calls)
    if all(_launch().fits(call, part) for call in calls):
        side_by_side(device, *(functools.partial(_run_on_gpu, call, part) for call in calls))
        return
    for call in calls:
        _run_on_gpu(call)


@functools.cache
def _launch() -> ModuleType:
    from . import launch

    return launch


torch.library.impl(_PREFILL, "CPU", lambda *values: _run_on_cpu(Call(*values)))
torch.library.impl(_PREFILL, "CUDA", lambda *values: _run_on_gpu(Call(*values)))
register_fake(_PREFILL)
ON_CPU = backward.Where(_run_all_on_cpu, decays.on_cpu)
backward.register(
    ON_CPU, backward.Where(_run_all_on_gpu, lambda sums: _launch().gradients_of_decays(sums))
)


def _run(call: Call) -> None:
    if is_plain_cuda_call(call.q):
        _run_on_gpu(call)
    else:
        torch.ops.cula_lightning_sm90.prefill.default(*call)


@functools.cache
def require_hopper(device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise RuntimeError(
            f"cula-lightning-sm90 needs compute capability 9.0, {device} has {major}.{minor}"
        )


@shortcut
def lightning_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention (Lightning Attention-2, arXiv 2401.04658) over a dense batch; d_t = -decay.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        decay: `[HV]` float32, natural log units per token, >= 0 (checked on the CPU only).
        scale: factor of the outputs; None: K ** -0.5.
        initial_state: `[B, HV, K, V]`, or `[B, HV, V, K]` with `state_v_first`; it is not changed. None: zero.
        output_final_state: whether to return the states after the last token.
        state_v_first: layout of all states.
        use_qk_l2norm_in_kernel, exact_state, state_checkpoints, checkpoint_every_n_tokens: see the head of this module,
            which also gives dtypes, strides and layouts.
        num_splits, segment_tokens, out: see there.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v; the final states as `initial_state`, or None.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        RuntimeError: the GPU is not of compute capability 9.0.

    Example:
        >>> import torch
        >>> from cula_lightning_sm90 import lightning_attn_fwd
        >>> q, k, v = torch.ones(3, 1, 3, 2, 64)  # each [B, T, H, D]
        >>> decay = torch.tensor([0.0, 2.0]).log1p()  # the first head keeps everything, the second a third per token
        >>> o, state = lightning_attn_fwd(q, k, v, decay, scale=1 / 64, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 3, 2, 64]), torch.Size([1, 2, 64, 64]))
        >>> o[0, :, :, 0]  # a row per token, a column per head
        tensor([[1.0000, 1.0000],
                [2.0000, 1.3333],
                [3.0000, 1.4444]])
    """
    return _prefill(
        q, k, v, None, decay, "decay", scale, initial_state, "initial_state", None, False,
        output_final_state, state_v_first, None, use_qk_l2norm_in_kernel, exact_state, state_checkpoints,
        checkpoint_every_n_tokens, num_splits, segment_tokens, out, checkpoint_rows=checkpoint_rows,
        checkpoint_offsets=checkpoint_offsets,
    )  # fmt: skip


@shortcut
def lightning_attn_fwd_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_final_state: bool = True,
    state_v_first: bool = False,
    *,
    update_state_pool: bool = True,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention over N packed sequences whose states live in a pool that is updated in place.

    (Lightning Attention-2, arXiv 2401.04658; d_t = -decay.)

    Args:
        q, k: `[1, T, H, K]`.
        v: `[1, T, HV, V]`.
        decay: `[HV]` float32, natural log units per token, >= 0 (checked on the CPU only).
        cu_seqlens: `[N + 1]` int32 or int64 on the device of q: sequence n holds the tokens cu_seqlens[n] ..
            cu_seqlens[n + 1] - 1; from 0 to T, rising; empty sequences keep their state. Checked on the CPU only, a
            device is never read back.
        scale: factor of the outputs; None: K ** -0.5.
        state_pool: `[rows, HV, K, V]`, or `[rows, HV, V, K]` with `state_v_first`. None: states start from zero.
        initial_state_indices: `[N]` int32, any stride, the row of state_pool of every sequence. Negative, or
            `null_slot`: padding, no row is read or written and the outputs are zero. No row of a pool that is updated
            may occur twice, which is checked on the CPU only. None: row n. Needs a state_pool.
        output_final_state: whether to return the final states where no pool is updated.
        state_v_first: layout of all states.
        update_state_pool: False only reads the pool and returns the final states `[N, HV, ..]` (zero for padding).
        null_slot: a row of the pool that means padding, as negative ones do.
        has_initial_state: `[N]` bool: False: the sequence begins from zero, whatever its row holds. Needs a state_pool.
        use_qk_l2norm_in_kernel, exact_state, state_checkpoints, checkpoint_every_n_tokens: see the head of this module,
            which also gives dtypes, strides and layouts.
        num_splits, segment_tokens, out: see there.

    Returns:
        `(o, state_pool)`, the pool updated; without a pool, or with `update_state_pool=False`, `(o, final_states)` or
        `(o, None)` by `output_final_state`. o is `[1, T, HV, V]` in the dtype of v.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        RuntimeError: the GPU is not of compute capability 9.0.

    Example:
        >>> import torch
        >>> from cula_lightning_sm90 import lightning_attn_fwd_varlen
        >>> q, k, v = torch.ones(3, 1, 100, 2, 64)  # each [1, T, H, D]
        >>> cu_seqlens = torch.tensor([0, 60, 90, 100])  # three sequences
        >>> rows = torch.tensor([3, 0, -1], dtype=torch.int32)  # where their states are; the last one is padding
        >>> pool, decay = torch.zeros(4, 2, 64, 64), torch.zeros(2)
        >>> o, pool = lightning_attn_fwd_varlen(
        ...     q, k, v, decay, cu_seqlens, state_pool=pool, initial_state_indices=rows
        ... )
        >>> pool[:, 0, 0, 0].tolist(), o[:, 90:].any().item()  # without decay a state counts the tokens
        ([30.0, 0.0, 0.0, 60.0], False)
    """
    check_packed(cu_seqlens)
    return _prefill(
        q, k, v, None, decay, "decay", scale, state_pool, "state_pool", initial_state_indices,
        update_state_pool, output_final_state, state_v_first, cu_seqlens, use_qk_l2norm_in_kernel, exact_state,
        state_checkpoints, checkpoint_every_n_tokens, num_splits, segment_tokens, out, null_slot=null_slot,
        has_initial_state=has_initial_state, checkpoint_rows=checkpoint_rows, checkpoint_offsets=checkpoint_offsets,
    )  # fmt: skip


@shortcut
def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention with the decays of a layer: (8 / HV) * (1 - layer_idx / num_layers) * h for value head h.

    (Lightning Attention-2, arXiv 2401.04658.) layer_idx: 0 .. num_layers - 1. cu_seqlens: `[N + 1]` int32 or int64, as
    in `lightning_attn_fwd_varlen`, packs N sequences into B = 1, with states `[N, HV, ..]`; None: a dense batch, N = B.
    Other arguments, results and errors are those of `lightning_attn_fwd`.

    Example:
        >>> import torch
        >>> from cula_lightning_sm90 import chunk_lightning_attn
        >>> q, k, v = torch.ones(3, 1, 3, 2, 64)  # each [B, T, H, D]
        >>> o, state = chunk_lightning_attn(q, k, v, layer_idx=9, num_layers=12, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 3, 2, 64]), torch.Size([1, 2, 64, 64]))
        >>> state[0, :, 0, 0]  # the decays of the heads are 0 and 1: 1 + 1 + 1, and 1 + 1/e + 1/e^2
        tensor([3.0000, 1.5032])
    """
    check_layer(layer_idx, num_layers)
    decay = None
    # What is wrong with v is found with everything else.
    if isinstance(v, Tensor) and v.dim() == 4:
        step = 8 / max(1, v.shape[2]) * (1 - layer_idx / num_layers)
        decay = torch.arange(v.shape[2], dtype=torch.float32, device=v.device) * step
    return _prefill(
        q, k, v, None, decay, "decay", scale, initial_state, "initial_state", None, False,
        output_final_state, state_v_first, cu_seqlens, use_qk_l2norm_in_kernel, exact_state, state_checkpoints,
        checkpoint_every_n_tokens, num_splits, segment_tokens, out, checkpoint_rows=checkpoint_rows,
        checkpoint_offsets=checkpoint_offsets,
    )  # fmt: skip


@shortcut
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a scalar gate per token and head, after GLA (arXiv 2312.06635); d_t = g_t + g_gamma.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV]` of any floating dtype and strides, natural log units, <= 0 (checked on the CPU only).
        g_gamma: `[HV]` float32, natural log units per token, <= 0 (checked on the CPU only). With both g and g_gamma
            they add; with neither there is no decay.
        scale: factor of the outputs; None: K ** -0.5.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; it is not changed. None: zero.
        output_final_state: whether to return the states after the last token of every sequence.
        state_v_first: layout of all states.
        cu_seqlens: `[N + 1]` int32 or int64, as in `lightning_attn_fwd_varlen`, packs N sequences into B = 1; None: a
            dense batch, N = B.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU; accepted because callers may have one; it is not used.
        use_qk_l2norm_in_kernel, exact_state, state_checkpoints, checkpoint_every_n_tokens: see the head of this module,
            which also gives dtypes, strides and layouts.
        num_splits, segment_tokens, out: see there.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v; the final states as `initial_state`, or None.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        RuntimeError: the GPU is not of compute capability 9.0.

    Example:
        >>> import torch
        >>> from cula_lightning_sm90 import chunk_simple_gla
        >>> q, k, v = torch.randn(3, 1, 100, 2, 64)  # each [B, T, H, D]
        >>> g = torch.nn.functional.logsigmoid(torch.randn(1, 100, 2))  # [B, T, HV], <= 0
        >>> whole, _ = chunk_simple_gla(q, k, v, g)
        >>> first, state = chunk_simple_gla(q[:, :64], k[:, :64], v[:, :64], g[:, :64], output_final_state=True)
        >>> rest, _ = chunk_simple_gla(q[:, 64:], k[:, 64:], v[:, 64:], g[:, 64:], initial_state=state)
        >>> state.shape, torch.allclose(torch.cat((first, rest), 1), whole, atol=1e-3)
        (torch.Size([1, 2, 64, 64]), True)
    """
    return _prefill(
        q, k, v, g, g_gamma, "g_gamma", scale, initial_state, "initial_state", None, False,
        output_final_state, state_v_first, cu_seqlens, use_qk_l2norm_in_kernel, exact_state, state_checkpoints,
        checkpoint_every_n_tokens, num_splits, segment_tokens, out, cu_seqlens_cpu,
        checkpoint_rows=checkpoint_rows, checkpoint_offsets=checkpoint_offsets,
    )  # fmt: skip


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    head_decay: Tensor | None,
    decay_name: str,
    scale: float | None,
    state: Tensor | None,
    state_name: str,
    indices: Tensor | None,
    update: bool,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    l2norm: bool,
    exact_state: bool,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    num_splits: int | None,
    segment_tokens: int | None,
    out: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Checks, allocates and runs for every public function. update: the state is replaced, not only read."""
    if is_plain_cuda_call(q):
        require_hopper(q.device)
    check_prefill(
        q, k, v, g, head_decay, decay_name, scale, state, state_name, indices, output_final_state,
        state_v_first, cu_seqlens, (update, l2norm, exact_state), checkpoints, checkpoint_every, num_splits,
        segment_tokens, out, cu_seqlens_cpu, null_slot, has_initial_state, checkpoint_rows, checkpoint_offsets,
    )  # fmt: skip
    if null_slot is not None and indices is None and cu_seqlens is not None:
        indices = torch.arange(cu_seqlens.shape[0] - 1, dtype=torch.int32, device=q.device)
    of_decays = wants_gradients(g, head_decay)
    trained = of_decays or wants_gradients(q, k, v, state)
    if trained and state is not None and state_name == "state_pool" and cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        state, indices = backward.read_pool(state, indices, null_slot, has_initial_state, sequences)
        has_initial_state = None
    initial, turned = as_stored(state)
    v_first = state_v_first != turned
    if scale is None:
        scale = q.shape[3] ** -0.5
    if trained:
        o, last = backward.Prefill.apply(
            _run, output_final_state, q, k, v, g, head_decay, initial, indices, cu_seqlens, float(scale),
            1 if decay_name == "g_gamma" else -1, v_first, l2norm, exact_state, num_splits, segment_tokens or 0,
            of_decays,
        )  # fmt: skip
        return o, last.transpose(2, 3) if turned and last is not None else last
    pool: Tensor | None = None
    final: Tensor | None = None
    if update and initial is not None:
        pool, initial = initial, None
    elif output_final_state:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = new_states(sequences, q, v, v_first, initial)
    if checkpoints is not None and checkpoints is state and pool is not None:
        checkpoints = None
    # All states of a call lie alike. A copy starts from the caller's, because not every row is written.
    saved = stored_alike(checkpoints, turned)
    if out is None:
        out = torch.empty_like(v, memory_format=DENSE)
    call = Call(
        q, k, v, g, head_decay, initial, pool, indices, final, saved, cu_seqlens, out, float(scale),
        decay_sign=1 if decay_name == "g_gamma" else -1,
        state_v_first=v_first,
        l2norm=l2norm,
        exact_state=exact_state,
        checkpoint_every=checkpoint_every or 0,
        num_splits=num_splits,
        segment_tokens=segment_tokens or 0,
        checkpoint_rows=checkpoint_rows,
        checkpoint_offsets=checkpoint_offsets,
        has_initial_state=has_initial_state,
        null_slot=null_slot,
    )  # fmt: skip
    _run(call)
    put_back(saved, checkpoints, turned)
    if pool is not None:
        return out, state
    return out, final.transpose(2, 3) if turned and final is not None else final
