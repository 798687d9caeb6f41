"""Prefill of the gated delta rule on a Hopper GPU, beside the reference in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cula_core.reference.gated_delta_rule import gated_delta_rule
from cula_lightning_sm90 import chunk_gated_delta_rule
from cula_testing.comparing import relative_rmse, same
from cula_testing.gated.cases import Case, arguments, cases
from cula_testing.gated.contract import WRONG, good_arguments
from cula_testing.refusals import assert_refused
from cula_testing.refusals import cases as refusals
from cula_testing.tensors import column, int32

pytestmark = pytest.mark.gpu

MAX_ERROR = 3e-3
CUDA = torch.device("cuda")


def assert_close(a: dict[str, Any], limit: float = MAX_ERROR) -> None:
    """A call beside the reference; what it allocates is not cleared, so memory is filled with NaN before."""
    given = {name: x for name, x in a.items() if name not in ("out", "output_final_state")}
    want = gated_delta_rule(**given)
    torch.full((1 << 26,), float("nan"), device=CUDA)
    o, state = chunk_gated_delta_rule(**a)
    pool = a.get("state_pool") is not None and a.get("update_state_pool", True)
    errors = [relative_rmse(o, want.out)]
    if state is not None:
        errors.append(relative_rmse(state, want.pool if pool else want.states))
    if want.checkpoints is not None:
        errors.append(relative_rmse(a["state_checkpoints"], want.checkpoints))
    assert max(errors) <= limit, errors


@pytest.mark.parametrize("case", cases(), ids=str)
def test_heads_lengths_and_choices(case):
    assert_close(arguments(case, device=CUDA))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("mode", ["dense", "packed"])
def test_every_argument(mode, state_v_first):
    """Pools and their rows, sequences without a state, checkpoints, raw gates, logits of strengths, norms inside."""
    a = good_arguments(mode, CUDA) | {"use_qk_l2norm_in_kernel": True}
    assert_close(a | {"state_v_first": state_v_first})


def test_float16():
    a = good_arguments("packed", CUDA) | {"use_qk_l2norm_in_kernel": True, "out": None}
    assert_close(a | {name: a[name].half() for name in ("q", "k", "v")})


KEYS = {
    "one key": lambda k: k[:, :1].expand_as(k),
    "eight keys": lambda k: k[:, torch.arange(k.shape[1], device=k.device) % 8],
    "keys that resemble each other": lambda k: k[:, :1] + 0.3 * k,
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_repeat(name):
    """Where nothing fades, what is written must not grow.

    With one key the roundings of the inverse are alike for all tokens of a chunk, and add up.
    """
    a = arguments(Case((2, 2, 2), (1024,), True, True, None), device=CUDA)
    a |= {"k": KEYS[name](a["k"]).contiguous(), "use_qk_l2norm_in_kernel": True}
    a |= {"g": torch.full_like(a["g"], -1e-4), "beta": torch.ones_like(a["beta"])}
    assert_close(a, 4e-3 if name == "one key" else MAX_ERROR)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [(5000,), (4096, 4096), (2100, 0, 70, 1, 9000, 2048)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1, 1), (4, 2, 4)], ids=str)
def test_sequences_that_are_cut(heads, lengths, state_v_first):
    """Where decays are weak, so that every segment shows in all behind it; hardly less precise than in one piece.

    Two of four heads forget within a segment.
    """
    a = arguments(Case(heads, lengths, True, True, None), device=CUDA)
    a |= {"g": a["g"].clone(), "state_v_first": state_v_first}
    a["g"][..., ::2] /= 500
    a["initial_state"] = torch.randn(len(lengths), max(heads), 128, 128, device=CUDA)
    kept = torch.zeros(1, sum(lengths) // 128, max(heads), 128, 128, device=CUDA)
    a |= {"state_checkpoints": kept, "checkpoint_every_n_tokens": 128}
    want = gated_delta_rule(**{name: x for name, x in a.items() if name != "output_final_state"})
    copy = {"cu_seqlens_cpu": a["cu_seqlens"].cpu()}
    whole, cut = (chunk_gated_delta_rule(**a, **copy, use_intracard_cp=x) for x in (False, True))
    assert not same(whole[0], cut[0])
    for x, y, right in zip(whole, cut, (want.out, want.states)):
        assert relative_rmse(y, right) <= min(1.1 * relative_rmse(x, right), MAX_ERROR)
    owned = ~want.checkpoints.isnan()
    assert relative_rmse(kept[owned], want.checkpoints[owned]) <= MAX_ERROR


@pytest.mark.parametrize("in_pool", [False, True])
def test_states_on_the_way_are_those_of_calls_that_end_there(in_pool):
    """Bit for bit, in rows of the caller; and going on from them gives the bits of the whole call."""
    lengths, offsets, rows = (200, 100, 212), (128, 64, 192), (5, -1, 7)
    a = arguments(Case((2, 2, 4), lengths, True, True, None), device=CUDA)
    pool = torch.randn(8, 4, 128, 128, device=CUDA)
    kept = pool.clone() if in_pool else torch.full_like(pool, math.nan)
    vectors = {"state_indices": (0, 1, 2), "checkpoint_rows": rows, "checkpoint_offsets": offsets}
    given = {name: column(int32(*x).to(CUDA)) for name, x in vectors.items()}
    states = kept if in_pool else pool.clone()
    out, _ = chunk_gated_delta_rule(
        **a, **given, state_pool=states, state_checkpoints=None if in_pool else kept
    )
    starts, per_token = a["cu_seqlens"].tolist(), ("q", "k", "v", "g", "beta")
    for n, (offset, row) in enumerate(zip(offsets, rows)):
        if row < 0:
            continue
        first, second, end = starts[n], starts[n] + offset, starts[n + 1]

        def part(begin: int, end: int, state: Tensor) -> tuple[Tensor, Tensor]:
            tokens = {name: x[:, begin:end] for name, x in a.items() if name in per_token}
            tokens |= {"initial_state": state[None].clone(), "cu_seqlens": None}
            return chunk_gated_delta_rule(**{**a, **tokens})

        _, state = part(first, second, pool[n])
        assert same(kept[row], state[0])
        o, final = part(second, end, kept[row])
        assert same(o, out[:, second:end]) and same(final[0], states[n])
    assert same(kept[6], pool[6]) if in_pool else kept[6].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_states_of_16_bits(cut, update, state_v_first, dtype):
    """They are widened where a sequence begins and rounded where they are stored; nothing else changes."""
    lengths = (2100, 0, 64, 3000)
    a = arguments(Case((2, 2, 4), lengths, True, True, None), device=CUDA)
    vectors = {"state_indices": (4, 0, -1, 2)}
    vectors |= {"output_state_indices": (4, 1, 0, 2)} if update else {}
    a |= {name: torch.tensor(x, dtype=torch.int32, device=CUDA) for name, x in vectors.items()}
    a |= {"use_intracard_cp": cut, "cu_seqlens_cpu": a["cu_seqlens"].cpu()}
    a |= {"state_v_first": state_v_first, "update_state_pool": update}

    def run(pool: Tensor) -> tuple[Tensor, ...]:
        kept = pool.new_zeros(1, sum(lengths) // 64, *pool.shape[1:])
        saved = {"state_checkpoints": kept, "checkpoint_every_n_tokens": 64}
        return *chunk_gated_delta_rule(**a, **saved, state_pool=pool.clone()), kept

    pool = torch.randn(5, 4, 128, 128, device=CUDA).to(dtype)
    (out, *states), (expected, *exact) = run(pool), run(pool.float())
    assert same(out, expected)
    assert all(same(own, other.to(dtype)) for own, other in zip(states, exact))


@pytest.mark.parametrize("wrong, mode", refusals(WRONG, "cuda"))
def test_refusals(wrong, mode):
    assert_refused(chunk_gated_delta_rule, wrong, good_arguments(mode, CUDA))


def bits(*tensors: Tensor) -> list[Tensor]:
    return [x.clone() for x in tensors]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("keys, heads, cut", [(64, 64, False), (16, 64, False), (8, 8, True)])
def test_the_same_bits_in_every_run(keys, heads, cut, norm):
    """On all multiprocessors, so that loads are as slow as they get."""
    a = arguments(Case((keys, keys, heads), (4096,), True, True, None), device=CUDA)
    a |= {"use_qk_l2norm_in_kernel": norm, "use_intracard_cp": cut}
    first = bits(*chunk_gated_delta_rule(**a))
    for _ in range(500):
        assert all(same(x, y) for x, y in zip(chunk_gated_delta_rule(**a), first))


def test_copies_do_not_overtake_reads():
    """Every value is the number of its chunk, and every output has to be that number."""
    tokens, heads = 4096, 64
    at = torch.arange(tokens, device=CUDA)
    k = torch.zeros(1, tokens, heads, 128, device=CUDA, dtype=torch.bfloat16)
    k[:, at, :, at % 64] = 1
    v = (at // 64).bfloat16().view(1, tokens, 1, 1).expand_as(k).contiguous()
    for _ in range(200):
        assert chunk_gated_delta_rule(k, k, v, scale=1.0)[0].equal(v)


def test_a_graph_replays_with_other_lengths():
    a = arguments(Case((2, 2, 4), (200, 100, 212), True, True, None), device=CUDA)
    pool = torch.randn(5, 4, 128, 128, device=CUDA)
    rows = torch.tensor([4, -1, 0], dtype=torch.int32, device=CUDA)
    a |= {"state_pool": pool.clone(), "state_indices": rows, "out": torch.empty_like(a["v"])}
    chunk_gated_delta_rule(**a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk_gated_delta_rule(**a)
    a["cu_seqlens"].copy_(torch.tensor([0, 0, 321, 512], device=CUDA))
    rows.copy_(torch.tensor([1, 2, 3], device=CUDA))
    a["state_pool"].copy_(pool)
    graph.replay()
    want = chunk_gated_delta_rule(**a | {"state_pool": pool, "out": None})
    assert same(a["out"], want[0]) and same(a["state_pool"], want[1])
