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
    """q, k, v of every call, all tokens. Tiles have large and small keys, so that parts drop different ones."""
    q, k, v = (
        torch.randn(2, sum(counts), h, 8, generator=torch.Generator().manual_seed(seed))
        for seed, h in enumerate((heads, heads_kv, heads_kv))
    )
    large = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1, 0])[torch.arange(sum(counts)) // 64]
    k = k * (0.01 + 8 * large)[:, None, None]
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


def attention_around(counts: list[int], dtype: torch.dtype) -> None:
    """The same of a module per part in this process, its results merged in float32 from the own part down."""
    rank = dist.get_rank()
    parts = SeqParallelLiteAttention(RANKS, threshold=-2.0)
    merge = of_the_package("merge")
    across = SeqParallelLiteAttention(threshold=-2.0, group=dist.group.WORLD)
    for inputs in attention_inputs(4, 2, counts):
        q, k, v = (x.to(dtype) for x in inputs)
        keys, values = k.split(counts, 1), v.split(counts, 1)
        query = q.split(counts, 1)[rank]
        merged = None
        for j in ((rank - step) % RANKS for step in range(RANKS)):
            out, lse = parts(query, keys[j], values[j], j, return_softmax_lse=True)
            merged = (
                (out.float(), lse) if merged is None else merge((merged[0], out), (merged[1], lse))
            )
        with torch.no_grad():
            got = across(query, keys[rank], values[rank], return_softmax_lse=True, lengths=counts)
        assert torch.equal(got[0], merged[0].to(dtype)) and torch.equal(got[1], merged[1])
        for mine, one in zip(across.lite_attention, parts.lite_attention, strict=True):
            assert torch.equal(mine.write_mask, one.write_mask)
    assert min(one.density().item() for one in across.lite_attention) < 1


def gradients_around(counts: list[int]) -> None:
    """Of dense attention, whose parts are merged exactly."""
    rank = dist.get_rank()
    across = SeqParallelLiteAttention(enable_skipping=False, group=dist.group.WORLD)
    given = [x.requires_grad_() for x in attention_inputs(4, 2, counts)[0]]
    own = [x.detach().split(counts, 1)[rank].clone().requires_grad_() for x in given]
    wanted = torch.autograd.grad(lite_attention(*given, threshold=None)[0].square().sum(), given)
    grads = torch.autograd.grad(across(*own, lengths=counts).square().sum(), own)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b.split(counts, 1)[rank], rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("counts", "dtype"),
    [
        ([192, 192, 192], torch.float32),
        ([130, 1, 90], torch.float32),
        ([130, 1, 90], torch.bfloat16),
    ],
)
def test_skip_list_attention_around_the_ranks(world, counts, dtype):
    world(attention_around, counts, dtype)


def test_gradients_around_the_ranks(world):
    world(gradients_around, [130, 1, 90])


def test_arguments_of_attention_that_do_not_fit_are_refused(world):
    world(refused_attention)
