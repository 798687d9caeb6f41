"""Thresholds per layer and step: found, kept in a file, and set again."""

from __future__ import annotations

import math
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from liteattention_sm89.calibration import (
    LiteAttentionCalibConfig,
    LiteAttentionRegistry,
    LiteAttentionRunConfig,
    dump,
    load,
)
from liteattention_sm89.module import LiteAttention, SeqParallelLiteAttention, SkipState

Calib, Run = LiteAttentionCalibConfig, LiteAttentionRunConfig
reads_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")


class Model(nn.Module):
    """Two layers, one of which works on parts of the keys."""

    def __init__(self, **arguments) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attention": LiteAttention(**arguments)}) for _ in range(2)
        )
        self.parallel = SeqParallelLiteAttention(2, **arguments)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for block in self.blocks:
            block["attention"](q, k, v)
            k = k * 0.9
        for part in range(2):
            self.parallel(q, k, v, part)


NAMES = [
    "blocks.0.attention",
    "blocks.1.attention",
    "parallel.lite_attention.0",
    "parallel.lite_attention.1",
]


def waves(length: int = 512, heads: int = 8, dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that fall smoothly with the distance, in every head over another length."""
    time = torch.linspace(0, 1, length)[:, None, None]
    reach = torch.logspace(-1.5, -0.5, heads)[:, None]
    phase = time * torch.randn(heads, dim // 2) / reach * 2 * math.pi
    features = 1.5 * torch.cat((phase.cos(), phase.sin()), -1)[None]
    q, k = (features + 0.2 * torch.randn_like(features) for _ in range(2))
    return q, k, torch.randn(1, length, heads, dim)


def drift(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x + 0.02 * torch.randn_like(x) for x in inputs)


# --- the search ------------------------------------------------------------------------------------------------------


class Counted:
    def __init__(self, error_of) -> None:
        self.error_of, self.tried = error_of, []

    def __call__(self, threshold: float) -> float:
        self.tried.append(threshold)
        return self.error_of(threshold)


@given(slope=st.floats(0.1, 3.0), place=st.floats(-18, -2), target=st.floats(1e-4, 0.5))
def test_the_search_hits_a_smooth_target(slope, place, target):
    error_of = Counted(lambda t: target * math.exp(slope * (t - place)))
    found = Calib(target_error=target).search(error_of)
    assert abs(error_of(found) - target) <= 0.1 * target
    assert len(error_of.tried) <= 31 and all(-20 <= t <= 0 for t in error_of.tried)


def test_the_highest_threshold_serves_when_even_that_errs_too_little():
    error_of = Counted(lambda t: 0.0)
    assert Calib().search(error_of) == 0.0
    assert error_of.tried == [0.0]


@given(jump=st.floats(-19.9, -0.1))
def test_a_jump_over_the_target_leaves_the_highest_threshold_before_it(jump):
    error_of = Counted(lambda t: 0.5 if t >= jump else 0.001)
    found = Calib().search(error_of)
    assert found < jump <= found + 1e-6
    assert len(error_of.tried) == 30


@pytest.mark.parametrize("error", [0.5, math.inf, math.nan])
def test_a_target_out_of_reach_is_reported(error):
    error_of = Counted(lambda t: error)
    with pytest.warns(RuntimeWarning, match=r"no threshold down to -20.0 has a L1 error of 0.01"):
        assert Calib().search(error_of) == -20.0
    assert len(error_of.tried) == 30


def test_the_range_and_the_steps_are_settings():
    error_of = Counted(lambda t: 0.5 if t >= -5.9 else 0.0)
    config = Calib(low=-8, high=-4, max_steps=4)
    assert config.search(error_of) == -6.0
    assert error_of.tried == [-4.0, -6.0, -5.0, -5.5]


BAD_CALIB = [
    ({"target_error": 0.0}, ValueError),
    ({"target_error": math.nan}, ValueError),
    ({"target_error": math.inf}, ValueError),
    ({"target_error": "1%"}, TypeError),
    ({"tolerance": -0.1}, ValueError),
    ({"tolerance": True}, TypeError),
    ({"metric": "L2"}, ValueError),
    ({"low": 0.0}, ValueError),
    ({"low": -math.inf}, ValueError),
    ({"high": 1.0}, ValueError),
    ({"max_steps": 0}, ValueError),
    ({"max_steps": 3.0}, TypeError),
]


@pytest.mark.parametrize("fields, error", BAD_CALIB)
def test_wrong_calibrations(fields, error):
    with pytest.raises(error, match="|".join(fields) + "|threshold"):
        Calib(**fields)


@pytest.mark.parametrize("threshold", [0.5, math.nan])
def test_wrong_thresholds(threshold):
    with pytest.raises(ValueError, match="threshold"):
        Run(threshold)
    assert Run().threshold == -10.0 and Run(-3) == Run(-3.0)


# --- calibration of a module -----------------------------------------------------------------------------------------


def error_after(threshold: float, state: SkipState, inputs: tuple, metric: str) -> float:
    """What the call after one with this threshold loses on the same inputs."""
    lite, branch = LiteAttention(threshold=threshold), state.fork()
    exact = lite(*inputs, state=branch)
    return LiteAttention.calc_error(lite(*inputs, state=branch), exact)[metric]


@pytest.mark.parametrize("metric, target", [("L1", 0.02), ("RMSE", 0.01), ("Cossim", 0.001)])
def test_calibration_hits_the_target(metric, target):
    lite, inputs = LiteAttention(config=Calib(target_error=target, metric=metric)), waves()
    hits = []
    for step in range(3):
        before = lite.state.fork()
        lite(*inputs)
        found = lite.found_thresholds[step]
        error = error_after(found, before, inputs, metric)
        assert -20 <= found <= 0 and error <= 1.1 * target
        hits.append(error >= 0.9 * target)
        # Whole tiles come and go; the errors may jump past the target.
        if not hits[-1] and found < 0:
            assert error_after(found + 1e-4, before, inputs, metric) > 1.1 * target
    assert any(hits) and lite.density() < 1


def test_a_calibrated_call_is_an_ordinary_call_with_the_threshold_found():
    lite, inputs = LiteAttention(config=Calib(0.02)), waves(heads=4)
    chain = [inputs, drift(*inputs), drift(*inputs)]
    outs = [lite(*x, must_do_list=[0, 64], must_skip_list=[448, 512]) for x in chain]
    replay = LiteAttention(config=[Run(x) for x in lite.found_thresholds])
    for out, x in zip(outs, chain):
        assert torch.equal(replay(*x, must_do_list=[0, 64], must_skip_list=[448, 512]), out)
    assert torch.equal(replay.write_mask, lite.write_mask)
    with pytest.raises(RuntimeError, match="threshold: there is none while the module calibrates"):
        _ = lite.threshold
    lite.set_threshold(-4)
    assert lite.threshold == -4


def test_a_tighter_target_keeps_more():
    inputs, densities = waves(heads=4), []
    for target in (0.001, 0.01, 0.1):
        lite = LiteAttention(config=Calib(target))
        lite(*inputs)
        densities.append(lite.density().item())
    assert densities[0] > densities[1] > densities[2]


def test_branches_and_runs_agree_on_the_strictest_threshold():
    lite, other = LiteAttention(config=Calib(0.02)), SkipState()
    first, second = waves(heads=4), waves(heads=4)
    lite(*first)
    (mine,) = lite.found_thresholds
    lite(*second, state=other)
    alone = LiteAttention(config=Calib(0.02))
    alone(*second)
    assert lite.found_thresholds == [min(mine, *alone.found_thresholds)]
    lite.reset_skip_state()
    lite(*first)
    assert lite.found_thresholds == [min(mine, *alone.found_thresholds)]


# --- the registry ----------------------------------------------------------------------------------------------------


def test_const():
    model = Model()
    registry = LiteAttentionRegistry.from_model(model, mode="const", threshold=-7)
    assert list(registry.modules) == NAMES
    assert {x.threshold for x in registry.modules.values()} == {-7.0}
    assert registry.save_if_calib() is None and registry.config_output == {}
    LiteAttentionRegistry.from_model(model, mode="const")
    assert {x.threshold for x in registry.modules.values()} == {-10.0}


def test_without_a_mode_const_serves_with_a_warning():
    with pytest.warns(UserWarning, match="mode: expected one, got None; 'const' serves"):
        registry = LiteAttentionRegistry.from_model(Model(), threshold=-2.0)
    assert registry.mode == "const" and registry.modules[NAMES[0]].threshold == -2.0


def test_what_a_registry_refuses(tmp_path):
    model = Model()
    from_model = LiteAttentionRegistry.from_model
    with pytest.raises(
        ValueError, match=r"mode: expected one of .*'const', 'load', 'calib'.*'auto'"
    ):
        from_model(model, mode="auto")
    for mode in ("load", "calib"):
        with pytest.raises(ValueError, match=f"filename: expected one, for mode '{mode}'"):
            from_model(model, mode=mode)
    with pytest.raises(ValueError, match="model: expected LiteAttention modules in it"):
        from_model(nn.Linear(2, 2), mode="const")
    with pytest.raises(ValueError, match="threshold: expected log2 units"):
        from_model(model, mode="const", threshold=3.0)
    with pytest.raises(FileNotFoundError):
        from_model(model, mode="load", filename=tmp_path / "none.toml")
    with pytest.raises(TypeError, match="goal"):
        from_model(model, mode="calib", filename="x.toml", calib_config={"goal": 0.1})
    assert {x.threshold for x in model.modules() if isinstance(x, LiteAttention)} == {-10.0}


@reads_toml
@pytest.mark.parametrize(
    "config", [Calib(0.05, max_steps=12), {"target_error": 0.05, "metric": "L1", "max_steps": 12}]
)
def test_calibrate_save_and_load(tmp_path, config):
    path, chain = tmp_path / "thresholds.toml", [waves(256, heads=2)]
    chain += [drift(*chain[0]) for _ in range(2)]
    model = Model()
    model(*chain[0])
    model.blocks[0]["attention"].state.reset()
    registry = LiteAttentionRegistry.from_model(
        model, mode="calib", filename=str(path), calib_config=config
    )
    with pytest.raises(ValueError, match="nothing was calibrated for .*parallel"):
        registry.save_if_calib()
    assert not path.exists()
    for x in model.modules():
        if hasattr(x, "reset_skip_state"):
            x.reset_skip_state()
    outs = [record(model, x) for x in chain]
    assert registry.save_if_calib() == path
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    assert list(registry.config_output) == NAMES
    assert all(len(x) == 3 for x in registry.config_output.values())
    # Layers and steps differ.
    assert len({x.threshold for y in registry.config_output.values() for x in y}) > 4

    loaded = Model()
    other = LiteAttentionRegistry.from_model(loaded, mode="load", filename=path)
    assert load(path) == registry.config_output
    for x, expected in zip(chain, outs):
        assert all(map(torch.equal, record(loaded, x), expected))
    assert other.save_if_calib() is None
    with pytest.warns(RuntimeWarning, match="step 3 has no threshold of its own"):
        loaded(*chain[0])


def record(model: Model, inputs: tuple) -> list[Tensor]:
    """The masks after a call, which depend on every threshold used so far."""
    model(*inputs)
    return [x.write_mask.clone() for x in model.modules() if isinstance(x, LiteAttention)]


@reads_toml
def test_a_new_registry_starts_at_the_first_step(tmp_path):
    model, inputs = Model(), waves(256, heads=2)
    from_model, few = LiteAttentionRegistry.from_model, {"max_steps": 8}
    registry = from_model(model, mode="calib", filename=tmp_path / "a.toml", calib_config=few)
    model(*inputs)
    model(*inputs)
    registry = from_model(model, mode="calib", filename=tmp_path / "b.toml", calib_config=few)
    assert registry.config_output == {}
    model(*inputs)
    assert [len(x) for x in registry.config_output.values()] == [1] * 4
    steps = [Run(-1), Run(-2), Run(-3)]
    (tmp_path / "c.toml").write_text(dump(dict.fromkeys(NAMES, steps)))
    registry = from_model(model, mode="load", filename=tmp_path / "c.toml")
    assert {x.threshold for x in registry.modules.values()} == {-1.0}


@reads_toml
def test_modules_that_do_not_skip_need_no_threshold(tmp_path):
    path, model = tmp_path / "thresholds.toml", Model()
    quiet = model.blocks[1]["attention"]
    quiet.enable_skip_optimization(False)
    registry = LiteAttentionRegistry.from_model(model, mode="calib", filename=path)
    model(*waves(256, heads=2))
    registry.save_if_calib()
    assert list(load(path)) == [name for name in NAMES if name != "blocks.1.attention"]
    LiteAttentionRegistry.from_model(model, mode="load", filename=path)
    with pytest.raises(ValueError, match=r"there is no entry for \['blocks.1.attention'\]"):
        LiteAttentionRegistry.from_model(Model(), mode="load", filename=path)


@pytest.mark.parametrize("mode", ["const", pytest.param("load", marks=reads_toml), "calib"])
def test_a_modules_own_threshold_stays_unless_forced(tmp_path, mode):
    path = tmp_path / "thresholds.toml"
    path.write_text(dump(dict.fromkeys(NAMES, Run(-5))))
    model = Model()
    own = model.blocks[0]["attention"]
    own.set_threshold(-1)
    arguments = {"mode": mode, "threshold": -5, "filename": path}
    with pytest.warns(
        UserWarning, match="'blocks.0.attention': the module's own threshold or config"
    ):
        registry = LiteAttentionRegistry.from_model(model, **arguments)
    assert own.threshold == -1 and list(registry.modules) == NAMES[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry = LiteAttentionRegistry.from_model(model, **arguments, force=True)
    assert list(registry.modules) == NAMES and not own.has_own_config
    if mode != "calib":
        assert own.threshold == -5
    own.set_threshold(-2)
    assert own.threshold == -2


@reads_toml
def test_one_entry_serves_all_parts_of_the_keys(tmp_path):
    path, model = tmp_path / "thresholds.toml", Model()
    entries = {"blocks.0.attention": Run(-1), "blocks.1.attention": [Run(-2), Run(-3)]}
    path.write_text(dump(entries | {"parallel": Run(-4), "parallel.lite_attention.1": Run(-5)}))
    registry = LiteAttentionRegistry.from_model(model, mode="load", filename=path)
    assert [x.threshold for x in registry.modules.values()] == [-1, -2, -4, -5]


@reads_toml
def test_a_model_that_is_the_attention_itself(tmp_path):
    path, lite = tmp_path / "thresholds.toml", LiteAttention()
    registry = LiteAttentionRegistry.from_model(lite, mode="calib", filename=path)
    lite(*waves(256, heads=2))
    registry.save_if_calib()
    LiteAttentionRegistry.from_model(LiteAttention(), mode="load", filename=path)
    parts = SeqParallelLiteAttention(2)
    LiteAttentionRegistry.from_model(parts, mode="load", filename=path)
    assert parts.lite_attention[1].threshold == load(path)[""][0].threshold


# --- the file --------------------------------------------------------------------------------------------------------

THRESHOLDS = st.floats(max_value=0.0, allow_nan=False) | st.just(math.inf)
RUNS = st.builds(Run, THRESHOLDS)
# TOML, like UTF-8, has no lone surrogates.
NAME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@reads_toml
@given(
    configs=st.dictionaries(NAME_TEXT, RUNS | st.lists(RUNS, min_size=1, max_size=3), max_size=4)
)
def test_what_is_written_is_read_back_exactly(tmp_path_factory, configs):
    path = tmp_path_factory.mktemp("toml") / "thresholds.toml"
    path.write_text(dump(configs), encoding="utf-8", newline="\n")
    read = load(path)
    assert read == configs and list(read) == list(configs)
    for name, config in configs.items():
        both = zip([config], [read[name]]) if isinstance(config, Run) else zip(config, read[name])
        assert all(math.copysign(1, a.threshold) == math.copysign(1, b.threshold) for a, b in both)


def test_the_format():
    comment, *tables = dump({"a.b": Run(-3), 'q"\n': [Run(-1.5), Run(-math.inf)]}).split("\n\n")
    assert comment.startswith("# LiteAttention thresholds")
    assert tables == [
        '["a.b"]\n_type = "LiteAttentionRunConfig"\nthreshold = -3.0',
        '[["q\\"\\n"]]\n_type = "LiteAttentionRunConfig"\nthreshold = -1.5',
        '[["q\\"\\n"]]\n_type = "LiteAttentionRunConfig"\nthreshold = -inf\n',
    ]


TYPE = '_type = "LiteAttentionRunConfig"\n'
BAD_FILES = {
    "no TOML": ("[[a]\n", "Expected|a"),
    "another type": ('[a]\n_type = "Other"\nthreshold = -1.0\n', "'a': unknown type 'Other'"),
    "no type": ("[a]\nthreshold = -1.0\n", "'a': expected a table of"),
    "more fields": (f"[a]\n{TYPE}threshold = -1.0\nbeta = 1\n", "'a': expected a table of"),
    "no table": ("a = 1\n", "'a': expected a table of"),
    "no steps": ("a = []\n", "'a': expected a table of"),
    "positive": (f"[[a]]\n{TYPE}threshold = 1.0\n", "'a': threshold: expected log2 units"),
    "not a number": (f"[[a]]\n{TYPE}threshold = nan\n", "'a': threshold: expected log2 units"),
    "text": (f"[[a]]\n{TYPE}threshold = '-1'\n", "'a': threshold: expected a number"),
    "yes": (f"[a]\n{TYPE}threshold = true\n", "'a': threshold: expected a number"),
    "other names": (f"[a]\n{TYPE}threshold = -1\n", "there is no entry for .*blocks.0.attention"),
    "one name more": (
        dump(dict.fromkeys([*NAMES, "gone"], Run())),
        r"there is no module for the entries \['gone'\]",
    ),
}


@reads_toml
@pytest.mark.parametrize("kind", BAD_FILES)
def test_files_that_do_not_load(tmp_path, kind):
    text, message = BAD_FILES[kind]
    path, model = tmp_path / "thresholds.toml", Model()
    path.write_text(text)
    with pytest.raises(ValueError, match=f"thresholds.toml: .*({message})"):
        LiteAttentionRegistry.from_model(model, mode="load", filename=path)
    assert {x.threshold for x in model.modules() if isinstance(x, LiteAttention)} == {-10.0}


def test_reading_without_tomllib(tmp_path, monkeypatch):
    path = tmp_path / "thresholds.toml"
    path.write_text(dump({"a": Run(-1)}))
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(RuntimeError, match=r"needs Python 3.11 or newer \(tomllib\)"):
        load(path)
