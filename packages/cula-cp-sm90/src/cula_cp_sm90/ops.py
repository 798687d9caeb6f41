"""The torch operator and the public functions. The kernels are imported when a CUDA tensor comes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arch import NAME, TARGETS
from .check import SAFE_LOWER_BOUND, check_prefill, check_sizes, is_aligned, longest_sequence
from .config import CHUNK, dtype_name, workspace_bytes

# The pool of an in-place call has an argument of its own, so that no tensor that is written has two names.
_PREFILL = f"{__package__}::prefill"
torch.library.define(
    _PREFILL,
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor(a!)? state_pool, Tensor? state_indices, Tensor(b!)? final_state, Tensor? cu_seqlens, "
    "Tensor? cu_seqlens_cpu, Tensor(c!) out, Tensor(d!)? workspace, Tensor(e!)? Aqk, Tensor(f!)? Akk, "
    "Tensor(g!)? w, Tensor(h!)? u, Tensor(i!)? qg, Tensor(j!)? kg, float scale, "
    "str gate, float lower_bound, bool bounded, bool l2norm, bool beta_sigmoid, bool neg_eigval, bool state_v_first, "
    "str operand, str intracard_cp) -> ()",
)
_INTRACARD_CP: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}


def _prefill_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, state_pool: Tensor | None,
    state_indices: Tensor | None, final_state: Tensor | None, cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None, out: Tensor, workspace: Tensor | None, Aqk: Tensor | None,
    Akk: Tensor | None, w: Tensor | None, u: Tensor | None, qg: Tensor | None, kg: Tensor | None,
    scale: float, gate: str, lower_bound: float, bounded: bool, l2norm: bool, beta_sigmoid: bool,
    neg_eigval: bool, state_v_first: bool, operand: str, intracard_cp: str,
) -> None:  # fmt: skip
    if state_pool is not None:
        initial_state = final_state = state_pool
    reference.prefill(
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, final_state, cu_seqlens, out,
        scale=scale, gate=gate, lower_bound=lower_bound, l2norm=l2norm, beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval, state_v_first=state_v_first, intra=_given(Aqk, Akk, w, u, qg, kg),
    )  # fmt: skip


def _prefill_cuda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, state_pool: Tensor | None,
    state_indices: Tensor | None, final_state: Tensor | None, cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None, out: Tensor, workspace: Tensor | None, Aqk: Tensor | None,
    Akk: Tensor | None, w: Tensor | None, u: Tensor | None, qg: Tensor | None, kg: Tensor | None,
    scale: float, gate: str, lower_bound: float, bounded: bool, l2norm: bool, beta_sigmoid: bool,
    neg_eigval: bool, state_v_first: bool, operand: str, intracard_cp: str,
) -> None:  # fmt: skip
    _require_target(q.device)
    if state_pool is not None:
        initial_state = final_state = state_pool
    if out.numel() == 0 or (initial_state is not None and initial_state.shape[0] == 0):
        # No token at all, or nothing but padding.
        for written in (out, Aqk, Akk, w, u, qg, kg):
            if written is not None:
                written.zero_()
        _pass_through(initial_state, state_indices, final_state)
        return
    g, beta = (x.float() if x.dtype == torch.float64 else x for x in (g, beta))
    q, k, v, g = (_aligned(x) for x in (q, k, v, g))
    if A_log is not None:
        A_log = A_log.float()
    if dt_bias is not None:
        dt_bias = _aligned(dt_bias.float().reshape(g.shape[2:]).contiguous())
    batch, tokens, heads_v = v.shape[:3]
    longest: int | None = tokens
    sequences = None
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        longest = None if cu_seqlens_cpu is None else longest_sequence(cu_seqlens_cpu)
    if workspace is None:
        size = workspace_bytes(batch, tokens, heads_v, sequences)
        workspace = q.new_empty(size, dtype=torch.uint8)
    target = out if is_aligned(out) else torch.empty_like(out, memory_format=_DENSE)
    _launch()(
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, final_state, cu_seqlens, target, workspace,
        scale=scale, gate=gate, lower_bound=lower_bound, bounded=bounded, l2norm=l2norm, beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval, state_v_first=state_v_first, operand=operand,
        intra=_given(Aqk, Akk, w, u, qg, kg), intracard_cp=_INTRACARD_CP[intracard_cp], longest=longest,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


_DENSE = torch.contiguous_format
torch.library.impl(_PREFILL, "CPU", _prefill_cpu)
torch.library.impl(_PREFILL, "CUDA", _prefill_cuda)
torch.library.register_fake(_PREFILL, lambda *_: None)

_prefill_op = getattr(torch.ops, __package__).prefill.default


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
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_intracard_cp: bool | str = "auto",
    out: Tensor | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    update_state_pool: bool = True,
    operand_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
    return_intra: bool = False,
) -> tuple[Any, ...]:
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692) over whole sequences, forward only.

    Per sequence and value head, with the state S `[K, V]`, the log decay d_t `[K]` and the write strength b_t:

        S'_t = diag(exp(d_t)) S_(t-1)
        S_t  = S'_t + b_t k_t (v_t - S'_t^T k_t)^T          o_t = scale * S_t^T q_t

    q, k, v are bfloat16 or float16, of one dtype, and K = V = 128; on the CPU any dimensions, and float32 and float64
    too. HV is a multiple of H; value head h reads query and key head h // (HV // H). T, B and the lengths of packed
    sequences may be 0. Views are taken as they are if their last dimension is contiguous; on the GPU a q, k, v, g or
    out whose address or other strides are no multiples of 16 bytes goes through a copy.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV, K]` of any floating dtype: the natural-log decay, meant to be <= 0, which is not checked; or the
            raw gate with `use_gate_in_kernel`. float64 is converted on the GPU.
        beta: `[B, T, HV]` of any floating dtype and strides: the write strength; or its logits with
            `use_beta_sigmoid_in_kernel`.
        scale: factor of the outputs; None: K ** -0.5.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; float32 (float64 is taken with float64
            activations); dense matrices, whose address and other strides are multiples of 16 bytes on the GPU. A
            `[.., K, V]` view of `[.., V, K]` storage, or the other way round, is taken as it lies. It is not changed.
            None: zero.
        output_final_state: whether to return the states after the last token of every sequence.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum(x^2) + 1e-6), per token and head.
        use_gate_in_kernel: the decay is -exp(A_log) * softplus(g + dt_bias) without `lower_bound`, and
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) with it.
        use_beta_sigmoid_in_kernel: the strength is sigmoid(beta).
        allow_neg_eigval: the strength is 2 * sigmoid(beta); needs `use_beta_sigmoid_in_kernel`.
        safe_gate: promises log decays in [-5, 0) per token. A faster kernel serves then, and where the gate is computed
            inside with a lower_bound of at least -5; any other decay is served right, but slower. A gate computed
            inside needs `lower_bound` beside this.
        lower_bound: bound of the gate, below 0, and at least -5 with `safe_gate`.
        disable_recompute: with `return_intra`, keep more for the backward pass.
        return_intermediate_states: False.
        state_v_first: layout of all states.
        cu_seqlens: `[N + 1]` int32 or int64 on the device of q packs N sequences into B = 1: sequence n holds the
            tokens cu_seqlens[n] .. cu_seqlens[n + 1] - 1; from 0 to T, rising; empty sequences keep their state.
            Checked on the CPU only, a device is never read back. None: a dense batch, N = B.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which tells how long the longest sequence is. A captured CUDA
            graph keeps the plan that was made from it.
        cp_context: None.
        A_log: `[HV]` of any floating dtype, used in float32. May be None with `lower_bound`, the factor is then 1.
        dt_bias: `[HV * K]` or `[HV, K]` of any floating dtype, used in float32. None: 0.
        use_intracard_cp: whether long sequences are cut into segments that run side by side: "auto" decides from shapes
            and the GPU; True refuses what cannot be cut into two segments of 1024 tokens, or does not fit the
            workspace in one piece; False never cuts. No effect on the CPU.
        out: `[B, T, HV, V]` in the dtype of v, written and returned. None: allocated.
        state_pool: `[rows, HV, K, V]`, or V, K, in place of an initial_state and like it, updated in place.
        initial_state_indices: `[N]` int32 on the device of q, the row of state_pool of every sequence. Negative:
            padding, no row is read or written and the outputs are zero. The same row twice is undefined (it is not
            checked, because that needs a synchronisation). None: row n. Needs a state_pool.
        update_state_pool: False only reads the pool, and `output_final_state` decides what is returned.
        operand_dtype: of what the kernels hand to the tensor cores: torch.float16 is more precise, for values up to 1e4
            and queries and keys of norm about 1; torch.bfloat16 takes any. None: float16 with
            `use_qk_l2norm_in_kernel`, else bfloat16. No effect on the CPU.
        workspace: `[bytes]` uint8 on the device of q, contiguous, at an address that is a multiple of 128: memory
            between the kernels, with nothing of worth before and after. `kda_workspace_bytes` says how much a call in
            one piece needs; with less, but a chunk of 64 tokens of every value head (59,904 HV bytes), it goes piece by
            piece. None: allocated.
        return_intra: also return what a backward pass takes of the chunks of 64 tokens: Aqk and (I + Akk)^-1, both
            `[B, T, HV, 64]`, and with `disable_recompute` w, u, qg, kg `[B, T, HV, 128]`, all in the dtype of q, as
            `reference.Intermediates` defines them.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v; the final states `[N, HV, ..]` (zero for padding), or
        None. With a state_pool that is updated `(o, state_pool)`. With `return_intra` two or six
        more.

    Raises:
        TypeError, ValueError: an argument does not fit, gradients included; nothing was changed.
        NotImplementedError: `return_intermediate_states` or `cp_context` is given.
        RuntimeError: the GPU is not one that this package has kernels for.
    """
    plain = _is_plain_cuda_call(q)
    if plain:
        _require_target(q.device)
    check_prefill(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, state_pool=state_pool,
        indices=initial_state_indices, lower_bound=lower_bound, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context, A_log=A_log, dt_bias=dt_bias, use_intracard_cp=use_intracard_cp, out=out,
        operand_dtype=operand_dtype, workspace=workspace,
        flags={
            "output_final_state": output_final_state,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
            "use_gate_in_kernel": use_gate_in_kernel,
            "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
            "allow_neg_eigval": allow_neg_eigval,
            "safe_gate": safe_gate,
            "disable_recompute": disable_recompute,
            "return_intermediate_states": return_intermediate_states,
            "state_v_first": state_v_first,
            "update_state_pool": update_state_pool,
            "return_intra": return_intra,
        },
    )  # fmt: skip
    initial, turned = _as_stored(initial_state if state_pool is None else state_pool)
    v_first = state_v_first != turned
    pool: Tensor | None = None
    final: Tensor | None = None
    if state_pool is not None and update_state_pool:
        pool, initial = initial, None
    elif output_final_state:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = _new_states(sequences, q, v, v_first, initial)
    if out is None:
        out = torch.empty_like(v, memory_format=_DENSE)
    intra: list[Tensor | None] = [None] * 6
    if return_intra:
        intra[:2] = (q.new_empty(*v.shape[:3], CHUNK) for _ in range(2))
        if disable_recompute:  # w, u, qg, kg
            dims = (q.shape[3], v.shape[3], q.shape[3], q.shape[3])
            intra[2:] = (q.new_empty(*v.shape[:3], dim) for dim in dims)
    Aqk, Akk, w, u, qg, kg = intra
    if scale is None:
        scale = q.shape[3] ** -0.5
    gate = "log" if not use_gate_in_kernel else "softplus" if lower_bound is None else "safe"
    bound = float(lower_bound) if gate == "safe" and lower_bound is not None else 0.0
    bounded = safe_gate or (gate == "safe" and bound >= SAFE_LOWER_BOUND)
    if operand_dtype is None:
        operand_dtype = torch.float16 if use_qk_l2norm_in_kernel else torch.bfloat16
    run = _prefill_cuda if plain else _prefill_op
    run(
        q, k, v, g, beta, A_log, dt_bias, initial, pool, initial_state_indices, final, cu_seqlens, cu_seqlens_cpu, out,
        workspace, Aqk, Akk, w, u, qg, kg, float(scale), gate, bound, bounded, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, v_first, dtype_name(operand_dtype),
        "auto" if use_intracard_cp == "auto" else "on" if use_intracard_cp else "off",
    )  # fmt: skip
    states = final.transpose(2, 3) if turned and final is not None else final
    if pool is not None:
        states = state_pool
    return out, states, *(_given(*intra) or ())


def kda_workspace_bytes(
    batch: int, tokens: int, value_heads: int, sequences: int | None = None
) -> int:
    """Bytes of a workspace that lets `chunk_kda` go in one piece. sequences: of packed input, batch is 1 then; else
    None."""
    check_sizes(batch, tokens, value_heads, sequences)
    # No workspace is smaller than a chunk.
    return max(
        workspace_bytes(batch, tokens, value_heads, sequences), workspace_bytes(1, 1, value_heads)
    )


def _is_plain_cuda_call(q: Tensor) -> bool:
    """Whether the launcher may be called without the dispatcher: a real CUDA tensor, and nothing is being traced."""
    return (
        type(q) is Tensor
        and q.is_cuda
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


@functools.cache
def _require_target(device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in TARGETS:
        known = " or ".join(f"{first}.{second}" for first, second in TARGETS)
        raise RuntimeError(f"{NAME} needs compute capability {known}, {device} has {major}.{minor}")


@functools.cache
def _launch() -> Callable[..., None]:
    from .launch import run

    return run


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...] | None:
    """Those that are there, None for none."""
    return tuple(x for x in tensors if x is not None) or None


def _aligned(x: Tensor) -> Tensor:
    return x if is_aligned(x) else x.clone(memory_format=_DENSE)


def _as_stored(state: Tensor | None) -> tuple[Tensor | None, bool]:
    """The states as they lie in memory, and whether that is the other layout: a transposed view needs no copy."""
    if state is not None and state.stride(3) != 1 and state.stride(2) == 1:
        return state.transpose(2, 3), True
    return state, False


def _new_states(sequences: int, q: Tensor, v: Tensor, v_first: bool, like: Tensor | None) -> Tensor:
    """Memory for the final states, in the dtype of the initial ones."""
    matrix = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    if like is not None:
        dtype = like.dtype
    else:
        dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return torch.empty(sequences, v.shape[2], *matrix, dtype=dtype, device=q.device)


def _pass_through(
    initial_state: Tensor | None, state_indices: Tensor | None, final_state: Tensor | None
) -> None:
    """Final states of sequences that have no token: the initial ones, zero for padding. Reads nothing back."""
    if final_state is None or final_state is initial_state:
        return
    if initial_state is None or initial_state.shape[0] == 0:
        final_state.zero_()
    elif state_indices is None:
        final_state.copy_(initial_state[: final_state.shape[0]])
    else:
        rows = initial_state[state_indices.clamp(min=0).long()]
        final_state.copy_(torch.where((state_indices >= 0)[:, None, None, None], rows, 0.0))
