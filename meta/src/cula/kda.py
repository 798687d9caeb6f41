"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): linear attention with a delta rule and a decay per channel.

Per sequence and value head, with the state S `[K, V]`, the log decay g_t `[K]` (natural log, <= 0) and the write
strength beta_t:

    S'_t = diag(exp(g_t)) S_{t-1}
    S_t  = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T        o_t = scale * S_t^T q_t

`chunk_kda` is for prefill and training, `fused_recurrent_kda` for the few tokens of decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula import _check, _ranks
from cula._registry import KERNELS_ONLY, arch_of, resolve, to_be_checked
from cula_core.delta_decode.recurrent import check_fused_recurrent_kda
from cula_core.delta_rule.contract import check_split_choice

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda_prefill_hopper"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_intracard_cp: bool | str = "auto",
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    update_state_pool: bool = True,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """KDA over whole sequences, with the argument order of flash-linear-attention 0.6.

    Activations q, k, v are bfloat16, float16, float32 or float64, of one dtype, and may be strided as long as the last
    dimension is contiguous; autocast casts them where q is float32. HV is a multiple of H; value head h reads query and
    key head `h // (HV // H)`. Sums are kept in fp32 (fp64 for float64).

    Gradients: a kernel package has a backward of its own or not, as `cula.explain(.., requires_grad=True)` says. One of
    its own keeps the inputs alone, and takes a `beta` that is given as >= 0 (checked on the CPU). Behind a kernel
    without one runs that of flash-linear-attention, where it is installed and able (bfloat16 or float16); else
    `impl="auto"` takes the reference, and a kernel that was asked for refuses.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV, K]`, any floating dtype: the natural-log decay, <= 0 (checked on the CPU); or the raw gate with
            `use_gate_in_kernel`.
        beta: `[B, T, HV]`, any floating dtype: the write strength; or its logits with `use_beta_sigmoid_in_kernel`.
        scale: factor of the output, finite; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; float32, bfloat16, float16 (or float64
            with float64 activations), which the final states have as well; N is B, or the number of packed sequences.
            None: zero, and final states are float32.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: normalise q and k, `x / sqrt(sum(x^2) + 1e-6)` per head.
        use_gate_in_kernel: compute the decay from the raw g: without `lower_bound`
            `-exp(A_log) * softplus(g + dt_bias)`, with it `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        use_beta_sigmoid_in_kernel: use `sigmoid(beta)`.
        allow_neg_eigval: use `2 * sigmoid(beta)`; needs `use_beta_sigmoid_in_kernel`.
        safe_gate: promises decays in [-5, 0), which lets kernels use wider matrix instructions. A gate computed inside
            then needs `lower_bound`.
        lower_bound: bound of the safe gate, in [-5, 0) with `safe_gate`, else finite and < 0. None: the softplus form.
        disable_recompute: keep more for the backward pass. Kernels with one of their own keep the blocks of all chunks,
            60,928 bytes per chunk of 64 tokens and value head. In front of the backward of flash-linear-attention a
            kernel keeps w, u, qg and kg, and its own forward all intermediates.
        return_intermediate_states: also return the state before each chunk; inference only. It has the dtype of the
            states, where flash-linear-attention rounds it to that of the activations.
        state_v_first: states are stored `[.., V, K]` instead of `[.., K, V]`.
        cu_seqlens: `[N + 1]` int32 or int64 on the device of q: B is 1 and T holds N sequences, some possibly empty.
            Values are checked when they lie on the CPU; a device is never read back by cula itself.
        cu_seqlens_cpu: the same on the CPU, for implementations that plan on the host.
        cp_context: the sequences lie over several ranks, and the tensors are this rank's: a
            `cula.distributed.ContextParallel`; a ProcessGroup or a DeviceMesh of one dimension, over which a dense
            batch lies in contiguous slices of any lengths; or the context of flash-linear-attention. A row of
            initial_state, and of the final states, then belongs to a local piece; see `ContextParallel.pieces`.
            `out`, `return_intermediate_states`, pools, has_initial_state and checkpoints are refused beside it.
            None: the one of `with cp:` around the call, if any; False: none.
        use_graph, max_num_seqs: what flash-linear-attention is told for a CUDA graph. Here they change nothing: a
            kernel takes its grid from shapes, and cu_seqlens may end in empty sequences. max_num_seqs is at least N.
        A_log: `[HV]`, any floating dtype, log of the gate's rate. May be None with `lower_bound`, the factor is then 1.
        dt_bias: `[HV * K]` or `[HV, K]`, bias of the raw gate; None: 0. Both may have more dimensions of size 1.
        use_intracard_cp: split long sequences over the multiprocessors of one GPU: "auto", True (refuse what cannot) or
            False.
        out: `[B, T, HV, V]` in the dtype of v, written and returned; not with gradients.
        segment_tokens: a kernel cuts every sequence after each so many tokens, a multiple of 64 and at least 1024, so
            that a sequence has the same bits in every batch. None: as use_intracard_cp says.
        state_pool: `[pool, HV, K, V]`, or `[pool, HV, V, K]` with `state_v_first`, in place of an initial_state.
            Sequence n starts from one of its rows and leaves its final state in one, unless `update_state_pool` is
            False; an updated pool excludes gradients.
        initial_state_indices: `[N]` int32, any stride: the row where every sequence starts. Negative: a padding slot,
            no row is read or written, no checkpoint is written, and the outputs are zero. None: sequence n uses row n.
        output_state_indices: `[N]` int32, any stride: the row for every final state; negative: it is not stored. None:
            the row where the sequence starts. A row that is written belongs to one sequence alone, which is checked on
            the CPU and undefined elsewhere.
        update_state_pool: False only reads the pool and returns the final states by themselves.
        null_slot: one more index that means what a negative one does.
        has_initial_state: `[N]` bool. Where it is False the sequence starts from zero and its row of initial_state or
            state_pool is not read, whatever it holds. None: all True.
        state_checkpoints: contiguous memory for states on the way, in the dtype and layout of the states.
        checkpoint_every_n_tokens: n, a multiple of 64: every sequence keeps its state after each n tokens, in
            state_checkpoints `[B, T // n, HV, K, V]`: a dense sequence b from row [b, 0] on, a packed one that begins
            at token a from row [0, a // n] on. With checkpoint_rows in `[rows, HV, K, V]`.
        checkpoint_offsets: `[N]` int32 or int64, in place of an interval: each sequence keeps one state, after so many
            tokens; a multiple of 64, or none is kept. It goes to row n of state_checkpoints `[rows, HV, K, V]` or, with
            checkpoint_rows and no state_checkpoints, to a row of the state_pool.
        checkpoint_rows: `[N]` int32 or int64: the row of state_checkpoints `[rows, HV, K, V]` of a sequence's first
            state; negative: none of its states is kept.
        chunk_size: 16, 32 or 64, of flash-linear-attention. It would change rounding alone: chunks have 64 tokens here.
            With `return_intermediate_states` it is 64.
        impl: "auto", or the name of an implementation, which then serves or raises; see `cula.explain`.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v, final_state like initial_state (zero for a padding
        slot) or None. With a pool that is updated `(o, state_pool)`. With `return_intermediate_states`, which a pool or
        state_checkpoints exclude, a third tensor `[B, NT, HV, K, V]` (`[B, NT, HV, V, K]` with `state_v_first`): one
        state per chunk of 64 tokens, in the dtype of the states.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        NotImplementedError: a context of flash-linear-attention that is zigzag, or counts ranks on a device.
        RuntimeError: the implementation asked for cannot serve; the message says why.

    Example:
        >>> import torch
        >>> from cula.kda import chunk_kda
        >>> q, k = torch.randn(2, 1, 100, 2, 32)  # [B, T, H, K]
        >>> v = torch.randn(1, 100, 4, 32)  # [B, T, HV, V]: two value heads for each head of q and k
        >>> g, beta = -torch.rand(1, 100, 4, 32), torch.rand(1, 100, 4)
        >>> cu_seqlens = torch.tensor([0, 30, 30, 100])  # three packed sequences, one of them empty
        >>> o, states = chunk_kda(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True, cu_seqlens=cu_seqlens
        ... )
        >>> o.shape, states.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([3, 4, 32, 32]))
    """
    if A_log is not None or dt_bias is not None:
        A_log, dt_bias = _check.without_ones(A_log), _check.without_ones(dt_bias)
    cp_context = _ranks.context_of(cp_context)
    if cp_context is not None:
        from cula.distributed.operators import across_ranks

        # fmt: off
        return across_ranks(
            chunk_kda, _check.chunk_kda, cp_context,
            tokens={"q": q, "k": k, "v": v, "g": g, "beta": beta},
            shared={"A_log": A_log, "dt_bias": dt_bias},
            options={
                "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": use_gate_in_kernel,
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate, "lower_bound": lower_bound, "disable_recompute": disable_recompute,
                "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu,
                "update_state_pool": update_state_pool, "use_intracard_cp": use_intracard_cp,
                "segment_tokens": segment_tokens,
            },
            choices={"impl": impl, "cp_context": False},
            refused={
                "return_intermediate_states": return_intermediate_states, "out": out, "cp_context": None,
                "state_pool": state_pool, "initial_state_indices": initial_state_indices, "null_slot": null_slot,
                "output_state_indices": output_state_indices, "has_initial_state": has_initial_state,
                "state_checkpoints": state_checkpoints, "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
                "checkpoint_rows": checkpoint_rows, "checkpoint_offsets": checkpoint_offsets,
            },
            begin="begin_chunk_kda",
        )
        # fmt: on
    states = initial_state if state_pool is None else state_pool
    requires_grad = _check.requires_grad(q, k, v, g, beta, states, A_log, dt_bias)
    dim_k, dim_v, group = _check.prefill_operands(q, v)
    if use_graph is not False or max_num_seqs is not None:
        _check.graph(use_graph, max_num_seqs, cu_seqlens)
    if chunk_size != 64:
        _check.chunk_size(chunk_size, return_intermediate_states)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    check_split_choice(use_intracard_cp, segment_tokens)
    run = resolve(
        "chunk_kda",
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
        safe_gate,
        lower_bound is not None,
        return_intermediate_states,
        state_pool is not None,
        update_state_pool,
        has_initial_state is not None,
        state_checkpoints is not None or checkpoint_offsets is not None,
        use_intracard_cp,
        segment_tokens,
    )
    # fmt: off
    options: dict[str, Any] = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "safe_gate": safe_gate, "lower_bound": lower_bound, "disable_recompute": disable_recompute,
        "return_intermediate_states": return_intermediate_states, "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "cp_context": cp_context, "A_log": A_log,
        "dt_bias": dt_bias, "use_intracard_cp": use_intracard_cp, "out": out, "segment_tokens": segment_tokens,
        "state_pool": state_pool, "initial_state_indices": initial_state_indices,
        "output_state_indices": output_state_indices, "update_state_pool": update_state_pool, "null_slot": null_slot,
        "has_initial_state": has_initial_state, "state_checkpoints": state_checkpoints,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "checkpoint_rows": checkpoint_rows,
        "checkpoint_offsets": checkpoint_offsets,
    }
    # fmt: on
    if to_be_checked(run):
        _check.chunk_kda(q, k, v, g, beta, **options, requires_grad=requires_grad)
    return run(q, k, v, g, beta, **options)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """KDA one token after another, with the argument order of flash-linear-attention 0.6: decode, one or a few tokens.

    It takes any number of tokens, computes what `chunk_kda` computes, and continues from the states that `chunk_kda`
    returns. Activations q, k, v are bfloat16, float16, float32 or float64, of one dtype, and may be strided as long as
    the last dimension is contiguous. HV is a multiple of H; value head h reads query and key head `h // (HV // H)`.
    Sums are kept in fp32 (fp64 for float64). For inference: of the implementations only the reference is
    differentiable, and gradients through many tokens are the work of `chunk_kda`. A pool of states that is updated in
    place, with slots, has `cula.delta.delta_rule_decode`, in one launch.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV, K]`, any floating dtype: the natural-log decay, <= 0 (checked on the CPU); or the raw gate with
            `use_gate_in_kernel`.
        beta: `[B, T, HV]`, any floating dtype: the write strength; or its logits with `use_beta_sigmoid_in_kernel`.
        A_log: `[HV]`, any floating dtype, log of the gate's rate. May be None with `lower_bound`, the factor is then 1.
        dt_bias: `[HV * K]` or `[HV, K]`, bias of the raw gate; None: 0. Both may have more dimensions of size 1.
        scale: factor of the output, finite; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; any floating dtype, which the final
            states have too; N is B, or the number of packed sequences. It is left as it is. None: zero.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: normalise q and k, `x / sqrt(sum(x^2) + 1e-6)` per head.
        use_gate_in_kernel: compute the decay from the raw g: without `lower_bound`
            `-exp(A_log) * softplus(g + dt_bias)`, with it `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        use_beta_sigmoid_in_kernel: use `sigmoid(beta)`.
        allow_neg_eigval: use `2 * sigmoid(beta)`; needs `use_beta_sigmoid_in_kernel`.
        lower_bound: bound of the safe gate, finite and < 0, with `use_gate_in_kernel`. None: the softplus form.
        state_v_first: states are stored `[.., V, K]` instead of `[.., K, V]`.
        cu_seqlens: `[N + 1]` int32 or int64 on the device of q: B is 1 and T holds N sequences, some possibly empty.
            Values are checked when they lie on the CPU; a device is never read back.
        out: `[B, T, HV, V]` in the dtype of v, written and returned; not with gradients.
        impl: "auto", or the name of an implementation, which then serves or raises; see `cula.explain`.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v, final_state like initial_state or None.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        RuntimeError: the implementation asked for cannot serve; the message says why.

    Example:
        >>> import torch
        >>> from cula.kda import chunk_kda, fused_recurrent_kda
        >>> q, k = torch.randn(2, 1, 100, 2, 32)  # [B, T, H, K]
        >>> v = torch.randn(1, 100, 4, 32)  # [B, T, HV, V]: two value heads for each head of q and k
        >>> g, beta = -torch.rand(1, 100, 4, 32), torch.rand(1, 100, 4)
        >>> first, last = slice(0, 99), slice(99, 100)
        >>> _, state = chunk_kda(
        ...     *(x[:, first] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o, state = fused_recurrent_kda(
        ...     *(x[:, last] for x in (q, k, v, g, beta)),
        ...     initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 1, 4, 32]), torch.Size([1, 4, 32, 32]))
    """
    _ranks.refuse_context("fused_recurrent_kda")
    if A_log is not None or dt_bias is not None:
        A_log, dt_bias = _check.without_ones(A_log), _check.without_ones(dt_bias)
    requires_grad = _check.requires_grad(q, k, v, g, beta, initial_state, A_log, dt_bias)
    dim_k, dim_v, group = _check.prefill_operands(q, v)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    run = resolve(
        "fused_recurrent_kda",
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
        lower_bound is not None,
    )
    # fmt: off
    options: dict[str, Any] = {
        "A_log": A_log, "dt_bias": dt_bias, "scale": scale, "initial_state": initial_state,
        "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "lower_bound": lower_bound, "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens, "out": out,
    }
    # fmt: on
    if to_be_checked(run):
        check_fused_recurrent_kda(q, k, v, g, beta, **options, requires_grad=requires_grad)
    return run(q, k, v, g, beta, **options)


def kda_prefill_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_intracard_cp: bool | str = "auto",
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    update_state_pool: bool = True,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`chunk_kda` by a Hopper kernel or not at all: the same contract, for callers that must not get a slower path.

    Args: see `chunk_kda`.

    Returns: see `chunk_kda`.

    Raises:
        RuntimeError: the tensors are not on a Hopper GPU (sm90), no Hopper KDA kernel is installed, or the kernel does
            not take this problem. Inputs that require gradients need flash-linear-attention where the kernel has no
            backward for the problem.
        TypeError, ValueError, NotImplementedError: as `chunk_kda`.

    Example:
        >>> import torch
        >>> from cula.kda import kda_prefill_hopper
        >>> q, k = torch.randn(2, 1, 100, 2, 32)  # [B, T, H, K]
        >>> v = torch.randn(1, 100, 4, 32)  # [B, T, HV, V]: two value heads for each head of q and k
        >>> g, beta = -torch.rand(1, 100, 4, 32), torch.rand(1, 100, 4)
        >>> kda_prefill_hopper(q, k, v, g, beta)  # these tensors are on the CPU
        Traceback (most recent call last):
        RuntimeError: kda_prefill_hopper needs tensors on a Hopper GPU (sm90), got cpu
    """
    if isinstance(q, Tensor) and arch_of(q.device) != "sm90":
        raise RuntimeError(
            f"kda_prefill_hopper needs tensors on a Hopper GPU (sm90), got {arch_of(q.device)}"
        )
    return chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        safe_gate,
        lower_bound,
        disable_recompute,
        return_intermediate_states,
        state_v_first,
        cu_seqlens,
        cu_seqlens_cpu,
        cp_context,
        use_graph,
        max_num_seqs,
        A_log=A_log,
        dt_bias=dt_bias,
        use_intracard_cp=use_intracard_cp,
        out=out,
        segment_tokens=segment_tokens,
        state_pool=state_pool,
        initial_state_indices=initial_state_indices,
        output_state_indices=output_state_indices,
        update_state_pool=update_state_pool,
        null_slot=null_slot,
        has_initial_state=has_initial_state,
        state_checkpoints=state_checkpoints,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        checkpoint_rows=checkpoint_rows,
        checkpoint_offsets=checkpoint_offsets,
        chunk_size=chunk_size,
        impl=KERNELS_ONLY,
    )
