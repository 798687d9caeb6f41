"""KDA as FlashKDA has it: `flash_kda.fwd`, which writes into buffers of the caller."""

from __future__ import annotations

from torch import Tensor

from cula import kda
from cula_core import arguments

__all__ = ["fwd"]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """KDA over whole sequences with raw inputs: q and k are normalised, and gates and beta activated, in the call.

    Args:
        q, k: `[B, T, H, K]`.
        v, out: `[B, T, HV, V]`; out is written.
        g: `[B, T, HV, K]`, the raw gate.
        beta: `[B, T, HV]`, logits of the write strength.
        scale: factor of the output.
        A_log, dt_bias: `[HV]` and `[HV, K]`.
        lower_bound: in [-5, 0); the decay is `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        initial_state: `[N, HV, V, K]`, bfloat16 or float32; None: zero.
        final_state: the same, written; it may be initial_state itself. None: the final states are not wanted.
        cu_seqlens: `[N + 1]` for packed input.

    Raises:
        TypeError, ValueError, RuntimeError: as `cula.kda.chunk_kda`.

    Example:
        >>> import torch
        >>> from cula.compat import flash_kda
        >>> q, k, v, g = torch.randn(4, 1, 100, 2, 32)  # each [B, T, H, D]
        >>> beta, out, state = torch.randn(1, 100, 2), torch.empty(1, 100, 2, 32), torch.zeros(1, 2, 32, 32)
        >>> flash_kda.fwd(q, k, v, g, beta, 32**-0.5, out, torch.zeros(2), torch.zeros(2, 32), -5.0, None, state)
        >>> out.isfinite().all().item(), state.any().item()
        (True, True)
    """
    if final_state is not None:
        for name, x, letters in (
            ("q", q, "[B, T, H, K]"),
            ("k", k, "[B, T, H, K]"),
            ("v", v, "[B, T, HV, V]"),
        ):
            arguments.four_dims(name, x, letters)
        if cu_seqlens is not None:
            arguments.tensor("cu_seqlens", cu_seqlens)
        sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        arguments.tensor("final_state", final_state)
        arguments.device("final_state", final_state, q)
        shape = (sequences, v.shape[2], v.shape[3], k.shape[3])
        if final_state.shape != shape:
            arguments.value_error(
                "final_state", f"[N, HV, V, K] = {list(shape)}", list(final_state.shape)
            )
    states = kda.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        final_state is not None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        out=out,
    )[1]
    if final_state is not None and states is not None:
        final_state.copy_(states)
