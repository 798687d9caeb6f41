"""Tile masses against fp64 softmax summed tile by tile, the rule against Fractions, and what the gradient loses."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from as_cuda import AsCuda
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from replay_helpers import inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from liteattention_sm89 import lite_attention, masks, reference
from liteattention_sm89 import mass as mass_module
from liteattention_sm89.mass import mask_by_mass, tile_mass

KEEP = settings(deadline=None, derandomize=True, max_examples=150)
TILES = {"block_m": 16, "block_n": 8}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


def visible(rows: int, keys: int, causal: bool) -> Tensor:
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    return (j <= i + keys - rows) | torch.full((rows, keys), not causal)


def oracle(q, k, *, scale=None, causal=False, block_m=128, block_n=64, bits=None) -> Tensor:
    """fp64 [B, Hq, Mt, Nt]: the whole softmax, over the tiles of `bits` alone, and the sum of every block of it."""
    q, k = q.double(), k.double()
    (batch, rows, heads, dim), keys = q.shape, k.shape[1]
    seen = visible(rows, keys, causal).expand(batch, heads, -1, -1)
    if bits is not None:
        spread = bits.repeat_interleave(block_m, 2).repeat_interleave(block_n, 3)
        seen = seen & spread[:, :, :rows, :keys]
    of_query = k.repeat_interleave(heads // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, of_query) * (dim**-0.5 if scale is None else scale)
    p = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0)
    return torch.stack([
        torch.stack([block.sum((2, 3)) for block in strip.split(block_n, 3)], -1)
        for strip in p.split(block_m, 2)
    ], 2)  # fmt: skip


def dense(q, k, **given) -> Tensor:
    """The masses by the lse of a dense call."""
    _, lse, _ = lite_attention(q, k, torch.zeros_like(k), threshold=None, **given)
    return tile_mass(q, k, lse, **given)


def close(found: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    assert found.dtype == torch.float32 and found.is_contiguous() and found.shape == want.shape
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=1e-9)


# Masses

PROBLEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiles of the kernels": ({"queries": 300, "keys": 200}, {}),
    "wide tiles, bf16": ({"queries": 200, "keys": 300, "dtype": torch.bfloat16}, {"block_n": 128}),
    "one": ({"queries": 1, "keys": 1}, {}),
    "whole": ({"queries": 48, "keys": 40}, TILES),
    "ragged, grouped": ({"queries": 41, "keys": 67, "batch": 2, "heads": 4, "heads_kv": 2}, TILES),
    "one key head": ({"queries": 33, "keys": 20, "heads": 3, "heads_kv": 1}, TILES | {"scale": 0.3}),
    "causal": ({"queries": 50, "keys": 50, "heads": 3}, TILES | {"causal": True}),
    "causal, more keys": ({"queries": 19, "keys": 68, "batch": 2}, TILES | {"causal": True}),
    "causal, more rows": ({"queries": 71, "keys": 30, "heads": 4, "heads_kv": 2}, TILES | {"causal": True}),
    "scale below 0": ({"queries": 41, "keys": 67, "dtype": torch.float16}, TILES | {"scale": -0.2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_masses_are_sums_of_the_softmax(name, monkeypatch):
    shape, more = PROBLEMS[name]
    q, k, _ = inputs(**shape)
    want, found = oracle(q, k, **more), dense(q, k, **more)
    close(found, want)
    sees = visible(q.shape[1], k.shape[1], more.get("causal", False)).any(-1)
    rows = torch.stack([part.sum() for part in sees.split(more.get("block_m", 128))])
    assert torch.allclose(found.sum(-1), rows.float(), rtol=1e-5)
    close(dense(q.double(), k.double(), **more), want, 2e-7)
    # However little is held at once.
    for scores in (1, 600, 4000, 30000):
        monkeypatch.setattr(mass_module, "_SCORES", scores)
        close(dense(q, k, **more), want)


def test_fp64_is_fp64_throughout():
    # Scores near 2^26 that differ by 1: fp32 does not tell them apart.
    q = torch.full((1, 1, 1, 1), 2.0**26, dtype=torch.float64)
    k = 1 + 2.0**-26 * torch.arange(4, dtype=torch.float64).view(1, 4, 1, 1)
    mass = dense(q, k, scale=1.0, block_m=1, block_n=1)
    close(mass, torch.arange(4).double().softmax(0).view(1, 1, 1, 4), 1e-6)


def test_views_and_gradients_of_the_inputs_do_not_matter():
    q, k, _ = inputs(queries=41, keys=67, batch=2)
    want = dense(q, k, **TILES)
    spread = [torch.randn(2, x.shape[1] + 3, 5, 40) for x in (q, k)]
    views = [s[:, 2:-1, 1:3, 4:36].copy_(x) for s, x in zip(spread, (q, k))]
    _, lse, _ = lite_attention(q, k, k, threshold=None, **TILES)
    found = tile_mass(*(x.requires_grad_() for x in views), lse.mT.contiguous().mT, **TILES)
    assert torch.allclose(found, want, rtol=1e-5) and not found.requires_grad


def test_rows_without_lse_and_keys_that_nobody_sees_count_nothing():
    q, k, _ = inputs(queries=71, keys=30, dtype=torch.float64)
    given = TILES | {"causal": True}
    want = dense(q, k, **given)
    _, lse, _ = lite_attention(q, k, k, threshold=None, **given)
    assert (lse[:, :, :41] == -math.inf).all() and not want[:, :, :2].any()
    q[:, :41] = math.nan
    assert torch.equal(tile_mass(q, k, lse, **given), want)
    lse[:, 0] = -math.inf
    found = tile_mass(q, k, lse, **given)
    assert not found[:, 0].any() and torch.equal(found[:, 1], want[:, 1])
    # Key 9 is in key tile 1 and seen from row 50 on, in the tiles 3 and 4.
    k[:, 9] = math.nan
    found = tile_mass(q, k, lse, **given).isnan()
    assert found[:, 1, 3:, 1].all() and found.sum() == 2


# Packed

LENGTHS = [(41, 67), (0, 5), (16, 8), (1, 0), (7, 80), (33, 20)]


def packed(lengths, dtype=torch.int32, heads_k=2, spare=0):
    q, k = (torch.randn(1, sum(x) + spare, h, 32) for x, h in zip(zip(*lengths), (4, heads_k)))
    starts = (torch.tensor([0, *x]).cumsum(0).to(dtype) for x in zip(*lengths))
    return q, k, dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", [2**24, 1, 5000])
def test_packed_sequences_are_those_one_by_one(causal, scores, monkeypatch):
    monkeypatch.setattr(mass_module, "_SCORES", scores)
    for dtype, heads_k, most in ((torch.int32, 4, {}), (torch.int64, 1, (50, 100))):
        q, k, where = packed(LENGTHS, dtype, heads_k)
        if most:
            where |= {"max_seqlen_q": 50, "max_seqlen_k": 100}
        found = dense(q, k, causal=causal, **where, **TILES)
        assert found.shape == ((6, 4, 4, 13) if most else (6, 4, 3, 10)) and found.is_contiguous()
        rest = found.clone()
        for n, (a, b, c, d) in enumerate(
            zip(*(x.tolist()[i:] for x in list(where.values())[:2] for i in (0, 1)))
        ):
            if a < b and c < d:
                want = oracle(q[:, a:b], k[:, c:d], causal=causal, **TILES)
                inside = (n, slice(None), slice(want.shape[2]), slice(want.shape[3]))
                torch.testing.assert_close(found[inside].double(), want[0], rtol=2e-5, atol=1e-9)
                rest[inside] = 0
        assert not rest.any()


def test_one_sequence_does_not_reach_into_another():
    q, k, where = packed(LENGTHS)
    want = dense(q, k, **where, **TILES)
    k[:, 67 : 67 + 5 + 8], q[:, 41 : 41 + 16] = math.nan, math.nan
    found = dense(q, k, **where, **TILES)
    others = [0, 1, 3, 4, 5]
    assert found[2].isnan().any() and torch.equal(found[others], want[others])


@KEEP
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9))
def test_every_tile_of_a_packing_has_its_rows(lengths):
    """Keys that all score alike: the masses are the shares of the keys, times the rows."""
    q, k, where = packed(lengths)
    found = dense(torch.zeros_like(q), k, **where, block_m=3, block_n=2)
    for n, (rows, keys) in enumerate(lengths):
        for m in range(found.shape[2]):
            for j in range(found.shape[3]):
                tile_rows = min(max(rows - 3 * m, 0), 3)
                tile_keys = min(max(keys - 2 * j, 0), 2)
                want = tile_rows * tile_keys / max(keys, 1)
                assert found[n, :, m, j].tolist() == pytest.approx([want] * 4, rel=1e-5)


@pytest.mark.parametrize("empty", ["rows", "keys", "batch", "sequences"])
def test_nothing_has_no_mass(empty):
    batch, rows, keys = int(empty != "batch"), 20 * (empty != "rows"), 20 * (empty != "keys")
    q, k = torch.randn(batch, rows, 2, 32), torch.randn(batch, keys, 2, 32)
    lse, given = torch.zeros(batch, 2, rows), dict(TILES)
    if empty == "sequences":
        q, k, lse = q[:, :0], k[:, :0], lse[0, :, :0]
        starts = torch.zeros(3, dtype=torch.int32)
        given |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_k": 20}
    mass = tile_mass(q, k, lse, **given)
    want = {"rows": (1, 2, 0, 3), "keys": (1, 2, 2, 0), "batch": (0, 2, 2, 3)}
    assert mass.shape == want.get(empty, (2, 2, 0, 3)) and not mass.any()
    words = mask_by_mass(mass, 0.1)
    assert words.shape == (*mass.shape[:3], masks.words(mass.shape[3])) and not words.any()


# Lists


@pytest.mark.parametrize("causal", [False, True])
def test_masses_and_masks_of_a_call_over_a_list(causal):
    q, k, v = inputs(queries=200, keys=150, heads=4, heads_kv=2)
    given = TILES | {"causal": causal}
    bits = torch.rand(1, 4, 13, 19) < 0.6
    # What is not on the list does not enter the call, whatever it holds.
    bits[:, :2, :, 5] = False
    k[:, 40:48, 0] = math.nan
    _, lse, lists = lite_attention(q, k, v, masks.pack(bits), threshold=0.0, **given)
    listed = masks.unpack(lists, 19)
    assert 0.2 < listed.float().mean() < 0.55 and not (listed & ~bits).any()
    for words, read in ((masks.pack(bits), bits), (lists, listed)):
        _, lse, _ = lite_attention(q, k, v, words, threshold=-1.0, direction=-1, **given)
        mass, want = tile_mass(q, k, lse, **given), oracle(q, k.nan_to_num(0), bits=read, **given)
        close(mass.where(read, 0), want.where(read, 0))
        assert torch.allclose(mass.where(read, 0).sum(-1), want.sum(-1).float(), rtol=1e-5)
        # The other tiles hold anything: more than there are rows, or NaN.
        assert mass[:, :2, -1, 5].isnan().all() and (mass.nan_to_num(0) > 17).any()
        counts = []
        for drop in (0.0, 0.05, 0.3, 0.9):
            kept = mask_by_mass(mass, drop, words)
            assert torch.equal(kept, mask_by_mass(want, drop)) and not (kept & ~words).any()
            counts.append(int(masks.count(kept).sum()))
        assert counts == sorted(set(counts), reverse=True)
        assert counts[0] == (want > 0).sum() and 0 < counts[-1] < counts[0] / 2


# The rule


def cumulated(column: list[float]) -> list[tuple[int, Fraction]]:
    """The query tiles of a key tile from the smallest mass on, and the share of all up to each."""
    order = sorted(range(len(column)), key=lambda m: (column[m], m))
    exact = [Fraction(column[m]) for m in order]
    total = sum(exact) or Fraction(1)
    return [(m, sum(exact[: i + 1], Fraction(0)) / total) for i, m in enumerate(order)]


def rule(column: list[float], drop: float) -> list[bool]:
    """Which query tiles of a key tile stay."""
    gone = {m for m, share in cumulated(column) if share < Fraction(drop)}
    return [mass > 0 and m not in gone for m, mass in enumerate(column)]


MASSES = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 0.5, 1e-30, 128.0]),
    st.floats(0, 128, width=32),
    st.floats(0, 2.0**-20, width=32),
)


@KEEP
@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(MASSES, min_size=n, max_size=n), min_size=1, max_size=6)
    ),
    st.one_of(st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.499, 0.99]), st.floats(0, 0.999)),
)
@example([[3.0, 3.0, 3.0, 3.0, 3.0]], 0.41)
def test_the_rule_against_fractions(columns, drop):
    # Shares are rounded up a little.
    for column in columns:
        for _, share in cumulated(column):
            assume(share == 0 or abs(share - Fraction(drop)) > Fraction(1, 10**9))
    mass = torch.tensor(columns).T[None, None]
    want = [rule(column, drop) for column in columns]
    for found in (mass, mass.double()):
        words = mask_by_mass(found, drop)
        assert words.dtype == torch.int32 and words.is_contiguous()
        assert words.shape == (1, 1, mass.shape[2], 1)
        assert masks.unpack(words, len(columns))[0, 0].T.tolist() == want


def kept(column: list[float], drop: float) -> list[int]:
    bits = masks.unpack(mask_by_mass(torch.tensor(column)[None, None, :, None], drop), 1)
    return bits.flatten().nonzero().flatten().tolist()


def test_the_rule_at_its_edges():
    # Below the share, not at it; shares here are multiples of 1/8.
    column = [1.0, 4.0, 2.0, 1.0, 0.0]
    assert kept(column, 0.125) == [0, 1, 2, 3]
    assert kept(column, 0.126) == [1, 2, 3]
    assert kept(column, 0.25) == [1, 2, 3]
    assert kept(column, 0.251) == [1, 2]
    assert kept(column, 0.5) == [1, 2]
    assert kept(column, 0.501) == [1]
    assert kept(column, 1 - 2.0**-53) == [1]
    # Of equal masses the first leaves first; something always stays.
    assert kept([1.0] * 4, 0.3) == [1, 2, 3]
    assert kept([1.0] * 4, 0.6) == [2, 3]
    assert kept([1.0] * 1000, 1 - 2.0**-53) == [999]
    assert kept([0.7] * 300, 0.999999) == [299]
    # At 0 only what has no mass leaves.
    assert kept([0.0, 1e-30, 128.0, 0.0, 1e-45], 0) == [1, 2, 4]
    assert kept([0.0, 0.0], 0.5) == [] == kept([0.0, 0.0], 0)
    assert kept([1e-38, 3e-38, 1e-45], 0.2) == [0, 1] == kept([1e38, 3e38, 1e30], 0.2)
    # What cannot be weighed stays.
    assert kept([1.0, math.nan, 0.0, 9.0], 0.9) == [0, 1, 3]
    assert kept([1.0, math.inf, 0.0, math.inf], 0.9) == [1, 3]


def test_key_tiles_and_heads_are_judged_apart_and_a_list_counts_alone():
    mass = torch.rand(2, 3, 9, 70) ** 4
    bits = torch.rand(2, 3, 9, 70) < 0.5
    words, listed = mask_by_mass(mass, 0.1), mask_by_mass(mass, 0.1, masks.pack(bits))
    assert torch.equal(listed, mask_by_mass(mass.where(bits, 0), 0.1))
    assert torch.equal(mask_by_mass(mass, 0.1, masks.full(2, 3, 9, 70)), words)
    # Bits behind the tiles do not come through, and no mass of a tile off the list counts.
    wild = mass.where(bits, torch.tensor([math.nan, math.inf, 1e30])[torch.randint(3, mass.shape)])
    behind = masks.pack(torch.cat((bits, torch.ones(2, 3, 9, 26, dtype=torch.bool)), -1))
    assert torch.equal(mask_by_mass(wild, 0.1, behind), listed)
    assert torch.equal(
        mask_by_mass(wild.mT.contiguous().mT, 0.1, behind.mT.contiguous().mT), listed
    )
    for b, h, n in ((0, 0, 0), (1, 2, 69), (1, 0, 33), (0, 1, 64)):
        for found, column in ((words, mass[b, h, :, n]), (listed, (mass * bits)[b, h, :, n])):
            assert masks.unpack(found, 70)[b, h, :, n].tolist() == rule(column.tolist(), 0.1)


def test_a_larger_share_drops_more():
    mass = torch.rand(1, 2, 40, 50) ** 8
    before = mask_by_mass(mass, 0)
    assert torch.equal(before, masks.full(1, 2, 40, 50))
    counts = []
    for drop in (0.01, 0.02, 0.05, 0.1, 0.3, 0.6, 0.95):
        words = mask_by_mass(mass, drop)
        assert not (words & ~before).any()
        left = (mass * ~masks.unpack(words, 50)).sum(2, dtype=torch.float64)
        assert (left < drop * mass.sum(2, dtype=torch.float64)).all()
        before = words
        counts.append(int(masks.count(words).sum()))
    assert counts == sorted(set(counts), reverse=True) and counts[0] < 4000 and counts[-1] >= 100


# Gradients


def gradients(q, k, v, dout, mask, forward=None, **given) -> tuple[Tensor, Tensor, Tensor]:
    """Of the dense forward over the tiles of `mask`, or by autograd without one."""
    if mask is not None:
        return reference.masked_gradients(
            q, k, v, dout, mask, out=forward[0], lse=forward[1], **given
        )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _, _ = reference.lite_attention(*leaves, **given)
    return torch.autograd.grad(out, leaves, dout)


def smooth(tokens=500, heads=4, dim=32) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that fall with the distance on a line, with noise: most of the probability is in few tiles."""
    place = torch.linspace(0, 1, tokens, dtype=torch.float64)[:, None, None]
    phase = 12 * place * torch.randn(heads, dim // 2, dtype=torch.float64)
    q = 2.2 * torch.cat((phase.cos(), phase.sin()), -1)[None]
    q = q + 0.3 * torch.randn_like(q)
    return q, q + 0.1 * torch.randn_like(q), torch.randn_like(q)


@pytest.mark.parametrize("causal", [False, True])
def test_what_the_gradient_loses_is_bounded(causal):
    q, k, v = smooth()
    dout, given = torch.randn_like(q), {"causal": causal, "block_m": 32, "block_n": 16}
    out, lse, _ = lite_attention(q, k, v, threshold=None, **given)
    mass, exact = tile_mass(q, k, lse, **given), gradients(q, k, v, dout, None, **given)
    errors, densities = [], []
    for drop in (0.0, 0.005, 0.02, 0.05, 0.2):
        mask = mask_by_mass(mass, drop)
        found = gradients(q, k, v, dout, mask, (out, lse), **given)
        lost = (found[2] - exact[2]).norm(dim=-1)[0]  # [Sk, H]
        for n, part in enumerate(lost.split(16)):
            # |sum of P dout| <= sum of P |dout|, and the P that are left out are less than `drop` of the column.
            limit = drop * mass[0, :, :, n].double().sum(1) * dout.norm(dim=-1).max()
            assert (part.sum(0) <= limit + 1e-12).all()
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, exact)])
        densities.append(float(masks.density(mask, 32)))
    assert densities == sorted(set(densities), reverse=True)
    assert max(errors[0]) < 1e-12 and all(list(e) == sorted(set(e)) for e in zip(*errors))
    # With half of one percent two thirds of the tiles leave, for less than 1 % of dv and 5 % of the rest.
    assert densities[1] < densities[0] / 3
    assert errors[1][2] < 0.01 and max(errors[1]) < 0.05 < errors[4][2]


def test_a_constant_gradient_loses_exactly_the_share_that_was_dropped():
    q, k, v = inputs(queries=300, heads=4, heads_kv=2, dtype=torch.float64)
    dout, given = torch.ones_like(q), {"block_m": 32, "block_n": 16}
    out, lse, _ = lite_attention(q, k, v, threshold=None, **given)
    mass = tile_mass(q, k, lse, **given)
    mask = mask_by_mass(mass, 0.1)
    exact = gradients(q, k, v, dout, None, **given)[2]
    found = gradients(q, k, v, dout, mask, (out, lse), **given)[2]
    left = (mass.double() * ~masks.unpack(mask, 19)).sum(2)
    # Two query heads add up in one key head.
    lost, per_tile = ((exact - found)[0, :, :, 0].T, left[0].unflatten(0, (2, 2)).sum(1))
    want = torch.stack([part.sum(-1) for part in lost.split(16, -1)], -1)
    torch.testing.assert_close(per_tile, want, rtol=1e-5, atol=1e-9)
    assert (left < 0.1 * mass.sum(2)).all() and left.max() > 0.05 * mass.sum(2).max()


# Arguments

Q, K = torch.randn(2, 20, 4, 32), torch.randn(2, 24, 2, 32)
LSE, STARTS = torch.zeros(2, 4, 20), torch.tensor([0, 20], dtype=torch.int32)
PACKED = {"q": Q[:1], "k": K[:1, :20], "lse": LSE[0], "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}  # fmt: skip
MASS, WORDS = torch.rand(2, 4, 3, 40), torch.full((2, 4, 3, 2), -1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
        ({"q": Q.int()}, TypeError, "q: expected bfloat16 or float16 or float32 or float64, got int32"),
        ({"q": Q[0]}, ValueError, r"q: expected 4 dimensions \[B, Sq, Hq, D\], got \[20, 4, 32\]"),
        ({"q": Q[:, :, :3]}, ValueError, "q: expected a number of heads that is a multiple of Hkv = 2"),
        ({"q": Q.mT.contiguous().mT}, ValueError, "q: expected a contiguous last dimension"),
        ({"k": [1.0]}, TypeError, "k: expected a torch.Tensor, got list"),
        ({"k": K.half()}, TypeError, "k: expected the dtype of q, float32, got float16"),
        ({"k": K[:1]}, ValueError, r"k: expected \[B, Sk, Hkv, D\] with B, D = 2, 32 as in q"),
        ({"k": K.to("meta")}, ValueError, "k: expected a tensor on cpu, as q, got meta"),
        ({"lse": None}, TypeError, "lse: expected a torch.Tensor, got NoneType"),
        ({"lse": LSE.half()}, TypeError, "lse: expected float32 or float64, got float16"),
        ({"lse": LSE.mT}, ValueError, r"lse: expected \[B, Hq, Sq\] = \[2, 4, 20\], got \[2, 20, 4\]"),
        ({"lse": LSE[0]}, ValueError, r"lse: expected \[B, Hq, Sq\] = \[2, 4, 20\], got \[4, 20\]"),
        ({"lse": LSE[:, :2]}, ValueError, r"lse: .*got \[2, 2, 20\]"),
        ({"lse": LSE.to("meta")}, ValueError, "lse: expected a tensor on cpu, as q, got meta"),
        ({"scale": "1"}, TypeError, "scale: expected a number, got str"),
        ({"scale": True}, TypeError, "scale: expected a number, got bool"),
        ({"scale": math.nan}, ValueError, "scale: expected a finite number, got nan"),
        ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
        ({"block_m": 16.0}, TypeError, "block_m: expected an int, got float"),
        ({"block_m": 0}, ValueError, "block_m: expected at least 1, got 0"),
        ({"block_n": None}, TypeError, "block_n: expected an int, got NoneType"),
        ({"block_n": -64}, ValueError, "block_n: expected at least 1, got -64"),
        ({"cu_seqlens_q": STARTS}, ValueError, "cu_seqlens_q: expected None unless"),
        ({"cu_seqlens_k": STARTS}, ValueError, "cu_seqlens_k: expected None unless"),
        ({"max_seqlen_q": 20}, ValueError, "max_seqlen_q: expected None unless"),
        ({"max_seqlen_k": 20}, ValueError, "max_seqlen_k: expected None unless"),
        (PACKED | {"lse": LSE[:1]}, ValueError, r"lse: expected \[Hq, Tq\] = \[4, 20\], got \[1, 4, 20\]"),
        (PACKED | {"q": Q, "k": K}, ValueError, "cu_seqlens_q: expected None unless B = 1"),
        (PACKED | {"cu_seqlens_q": STARTS.float()}, TypeError, "cu_seqlens_q: expected int32 or int64"),
        (PACKED | {"cu_seqlens_q": STARTS + 1}, ValueError, "cu_seqlens_q: expected rising numbers"),
        (PACKED | {"cu_seqlens_k": STARTS.long()}, TypeError, "cu_seqlens_k: expected the dtype"),
        (PACKED | {"cu_seqlens_k": STARTS[[0, 1, 1]]}, ValueError, "cu_seqlens_k: expected the shape"),
        (PACKED | {"cu_seqlens_k": None}, ValueError, "cu_seqlens_q: expected None unless"),
        (PACKED | {"max_seqlen_q": 19}, ValueError, "max_seqlen_q: expected at least the length"),
        (PACKED | {"max_seqlen_k": 20.0}, TypeError, "max_seqlen_k: expected an int, got float"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_masses_are_named(change, error, message):
    good = {"q": Q, "k": K, "lse": LSE}
    tile_mass(**(good if "cu_seqlens_q" not in change else PACKED))
    with pytest.raises(error, match=f"^{message}"):
        tile_mass(**good | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mass": MASS.tolist()}, TypeError, "mass: expected a torch.Tensor, got list"),
        ({"mass": MASS.half()}, TypeError, "mass: expected float32 or float64, got float16"),
        ({"mass": MASS.int()}, TypeError, "mass: expected float32 or float64, got int32"),
        ({"mass": MASS[0]}, ValueError, r"mass: expected 4 dimensions \[B, Hq, Mt, Nt\], got \[4, 3, 40\]"),
        ({"drop": None}, TypeError, "drop: expected a number, got NoneType"),
        ({"drop": False}, TypeError, "drop: expected a number, got bool"),
        ({"drop": torch.tensor(0.1)}, TypeError, "drop: expected a number, got Tensor"),
        *(({"drop": wrong}, ValueError, f"drop: expected a share, 0 <= drop < 1, got {wrong}")
          for wrong in (-0.1, 1, 1.0, 5, math.nan, math.inf)),
        ({"read_mask": [1]}, TypeError, "read_mask: expected a torch.Tensor, got list"),
        ({"read_mask": WORDS.long()}, TypeError, "read_mask: expected int32 words of 32 tiles, got int64"),
        ({"read_mask": WORDS.bool()}, TypeError, "read_mask: expected int32 words of 32 tiles, got bool"),
        ({"read_mask": WORDS[..., :1]}, ValueError, r"read_mask: expected \[B, Hq, Mt, W\] = \[2, 4, 3, 2\], got"),
        ({"read_mask": WORDS[:1]}, ValueError, r"read_mask: .* got \[1, 4, 3, 2\]"),
        ({"read_mask": WORDS.to("meta")}, ValueError, "read_mask: expected a tensor on cpu, as mass, got meta"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_masks_are_named(change, error, message):
    good = {"mass": MASS, "drop": 0.1, "read_mask": WORDS}
    mask_by_mass(**good)
    with pytest.raises(error, match=f"^{message}"):
        mask_by_mass(**good | change)


# Devices


def both(q, k, lse, where) -> tuple[Tensor, Tensor]:
    """What a call on a device may do: masses and their mask."""
    mass = tile_mass(q, k, lse, causal=True, **where)
    return mass, mask_by_mass(mass, 0.1, masks.full(*mass.shape, device=mass.device))


def device_problems():
    q, k, where = packed([(300, 200), (0, 3), (70, 130)], heads_k=2)
    most = {"max_seqlen_q": 300, "max_seqlen_k": 200}
    for more in (where | most, {}):
        x = q.bfloat16(), k.bfloat16()
        _, lse, _ = lite_attention(*x, x[1], threshold=None, causal=True, **more)
        yield *x, lse, more


def test_nothing_reads_the_values_on_the_host():
    for q, k, lse, where in device_problems():
        real = both(q, k, lse, where)
        # A fake tensor has no values: reading one raises.
        with FakeTensorMode() as mode:
            fake = [
                {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in given.items()}
                for given in ({"q": q, "k": k, "lse": lse}, where)
            ]
            found = both(**fake[0], where=fake[1])
        for a, b in zip(found, real, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_a_gpu_multiplies_what_it_is_given_and_sums_in_fp32(monkeypatch):
    taken = []

    def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        taken.append((a.dtype, b.dtype, out_dtype))
        return a.to(out_dtype) @ b.to(out_dtype)

    for q, k, lse, where in device_problems():
        want = both(q, k, lse, where)
        with monkeypatch.context() as patch, AsCuda():
            patch.setattr(torch, "bmm", bmm)
            found = both(q, k, lse, where)
            if where:
                with pytest.raises(ValueError, match="^max_seqlen_q: expected the length"):
                    tile_mass(q, k, lse, **where | {"max_seqlen_q": None})
        assert all(map(torch.equal, found, want))
    assert set(taken) == {(torch.bfloat16, torch.bfloat16, torch.float32)} and len(taken) >= 2


@pytest.mark.gpu
def test_a_gpu_gives_the_same_and_is_not_waited_for(cuda):
    for q, k, lse, where in device_problems():
        want_mass, want = both(q, k, lse, where)
        moved = [x.to(cuda) for x in (q, k, lse)]
        where = {n: x.to(cuda) if isinstance(x, Tensor) else x for n, x in where.items()}
        both(*moved, where)
        torch.cuda.set_sync_debug_mode("error")
        try:
            mass, words = both(*moved, where)
            again = both(*moved, where)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(mass.cpu(), want_mass, rtol=1e-4, atol=1e-7)
        assert torch.equal(words, mask_by_mass(mass.cpu(), 0.1).to(cuda))
        assert masks.count(words.cpu() ^ want).sum() <= 2
        assert torch.equal(mass, again[0]) and torch.equal(words, again[1])
