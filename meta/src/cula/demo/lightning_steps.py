"""Lightning attention over the text: prefill most of it, then decode the rest token by token from the same state."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import cula.lightning
from cula.demo.data import Corpus, Projections
from cula.demo.results import Check, Outcome, Row, relative_rmse
from cula.demo.runtime import Advance, Machine, oracle, served_by
from cula.reference import recurrent_simple_gla

HEADS, DIM = 4, 128
TICKS = 4


def run(
    machine: Machine, corpus: Corpus, projections: Projections, tokens: int, advance: Advance
) -> Outcome:
    """Prefill, decode, and compare both with one prefill of the whole text and with the fp64 recurrence."""
    text = _rows(corpus.stream(max(2, tokens // 2)))
    batch, length = text.shape
    split = length - max(1, length // 4)
    q, k = (machine.put(projections.blend(text, f"lightning-{x}", HEADS, DIM)) for x in "qk")
    v = machine.put(projections.embed(text, "lightning-v", HEADS, DIM))
    # Slopes 1/2, 1/8, ...: from heads that forget within a word to heads that remember a whole page.
    decay = torch.tensor([0.5 ** (2 * h + 1) for h in range(HEADS)], device=machine.device)

    exact: Any = recurrent_simple_gla(
        oracle(q), oracle(k), oracle(v), g_gamma=-oracle(decay), output_final_state=True
    )
    want, want_state = exact
    advance(1)

    def prefill(stop: int) -> Any:
        return cula.lightning.lightning_attn_fwd(
            q[:, :stop], k[:, :stop], v[:, :stop], decay, output_final_state=True
        )

    (first, state), prefill_rate = machine.timed(partial(prefill, split), batch * split)
    advance(1)
    whole, whole_state = prefill(length)
    advance(1)

    def decode() -> tuple[torch.Tensor, torch.Tensor]:
        pool = state.clone()
        outputs = [
            cula.lightning.linear_attention_decode(
                q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], pool, decay
            )
            for t in range(split, length)
        ]
        return torch.cat(outputs, dim=1), pool

    (rest, decoded_state), decode_rate = machine.timed(decode, batch * (length - split))
    advance(1)

    dims = dict(dtype=q.dtype, head_dim_k=DIM, head_dim_v=DIM)
    prefilled = Row(
        "lightning.prefill",
        f"the first {split} of {length} tokens of {batch} texts",
        served_by(
            "lightning.prefill", machine, function="lightning_attn_fwd", tokens=split, **dims
        ),
        prefill_rate,
        Check("error", relative_rmse(first, want[:, :split]), machine.bound),
        (Check("vs one go", relative_rmse(first, whole[:, :split]), machine.pair_bound),),
    )
    decoded = Row(
        "lightning.decode",
        f"the other {length - split} one by one, same state",
        served_by(
            "lightning.decode", machine, function="linear_attention_decode", tokens=1, **dims
        ),
        decode_rate,
        Check("error", relative_rmse(rest, want[:, split:]), machine.bound),
        (
            Check("vs one go", relative_rmse(rest, whole[:, split:]), machine.pair_bound),
            Check("state", relative_rmse(decoded_state, want_state), machine.bound),
            Check("state vs one go", relative_rmse(decoded_state, whole_state), machine.pair_bound),
        ),
    )
    return Outcome([prefilled, decoded])


def _rows(text: torch.Tensor, most: int = 4) -> torch.Tensor:
    """Cut the text into up to `most` equally long texts of at least 16 bytes: `[batch, length]`."""
    batch = max(1, min(most, len(text) // 16))
    length = len(text) // batch
    return text[: batch * length].view(batch, length)
