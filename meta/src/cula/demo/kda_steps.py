"""KDA prefill of one text in one go, in ragged pieces with the state carried, and packed with other texts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

import cula.kda
from cula.demo.data import Corpus, Projections
from cula.demo.results import Check, Outcome, Row, relative_rmse
from cula.demo.runtime import Advance, Machine, oracle, served_by
from cula.reference import recurrent_kda

HEADS, DIM = 4, 128
TICKS = 4
# The strongest decay per token, as safe-gate models have it; natural log.
LOWER_BOUND = -5.0

Activations = dict[str, Any]


def run(
    machine: Machine, corpus: Corpus, projections: Projections, tokens: int, advance: Advance
) -> Outcome:
    """Three ways through the same text must agree with each other and with the fp64 recurrence."""
    names, texts = zip(*corpus.packable(max(2, tokens // 2)), strict=True)
    # The longest document is shown; in the middle of the pack both of its edges are inner ones.
    longest = max(range(len(corpus.documents)), key=lambda i: len(texts[i]))
    order = [i for i in range(len(texts)) if i != longest]
    shown = len(order) // 2
    order.insert(shown, longest)
    inputs = [_activations(machine, projections, texts[i]) for i in order]
    lengths = [len(texts[i]) for i in order]
    name, length = names[order[shown]], lengths[shown]

    wanted = [_recurrence(one) for one in inputs]
    want, want_state = wanted[shown]
    advance(1)

    one = inputs[shown]
    (whole, whole_state), rate = machine.timed(lambda: _prefill(one), length)
    advance(1)

    cuts = ragged(length)

    def in_pieces() -> tuple[torch.Tensor, torch.Tensor]:
        outputs: list[torch.Tensor] = []
        state: Any = None
        for start, stop in pairwise(cuts):
            part, state = _prefill(
                {n: x[:, start:stop] for n, x in one.items()}, initial_state=state
            )
            outputs.append(part)
        return torch.cat(outputs, dim=1), state

    (pieces, pieces_state), pieces_rate = machine.timed(in_pieces, length)
    advance(1)

    packed_inputs = {n: torch.cat([x[n] for x in inputs], dim=1) for n in one}
    offsets = torch.tensor([0, *lengths], device=machine.device).cumsum(0).to(torch.int32)
    start = sum(lengths[:shown])
    (packed, packed_states), packed_rate = machine.timed(
        lambda: _prefill(packed_inputs, cu_seqlens=offsets), sum(lengths)
    )
    advance(1)
    mine, my_state = packed[:, start : start + length], packed_states[shown : shown + 1]

    problem = dict(function="chunk_kda", dtype=whole.dtype, head_dim_k=DIM, head_dim_v=DIM)
    impl = served_by("kda.prefill", machine, tokens=length, **problem)
    packed_impl = served_by("kda.prefill", machine, tokens=sum(lengths), varlen=True, **problem)
    pair = machine.pair_bound
    return Outcome(
        [
            Row(
                "kda.prefill",
                f"{name} in one go, {length} tokens",
                impl,
                rate,
                Check("error", relative_rmse(whole, want), machine.bound),
                (Check("state", relative_rmse(whole_state, want_state), machine.bound),),
            ),
            Row(
                "kda.prefill",
                f"{name} in {len(cuts) - 1} ragged pieces",
                impl,
                pieces_rate,
                Check("error", relative_rmse(pieces, want), machine.bound),
                (
                    Check("vs one go", relative_rmse(pieces, whole), pair),
                    Check("state vs one go", relative_rmse(pieces_state, whole_state), pair),
                ),
            ),
            Row(
                "kda.prefill",
                f"{name} packed with {len(lengths) - 1} more, {sum(lengths)} tokens",
                packed_impl,
                packed_rate,
                Check(
                    "error",
                    relative_rmse(packed, torch.cat([o for o, _ in wanted], dim=1)),
                    machine.bound,
                ),
                (
                    Check("vs one go", relative_rmse(mine, whole), pair),
                    Check("state vs one go", relative_rmse(my_state, whole_state), pair),
                    Check(
                        "states",
                        relative_rmse(packed_states, torch.cat([s for _, s in wanted])),
                        machine.bound,
                    ),
                ),
            ),
        ]
    )


def ragged(length: int) -> list[int]:
    """Cut positions from 0 to `length`: pieces of 1, 63, 65, 17, 128 and 100 tokens over and over."""
    cuts, sizes = [0], (1, 63, 65, 17, 128, 100)
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + sizes[(len(cuts) - 1) % len(sizes)]))
    return cuts


def _prefill(inputs: Activations, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    outcome: Any = cula.kda.chunk_kda(**inputs, output_final_state=True, safe_gate=True, **options)
    return outcome


def _recurrence(inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    exact: Any = {name: oracle(x) for name, x in inputs.items()}
    outcome: Any = recurrent_kda(**exact, output_final_state=True)
    return outcome


def _activations(machine: Machine, projections: Projections, text: torch.Tensor) -> Activations:
    """q, k, v, g, beta of one text; g is the safe gate `LOWER_BOUND * sigmoid(.)`, mostly mild forgetting."""
    blend = {x: projections.blend(text, f"kda-{x}", HEADS, DIM) for x in "qkg"}
    # blend() returns unit vectors: sqrt(DIM) restores entries of size one before the sigmoid.
    gate = LOWER_BOUND * torch.sigmoid(1.5 * blend["g"] * DIM**0.5 - 4.0)
    beta = torch.sigmoid(projections.table("kda-beta", 256, HEADS)[text])
    parts = dict(
        q=blend["q"],
        k=blend["k"],
        v=projections.embed(text, "kda-v", HEADS, DIM),
        g=gate,
        beta=beta,
    )
    return {name: machine.put(x)[None] for name, x in parts.items()}
