"""Skip-list attention over the ranks of a real process group, against one process, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cula.lite import LiteAttention, SeqParallelLiteAttention, lite_attention, of_the_package

RANKS = 3
CALLS = 3


def attention_inputs(heads: int, heads_kv: int, counts: list[int]) -> list[list[torch.Tensor]]:
    """q, k, v of every call, all tokens, with keys of very different sizes so that tiles are dropped."""
    q, k, v = (
        torch.randn(2, sum(counts), h, 8, generator=torch.Generator().manual_seed(seed))
        for seed, h in enumerate((heads, heads_kv, heads_kv))
    )
    k = k * torch.linspace(0.1, 3, k.shape[1])[:, None, None]
    return [[q + 0.1 * i, k, v] for i in range(CALLS)]


def attention_by_heads(counts: list[int], options: dict[str, Any]) -> None:
    """Outputs, log-sum-exps and lists are those of one module in one process, to the bit; gradients too."""
    rank, ranges = dist.get_rank(), {"must_do_list": [130, 131], "must_skip_list": [0, 64]}
    whole = LiteAttention(threshold=-2.0, **options)
    across = SeqParallelLiteAttention(threshold=-2.0, group=dist.group.WORLD, **options)
    assert across.num_nodes == RANKS
    for q, k, v in attention_inputs(6, 3, counts):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        own = [x.split(counts, 1)[rank].clone().requires_grad_() for x in (q, k, v)]
        out, lse = whole(*given, return_softmax_lse=True, **ranges)
        lengths = counts if len(set(counts)) > 1 else None
        got, got_lse = across(*own, return_softmax_lse=True, lengths=lengths, **ranges)
        assert torch.equal(got, out.split(counts, 1)[rank])
        assert torch.equal(got_lse, lse.split(counts, 2)[rank])
        for name in ("read_mask", "write_mask"):
            mask = getattr(across.lite_attention[0], name)
            assert torch.equal(mask, getattr(whole, name).chunk(RANKS, 1)[rank])
        wanted = torch.autograd.grad((out.square().sum() + lse.sum()), given)
        grads = torch.autograd.grad((got.square().sum() + got_lse.sum()), own)
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b.split(counts, 1)[rank], rtol=1e-4, atol=1e-5)
    assert across.lite_attention[0].density() < 1
    assert torch.equal(across(*own, lengths=lengths), whole(*given).split(counts, 1)[rank])


def attention_around(counts: list[int]) -> None:
    """The same of a module per part in this process, its results merged from the own part down."""
    rank = dist.get_rank()
    parts = SeqParallelLiteAttention(RANKS, threshold=torch.inf)
    merge = of_the_package("merge")
    across = SeqParallelLiteAttention(threshold=torch.inf, group=dist.group.WORLD)
    for q, k, v in attention_inputs(4, 2, counts):
        keys, values = k.split(counts, 1), v.split(counts, 1)
        query = q.split(counts, 1)[rank]
        merged = None
        for j in ((rank - step) % RANKS for step in range(RANKS)):
            found = parts(query, keys[j], values[j], j, return_softmax_lse=True)
            merged = found if merged is None else merge(*zip(merged, found, strict=True))
        with torch.no_grad():
            got = across(query, keys[rank], values[rank], return_softmax_lse=True, lengths=counts)
        assert all(torch.equal(a, b) for a, b in zip(got, merged, strict=True))
        for mine, one in zip(across.lite_attention, parts.lite_attention, strict=True):
            assert torch.equal(mine.write_mask, one.write_mask)
    assert min(one.density().item() for one in across.lite_attention) < 1
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    own = [x.split(counts, 1)[rank].clone().requires_grad_() for x in (q, k, v)]
    across.enable_skip_optimization(False)
    wanted = torch.autograd.grad(lite_attention(*given, threshold=None)[0].square().sum(), given)
    grads = torch.autograd.grad(across(*own, lengths=counts).square().sum(), own)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b.split(counts, 1)[rank], rtol=1e-4, atol=1e-5)
    half = [x.bfloat16() for x in own]
    assert across(*half, lengths=counts).dtype == torch.bfloat16


def refused_attention() -> None:
    rank = dist.get_rank()
    across = SeqParallelLiteAttention(group=dist.group.WORLD)
    q, k = torch.zeros(1, 70, 3, 8), torch.zeros(1, 70, 1, 8)
    for error, match, given in (
        (ValueError, "^split_idx: expected None with a group", {"split_idx": 0}),
        (ValueError, f"^lengths: expected 3 numbers from 1, that of rank {rank} 70", {"lengths": [70, 70]}),
        (ValueError, "^lengths: expected 3 numbers", {"lengths": [71, 71, 71]}),
        (ValueError, "^must_do_list: expected None where heads", {"must_do_list": [0, 3]}),
        (ValueError, "^value: expected .* one shape", {"value": torch.zeros(1, 70, 3, 8)}),
        (ValueError, "^key: expected .* as in query", {"key": k[:, :3]}),
        (TypeError, "^value: expected torch.float32 on cpu as query", {"value": k.double()}),
        (ValueError, "^query: expected at most max_batch_size = 2", {
            name: x.expand(3, -1, -1, -1) for name, x in (("query", q), ("key", k), ("value", k))
        }),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            across(**{"query": q, "key": k, "value": k, **given})
    with pytest.raises(ValueError, match="^num_nodes: expected None or 3 as in group, got 2"):
        SeqParallelLiteAttention(2, group=dist.group.WORLD)
    with pytest.raises(TypeError, match="^group: expected a ProcessGroup or a DeviceMesh, got"):
        SeqParallelLiteAttention(group=3)
    with pytest.raises(ValueError, match="^lengths: expected None without a group"):
        SeqParallelLiteAttention(3)(q, k, k, 0, lengths=[70] * 3)
    with pytest.raises(TypeError, match="^num_nodes: "):
        SeqParallelLiteAttention()


@pytest.mark.parametrize("counts", [[70, 70, 70], [130, 1, 90]])
def test_skip_list_attention_by_heads(world, counts):
    world(attention_by_heads, counts, {})
    if counts[0] == counts[1]:
        world(attention_by_heads, counts, {"threshold_mode": "length"})


@pytest.mark.parametrize("counts", [[70, 70, 70], [130, 1, 90]])
def test_skip_list_attention_around_the_ranks(world, counts):
    world(attention_around, counts)


def test_arguments_of_attention_that_do_not_fit_are_refused(world):
    world(refused_attention)
