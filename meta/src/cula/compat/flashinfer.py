"""The gated delta rule as FlashInfer has it: packed tokens without a batch dimension, decays as factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula import lightning
from cula.compat._indices import int32
from cula_core import arguments
from cula_core.reference.delta_decode import row_slots
from cula_core.reference.lightning_decode import store_live

__all__ = ["chunk_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
    state_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cula.lightning.chunk_gated_delta_rule` over packed sequences, with HS = max(HQ, HV) heads of states and outputs.

    Args:
        q, k, v: `[T, HQ, K]`, `[T, HK, K]`, `[T, HV, V]`.
        g: `[T, HS]`, the factor by which a state decays, in [0, 1]: no logarithm. None: 1.
        beta: `[T, HS]`, write strength. None: 1.
        scale: factor of the output; None or 0: `K ** -0.5`.
        initial_state: `[N, HS, V, K]`, or a pool `[pool, HS, V, K]` with state_indices; None: zero.
        output_final_state: whether to return the final states.
        cu_seqlens: `[N + 1]`, needed.
        use_qk_l2norm_in_kernel: normalise q and k.
        output: `[T, HS, V]`, written and returned.
        output_state: `[N, HS, V, K]`, written with the final states and returned in their place; it may be
            initial_state itself. None: a new tensor.
        state_checkpoints: `[rows, HS, V, K]`, the states after every `checkpoint_every_n_tokens` tokens.
        checkpoint_cu_starts: `[N + 1]`; those of sequence n begin at row `checkpoint_cu_starts[n]`.
        checkpoint_every_n_tokens: a multiple of 64; 0: none.
        use_cp: `use_intracard_cp` of our function.
        state_indices: `[N]`, int32 or int64: sequence n reads row `state_indices[n]` of the pool initial_state and
            writes that of the pool output_state, which is needed then. Rows of live sequences differ; others stay as
            they are. Negative: padding, no row is read or written and the outputs are zero.

    Returns:
        o, or `(o, final_state)` with `output_final_state`.

    Raises:
        TypeError, ValueError, RuntimeError: as our function.

    Example:
        >>> import torch
        >>> from cula.compat.flashinfer import chunk_gated_delta_rule
        >>> q, k, v = torch.randn(100, 2, 32), torch.randn(100, 2, 32), torch.randn(100, 4, 32)
        >>> decay, beta, cu_seqlens = torch.rand(100, 4), torch.rand(100, 4), torch.tensor([0, 60, 100])
        >>> o, state = chunk_gated_delta_rule(
        ...     q, k, v, decay, beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([100, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    if cu_seqlens is None:
        arguments.type_error("cu_seqlens", "a torch.Tensor", "NoneType")
    arguments.tensor("cu_seqlens", cu_seqlens)
    q, k, v = _one("q", q, "[T, HQ, K]"), _one("k", k, "[T, HK, K]"), _one("v", v, "[T, HV, V]")
    states: dict[str, Any] = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
    }
    if state_indices is not None:
        state_indices = int32("state_indices", state_indices)
        states = _pools(
            q, cu_seqlens, output_final_state, initial_state, output_state, state_indices
        )
    elif output_final_state and output_state is not None:
        arguments.tensor("output_state", output_state)
        arguments.device("output_state", output_state, q)
        shape = (cu_seqlens.numel() - 1, max(q.shape[2], v.shape[2]), v.shape[3], k.shape[3])
        if output_state.shape != shape:
            arguments.value_error(
                "output_state", f"[N, HS, V, K] = {list(shape)}", list(output_state.shape)
            )
    if checkpoint_cu_starts is not None:
        arguments.vector("checkpoint_cu_starts", checkpoint_cu_starts, "N + 1", cu_seqlens.numel())
        checkpoint_cu_starts = checkpoint_cu_starts[:-1]
    o, state = lightning.chunk_gated_delta_rule(
        q,
        k,
        v,
        None if g is None else _logarithm(_one("g", g, "[T, HS]")),
        None if beta is None else _one("beta", beta, "[T, HS]"),
        scale or None,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        state_checkpoints=state_checkpoints,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens or None,
        checkpoint_rows=checkpoint_cu_starts,
        use_intracard_cp=use_cp,
        **states,
        out=None if output is None else _one("output", output, "[T, HS, V]"),
    )
    o = o.squeeze(0) if output is None else output
    if state is None or not output_final_state:
        return o
    if output_state is None or output_state is states.get("state_pool"):
        return o, state
    if state_indices is None:
        return o, output_state.copy_(state)
    store_live(output_state, state, *row_slots(state_indices, None, len(state), output_state))
    return o, output_state


def _pools(
    q: Tensor, cu_seqlens: Tensor, output_final_state: bool, initial_state: Tensor | None, output_state: Tensor | None,
    state_indices: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """States in the rows of pools, as our function takes them: one pool that is updated, or one that is only read."""
    if output_state is None:
        arguments.value_error("output_state", "a pool beside state_indices", None)
    pool = output_state if initial_state is None else initial_state
    if pool is not output_state:
        arguments.tensor("initial_state", initial_state)
        arguments.tensor("output_state", output_state)
        arguments.device("output_state", output_state, q)
        if output_state.shape != pool.shape:
            expected = f"a pool {list(pool.shape)}, as initial_state"
            arguments.value_error("output_state", expected, list(output_state.shape))
    states: dict[str, Any] = {
        "state_pool": pool, "state_indices": state_indices, "output_final_state": output_final_state,
        "update_state_pool": output_final_state and pool is output_state,
    }  # fmt: skip
    if initial_state is None:
        count = cu_seqlens.numel() - 1
        states["has_initial_state"] = torch.zeros(count, dtype=torch.bool, device=q.device)
    return states


def _one(name: str, x: Tensor, letters: str) -> Tensor:
    """Packed tokens as a batch of one."""
    arguments.tensor(name, x)
    if x.dim() != letters.count(",") + 1:
        arguments.value_error(name, letters, list(x.shape))
    return x.unsqueeze(0)


def _logarithm(g: Tensor) -> Tensor:
    """The logarithm of factors; that of 0 would be no number to add up, and the smallest normal one is as good as 0."""
    arguments.floating("g", g)
    if arguments.is_readable(g) and not bool(((g >= 0) & (g <= 1)).all()):
        arguments.value_error("g", "factors in [0, 1]", f"{g.min().item()} to {g.max().item()}")
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    return g.clamp_min(torch.finfo(g.dtype).tiny).log()
