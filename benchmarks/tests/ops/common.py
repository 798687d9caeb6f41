"""What tests of several families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.harness import results
from benchmarks.harness.registry import Setting
from benchmarks.harness.timers import buffer_sets
from benchmarks.ops.sequences import spans

H200_L2 = 62_914_560

# step(batch row, token, head, first token of the sequence, state) -> (state, output)
Step = Callable[[int, int, int, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def token_by_token(
    problem: Setting,
    x: Any,
    step: Step,
    *,
    transpose: bool = False,
    whole: bool = False,
    carry: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states in fp64, with loops over sequences, heads and tokens; the flags plant one mistake each.

    transpose: final states are [V, K]. whole: a sequence starts from the final state of the one before it. carry: with
    False, initial states are left out.
    """
    dim = x.v.shape[-1]
    out, finals = torch.zeros_like(x.v), []
    for n, (b, start, end) in enumerate(spans(problem)):
        slot = n if x.indices is None else int(x.indices[n])
        heads = []
        for h in range(x.v.shape[2]):
            s = torch.zeros(dim, dim, dtype=torch.float64)
            if x.state is not None and carry:
                s = x.state[slot, h].double()
            if whole and n:
                s = finals[-1][h].double()
            for t in range(start, end):
                s, out[b, t, h] = step(b, t, h, start, s)
            heads.append(s)
        finals.append(torch.stack(heads).float())
        if x.indices is not None:
            x.state[slot] = finals[-1]
    final = torch.stack(finals)
    return out, final.mT if transpose else final


def assert_fits_the_h200(set_bytes: int, call_bytes: int) -> None:
    """The buffer sets of a setting exceed three times the L2, and all of its memory fits on the card.

    `call_bytes` are those of one buffer set with everything that the calls on it keep.
    """
    sets = buffer_sets(set_bytes, H200_L2, resident=False)
    assert sets * set_bytes > 3 * H200_L2
    assert sets * call_bytes < 30e9


def assert_every_setting_is_measured(
    op: str, settings: Iterable[str], providers: Iterable[str]
) -> None:
    """Result files have every setting for every one of these providers, and a rate of arithmetic in every row."""
    paths = list(results.RESULTS.glob(f"*/{op}.json"))
    assert paths
    for path in paths:
        result = results.load(path)
        for provider in providers:
            found = results.rows_of(result, provider=provider, method="graph")
            assert [row["setting"] for row in found] == list(settings)
        assert all(row["tflops"] > 0 for row in result["rows"])
