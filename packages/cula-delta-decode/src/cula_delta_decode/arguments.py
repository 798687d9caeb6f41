"""What the kernels are called with."""

from __future__ import annotations

from typing import Any, NamedTuple


class Arguments(NamedTuple):
    """What `DeltaDecode` is called with, the stream apart. next_state: where the last states go; null_slot: -1 is none;
    bound: the lower bound of the safe gate, or beta of softplus; inputs, positions, taps, tap_bias: of the convolution;
    gate, norm_weight, eps: of the norm."""

    q: Any = None
    k: Any = None
    v: Any = None
    g: Any = None
    beta: Any = None
    A_log: Any = None
    dt_bias: Any = None
    out: Any = None
    state: Any = None
    next_state: Any = None
    slots: Any = None
    next_slots: Any = None
    accepted: Any = None
    token_states: Any = None
    token_slots: Any = None
    offsets: Any = None
    ring_k: Any = None
    ring_u: Any = None
    ring_decay: Any = None
    cursor: Any = None
    inputs: Any = None
    positions: Any = None
    taps: Any = None
    tap_bias: Any = None
    gate: Any = None
    norm_weight: Any = None
    scale: Any = None
    bound: Any = None
    threshold: Any = None
    eps: Any = 0.0
    null_slot: Any = None
    rows: Any = None


def flush_arguments(x: Arguments) -> tuple:
    """Returns those of the arguments that `Flush` is called with."""
    rings = (x.ring_k, x.ring_u, x.ring_decay, x.cursor)
    return x.state, *rings, x.slots, x.accepted, x.null_slot, x.rows
