"""What the adapters of serving engines share: operands as engines hold them, and who serves a call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor


def serve(
    engine: str, name: str, ours: Callable[..., Any], theirs: Callable[..., Any], args: tuple, named: dict, impl: str
) -> Any:  # fmt: skip
    """What `ours` computes by `impl`, or `theirs` where cula does not serve the call, which the log says once a reason.

    `ours` must raise before it changes anything.
    """
    from cula._registry import Refused, log_once

    try:
        return ours(*args, **named, impl=impl)
    except (Refused, TypeError, ValueError, NotImplementedError) as error:
        # The engine says itself what is wrong with a call that is wrong.
        log_once(logging.INFO, f"{name} is left to {engine}: {error}")
    return theirs(*args, **named)


def refuse(**asked: Any) -> None:
    """Raises NotImplementedError for a name that has a value other than None or False."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is not served")


def split_qkv(mixed: Tensor, heads_v: int, dim_k: int, dim_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k `[L, H, K]` and v `[L, HV, V]` of rows `[L, 2 H K + HV V]`, whose stride is free.

    Raises:
        ValueError: the rows hold no whole number of heads H.
    """
    width = mixed.shape[-1] - heads_v * dim_v
    if mixed.dim() != 2 or width <= 0 or width % (2 * dim_k):
        expected = f"[L, 2 H K + HV V] with K = {dim_k}, HV = {heads_v}, V = {dim_v}"
        raise ValueError(f"mixed_qkv: expected {expected}, got {list(mixed.shape)}")
    q, k, v = mixed.split((width // 2, width // 2, heads_v * dim_v), 1)
    return q.unflatten(1, (-1, dim_k)), k.unflatten(1, (-1, dim_k)), v.unflatten(1, (-1, dim_v))


def decode_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    num_accepted: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`cula.delta.delta_rule_decode` of packed rows `[1, L, ...]`, on slots of a pool that is updated in place.

    Args:
        q, k, v, g, beta, state: as there.
        slots: `[N]` int32: every row has at most one token. `[N, S]`: the state after token t of a row goes to its slot
            number t. Rows beyond those of cu_seqlens are left out, here and in num_accepted.
        cu_seqlens: `[N + 1]` int32.
        num_accepted: `[N]` int32, with `[N, S]` slots: a row begins at its slot number `num_accepted - 1`; None: 0.
        options: what else it takes.

    Returns:
        `[1, L, HV, V]`.
    """
    from cula.delta import delta_rule_decode

    rows = cu_seqlens.shape[0] - 1
    slots, longest = slots[:rows], 1 if slots.dim() == 1 else slots.shape[1]
    accepted = None if num_accepted is None else num_accepted[:rows]
    options |= slots_of_tokens(slots, accepted, longest) | {"max_tokens": longest}
    return delta_rule_decode(q, k, v, g, beta, state, cu_seqlens=cu_seqlens, **options)


def slots_of_tokens(slots: Tensor, num_accepted: Tensor | None, tokens: int) -> dict[str, Any]:
    """What `delta_rule_decode` takes for slots `[N]`, or `[N, S]`, and num_accepted `[N]`, as in `decode_packed`."""
    if slots.dim() == 1:
        refuse(num_accepted_tokens=num_accepted)
        return {"state_indices": slots}
    return {
        "state_indices": slots[:, 0] if num_accepted is None else slots,
        "num_accepted": num_accepted,
        "token_state_indices": slots[:, :tokens],
        "commit": False,
    }
