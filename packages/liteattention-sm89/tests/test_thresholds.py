"""What a threshold limits: one dropped key, or all of a row together (threshold_mode)."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from module_helpers import BLOCK_N, ladder, listed, packed, qkv
from torch import Tensor, nn

from liteattention_sm89 import (
    LiteAttention,
    LiteAttentionCalibConfig,
    LiteAttentionRegistry,
    LiteAttentionRunConfig,
    SeqParallelLiteAttention,
    lite_attention,
    masks,
    reference,
)
from liteattention_sm89.calibration import dump, load
from liteattention_sm89.thresholds import check_threshold, effective, policy_of

Calib, Run = LiteAttentionCalibConfig, LiteAttentionRunConfig
INF = math.inf
reads_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")

# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold, keys, expected", [
    (-3.0, 1, -3.0), (-3.0, 1024, -13.0), (0, 4096, -12.0), (4, 4096, -8.0), (12.0, 4096, 0.0), (13.5, 4096, 0.0),
    (-1.5, 0, -1.5), (2.0, 0, 0.0), (-INF, 64, -INF), (INF, 64, 0.0),
])  # fmt: skip
def test_the_share_of_a_key_falls_with_their_number(threshold, keys, expected):
    assert effective(threshold, "length", keys) == expected
    assert effective(threshold, "max", keys) == threshold
    assert isinstance(effective(threshold, "length", keys), float)


@given(st.floats(allow_nan=False), st.integers(1, 2**24))
def test_as_many_keys_as_there_are_stay_within_the_limit(threshold, keys):
    found = effective(threshold, "length", keys)
    assert found <= 0
    if found < 0 and math.isfinite(threshold):
        assert abs(found + math.log2(keys) - threshold) <= 1e-12 * max(abs(threshold), 24)


def test_ranges_of_the_modes():
    assert check_threshold(-2) == -2.0 and check_threshold(INF) == INF
    for threshold in (-2, 0, 3, 1e9, INF, -INF):
        assert check_threshold(threshold, "length") == threshold
    for mode in ("max", "length"):
        with pytest.raises(ValueError, match="^threshold: expected log2 units.*, got nan"):
            check_threshold(math.nan, mode)
        with pytest.raises(TypeError, match="^threshold: expected a number, got str"):
            check_threshold("3", mode)
    with pytest.raises(ValueError, match="^threshold: expected log2 units, at most 0 .*, got 3.0"):
        check_threshold(3)


def dropped_share(q: Tensor, k: Tensor, write: Tensor) -> Tensor:
    """Of rows with scores in log2 units: the probability of the keys that the write mask lacks over the largest."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    kept = masks.unpack(write, k.shape[1] // BLOCK_N).repeat_interleave(BLOCK_N, 3)
    return (scores - scores.max()).exp2().masked_fill(kept, 0).sum(-1)


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("threshold", [-4.0, 0.0, 3.0])
def test_what_all_dropped_keys_hold_together(threshold, direction):
    """2**threshold of the row's largest probability limits the sum, which "max" exceeds with the same threshold."""
    levels = [-4.5, -30.0] * 15 + [0.0] if direction < 0 else [0.0] + [-30.0, -4.5] * 15
    x = ladder(*levels)
    q, k, v = (x[n].double() for n in ("query", "key", "value"))
    k[..., 0] -= 2 * torch.rand_like(k[..., 0])
    options = {"direction": direction, "threshold": threshold, "scale": x["scale"]}
    write = lite_attention(q, k, v, **options, threshold_mode="length")[2]
    assert dropped_share(q, k, write).max() <= 2**threshold
    assert masks.count(write).item() == 16
    if threshold <= 0:
        write = lite_attention(q, k, v, **options)[2]
        assert dropped_share(q, k, write).max() > 2**threshold


@pytest.mark.parametrize("threshold", [-3.0, 2.0, 30, INF, -INF])
def test_the_number_of_keys_is_that_of_the_call(threshold):
    q, k, v = qkv(2, 150, 700, 4, 2, dim=32)
    for keys, more in ((700, {}), (700, {"causal": True, "block_n": 128}), (330, {})):
        x = q, k[:, :keys], v[:, :keys]
        limit = min(0.0, threshold - math.log2(keys))
        expected = reference.lite_attention(*x, threshold=limit, **more)
        actual = lite_attention(*x, threshold=threshold, threshold_mode="length", **more)
        assert all(map(torch.equal, actual, expected))


def test_packed_sequences_count_the_longest():
    x, packing = packed([100, 60], [200, 500])
    known = packing | {"max_seqlen_k": 512}
    expected = reference.lite_attention(*x, threshold=-1.0 - 9, **known)
    actual = lite_attention(*x, threshold=-1.0, threshold_mode="length", **known)
    assert all(map(torch.equal, actual, expected))
    assert not torch.equal(expected[2], lite_attention(*x, threshold=-1.0, **known)[2])


# --- modules ---------------------------------------------------------------------------------------------------------


def test_a_module_judges_by_the_keys_of_each_call():
    assert BLOCK_N == 64
    for levels, kept in (
        ([0, -7, -9, -11], [0, 1, 2]),
        ([0, -7, -9, -11] + [-30] * 12, [0, 1, 2, 3]),
    ):
        lite = LiteAttention(threshold=-2, threshold_mode="length")
        lite(**ladder(*levels))
        # 256 keys: -10. 1024 keys: -12.
        assert listed(lite) == kept
    assert lite.threshold == -2.0 and lite.threshold_mode == "length"
    assert LiteAttention().threshold_mode == "max"
    assert "threshold=-2.0, threshold_mode='length'" in repr(lite)
    assert "threshold_mode" not in repr(LiteAttention())


def test_thresholds_of_a_module_are_of_its_mode():
    lite = LiteAttention(threshold=5, threshold_mode="length")
    lite.set_threshold(8)
    assert lite.threshold == 8.0
    lite.threshold = INF
    with pytest.raises(ValueError, match="threshold: expected log2 units, got nan"):
        lite.set_threshold(math.nan)
    assert lite.threshold == INF
    with pytest.raises(AttributeError):
        lite.threshold_mode = "max"
    for module in (LiteAttention, lambda **x: SeqParallelLiteAttention(2, **x)):
        with pytest.raises(
            ValueError, match="threshold_mode: expected 'max' or 'length', got 'sum'"
        ):
            module(threshold_mode="sum")
        with pytest.raises(TypeError, match="threshold_mode: expected a str, got NoneType"):
            module(threshold_mode=None)
        with pytest.raises(ValueError, match="threshold: expected log2 units, at most 0"):
            module(threshold=5, threshold_mode="max")


def test_the_parts_of_the_keys_have_one_mode():
    parts = SeqParallelLiteAttention(2, threshold=4, threshold_mode="length")
    assert parts.threshold_mode == "length"
    assert [x.threshold_mode for x in parts.lite_attention] == ["length"] * 2
    parts.set_threshold(-3)
    inputs = ladder(0, -7, -10, -12)
    parts(*(inputs[n] for n in ("query", "key", "value")), 1, inputs["scale"])
    assert listed(parts.lite_attention[1]) == [0, 1, 2]
    other = SeqParallelLiteAttention(2, threshold=-3)
    with pytest.raises(ValueError, match="at most 0"):
        other.set_threshold(4)
    assert {x.threshold for x in other.lite_attention} == {-3.0}


class Fixed:
    def __init__(self, threshold: float) -> None:
        self.threshold = threshold


def test_configs_of_the_other_mode_are_refused():
    lite = LiteAttention(config=[Fixed(3), Run(4.0, "length")], threshold_mode="length")
    assert lite.threshold == 3.0
    for mode, config, theirs in (
        ("length", Run(-3), "max"),
        ("length", [Fixed(-3), Run(-3)], "max"),
        ("length", Calib(), "max"),
        ("max", Run(-3, "length"), "length"),
        ("max", Calib(threshold_mode="length"), "length"),
    ):
        message = f"^config: expected threshold_mode '{mode}', the module's, got '{theirs}'"
        with pytest.raises(ValueError, match=message):
            LiteAttention(config=config, threshold_mode=mode)
        given_later = LiteAttention(threshold_mode=mode)
        with pytest.raises(ValueError, match=message):
            given_later.configure(config)
        assert given_later.threshold == -10.0
    with pytest.raises(ValueError, match="threshold: expected log2 units, at most 0"):
        policy_of(Fixed(3))


# --- calibration -----------------------------------------------------------------------------------------------------


def smooth() -> tuple[Tensor, Tensor, Tensor]:
    """Scores that fall slowly along the keys, with noise, in 8 heads at several rates."""
    q, k = torch.zeros(1, 512, 8, 16), 0.4 * torch.randn(1, 512, 8, 16)
    q[..., 0], q[..., 1:] = 1, torch.randn(1, 512, 8, 15)
    k[..., 0] = -torch.arange(512)[:, None] * torch.linspace(0.05, 0.5, 8)
    return q, k, torch.randn(1, 512, 8, 16)


def test_calibration_finds_thresholds_of_the_mode():
    x, found = smooth(), {}
    for mode in ("max", "length"):
        lite = LiteAttention(config=Calib(0.02, threshold_mode=mode), threshold_mode=mode)
        lite(*x)
        (found[mode],) = lite.found_thresholds
        assert 0 < lite.density() < 1
        # The call is an ordinary one with what was found.
        replay = LiteAttention(threshold=found[mode], threshold_mode=mode)
        replay(*x)
        assert torch.equal(replay.write_mask, lite.write_mask)
        exact, skipped = lite_attention(*x, threshold=None)[0], replay(*x)
        assert 0 < LiteAttention.calc_error(skipped, exact)["L1"] <= 0.022
    # 512 keys: the same tiles at a threshold 9 higher, as far as both searches meet the target.
    assert found["max"] < 0 < found["length"] and abs(found["length"] - found["max"] - 9) < 2


def test_where_calibration_looks():
    assert (Calib().low, Calib().high) == (-20.0, 0.0)
    long = Calib(threshold_mode="length")
    assert (long.low, long.high) == (-20.0, 20.0)
    tried: list[float] = []
    assert long.search(lambda t: tried.append(t) or 0.0) == 20.0 and tried == [20.0]
    assert abs(long.search(lambda t: 0.01 * 2 ** (t - 7.3)) - 7.3) < 0.2
    assert Calib(low=2, high=9, threshold_mode="length").search(lambda t: 0.0) == 9.0
    for wrong in (
        {"high": 1.0},
        {"threshold_mode": "length", "low": 3.0, "high": 2.0},
        {"threshold_mode": "length", "high": INF},
        {"threshold_mode": "length", "low": math.nan},
    ):
        with pytest.raises(ValueError, match="low, high|threshold: "):
            Calib(**wrong)
    for config in (Calib, Run):
        with pytest.raises(ValueError, match="threshold_mode: expected 'max' or 'length'"):
            config(threshold_mode="mean")
        with pytest.raises(TypeError, match="threshold_mode: expected a str"):
            config(threshold_mode=1)
    with pytest.raises(ValueError, match="at most 0"):
        Run(3.0)
    assert Run(3, "length").threshold == 3.0 and Run(-3) != Run(-3, "length")


def layers(*modes: str) -> nn.ModuleList:
    return nn.ModuleList(LiteAttention(threshold_mode=mode) for mode in modes)


def test_a_registry_serves_every_module_in_its_mode():
    model = layers("length", "max")
    registry = LiteAttentionRegistry.from_model(model, mode="const", threshold=-3)
    assert [x.threshold for x in registry.modules.values()] == [-3.0, -3.0]
    with pytest.raises(ValueError, match="threshold: expected log2 units, at most 0"):
        LiteAttentionRegistry.from_model(model, mode="const", threshold=3)
    assert [x.threshold for x in model] == [-3.0, -3.0]
    LiteAttentionRegistry.from_model(layers("length"), mode="const", threshold=3)
    with pytest.raises(ValueError, match="'0': config: expected threshold_mode 'length'"):
        LiteAttentionRegistry.from_model(model, mode="calib", filename="x", calib_config=Calib())
    assert [x.threshold for x in model] == [-3.0, -3.0]


@reads_toml
def test_a_file_tells_the_mode(tmp_path):
    path, model, x = tmp_path / "thresholds.toml", layers("length", "max"), smooth()
    registry = LiteAttentionRegistry.from_model(
        model, mode="calib", filename=path, calib_config={"target_error": 0.02}
    )
    for layer in model:
        layer(*x)
    registry.save_if_calib()
    read = load(path)
    assert read == registry.config_output
    assert [read[n][0].threshold_mode for n in "01"] == ["length", "max"]
    assert read["0"][0].threshold > 0 > read["1"][0].threshold
    loaded = layers("length", "max")
    LiteAttentionRegistry.from_model(loaded, mode="load", filename=path)
    for one, other in zip(loaded, model):
        one(*x)
        assert torch.equal(one.write_mask, other.write_mask)
    swapped = layers("max", "length")
    with pytest.raises(
        ValueError, match="'0': config: expected threshold_mode 'max', the module's"
    ):
        LiteAttentionRegistry.from_model(swapped, mode="load", filename=path)
    assert [m.threshold for m in swapped] == [-10.0] * 2
    text = dump({"a": Run(3, "length"), "b": Run(-3)})
    assert (
        text.count("threshold_mode") == 1 and 'threshold = 3.0\nthreshold_mode = "length"' in text
    )
    for line, message in (('"mean"', "threshold_mode: expected 'max'"), ("1", "expected a str")):
        path.write_text(text.replace('"length"', line))
        with pytest.raises(ValueError, match=f"thresholds.toml: 'a': .*{message}"):
            load(path)
