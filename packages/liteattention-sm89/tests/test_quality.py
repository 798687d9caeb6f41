"""The error measures against fp64 loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from replay_helpers import inputs

from liteattention_sm89 import lite_attention, masks
from liteattention_sm89 import quality as quality_module
from liteattention_sm89.quality import compare, density

TILES = {"block_m": 16, "block_n": 8}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


def relative(a, b, power):
    ratio = ((a - b).abs() ** power).sum() / (b.abs() ** power).sum()
    return float(ratio ** (1 / power))


def by_hand(q, k, v, out, mask, scale, causal, size_m, size_n):
    """Every measure row by row in fp64, with the softmax of the rows written out."""
    q, k, v, got = (x.double() for x in (q, k, v, out))
    (batch, rows, heads, _), keys = q.shape, k.shape[1]
    tiles = -(-rows // size_m), -(-keys // size_n)
    bits = masks.unpack(mask, tiles[1])
    dense, exact, best = (torch.zeros_like(got) for _ in range(3))
    dropped, lost = [], []
    listed = visible = 0
    for b in range(batch):
        for h in range(heads):
            key, value = k[b, :, h * k.shape[2] // heads], v[b, :, h * k.shape[2] // heads]
            for m in range(tiles[0]):
                place = range(m * size_m, min((m + 1) * size_m, rows))
                last = place[-1] + keys - rows if causal else keys - 1
                seen = [n for n in range(tiles[1]) if n * size_n <= last]
                chosen = [n for n in seen if bits[b, h, m, n]]
                visible, listed = visible + len(seen), listed + len(chosen)
                weights = torch.zeros(len(place), keys, dtype=torch.float64)
                for r, i in enumerate(place):
                    end = min(max(i + keys - rows + 1, 0), keys) if causal else keys
                    logits = torch.tensor([float(q[b, i, h] @ key[j]) * scale for j in range(end)])
                    if end:
                        e = (logits.double() - logits.max()).exp()
                        weights[r, :end] = e / e.sum()
                per_tile = [
                    weights[:, n * size_n : (n + 1) * size_n].sum(1) for n in range(tiles[1])
                ]
                order = sorted(seen, key=lambda n: -float(per_tile[n].sum()))[: len(chosen)]
                for r, i in enumerate(place):
                    dense[b, i, h] = weights[r] @ value
                    for target, kept in ((exact, chosen), (best, order)):
                        only = torch.zeros(keys, dtype=torch.float64)
                        for n in kept:
                            only[n * size_n : (n + 1) * size_n] = weights[
                                r, n * size_n : (n + 1) * size_n
                            ]
                        if only.sum() > 0:
                            target[b, i, h] = only @ value / only.sum()
                    dropped.append(sum(float(per_tile[n][r]) for n in seen if n not in chosen))
                    lost.append(sum(float(per_tile[n][r]) for n in seen if n not in order))
    best = best.to(out.dtype).double()
    count = len(dropped)
    return {
        "density": listed / visible,
        "l1": relative(got, dense, 1),
        "l2": relative(got, dense, 2),
        "worst_l1": max(
            relative(got[b, :, h], dense[b, :, h], 1) for b in range(batch) for h in range(heads)
        ),
        "dropped": sum(dropped) / count,
        "dropped_p99": sorted(dropped)[math.ceil(0.99 * count) - 1],
        "inexact": relative(got, exact, 2),
        "best_l1": relative(best, dense, 1),
        "best_l2": relative(best, dense, 2),
        "best_dropped": sum(lost) / count,
    }


PROBLEMS = {
    "plain": ({"queries": 48, "keys": 40}, False, None),
    "ragged": ({"queries": 41, "keys": 67, "batch": 2, "heads": 4, "heads_kv": 2}, False, 0.3),
    "causal": ({"queries": 50, "keys": 50, "heads": 3}, True, None),
    "few queries, causal": ({"queries": 19, "keys": 61}, True, None),
    "rows that see nothing": ({"queries": 45, "keys": 22}, True, None),
    "bf16": ({"queries": 33, "keys": 48, "dtype": torch.bfloat16}, False, None),
    "fp64": ({"queries": 33, "keys": 48, "dtype": torch.float64}, False, None),
}


def problem_of(name):
    shape, causal, scale = PROBLEMS[name]
    q, k, v = inputs(**{"heads_kv": shape.get("heads", 2), "dim": 8, **shape})
    tiles = -(-q.shape[1] // 16), -(-k.shape[1] // 8)
    bits = torch.rand(q.shape[0], q.shape[2], *tiles) < 0.5
    bits[..., 0] = True
    mask = masks.pack(bits)
    out, *_ = lite_attention(
        q, k, v, mask, threshold=-math.inf, scale=scale, causal=causal, **TILES
    )
    return (q, k, v), out + 0.01 * torch.randn_like(out), mask, scale, causal


@pytest.mark.parametrize("name", PROBLEMS)
def test_measures_are_those_of_fp64_loops(name):
    step, out, mask, scale, causal = problem_of(name)
    given = {"scale": scale, "causal": causal, "deep": True, **TILES}
    found, dense = compare(*step, [(out, mask), (out, None)], **given)
    want = by_hand(*step, out, mask, scale or 8**-0.5, causal, 16, 8)
    assert want["dropped"] > 0.02 and 0.2 < want["density"] < 0.9
    for field, value in want.items():
        assert getattr(found, field) == pytest.approx(value, rel=2e-5, abs=1e-7), field
    assert dense.density == 1 and dense.dropped == dense.dropped_p99 == dense.best_dropped == 0
    assert dense.l1 == pytest.approx(want["l1"], rel=2e-5)
    assert dense.inexact == pytest.approx(dense.l2, rel=1e-6)
    # However little is held at once; without the deep measures the others are the same.
    (small,) = compare(*step, [(out, mask)], scores=1, **given)
    (shallow,) = compare(*step, [(out, mask)], **{**given, "deep": False})
    for field, value in want.items():
        assert getattr(small, field) == pytest.approx(value, rel=2e-5, abs=1e-7), field
        plain = getattr(shallow, field)
        assert (
            plain is None
            if field.startswith(("best", "inexact"))
            else plain == getattr(found, field)
        )
    assert density(mask, *step[:2], causal=causal, **TILES) == pytest.approx(want["density"])


def test_what_is_exact_has_no_error_and_what_is_not_finite_has_no_number():
    q, k, v = inputs(dtype=torch.float64)
    out, _, _ = lite_attention(q, k, v, threshold=None)
    (same,) = compare(q, k, v, [(out, None)], deep=True)
    assert max(same.l1, same.l2, same.worst_l1, same.inexact, same.best_l1) < 1e-14
    out[0, 7, 1, 3] = math.nan
    (broken,) = compare(q, k, v, [(out, None)])
    assert all(math.isnan(x) for x in (broken.l1, broken.l2, broken.worst_l1))
    nothing = torch.zeros_like(v)
    (zero,) = compare(q, k, nothing, [(torch.zeros_like(q), None)])
    assert zero.l1 == zero.l2 == 0
    (wrong,) = compare(q, k, nothing, [(torch.ones_like(q), None)])
    assert wrong.l1 == wrong.worst_l1 == math.inf


def test_the_best_tiles_beat_a_list_and_no_list_beats_them():
    q, k, v = inputs(queries=256, dtype=torch.float64)
    listed = masks.pack(torch.rand(1, 2, 16, 32) < 0.3)
    (found,) = compare(q, k, v, [(q, listed)], deep=True, **TILES)
    mass = (torch.einsum("bihd,bjhd->bhij", q, k) * 32**-0.5).softmax(-1)
    mass = mass.view(1, 2, 16, 16, 32, 8).sum((3, 5))
    count = masks.count(listed)
    kept = sum(
        float(mass[0, h, m].topk(int(count[0, h, m])).values.sum())
        for h in range(2)
        for m in range(16)
    )
    assert found.best_dropped == pytest.approx(1 - kept / 512)
    assert found.best_dropped < found.dropped


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_products_are_not_rounded_and_the_setting_comes_back(precision, monkeypatch):
    before, during = torch.get_float32_matmul_precision(), []
    parts = quality_module._parts
    monkeypatch.setattr(
        quality_module,
        "_parts",
        lambda *args: during.append(torch.get_float32_matmul_precision()) or parts(*args),
    )
    try:
        torch.set_float32_matmul_precision(precision)
        q, k, v = inputs(queries=20)
        compare(q, k, v, [(q, None)])
        assert torch.get_float32_matmul_precision() == precision and during == ["highest"]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, out, mask: (q[0], k, v, out, mask), r"expected \[B, S, H, D\] each"),
        (lambda q, k, v, out, mask: (q, k, v[:, 1:], out, mask), r"twice \[B, Sk, Hkv, D\]"),
        (lambda q, k, v, out, mask: (q, k[..., :8], v[..., :8], out, mask), r"twice \[B, Sk"),
        (lambda q, k, v, out, mask: (q[:, :, :1], k, v, out, mask), r"twice \[B, Sk"),
        (lambda q, k, v, out, mask: (q, k[:, :0], v[:, :0], out, mask), "that are not empty"),
        (lambda q, k, v, out, mask: (q, k, v, out[:, 1:], mask), "expected outputs of shape"),
        (lambda q, k, v, out, mask: (q, k, v, out, mask[:, :1]), r"expected masks \[1, 2, 3, 1\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    q, k, v = inputs()
    q, k, v, out, mask = change(q, k, v, q, masks.full(1, 2, 3, 5))
    with pytest.raises(ValueError, match=message):
        compare(q, k, v, [(out, mask)])


@pytest.mark.gpu
def test_measures_on_a_gpu_are_those_on_the_cpu(cuda):
    step, out, mask, scale, causal = problem_of("ragged")
    given = {"scale": scale, "causal": causal, "deep": True, **TILES}
    (host,) = compare(*step, [(out, mask)], **given)
    (device,) = compare(*(x.to(cuda) for x in step), [(out.to(cuda), mask.to(cuda))], **given)
    for field, value in dataclasses.asdict(host).items():
        assert getattr(device, field) == pytest.approx(value, rel=1e-4), field
