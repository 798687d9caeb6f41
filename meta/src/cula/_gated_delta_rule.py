"""The gated delta rule of `cula.lightning`, whose docstring says what its functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula import _check, _ranks
from cula._registry import resolve, to_be_checked
from cula_core.delta_decode.recurrent import check_fused_recurrent_gated_delta_rule
from cula_core.delta_rule.gated import check_chunk_gated_delta_rule


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    update_state_pool: bool = True,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    use_intracard_cp: bool | str = "auto",
    operand_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule (Gated Delta Networks, arXiv 2412.06464), in the argument order of flash-linear-attention 0.6.

    Heads of q, k and v may be grouped in any way: states and outputs have HS = max(HQ, HV) heads, a multiple of HQ, HK
    and HV, and head s reads head `s // (HS // HQ)` of q, `s // (HS // HK)` of k and `s // (HS // HV)` of v.

    Args:
        q: `[B, T, HQ, K]`.
        k: `[B, T, HK, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HS]`, any floating dtype and strides: natural-log decay, <= 0 (checked on the CPU); or the raw gate
            with `use_gate_in_kernel`. None: no decay.
        beta: `[B, T, HS]`, any floating dtype and strides: write strength; or its logits with
            `use_beta_sigmoid_in_kernel`. None: a strength of 1.
        scale: factor of the output, finite; None: `K ** -0.5`.
        initial_state: `[N, HS, K, V]`, or `[N, HS, V, K]` with `state_v_first`; N is B, or the number of packed
            sequences. It is left as it is. None: zero.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: normalise q and k, `x / sqrt(sum(x^2) + 1e-6)` per head.
        use_beta_sigmoid_in_kernel: use `sigmoid(beta)`; needs `beta`.
        allow_neg_eigval: use `2 * sigmoid(beta)`; needs `use_beta_sigmoid_in_kernel`.
        state_v_first: layout of the states.
        cu_seqlens: `[N + 1]` for packed input. A sequence without tokens keeps its state.
        cu_seqlens_cpu: the same on the CPU, for implementations that plan on the host.
        chunk_indices: `[NT, 2]` int32 or int64, the schedule `cula.varlen.chunk_indices(cu_seqlens, 64, NT)` with
            the exact NT, for implementations that take one.
        cp_context: the sequences lie over several ranks, and the tensors are this rank's: a
            `cula.distributed.ContextParallel`; a ProcessGroup or a DeviceMesh of one dimension, over which a dense
            batch lies in contiguous slices of any lengths; or the context of flash-linear-attention. A row of
            initial_state, and of the final states, then belongs to a local piece; see `ContextParallel.pieces`.
            Pools, has_initial_state, checkpoints, chunk_indices and `out` are refused beside it. None: the one of
            `with cp:` around the call, if any; False: none.
        use_gate_in_kernel: use `-exp(A_log) * softplus(g + dt_bias)`; needs `g` and `A_log`.
        A_log: `[HS]`, any floating dtype, log of the gate's rate.
        dt_bias: `[HS]`, any floating dtype, bias of the raw gate; None: 0. Both may have more dimensions of size 1.
        softplus_beta, softplus_threshold: `softplus(x)` is `log(1 + exp(softplus_beta * x)) / softplus_beta`, and x
            where `softplus_beta * x` is above the threshold.
        state_pool: `[pool, HS, K, V]`, or `[pool, HS, V, K]` with `state_v_first`, in place of an initial_state.
            Sequence n starts from one of its rows and leaves its final state in one, unless `update_state_pool` is
            False; an updated pool excludes gradients.
        state_indices: `[N]` int32, any stride: the row where every sequence starts. Negative: a padding slot, no row is
            read or written, no checkpoint is written, and the outputs are zero. None: sequence n uses row n.
        output_state_indices: `[N]` int32, any stride: the row for every final state; negative: it is not stored. None:
            the row where the sequence starts. A row that is written belongs to one sequence alone, which is checked on
            the CPU and undefined elsewhere.
        update_state_pool: False only reads the pool and returns the final states by themselves.
        null_slot: one more index that means what a negative one does.
        has_initial_state: `[N]` bool. Where it is False the sequence starts from zero and its row of initial_state or
            state_pool is not read, whatever it holds. None: all True.
        state_checkpoints, checkpoint_every_n_tokens: see `cula.lightning`; heads are HS.
        checkpoint_offsets: `[N]` int32 or int64, in place of an interval: each sequence keeps one state, after so many
            tokens; a multiple of 64, or none is kept. It goes to row n of state_checkpoints `[rows, HS, K, V]` or, with
            checkpoint_rows and no state_checkpoints, to a row of the state_pool.
        checkpoint_rows: `[N]` int32 or int64: the row of state_checkpoints `[rows, HS, K, V]` of a sequence's first
            state; negative: none of its states is kept.
        use_intracard_cp: split long sequences over the multiprocessors of one GPU: "auto", True (refuse what cannot) or
            False.
        segment_tokens: a kernel cuts every sequence after each so many tokens, a multiple of 64 and at least 1024, so
            that a sequence has the same bits in every batch. None: as use_intracard_cp says.
        operand_dtype: torch.float16 or torch.bfloat16, what a kernel hands to the tensor cores: the first is more
            precise, the second takes values of any size. None: as the kernel finds best. No effect on the reference.
        out: `[B, T, HS, V]` in the dtype of v, written and returned; not with gradients.
        chunk_size: 16, 32 or 64, of flash-linear-attention. It would change rounding alone: chunks have 64 tokens here.
        impl: "auto" or the name of an implementation.

    Returns:
        `(o, final_state)`: o `[B, T, HS, V]` in the dtype of v; the state after the last token (zero for a padding
        slot), or None. With a pool that is updated `(o, state_pool)`.

    Raises:
        TypeError, ValueError, RuntimeError: see `cula.lightning`.
        NotImplementedError: a context of flash-linear-attention that is zigzag, or counts ranks on a device.

    Example:
        >>> import torch
        >>> from cula.lightning import chunk_gated_delta_rule
        >>> q, k = torch.randn(2, 1, 100, 2, 32)  # [B, T, HQ, K] and [B, T, HK, K]
        >>> v = torch.randn(1, 100, 4, 32)  # [B, T, HV, V]: two value heads for each head of q and k
        >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> o, state = chunk_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 32, 32]))

        Two packed sequences on a pool: the first goes on from row 5, the second is new, whatever row 2 holds.

        >>> pool = torch.full((8, 4, 32, 32), float("nan"))
        >>> pool[5] = state[0]
        >>> o, pool = chunk_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 60, 100]), state_pool=pool,
        ...     state_indices=torch.tensor([5, 2], dtype=torch.int32), has_initial_state=torch.tensor([True, False]),
        ... )
        >>> o.isfinite().all().item(), pool.isfinite().flatten(1).all(1).nonzero().flatten().tolist()
        (True, [2, 5])
    """
    if A_log is not None or dt_bias is not None:
        A_log, dt_bias = _check.without_ones(A_log), _check.without_ones(dt_bias)
    cp_context = _ranks.context_of(cp_context)
    if cp_context is not None:
        from cula.distributed.operators import across_ranks

        # fmt: off
        return across_ranks(
            chunk_gated_delta_rule, check_chunk_gated_delta_rule, cp_context,
            tokens={"q": q, "k": k, "v": v, "g": g, "beta": beta},
            shared={"A_log": A_log, "dt_bias": dt_bias},
            options={
                "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": use_gate_in_kernel,
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
                "softplus_beta": softplus_beta, "softplus_threshold": softplus_threshold,
                "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu,
                "update_state_pool": update_state_pool, "use_intracard_cp": use_intracard_cp,
                "operand_dtype": operand_dtype, "segment_tokens": segment_tokens,
            },
            choices={"impl": impl, "cp_context": False},
            refused={
                "state_pool": state_pool, "state_indices": state_indices, "null_slot": null_slot,
                "output_state_indices": output_state_indices, "has_initial_state": has_initial_state,
                "state_checkpoints": state_checkpoints, "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
                "checkpoint_rows": checkpoint_rows, "checkpoint_offsets": checkpoint_offsets,
                "chunk_indices": chunk_indices, "out": out, "cp_context": None,
            },
            begin="begin_chunk_gated_delta_rule",
        )
        # fmt: on
    states = initial_state if state_pool is None else state_pool
    requires_grad = _check.requires_grad(q, k, v, g, beta, states, A_log, dt_bias)
    dim_k, dim_v, group, grouped_queries = _check.grouped_operands(q, k, v)
    if chunk_size != 64:
        _check.chunk_size(chunk_size)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    _check.kernel_choices(
        use_intracard_cp, segment_tokens, operand_dtype, softplus_beta, softplus_threshold
    )
    run = resolve(
        "chunk_gated_delta_rule",
        impl,
        q.device,
        q.dtype,
        dim_k,
        dim_v,
        requires_grad,
        _check.dtype_of("initial_state" if state_pool is None else "state_pool", states),
        _check.dtype_of("g", g),
        _check.dtype_of("beta", beta),
        cu_seqlens is not None,
        group,
        initial_state is not None,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        grouped_queries,
        (softplus_beta, softplus_threshold) != (1.0, 20.0),
        state_pool is not None,
        update_state_pool,
        has_initial_state is not None,
        state_checkpoints is not None or checkpoint_offsets is not None,
        use_intracard_cp,
        segment_tokens,
        operand_dtype,
    )
    # fmt: off
    options: dict[str, Any] = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "state_v_first": state_v_first, "cu_seqlens": cu_seqlens,
        "cu_seqlens_cpu": cu_seqlens_cpu, "chunk_indices": chunk_indices, "cp_context": None,
        "use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias, "softplus_beta": softplus_beta,
        "softplus_threshold": softplus_threshold, "state_pool": state_pool, "state_indices": state_indices,
        "output_state_indices": output_state_indices, "update_state_pool": update_state_pool, "null_slot": null_slot,
        "has_initial_state": has_initial_state, "state_checkpoints": state_checkpoints,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "checkpoint_rows": checkpoint_rows,
        "checkpoint_offsets": checkpoint_offsets, "use_intracard_cp": use_intracard_cp,
        "operand_dtype": operand_dtype, "out": out, "segment_tokens": segment_tokens,
    }
    # fmt: on
    if to_be_checked(run):
        check_chunk_gated_delta_rule(q, k, v, g, beta, **options, requires_grad=requires_grad)
    return run(q, k, v, g, beta, **options)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule one token after another, in the argument order of flash-linear-attention 0.6: decode.

    It takes any number of tokens, and continues from the states that `chunk_gated_delta_rule` returns. For inference:
    of the implementations only the reference is differentiable. A pool of states that is updated in place, with slots,
    has `cula.delta.delta_rule_decode`, in one launch.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV]`, any floating dtype: natural-log decay per head, <= 0 (checked on the CPU); or the raw gate with
            `use_gate_in_kernel`. None: no decay.
        gk: `[B, T, HV, K]`, any floating dtype: natural-log decay per channel of K, <= 0.
        gv: `[B, T, HV, V]`, any floating dtype: natural-log decay per channel of V, <= 0. Decays that are given
            multiply. The kernel takes g or gk; other implementations take all three.
        beta: `[B, T, HV]`, any floating dtype: write strength; or its logits with `use_beta_sigmoid_in_kernel`. None: a
            strength of 1.
        scale: factor of the output, finite; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; any floating dtype, which the final
            states have too; N is B, or the number of packed sequences. It is left as it is. None: zero.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: normalise q and k, `x / sqrt(sum(x^2) + 1e-6)` per head.
        use_gate_in_kernel: use `-exp(A_log) * softplus(g + dt_bias)`; needs g.
        A_log: `[HV]`, any floating dtype, needed with `use_gate_in_kernel`.
        dt_bias: `[HV]`, bias of the raw gate; None: 0. Both may have more dimensions of size 1.
        use_beta_sigmoid_in_kernel: use `sigmoid(beta)`; needs beta.
        allow_neg_eigval: use `2 * sigmoid(beta)`; needs `use_beta_sigmoid_in_kernel`.
        state_v_first: layout of the states.
        cu_seqlens: `[N + 1]` for packed input.
        out: `[B, T, HV, V]` in the dtype of v, written and returned; not with gradients.
        impl: "auto" or the name of an implementation.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v, final_state like initial_state (float32 without one;
        float64 with float64 activations), or None.

    Raises:
        TypeError, ValueError, RuntimeError: see `cula.lightning`.

    Example:
        >>> import torch
        >>> from cula.lightning import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        >>> q, k = torch.randn(2, 1, 100, 2, 32)  # [B, T, H, K]
        >>> v, g, beta = torch.randn(1, 100, 4, 32), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> prompt, token = slice(0, 99), slice(99, 100)
        >>> _, state = chunk_gated_delta_rule(
        ...     *(x[:, prompt] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o, state = fused_recurrent_gated_delta_rule(
        ...     q[:, token], k[:, token], v[:, token], g[:, token], beta=beta[:, token],
        ...     initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 1, 4, 32]), torch.Size([1, 4, 32, 32]))
    """
    _ranks.refuse_context("fused_recurrent_gated_delta_rule")
    if A_log is not None or dt_bias is not None:
        A_log, dt_bias = _check.without_ones(A_log), _check.without_ones(dt_bias)
    requires_grad = _check.requires_grad(q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias)
    dim_k, dim_v, group = _check.prefill_operands(q, v)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    run = resolve(
        "fused_recurrent_gated_delta_rule",
        impl,
        q.device,
        q.dtype,
        dim_k,
        dim_v,
        requires_grad,
        _check.dtype_of("initial_state", initial_state),
        _check.dtype_of("g", g),
        _check.dtype_of("beta", beta),
        cu_seqlens is not None,
        group,
        initial_state is not None,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        _check.dtype_of("gk", gk),
        _check.dtype_of("gv", gv),
    )
    # fmt: off
    options: dict[str, Any] = {
        "g": g, "gk": gk, "gv": gv, "beta": beta, "scale": scale, "initial_state": initial_state,
        "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "out": out,
    }
    # fmt: on
    if to_be_checked(run):
        check_fused_recurrent_gated_delta_rule(q, k, v, **options, requires_grad=requires_grad)
    return run(q, k, v, **options)
