"""Calls of simple GLA over slices of sequences, which lie on several GPUs: the state in front of a slice, and on the
way back the gradient of the state behind it, becomes known while a call is under way.

What others wait for are states alone, which take about half as long as outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_rule.call import Slice
from cula_core.tensors import DENSE, new_states

from .backward import of_states_in_front
from .call import Call
from .ops import chunk_simple_gla, run_for_states


class Begun:
    """A call of which everything is done that others wait for.

    maps: of the slices that go on, in their order, A `[HV, K, V]` and None: a slice multiplies a state by the decay of
    all its tokens and adds A, which of a slice that begins a sequence is the state behind it.
    """

    def __init__(self, maps: list[tuple[Tensor, None]], finish: Callable[..., Any]) -> None:
        self.maps, self._finish = maps, finish

    def finish(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[1, T, HV, V]` and the states behind all slices, from those in front of them `[N, HV, K, V]`."""
        return self._finish(initial_state=starts, output_final_state=True)


class BegunBackward:
    """A backward that waits for gradients of states. gives: what `finish` returns gradients of."""

    gives = ("q", "k", "v", "initial_state", "g", "g_gamma")

    def __init__(self, front: Callable[[Tensor], Tensor], finish: Callable[[Tensor], Any]) -> None:
        self.front, self._finish = front, finish

    def prepare(self) -> None:
        """Nothing: all of it depends on gradients of states."""

    def finish(self, dht: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the inputs."""
        return self._finish(dht)


def begin_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Sequence[Slice],
    cu_seqlens: Tensor,
    initial_state: Tensor,
    *,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    num_splits: int | None = None,
    segment_tokens: int | None = None,
) -> Begun:
    """Begins a call of `chunk_simple_gla` over packed slices of sequences, before the states in front of them are
    known.

    It is for a dispatcher that spreads sequences over several GPUs and has checked the arguments as `chunk_simple_gla`
    does, beside which:

    Args:
        slices: at least one, the packed sequences.
        cu_seqlens: where they begin and end, as in `chunk_simple_gla`.
        initial_state: float32 `[N, HV, K, V]`; not read for slices that continue a sequence.

    Raises:
        RuntimeError: the GPU is not of compute capability 9.0.
    """
    settings: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "exact_state": exact_state, "num_splits": num_splits,
        "segment_tokens": segment_tokens,
    }  # fmt: skip
    maps: list[tuple[Tensor, None]] = []
    for n, part in enumerate(slices):
        if not part.goes_on:
            continue
        tokens = slice(part.start, part.stop)
        final = new_states(1, q, v, False, None)
        values = v[:, tokens]
        run_for_states(
            Call(
                q[:, tokens], k[:, tokens], values, None if g is None else g[:, tokens], g_gamma,
                None if part.comes_on else initial_state[n : n + 1], None, None, final, None, None,
                torch.empty_like(values, memory_format=DENSE), 1.0, 1, False, use_qk_l2norm_in_kernel, exact_state, 0,
                None,
            )
        )  # fmt: skip
        maps.append((final[0], None))
    offsets = None if len(slices) == 1 else cu_seqlens
    finish = partial(chunk_simple_gla, q, k, v, g, g_gamma, scale, cu_seqlens=offsets, **settings)
    return Begun(maps, finish)


def begin_chunk_simple_gla_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor,
    do: Tensor,
    *,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    num_splits: int | None = None,
    segment_tokens: int | None = None,
) -> BegunBackward:
    """Begins the backward of a call of `chunk_simple_gla` over packed slices of sequences on several GPUs.

    The arguments are those of the call, with all states in front of slices, float32 `[N, HV, K, V]`, and do, the
    gradient of the outputs. Gradients of the states behind slices are laid out like those in front. Those of decays are
    computed where g or g_gamma requires a gradient.
    """
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    offsets = None if initial_state.shape[0] == 1 else cu_seqlens
    of_decays = any(x is not None and x.requires_grad for x in (g, g_gamma))

    def finish(dht: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.cula_lightning_sm90.prefill_backward.default(
            do, dht, q, k, v, g, g_gamma, initial_state, None, offsets, factor, 1, False, use_qk_l2norm_in_kernel,
            exact_state, num_splits, segment_tokens or 0, of_decays,
        )  # fmt: skip
        left = iter(found[4:])
        decays = (next(left) if of_decays and x is not None else None for x in (g, g_gamma))
        return (*found[:4], *decays)

    front = partial(
        of_states_in_front, run_for_states, do, q=q, k=k, v=v, g=g, head_decay=g_gamma, cu_seqlens=offsets,
        scale=factor, l2norm=use_qk_l2norm_in_kernel, exact_state=exact_state,
    )  # fmt: skip
    return BegunBackward(front, finish)
