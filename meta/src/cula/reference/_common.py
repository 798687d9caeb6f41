"""What every reference function does to its arguments on the way in and to its results on the way out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cula.varlen import sequence_ids


def check_one_device(cp_context: object) -> None:
    """Refuses what the public functions have taken apart before they call a reference."""
    if cp_context is not None:
        raise NotImplementedError(
            "cp_context: expected None, the reference serves one rank; the functions of cula.kda and cula.lightning "
            "take a context"
        )


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H, D]` -> `[B, T, HV, D]`: value head h reads query/key head `h // (HV // H)`."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def incoming_state(
    initial_state: Tensor | None,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
) -> Tensor:
    """The initial states as `[N, HV, K, V]` in the dtype of v; zero when the caller gives none."""
    if initial_state is None:
        sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return v.new_zeros(sequences, v.shape[2], k.shape[-1], v.shape[-1])
    state = initial_state.to(v.dtype)
    return state.transpose(-1, -2) if state_v_first else state


def outgoing_state(state: Tensor, state_v_first: bool, initial_state: Tensor | None) -> Tensor:
    """`[..., K, V]` -> the caller's layout and the dtype of the initial state, of which it is never an alias."""
    state = (state.transpose(-1, -2) if state_v_first else state).clone(
        memory_format=torch.contiguous_format
    )
    return state if initial_state is None else state.to(initial_state.dtype)


def outgoing_tokens(o: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    """The output, contiguous and in the dtype of `like`, written to `out` when given."""
    return o.to(like.dtype).contiguous() if out is None else out.copy_(o)


def walk_tokens(
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: tuple[Tensor, ...],
    v: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Apply `step(state, v_t, *tokens_t) -> (state, o_t)` token by token; returns `(o, final_states)`.

    Reads `cu_seqlens` on the host. Tokens behind the last sequence give zero.
    """
    if cu_seqlens is None:
        outputs = [v[:, :0]]
        for t in range(v.shape[1]):
            state, o = step(state, v[:, t], *(x[:, t] for x in tokens))
            outputs.append(o[:, None])
        return torch.cat(outputs, dim=1), state

    bounds = cu_seqlens.tolist()
    outputs, states = [], [state[:0]]
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        part = tuple(x[:, start:end] for x in tokens)
        o, final = walk_tokens(step, part, v[:, start:end], state[n : n + 1], None)
        outputs.append(o)
        states.append(final)
    outputs.append(torch.zeros_like(v[:, bounds[-1] :]))
    return torch.cat(outputs, dim=1), torch.cat(states)


def live_states(pool: Tensor, slots: Tensor, live: Tensor) -> Tensor:
    """The row of every sequence, zeros for a padding slot; see pool_slots. A pool without rows has only those."""
    if len(pool) == 0:
        return pool.new_zeros(len(slots), *pool.shape[1:])
    return torch.where(live[:, None, None, None], pool.index_select(0, slots), 0)


def only_live(o: Tensor, live: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The tokens `[B, T, HV, V]` with zeros where they belong to a padding slot."""
    if cu_seqlens is None:
        return torch.where(live[:, None, None, None], o, 0)
    if len(live) == 0:
        return o
    owner = sequence_ids(cu_seqlens, o.shape[1]).clamp(min=0)
    return torch.where(live[owner][:, None, None], o, 0)
