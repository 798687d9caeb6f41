"""Linear attention with one decay per head: Lightning attention, simple gated linear attention, gated delta rule.

Per sequence and value head, with the state S `[K, V]`:

    Lightning           S_t = exp(-decay) S_{t-1} + k_t v_t^T
    simple GLA          S_t = exp(g_t) S_{t-1} + k_t v_t^T
    gated delta rule    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T

and `o_t = scale * S_t^T q_t`. Decays are in natural log units per token: `decay >= 0`, and FLA's `g`, `g_gamma` <= 0.

What every function here shares. Activations are bfloat16, float16, float32 or float64, of one dtype on one device, and
may be strided as long as the last dimension is contiguous. HV is a multiple of H; value head h reads query and key head
`h // (HV // H)`, and `chunk_gated_delta_rule` takes heads that are grouped in other ways too. States are
`[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; initial ones are float32, bfloat16 or float16 (float64 is
accepted with float64 activations), and final ones have their dtype, float32 without any; arithmetic is float32. Where
q is float32 and autocast is on, q, k and v are cast to its dtype.
`cu_seqlens` `[N + 1]`, int32 or int64 on the device of q, packs N sequences, some possibly empty, into B = 1; its
values are checked when it lies on the CPU, and a device is never read back by cula itself. `impl` is "auto" or the name
of an implementation, which then serves or raises; see `cula.explain`. TypeError and ValueError name the argument that
does not fit and nothing was changed; RuntimeError says why the implementation asked for cannot serve.

The four Lightning and simple GLA prefill functions also share these keyword arguments, of which
`chunk_gated_delta_rule` has those about norms and checkpoints:

    use_qk_l2norm_in_kernel      normalise q and k, `x / sqrt(sum(x^2) + 1e-6)` per token and head
    exact_state                  a kernel carries the state update in two 16-bit terms instead of one, which brings it
                                 close to fp32 at a price in speed; the reference is exact in any case
    state_checkpoints            `[B, T // n, HV, K, V]` (or V, K) contiguous, in the dtype of a state, written with the
                                 state after every n tokens of each sequence; not with gradients. Dense: `[b, i]` holds
                                 the state after `(i + 1) * n` tokens. Packed: a sequence that starts at token a writes
                                 its i-th one to row `a // n + i`; other rows stay as they are, and a padding slot
                                 writes none
    checkpoint_every_n_tokens    that n, a positive multiple of 64; given with state_checkpoints and only then
    num_splits                   n >= 2: a kernel processes a sequence in n parallel segments; 1: never, so that results
                                 do not depend on how a sequence is cut into calls at multiples of 64 tokens, bit for
                                 bit; None: as the shapes suggest
    segment_tokens               a kernel cuts every sequence after each so many tokens, a multiple of 64 and at least
                                 1024, so that a sequence has the same bits in every batch; None: as num_splits says

Gradients of these four: a kernel's backward is its own, or that of flash-linear-attention where it has none and that is
installed and able; otherwise `impl="auto"` takes the reference, which is differentiable in plain torch. FLA has no
gradient for the constant decay of a head (`decay`, or `g_gamma` without `g`).
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from cula import _check, _ranks
from cula._gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from cula._registry import resolve, to_be_checked

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_lightning_attn",
    "chunk_simple_gla",
    "fused_recurrent_gated_delta_rule",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
    "linear_attention_commit",
    "linear_attention_decode",
]


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
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention (Lightning Attention-2, arXiv 2401.04658) over a dense batch.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        decay: `[HV]` float32, >= 0 (checked on the CPU); a head's state shrinks by `exp(-decay)` per token.
        scale: factor of the output, finite; None: `K ** -0.5`.
        initial_state: `[B, HV, K, V]`, or `[B, HV, V, K]` with `state_v_first`. None: zero.
        output_final_state: whether to return the final states.
        state_v_first: layout of the states.
        use_qk_l2norm_in_kernel, exact_state, state_checkpoints, checkpoint_every_n_tokens: see the module.
        num_splits, segment_tokens: see the module.
        out: `[B, T, HV, V]` in the dtype of v, written and returned; not with gradients.
        impl: "auto" or the name of an implementation.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v; the state after the last token, or None.

    Raises:
        TypeError, ValueError, RuntimeError: see the module.

    Example:
        >>> import torch
        >>> from cula.lightning import lightning_attn_fwd
        >>> q, k, v = torch.randn(3, 1, 100, 2, 32)  # each [B, T, H, D]
        >>> decay = torch.tensor([0.01, 0.5])
        >>> o, state = lightning_attn_fwd(q, k, v, decay, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    _ranks.refuse_context("lightning_attn_fwd")
    requires_grad = _check.requires_grad(q, k, v, decay, initial_state)
    dim_k, dim_v, group = _check.prefill_operands(q, v)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    run = resolve(
        "lightning_attn_fwd",
        impl,
        q.device,
        q.dtype,
        dim_k,
        dim_v,
        requires_grad,
        _check.dtype_of("initial_state", initial_state),
        group,
        initial_state is not None,
        output_final_state,
        state_v_first,
        _check.requires_grad(decay),
        use_qk_l2norm_in_kernel,
        exact_state,
        state_checkpoints is not None,
        num_splits,
        segment_tokens,
    )
    # fmt: off
    options: dict[str, Any] = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
        "state_v_first": state_v_first, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "exact_state": exact_state,
        "state_checkpoints": state_checkpoints, "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
        "num_splits": num_splits, "out": out,
        "segment_tokens": segment_tokens,
    }
    # fmt: on
    if to_be_checked(run):
        _check.lightning_attn_fwd(q, k, v, decay, **options, requires_grad=requires_grad)
    return run(q, k, v, decay, **options)


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
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention over packed sequences, on a pool of states that is updated in place unless told otherwise.

    Args:
        q, k: `[1, T, H, K]`.
        v: `[1, T, HV, V]`.
        decay: `[HV]` float32, >= 0 (checked on the CPU).
        cu_seqlens: `[N + 1]`.
        scale: factor of the output, finite; None: `K ** -0.5`.
        state_pool: `[pool, HV, K, V]`, or `[pool, HV, V, K]` with `state_v_first`. Sequence n starts from its row and
            leaves its final state there, unless `update_state_pool` is False; an updated pool excludes gradients.
            None: sequences start from zero.
        initial_state_indices: `[N]` int32, any stride, the row of every sequence. Negative, or `null_slot`: a padding
            slot, no row is read or written and the outputs of that sequence are zero. Live rows of a pool that is
            updated must differ, which is checked on the CPU and undefined elsewhere. None: sequence n uses row n.
        output_final_state: without a pool that is updated, whether to return the final states.
        state_v_first: layout of the states.
        update_state_pool: False only reads the pool and returns the final states by themselves.
        null_slot: a row of the pool that means padding, as negative ones do.
        has_initial_state: `[N]` bool: False: the sequence begins from zero, whatever its row holds. Needs a state_pool.
        use_qk_l2norm_in_kernel, exact_state, state_checkpoints, checkpoint_every_n_tokens: see the module.
        checkpoint_offsets: `[N]` int32 or int64, in place of an interval: each sequence keeps one state, after so many
            tokens; a multiple of 64, or none is kept. It goes to row n of state_checkpoints `[rows, HV, K, V]` or, with
            checkpoint_rows and no state_checkpoints, to a row of the state_pool.
        checkpoint_rows: `[N]` int32 or int64: the row of state_checkpoints `[rows, HV, K, V]` of a sequence's first
            state, whose others follow; negative: none is kept. Rows that are written must differ from each other, and
            in a pool from the rows of sequences, which is undefined otherwise.
        num_splits, segment_tokens: see the module.
        out: `[1, T, HV, V]` in the dtype of v, written and returned; not with gradients.
        impl: "auto" or the name of an implementation.

    Returns:
        `(o, state_pool)`; without a pool, or one that is only read, `(o, final_states)`, `[N, HV, K, V]` (or
        `[N, HV, V, K]`), zero for a padding slot, or None for them.

    Raises:
        TypeError, ValueError, RuntimeError: see the module.

    Example:
        >>> import torch
        >>> from cula.lightning import lightning_attn_fwd_varlen
        >>> q, k, v = torch.randn(3, 1, 100, 2, 32)  # each [1, T, H, D]
        >>> decay = torch.tensor([0.01, 0.5])
        >>> cu_seqlens = torch.tensor([0, 60, 100])  # two sequences
        >>> pool, rows = torch.zeros(8, 2, 32, 32), torch.tensor([5, -1], dtype=torch.int32)
        >>> o, pool = lightning_attn_fwd_varlen(
        ...     q, k, v, decay, cu_seqlens, state_pool=pool, initial_state_indices=rows
        ... )
        >>> pool[5].any().item(), pool[:5].any().item(), o[:, 60:].any().item()  # the second one is padding
        (True, False, False)
    """
    _ranks.refuse_context("lightning_attn_fwd_varlen")
    requires_grad = _check.requires_grad(q, k, v, decay, state_pool)
    dim_k, dim_v, group = _check.prefill_operands(q, v)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    run = resolve(
        "lightning_attn_fwd_varlen",
        impl,
        q.device,
        q.dtype,
        dim_k,
        dim_v,
        requires_grad,
        _check.dtype_of("state_pool", state_pool),
        True,
        group,
        state_pool is not None,
        output_final_state,
        state_v_first,
        update_state_pool,
        _check.requires_grad(decay),
        use_qk_l2norm_in_kernel,
        exact_state,
        state_checkpoints is not None or checkpoint_offsets is not None,
        num_splits,
        segment_tokens,
    )
    # fmt: off
    options: dict[str, Any] = {
        "scale": scale, "state_pool": state_pool, "initial_state_indices": initial_state_indices,
        "output_final_state": output_final_state, "state_v_first": state_v_first,
        "update_state_pool": update_state_pool, "null_slot": null_slot, "has_initial_state": has_initial_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "exact_state": exact_state,
        "state_checkpoints": state_checkpoints,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "checkpoint_rows": checkpoint_rows,
        "checkpoint_offsets": checkpoint_offsets, "num_splits": num_splits, "out": out,
        "segment_tokens": segment_tokens,
    }
    # fmt: on
    if to_be_checked(run):
        _check.lightning_attn_fwd_varlen(
            q, k, v, decay, cu_seqlens, **options, requires_grad=requires_grad
        )
    return run(q, k, v, decay, cu_seqlens, **options)


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
    cp_context: object | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention with the decay of a layer, in the argument order of flash-linear-attention 0.6.

    Value head h of HV decays by `(8 / HV) * (1 - layer_idx / num_layers) * h` per token.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        layer_idx, num_layers: number of the layer, from 0, and of the layers of the model.
        scale: factor of the output, finite; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`. None: zero.
        output_final_state: whether to return the final states.
        cu_seqlens: `[N + 1]` for packed input.
        state_v_first: layout of the states.
        use_qk_l2norm_in_kernel, exact_state, state_checkpoints, checkpoint_every_n_tokens: see the module.
        num_splits, segment_tokens: see the module.
        out: `[B, T, HV, V]` in the dtype of v, written and returned; not with gradients.
        cp_context: as `chunk_simple_gla`.
        impl: "auto" or the name of an implementation.

    Returns:
        `(o, final_state)` as `chunk_simple_gla`, which serves it.

    Raises:
        TypeError, ValueError, RuntimeError: see the module.

    Example:
        >>> import torch
        >>> from cula.lightning import chunk_lightning_attn
        >>> q, k, v = torch.randn(3, 1, 100, 2, 32)  # each [B, T, H, D]
        >>> o, state = chunk_lightning_attn(q, k, v, layer_idx=3, num_layers=12, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    _check.layer(layer_idx, num_layers)
    g_gamma = None
    if isinstance(v, Tensor) and v.dim() == 4 and v.shape[2] > 0:
        slope = 8 / v.shape[2] * (1 - layer_idx / num_layers)
        g_gamma = torch.arange(v.shape[2], dtype=torch.float32, device=v.device) * -slope
    return chunk_simple_gla(
        q,
        k,
        v,
        None,
        g_gamma,
        scale,
        initial_state,
        output_final_state,
        state_v_first,
        cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        exact_state=exact_state,
        state_checkpoints=state_checkpoints,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        num_splits=num_splits,
        out=out,
        segment_tokens=segment_tokens,
        cp_context=cp_context,
        impl=impl,
    )


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
    cp_context: object | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Simple gated linear attention (arXiv 2312.06635), in the argument order of flash-linear-attention 0.6.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV]`, any floating dtype and strides: natural-log decay per token, <= 0 (checked on the CPU).
        g_gamma: `[HV]` float32: constant natural-log decay, <= 0 (checked on the CPU). With both, they add; with
            neither, nothing decays.
        scale: factor of the output, finite; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; N is B, or the number of packed
            sequences. None: zero.
        output_final_state: whether to return the final states.
        state_v_first: layout of the states.
        cu_seqlens: `[N + 1]` for packed input.
        cu_seqlens_cpu: the same on the CPU, for implementations that plan on the host.
        use_qk_l2norm_in_kernel, exact_state, state_checkpoints, checkpoint_every_n_tokens: see the module.
        num_splits, segment_tokens: see the module.
        out: `[B, T, HV, V]` in the dtype of v, written and returned; not with gradients.
        cp_context: the sequences lie over several ranks; as in `chunk_gated_delta_rule`. `state_checkpoints` and `out`
            are refused beside it.
        impl: "auto" or the name of an implementation.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v; the state after the last token, or None.

    Raises:
        TypeError, ValueError, RuntimeError: see the module.

    Example:
        >>> import torch
        >>> from cula.lightning import chunk_simple_gla
        >>> q, k, v = torch.randn(3, 1, 100, 2, 32)  # each [B, T, H, D]
        >>> g = torch.nn.functional.logsigmoid(torch.randn(1, 100, 2))  # [B, T, HV], <= 0
        >>> o, state = chunk_simple_gla(q[:, :64], k[:, :64], v[:, :64], g[:, :64], output_final_state=True)
        >>> rest, _ = chunk_simple_gla(q[:, 64:], k[:, 64:], v[:, 64:], g[:, 64:], initial_state=state)
        >>> whole, _ = chunk_simple_gla(q, k, v, g)
        >>> torch.allclose(torch.cat((o, rest), 1), whole, atol=1e-3)
        True
    """
    cp_context = _ranks.context_of(cp_context)
    if cp_context is not None:
        from cula.distributed.operators import across_ranks

        # fmt: off
        return across_ranks(
            chunk_simple_gla, _check.chunk_simple_gla, cp_context,
            tokens={"q": q, "k": k, "v": v, "g": g},
            shared={"g_gamma": g_gamma},
            options={
                "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
                "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "exact_state": exact_state,
                "num_splits": num_splits, "segment_tokens": segment_tokens,
            },
            choices={"impl": impl, "cp_context": False},
            refused={
                "state_checkpoints": state_checkpoints, "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
                "out": out,
            },
            one_decay=True,
            begin="begin_chunk_simple_gla",
        )
        # fmt: on
    requires_grad = _check.requires_grad(q, k, v, g, g_gamma, initial_state)
    dim_k, dim_v, group = _check.prefill_operands(q, v)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    run = resolve(
        "chunk_simple_gla",
        impl,
        q.device,
        q.dtype,
        dim_k,
        dim_v,
        requires_grad,
        _check.dtype_of("initial_state", initial_state),
        _check.dtype_of("g", g),
        g_gamma is not None,
        cu_seqlens is not None,
        group,
        initial_state is not None,
        output_final_state,
        state_v_first,
        _check.requires_grad(g_gamma),
        use_qk_l2norm_in_kernel,
        exact_state,
        state_checkpoints is not None,
        num_splits,
        segment_tokens,
    )
    # fmt: off
    options: dict[str, Any] = {
        "g": g, "g_gamma": g_gamma, "scale": scale, "initial_state": initial_state,
        "output_final_state": output_final_state, "state_v_first": state_v_first, "cu_seqlens": cu_seqlens,
        "cu_seqlens_cpu": cu_seqlens_cpu, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "exact_state": exact_state, "state_checkpoints": state_checkpoints,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "num_splits": num_splits, "out": out,
        "segment_tokens": segment_tokens,
    }
    # fmt: on
    if to_be_checked(run):
        _check.chunk_simple_gla(q, k, v, **options, requires_grad=requires_grad)
    return run(q, k, v, **options)


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
    impl: str = "auto",
) -> Tensor:
    """Lightning attention for 1 to 8 new tokens per row, on a pool of states that is updated in place. Inference only.

    Args:
        q, k: `[B, T, H, K]`, T = 1..8; on a CUDA device bfloat16 or float16.
        v: `[B, T, HV, V]`.
        state: `[pool, HV, K, V]`, or `[pool, HV, V, K]` with `state_v_first`; float32, bfloat16 or float16 (on the CPU
            also float64); arithmetic is fp32 or better. Updated in place unless `commit` is False.
        decay: `[HV]` float32, >= 0 (checked on the CPU).
        state_indices: `[B]` int32, any stride, the pool row of every row. Negative, or `null_slot`: padding, the
            output is zero and no state changes. With `commit` live rows must differ, which is checked on the CPU and
            undefined elsewhere. None: row b uses pool row b.
        scale: factor of the output, finite; None: `K ** -0.5`.
        state_v_first: layout of the pool.
        out: `[B, T, HV, V]` in the dtype of v, written and returned.
        commit: False leaves the pool alone and only returns the outputs, for speculative verification;
            `linear_attention_commit` then advances every row by the tokens that were accepted.
        rounding_seed: None rounds a state to the nearest. An int, or a one-element int64 tensor on the device (which a
            CUDA graph can advance between replays), rounds a bfloat16 state stochastically.
        null_slot: a row of the pool that means padding, as negative ones do.
        impl: "auto" or the name of an implementation.

    Returns:
        `[B, T, HV, V]` in the dtype of v: the output after each token, itself included.

    Raises:
        TypeError, ValueError, RuntimeError: see the module. Inputs that require gradients are a ValueError.

    Example:
        >>> import torch
        >>> from cula.lightning import linear_attention_decode
        >>> q, k, v = torch.randn(3, 2, 1, 4, 32)  # each [B, T, H, D]: one new token for each of two rows
        >>> pool = torch.zeros(8, 4, 32, 32)  # [pool, H, K, V]
        >>> rows = torch.tensor([6, -1], dtype=torch.int32)  # the second row is padding
        >>> out = linear_attention_decode(q, k, v, pool, torch.full((4,), 0.1), state_indices=rows)
        >>> out.shape, out[1].any().item(), pool[6].any().item()
        (torch.Size([2, 1, 4, 32]), False, True)
    """
    _check.decode_operands(k, v, state, q)
    run = resolve(
        "linear_attention_decode",
        impl,
        k.device,
        k.dtype,
        index(k.shape[3]),
        index(v.shape[3]),
        False,
        state.dtype,
        index(k.shape[1]),
        state_v_first,
        commit,
        rounding_seed is not None,
    )
    # fmt: off
    options: dict[str, Any] = {
        "state_indices": state_indices, "scale": scale, "state_v_first": state_v_first, "out": out, "commit": commit,
        "rounding_seed": rounding_seed, "null_slot": null_slot,
    }
    # fmt: on
    if to_be_checked(run):
        _check.linear_attention_decode(q, k, v, state, decay, **options)
    return run(q, k, v, state, decay, **options)


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
    impl: str = "auto",
) -> None:
    """Advances the state of row b by its first `num_accepted[b]` tokens, in place: the other half of `commit=False`.

    Args:
        k: `[B, T, H, K]`, T = 1..8.
        v: `[B, T, HV, V]`.
        state, decay, state_indices, state_v_first, rounding_seed, null_slot: as in `linear_attention_decode`.
        num_accepted: `[B]` int32, any stride; less than 0 counts as 0, more than T as T.
        impl: "auto" or the name of an implementation.

    Raises:
        TypeError, ValueError, RuntimeError: see the module. Inputs that require gradients are a ValueError.

    Example:
        >>> import torch
        >>> from cula.lightning import linear_attention_commit, linear_attention_decode
        >>> q, k, v = torch.randn(3, 2, 4, 4, 32)  # four tokens proposed for each of two rows
        >>> state, decay = torch.zeros(2, 4, 32, 32), torch.full((4,), 0.1)
        >>> draft = linear_attention_decode(q, k, v, state, decay, commit=False)  # the state stays
        >>> linear_attention_commit(k, v, state, decay, torch.tensor([3, 0], dtype=torch.int32))
        >>> state[0].any().item(), state[1].any().item()
        (True, False)
    """
    _check.decode_operands(k, v, state)
    run = resolve(
        "linear_attention_commit",
        impl,
        k.device,
        k.dtype,
        index(k.shape[3]),
        index(v.shape[3]),
        False,
        state.dtype,
        index(k.shape[1]),
        state_v_first,
        rounding_seed is not None,
    )
    if to_be_checked(run):
        _check.linear_attention_commit(
            k,
            v,
            state,
            decay,
            num_accepted,
            state_indices=state_indices,
            state_v_first=state_v_first,
            rounding_seed=rounding_seed,
            null_slot=null_slot,
        )
    run(
        k,
        v,
        state,
        decay,
        num_accepted,
        state_indices=state_indices,
        state_v_first=state_v_first,
        rounding_seed=rounding_seed,
        null_slot=null_slot,
    )
