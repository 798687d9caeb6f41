"""The torch operator and the public function. The kernel is imported when a CUDA tensor comes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cula_core import arguments
from cula_core.delta_decode.slots import Limits
from cula_core.delta_rule.call import Slice
from cula_core.delta_rule.config import INTRACARD_CP
from cula_core.delta_rule.contract import check_trained
from cula_core.delta_rule.gated import check_chunk_gated_delta_rule
from cula_core.operators import register_fake
from cula_core.reference.gated_delta_rule import gated_delta_rule
from cula_core.shortcuts import shortcut
from cula_core.tensors import (
    DENSE,
    aligned,
    as_stored,
    is_aligned,
    is_plain_cuda_call,
    move_states,
    put_back,
    stored_alike,
)

from ..ops import require_hopper
from .backward.ops import trained
from .call import SCHEMA, Call
from .config import HEAD_DIM

if TYPE_CHECKING:
    from cula_core.delta_rule.fold import Chain
    from cula_core.delta_rule.slices import Begun

_PREFILL = "cula_lightning_sm90::gated_prefill"
torch.library.define(_PREFILL, SCHEMA)

# Sequences and heads: twice their product, the items of work, is a 32-bit integer.
_LIMITS = Limits((HEAD_DIM,), 32767)


def _run_on_cpu(call: Call) -> None:
    pooled = call.state_indices is not None or call.state_pool is not None
    found = gated_delta_rule(
        call.q, call.k, call.v, call.g, call.beta, call.scale,
        initial_state=None if pooled else call.initial, use_qk_l2norm_in_kernel=call.l2norm,
        use_beta_sigmoid_in_kernel=call.beta_logits, allow_neg_eigval=call.doubled, state_v_first=call.state_v_first,
        cu_seqlens=call.cu_seqlens, use_gate_in_kernel=call.raw_gate, A_log=call.A_log, dt_bias=call.dt_bias,
        softplus_beta=call.softplus_beta, softplus_threshold=call.softplus_threshold,
        state_pool=call.initial if pooled else None, state_indices=call.state_indices,
        output_state_indices=call.output_state_indices, update_state_pool=call.state_pool is not None,
        null_slot=call.null_slot, has_initial_state=call.has_initial_state, state_checkpoints=call.checkpoints,
        checkpoint_every_n_tokens=call.checkpoint_every or None, checkpoint_rows=call.checkpoint_rows,
        checkpoint_offsets=call.checkpoint_offsets,
    )  # fmt: skip
    call.out.copy_(found.out)
    if call.state_pool is not None:
        assert found.pool is not None
        call.state_pool.copy_(found.pool)
    if call.final_state is not None:
        call.final_state.copy_(found.states)
    if call.checkpoints is not None:
        assert found.checkpoints is not None
        call.checkpoints.copy_(found.checkpoints)


def _run_on_gpu(call: Call) -> None:
    require_hopper(call.q.device)
    if call.out.numel() == 0 or call.sequences == 0:
        move_states(
            call.initial, call.state_pool, call.final_state, call.state_indices, call.output_state_indices,
            call.null_slot, call.has_initial_state, call.sequences,
        )  # fmt: skip
        return
    out = call.out
    changes = _as_read(call)
    for name in ("checkpoint_rows", "checkpoint_offsets"):
        x = getattr(call, name)
        changes[name] = None if x is None else x.to(torch.int32)
    if call.checkpoints is not None and call.checkpoints.numel() == 0:
        changes |= {"checkpoints": None, "checkpoint_every": 0, "checkpoint_offsets": None}
    if not is_aligned(out):
        changes["out"] = torch.empty_like(out, memory_format=DENSE)
    call = call._replace(**changes)
    _launch()(call)
    if call.out is not out:
        out.copy_(call.out)


def _as_read(call: Call) -> dict[str, Any]:
    """Returns the inputs of tokens and heads as the kernels read them."""
    return (
        {name: aligned(getattr(call, name)) for name in ("q", "k", "v")}
        | {name: _narrow(getattr(call, name)) for name in ("g", "beta")}
        | {name: _vector(getattr(call, name)) for name in ("A_log", "dt_bias")}
    )


def _narrow(x: Tensor | None) -> Tensor | None:
    """Returns a gate in a dtype that the kernel reads."""
    return x.float() if x is not None and x.dtype == torch.float64 else x


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


@functools.cache
def _launch() -> Callable[[Call], None]:
    from .launch import run

    return run


torch.library.impl(_PREFILL, "CPU", lambda *values: _run_on_cpu(Call(*values)))
torch.library.impl(_PREFILL, "CUDA", lambda *values: _run_on_gpu(Call(*values)))
register_fake(_PREFILL)

_prefill_op = torch.ops.cula_lightning_sm90.gated_prefill.default


@shortcut
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
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule (Gated Delta Networks, arXiv 2412.06464), in the argument order of flash-linear-attention 0.6.

    With the state S `[K, V]` of a sequence and head, the log decay d and the write strength b of a token:

        S <- exp(d) S        S <- S + b k (v - S^T k)^T        o = scale * S^T q

    Heads of q, k and v may be grouped in any way: states and outputs have HS = max(HQ, HV) heads, and head s reads head
    `s // (HS // HQ)` of q, `s // (HS // HK)` of k and `s // (HS // HV)` of v. On a GPU q, k, v are bfloat16 or float16
    and K = V = 128; the kernel reads by TMA, so that views whose address or strides are no multiples of 16 bytes are
    copied first. On the CPU any dimensions, and float32 and float64 too. States are float32, bfloat16 or float16, those
    of a call alike, and float32 without initial ones.

    Args:
        q: `[B, T, HQ, K]`.
        k: `[B, T, HK, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HS]`, any floating dtype and strides: log decays <= 0 (checked on the CPU), or with
            `use_gate_in_kernel` what `-exp(A_log) * softplus(g + dt_bias)` makes them of. None: nothing decays.
        beta: `[B, T, HS]`, any floating dtype and strides: strengths, or their logits with
            `use_beta_sigmoid_in_kernel`. None: 1.
        scale: factor of the outputs; None: K ** -0.5.
        initial_state: `[N, HS, K, V]`, or `[N, HS, V, K]` with `state_v_first`; it is not changed. None: zero.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum(x^2) + 1e-6), per token and head.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: strengths are `sigmoid(beta)`, and twice that with both.
        state_v_first: layout of all states.
        cu_seqlens: `[N + 1]` int32 or int64 on the device of q packs N sequences into B = 1; never read back. An empty
            sequence keeps its state.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which tells how long the longest sequence is. Without it packed
            sequences are taken for equally long. A captured graph keeps what was decided.
        chunk_indices: accepted because callers may have them; not used.
        cp_context: None; sequences are not split over several GPUs.
        A_log, dt_bias: `[HS]`, of raw gates.
        softplus_beta, softplus_threshold: of the softplus of raw gates.
        state_pool: `[pool, HS, K, V]` or V, K: sequence n starts from one of its rows, and leaves its final state in
            one unless `update_state_pool` is False, which only reads the pool.
        state_indices: `[N]` int32, any stride: the row of each sequence. Negative, or `null_slot`: padding, no row is
            read or written and the outputs are zero. None: row n.
        output_state_indices: `[N]` int32, any stride: the row for each final state; negative: it is not stored. None:
            as it began.
        has_initial_state: `[N]` bool: False: the sequence starts from zero, whatever its row holds.
        state_checkpoints: memory for states on the way, in the dtype and layout of the states; padding and rows that no
            state belongs to keep their contents. Where states are kept, one of:
        checkpoint_every_n_tokens: a multiple of 64, n: after every n tokens of each sequence, in
            `[B, T // n, HS, K, V]` (or V, K; contiguous); a packed sequence at [a, b) writes its i-th to row
            a // n + i. With checkpoint_rows in `[rows, HS, K, V]`, from row checkpoint_rows[n] on.
        checkpoint_offsets: `[N]` int32 or int64: once per sequence, after so many tokens; a multiple of 64, or none is
            kept. In `[rows, HS, K, V]`, or, with checkpoint_rows and no state_checkpoints, in the state_pool.
        checkpoint_rows: `[N]` int32 or int64; negative: none of the sequence's states is kept.
        use_intracard_cp: whether long sequences are cut into segments that run side by side: "auto" decides from shapes
            alone, and `cu_seqlens_cpu`; True, which needs a sequence of 2048 tokens, and False force it. Results differ
            in their last bits.
        segment_tokens: cuts every sequence after each so many tokens, a multiple of 64 and at least 1024, whatever the
            batch and the GPU, so that a sequence has the same bits in every call. None: as use_intracard_cp says. No
            effect on the CPU.
        operand_dtype: of what the kernel makes and multiplies again. None: float16, for values and states up to 65,504;
            torch.bfloat16 takes any size, is less precise, and needs bfloat16 activations. No effect on the CPU.
        out: `[B, T, HS, V]` in the dtype of v, written and returned. None: allocated.

    Returns:
        `(o, final_state)`: o `[B, T, HS, V]` in the dtype of v; the states after the last token (zero for padding), or
        None. With a pool that is updated `(o, state_pool)`.

    Raises:
        TypeError, ValueError: an argument does not fit, or a gradient is wanted that the package has not; nothing was
            changed.
        NotImplementedError: `cp_context` is given.
        RuntimeError: the GPU is not of compute capability 9.0.

    Example:
        >>> import torch
        >>> from cula_lightning_sm90 import chunk_gated_delta_rule
        >>> q, k = torch.randn(2, 1, 100, 2, 32)  # [B, T, HQ, K] and [B, T, HK, K]
        >>> v = torch.randn(1, 100, 4, 32)  # two value heads for each head of q and k
        >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> norm = {"use_qk_l2norm_in_kernel": True}
        >>> whole, _ = chunk_gated_delta_rule(q, k, v, g, beta, **norm)
        >>> first = [x[:, :64] for x in (q, k, v, g, beta)]
        >>> rest = [x[:, 64:] for x in (q, k, v, g, beta)]
        >>> o, state = chunk_gated_delta_rule(*first, output_final_state=True, **norm)
        >>> o, _ = chunk_gated_delta_rule(*rest, initial_state=state, **norm)
        >>> state.shape, torch.allclose(o, whole[:, 64:], atol=1e-5)
        (torch.Size([1, 4, 32, 32]), True)
    """
    if arguments.requires_grad(
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_pool, out, state_checkpoints
    ):
        check_trained(
            beta, use_beta_sigmoid_in_kernel, out=out, state_pool=state_pool, state_indices=state_indices,
            output_state_indices=output_state_indices, null_slot=null_slot, has_initial_state=has_initial_state,
            state_checkpoints=state_checkpoints, checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            checkpoint_rows=checkpoint_rows, checkpoint_offsets=checkpoint_offsets,
        )  # fmt: skip
        return trained(
            chunk_gated_delta_rule,
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "initial_state": initial_state,
                "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
                "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu,
                "chunk_indices": chunk_indices, "cp_context": cp_context, "use_gate_in_kernel": use_gate_in_kernel,
                "A_log": A_log, "dt_bias": dt_bias, "softplus_beta": softplus_beta,
                "softplus_threshold": softplus_threshold, "update_state_pool": update_state_pool,
                "use_intracard_cp": use_intracard_cp, "operand_dtype": operand_dtype, "segment_tokens": segment_tokens,
            },
        )  # fmt: skip
    plain = is_plain_cuda_call(q)
    if plain:
        require_hopper(q.device)
    check_chunk_gated_delta_rule(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, chunk_indices=chunk_indices, cp_context=cp_context,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, A_log=A_log, dt_bias=dt_bias, softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold, state_pool=state_pool, state_indices=state_indices,
        output_state_indices=output_state_indices, update_state_pool=update_state_pool, null_slot=null_slot,
        has_initial_state=has_initial_state, state_checkpoints=state_checkpoints,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens, checkpoint_rows=checkpoint_rows,
        checkpoint_offsets=checkpoint_offsets, use_intracard_cp=use_intracard_cp,
        segment_tokens=segment_tokens, operand_dtype=operand_dtype, out=out, limits=_LIMITS,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    if operand_dtype == torch.bfloat16 and q.dtype == torch.float16:
        expected = "None or torch.float16 beside float16 activations"
        arguments.value_error("operand_dtype", expected, operand_dtype)
    states, turned = as_stored(initial_state if state_pool is None else state_pool)
    v_first = state_v_first != turned
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state_pool is not None and state_indices is None:
        if null_slot is not None or output_state_indices is not None:
            state_indices = torch.arange(sequences, dtype=torch.int32, device=q.device)
    pool = states if state_pool is not None and update_state_pool else None
    heads = max(q.shape[2], v.shape[2])
    final: Tensor | None = None
    if pool is None and output_final_state:
        dims = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
        wide = q.dtype if q.dtype == torch.float64 else torch.float32
        dtype = wide if states is None else states.dtype
        final = torch.empty(sequences, heads, *dims, dtype=dtype, device=q.device)
    if state_checkpoints is state_pool:
        state_checkpoints = None
    saved = stored_alike(state_checkpoints, turned)
    if out is None:
        out = torch.empty(*q.shape[:2], heads, v.shape[3], dtype=v.dtype, device=v.device)
    call = Call(
        q, k, v, g, beta, A_log, dt_bias, None if pool is not None else states, pool, state_indices,
        output_state_indices, has_initial_state, final, saved, cu_seqlens, out,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        raw_gate=use_gate_in_kernel,
        beta_logits=use_beta_sigmoid_in_kernel,
        doubled=allow_neg_eigval,
        state_v_first=v_first,
        l2norm=use_qk_l2norm_in_kernel,
        softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
        null_slot=null_slot,
        checkpoint_every=checkpoint_every_n_tokens or 0,
        operand_dtype=operand_dtype,
        cu_seqlens_cpu=cu_seqlens_cpu,
        intracard_cp=INTRACARD_CP[use_intracard_cp],
        checkpoint_rows=checkpoint_rows,
        checkpoint_offsets=checkpoint_offsets,
        segment_tokens=segment_tokens or 0,
    )  # fmt: skip
    if plain:
        _run_on_gpu(call)
    else:
        _prefill_op(*call)
    put_back(saved, state_checkpoints, turned)
    if pool is not None:
        return out, state_pool
    return out, final.transpose(2, 3) if turned and final is not None else final


def begin_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Sequence[Slice],
    cu_seqlens: Tensor,
    initial_state: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_intracard_cp: bool | str = "auto",
    operand_dtype: torch.dtype | None = None,
    segment_tokens: int | None = None,
) -> Begun | None:
    """Begins a call of `chunk_gated_delta_rule` over packed slices of sequences, before the states in front of them are
    known.

    It is for a dispatcher that spreads sequences over several GPUs and has checked the arguments as
    `chunk_gated_delta_rule` does, beside which:

    Args:
        slices: at least one, the packed sequences, of at least one token together.
        cu_seqlens: where they begin and end, as in `chunk_gated_delta_rule`.
        initial_state: float32 `[N, HS, K, V]`; not read for slices that continue a sequence.

    Returns:
        a `Begun`, whose `maps` say what slices do to a state, and whose `finish` takes all states in front. None where
        no slice continues a sequence: the call itself finds what follows as soon.

    Raises:
        ValueError: more chunks than the kernels' memory can hold.
        RuntimeError: the GPU is not of compute capability 9.0.
    """
    if not any(part.comes_on for part in slices):
        return None
    require_hopper(q.device)
    out = torch.empty(
        *q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3], dtype=v.dtype, device=v.device
    )
    call = Call(
        q, k, v, g, beta, A_log, dt_bias, initial_state, None, None, None, None, None, None, cu_seqlens, out,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        raw_gate=use_gate_in_kernel,
        beta_logits=use_beta_sigmoid_in_kernel,
        doubled=allow_neg_eigval,
        state_v_first=False,
        l2norm=use_qk_l2norm_in_kernel,
        softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
        null_slot=None,
        checkpoint_every=0,
        operand_dtype=operand_dtype,
        cu_seqlens_cpu=None,
        intracard_cp=INTRACARD_CP[use_intracard_cp],
        segment_tokens=segment_tokens or 0,
    )  # fmt: skip
    from .slices import begin

    return begin(call._replace(**_as_read(call)), slices)


def fold_slices(added: Tensor, maps: Tensor, chains: Sequence[Chain], back: bool) -> list[Tensor]:
    """What `cula_core.delta_rule.fold.fold` returns, by a kernel for Hopper."""
    from cula_core.delta_rule.fold import fold

    from .launch import compile

    return fold(compile, added, maps, chains, back)
