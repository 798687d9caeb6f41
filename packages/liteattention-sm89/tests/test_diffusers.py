"""LiteAttention in tiny transformers of diffusers with random weights."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import warnings

import pytest
import torch
from diffusers_helpers import (
    ALL,
    KINDS,
    LAYERS,
    Attention,
    Direct,
    PlainAttention,
    attention_dispatch,
    direct,
    heads,
    inputs_of,
    later,
    model_of,
    pristine,
    run,
    wrapped,
)
from torch import nn
from torch.nn import functional

from liteattention_sm89 import LiteAttention, LiteAttentionRegistry, LiteAttentionRunConfig
from liteattention_sm89.diffusers import LiteProcessor, apply_lite_attention


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_drops_nothing_is_the_model(kind, batch, assert_close):
    inputs = inputs_of(kind, batch)
    expected = run(pristine(kind), inputs)
    model, lite = wrapped(kind, ALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):
            assert_close(run(model, inputs), expected, 1e-5)
    assert list(lite.layers) == LAYERS[kind]
    assert lite.density() == 1
    for layer in lite.layers.values():
        assert layer.state.key is not None and layer.state.key.seqlen_k >= 400


@pytest.mark.parametrize("kind", ["wan", "flux", "hunyuan"])
def test_dropped_tiles_are_left_out(kind, monkeypatch, assert_close):
    first = inputs_of(kind)
    second = later(first)
    model, lite = wrapped(kind)
    assert_close(run(model, first), run(pristine(kind), first), 1e-5)
    assert 0.2 < lite.density() < 0.95
    written = [layer.write_mask.clone() for layer in lite.layers.values()]
    out = run(model, second)
    lists = [layer.read_mask for layer in lite.layers.values()]
    assert all(map(torch.equal, lists, written))
    plain = PlainAttention(lists)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", plain)
    expected = run(pristine(kind), second)
    assert not plain.lists
    monkeypatch.undo()
    assert_close(out, expected, 1e-5)
    dense = run(pristine(kind), second)
    assert (dense - expected).norm() > 1e-3 * dense.norm()


def test_layers_remember_for_themselves():
    model, lite = wrapped("wan")
    a, b = lite.layers.values()
    assert a is not b and a.state is not b.state
    a.set_threshold(ALL)
    run(model, inputs_of("wan"))
    shares = lite.density_per_layer()
    assert list(shares) == LAYERS["wan"]
    assert shares["blocks.0.attn1"] == 1 and shares["blocks.1.attn1"] == b.density() < 0.95
    assert lite.density() == (1 + b.density()) / 2


@pytest.mark.parametrize("context", ["branch", "cache_context"])
def test_branches_remember_for_themselves(context, assert_close):
    cond, uncond = inputs_of("wan"), inputs_of("wan")
    alone, lite_alone = wrapped("wan")
    expected = [run(alone, x) for x in (cond, cond)]
    other, _ = wrapped("wan")
    expected_other = [run(other, x) for x in (uncond, uncond)]

    model, lite = wrapped("wan")
    branch = getattr(lite if context == "branch" else model, context)
    for step in range(2):
        with branch("cond"):
            assert torch.equal(run(model, cond), expected[step])
        with branch("uncond"):
            assert torch.equal(run(model, uncond), expected_other[step])
    # The first branch lives in the modules themselves.
    for mine, theirs in zip(lite.layers.values(), lite_alone.layers.values()):
        assert torch.equal(mine.write_mask, theirs.write_mask)
    # Inside of another branch, and outside of all, there is nothing to remember.
    dense = run(pristine("wan"), cond)
    with lite.branch("prompt"), branch("cond"):
        assert_close(run(model, cond), dense, 1e-5)
    assert_close(run(model, cond), dense, 1e-5)
    with pytest.raises(RuntimeError), branch("cond"):
        raise RuntimeError
    assert torch.equal(run(model, cond), expected[1])


def test_both_halves_of_a_batch_remember_for_themselves(assert_close):
    cond, uncond = inputs_of("wan"), inputs_of("wan")
    both = {name: torch.cat((x, uncond[name])) for name, x in cond.items()}
    model, lite = wrapped("wan")
    together, _ = wrapped("wan")
    for _ in range(2):
        parts = []
        for name, inputs in (("cond", cond), ("uncond", uncond)):
            with lite.branch(name):
                parts.append(run(model, inputs))
        assert_close(run(together, both), torch.cat(parts), 1e-5)


def test_every_attention_of_a_call_has_its_own_lists():
    batch = inputs_of("mochi", 2)
    model, lite = wrapped("mochi")  # one attention for each row of a batch
    out = [run(model, batch) for _ in range(2)]
    for row in range(2):
        alone, _ = wrapped("mochi")
        for step in range(2):
            one = run(alone, {name: x[row : row + 1] for name, x in batch.items()})
            torch.testing.assert_close(out[step][row : row + 1], one, rtol=1e-4, atol=1e-5)
    assert lite.density() < 1


def test_reset_lists_everything_again():
    inputs = inputs_of("wan")
    model, lite = wrapped("wan")
    first = run(model, inputs)
    with lite.branch("uncond"):
        run(model, inputs)
    assert not torch.equal(run(model, inputs), first)
    lite.reset()
    assert lite.density() == 1
    with lite.branch("uncond"):
        assert torch.equal(run(model, inputs), first)
    assert torch.equal(run(model, inputs), first)


def test_remove_gives_the_processors_back():
    model, inputs = model_of("wan"), inputs_of("wan")
    before, names = model.attn_processors, list(model.state_dict())
    lite = apply_lite_attention(model, -1.0, min_tokens=0)
    assert all(isinstance(m, LiteAttention) for m in lite.layers.values())
    now = model.attn_processors
    assert [n for n in now if now[n] is not before[n]] == [f"{n}.processor" for n in LAYERS["wan"]]
    run(model, inputs)
    lite.remove()
    assert model.attn_processors == before and list(model.state_dict()) == names
    assert "cache_context" not in vars(model)
    assert torch.equal(run(model, inputs), run(pristine("wan"), inputs))
    lite.remove()
    # What somebody else has put there stays; a processor that is a module comes back as one.
    lite = apply_lite_attention(model, min_tokens=0)
    other = copy.copy(before["blocks.0.attn1.processor"])
    model.blocks[0].attn1.set_processor(other)
    lite.remove()
    assert model.blocks[0].attn1.processor is other
    assert model.blocks[1].attn1.processor is before["blocks.1.attn1.processor"]
    trained = type("Trained", (nn.Linear,), {"forward": lambda self, attn, x: x})(2, 3)
    attention = Attention(trained)
    names = list(attention.state_dict())
    apply_lite_attention(attention).remove()
    assert attention.processor is trained and list(attention.state_dict()) == names


def test_handles_on_parts_of_a_model():
    model, inputs = model_of("wan"), inputs_of("wan")
    some = apply_lite_attention(model, -1.0, layers=["blocks.1.attn1"], min_tokens=0)
    rest = apply_lite_attention(
        model, ALL, layers=lambda name, module: name == "blocks.0.attn1", min_tokens=0
    )
    assert (list(some.layers), list(rest.layers)) == (["blocks.1.attn1"], ["blocks.0.attn1"])
    for _ in range(2):
        with model.cache_context("cond"):
            run(model, inputs)
    assert some.density() < 1 and rest.density() == 1
    with some.branch("else"):
        run(model, inputs)
    assert len(some.layers) == len(rest.layers) == 1
    rest.remove()
    assert vars(model)["cache_context"] == some._cache_context
    with model.cache_context("cond"):
        run(model, inputs)
    some.remove()
    assert "cache_context" not in vars(model)


def test_registry_finds_the_layers_and_sets_their_thresholds(tmp_path):
    inputs, path = inputs_of("wan"), tmp_path / "thresholds.toml"
    model, lite = wrapped("wan", None)
    registry = LiteAttentionRegistry.from_model(
        model, "calib", filename=path, calib_config={"target_error": 0.05, "max_steps": 8}
    )
    names = [f"{name}.processor.lite_attention" for name in LAYERS["wan"]]
    assert list(registry.modules) == names
    for _ in range(2):
        with model.cache_context("cond"):
            run(model, inputs)
        with model.cache_context("uncond"):
            run(model, later(inputs))
    assert registry.save_if_calib() == path
    found = registry.config_output
    assert [len(found[name]) for name in names] == [2, 2]

    fresh, lite = wrapped("wan", -3.0)
    assert {layer.threshold for layer in lite.layers.values()} == {-3.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = LiteAttentionRegistry.from_model(fresh, "load", filename=path)
    for step in range(2):
        for name in names:
            assert loaded.modules[name].threshold == found[name][step].threshold
        run(fresh, inputs)


def test_configs_serve_every_layer():
    steps = [LiteAttentionRunConfig(ALL), LiteAttentionRunConfig(math.inf)]
    model, lite = wrapped("wan", None, config=steps)
    inputs = inputs_of("wan")
    run(model, inputs)
    assert lite.density() == 1
    run(model, inputs)
    assert all(d == 1 / 8 for d in lite.density_per_layer().values())
    _, lite = wrapped("wan", 3.0, threshold_mode="length")
    assert {m.threshold_mode for m in lite.layers.values()} == {"length"}
    _, lite = wrapped("wan", None)
    assert {m.threshold for m in lite.layers.values()} == {-10.0}
    assert not any(m.has_own_config for m in lite.layers.values())


def test_dense_steps_are_counted_in_every_branch():
    inputs = inputs_of("wan")
    model, lite = wrapped("wan", math.inf, dense_steps=2)
    dense = run(pristine("wan"), inputs)
    for _ in range(2):
        for name in ("cond", "uncond"):
            with lite.branch(name):
                for _ in range(2):
                    assert torch.equal(run(model, inputs), dense)
        assert lite.density() == 1 and lite.layers["blocks.0.attn1"].state.step == 0
        with lite.branch("cond"):
            run(model, inputs)
            assert lite.density() == 1 / 8
            assert not torch.equal(run(model, inputs), dense)
        lite.reset()


def test_few_tokens_are_left_to_the_model():
    inputs = inputs_of("wan")  # 450 tokens
    dense = run(pristine("wan"), inputs)
    for least, served in ((450, True), (451, False), (1024, False)):
        model, lite = wrapped("wan", min_tokens=least)
        assert torch.equal(run(model, inputs), dense) or served
        assert (lite.density() < 1) == served
    assert inspect.signature(apply_lite_attention).parameters["min_tokens"].default == 1024


def test_cross_attention_on_request(assert_close):
    inputs = inputs_of("wan")
    model, lite = wrapped(
        "wan", ALL, cross_attention=True, min_tokens=24, text="last", text_tokens=9
    )
    assert_close(run(model, inputs), run(pristine("wan"), inputs), 1e-5)
    assert list(lite.layers) == [f"blocks.{i}.attn{j}" for i in range(2) for j in (1, 2)]
    assert lite.layers["blocks.0.attn2"].state.key[1:3] == (450, 24)
    # Chosen by name it is still no self-attention.
    model, lite = wrapped("wan", layers=["blocks.0.attn2"], min_tokens=0)
    assert torch.equal(run(model, inputs), run(pristine("wan"), inputs))
    assert lite.layers["blocks.0.attn2"].state.key is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_other_backends_serve_what_lite_attention_does_not(when, monkeypatch):
    name = attention_dispatch.AttentionBackendName.FLEX
    registry = attention_dispatch._AttentionBackendRegistry
    lengths = []

    def backend(query, key, value, **kwargs):
        lengths.append((query.shape[1], key.shape[1]))
        return attention_dispatch._native_attention(query, key, value)

    monkeypatch.setitem(registry._backends, name, backend)
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value"})
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    model, inputs = model_of("wan"), inputs_of("wan")
    dense = run(model, inputs)
    if when == "before":
        model.set_attention_backend("flex")
    lite = apply_lite_attention(model, -1.0, min_tokens=64, dense_steps=1)
    if when == "after":
        model.set_attention_backend("flex")
    assert torch.equal(run(model, inputs), dense)
    assert lengths == [(450, 450), (450, 24)] * 2
    lengths.clear()
    run(model, inputs)
    assert lengths == [(450, 24)] * 2 and lite.density() < 1
    lite.remove()
    assert {p._attention_backend for p in model.attn_processors.values()} == {name}


@pytest.mark.parametrize("kind", KINDS)
def test_processors_keep_their_signature(kind):
    model, lite = wrapped(kind)
    for name in lite.layers:
        now = model.get_submodule(name).processor
        before = pristine(kind).get_submodule(name).processor
        assert isinstance(now, LiteProcessor) and type(before).__name__ in type(now).__name__
        assert inspect.signature(now.__call__) == inspect.signature(before.__call__)


def test_gradients_are_those_of_the_model():
    gradients = []
    for model in (model_of("flux"), wrapped("flux", ALL)[0]):
        torch.manual_seed(3)
        inputs = inputs_of("flux")
        inputs["hidden_states"].requires_grad_()
        model(**inputs, return_dict=False)[0].square().sum().backward()
        gradients.append(inputs["hidden_states"].grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_compiled_models():
    inputs = inputs_of("wan")
    eager, compiled = wrapped("wan")[0], wrapped("wan")[0]
    compiled = torch.compile(compiled, backend="eager")
    for _ in range(3):
        assert torch.equal(run(compiled, inputs), run(eager, inputs))
    lite = apply_lite_attention(torch.compile(model_of("wan"), backend="eager"))
    assert list(lite.layers) == LAYERS["wan"]


def test_layers_are_chosen_by_attribute_and_name():
    yes = ("attn", "attn1", "self_attention", "blocks.0.visual", "video_text.attn", "sd3.attn2")
    no = ("attn2", "x_cross", "a_to_b_attn", "audio_attn1", "text_blocks.0", "txt.audio.attn",
          "context_refiner.attn", "token_refiner.0.attn", "wan.attn1")  # fmt: skip
    model = nn.Module()
    for name in (*yes, *no):
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.add_module(leaf, Attention(Direct()))
    model.sd3.attn2.is_cross_attention, model.wan.attn1.is_cross_attention = False, True
    lite = apply_lite_attention(model)
    assert sorted(lite.layers) == sorted(yes)
    lite.remove()
    lite = apply_lite_attention(model, cross_attention=True)
    assert {"attn2", "x_cross", "a_to_b_attn", "wan.attn1"} == lite.layers.keys() - set(yes)


@contextlib.contextmanager
def unchanged(model: nn.Module):
    before = [getattr(m, "processor", None) for m in model.modules()]
    yield
    assert [getattr(m, "processor", None) for m in model.modules()] == before
    assert "cache_context" not in vars(model)


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"threshold": 1.0}, ValueError, "threshold: expected"),
        ({"threshold": math.nan}, ValueError, "threshold: expected"),
        ({"threshold": "-6"}, TypeError, "threshold: expected a number"),
        ({"threshold": -6.0, "config": LiteAttentionRunConfig(-6.0)}, ValueError, "threshold, config"),
        ({"config": []}, TypeError, "config"),
        ({"config": -6.0}, TypeError, "config"),
        ({"threshold_mode": "mass"}, ValueError, "threshold_mode"),
        ({"layers": "blocks.0.attn1"}, TypeError, "layers: expected names"),
        ({"layers": 3}, TypeError, "layers: expected names"),
        ({"layers": ["blocks.0.attn1", "blocks.0", "no"]}, ValueError, r"no attention modules \['blocks.0', 'no'\]"),
        ({"layers": []}, ValueError, "found none"),
        ({"layers": lambda name, module: False}, ValueError, "found none"),
        ({"min_tokens": -1}, ValueError, "min_tokens: expected at least 0"),
        ({"min_tokens": 1.5}, TypeError, "min_tokens: expected an int"),
        ({"min_tokens": True}, TypeError, "min_tokens: expected an int"),
        ({"text": "middle", "text_tokens": 4}, ValueError, "text: expected one of"),
        ({"text": "first"}, ValueError, "text, text_tokens: expected both"),
        ({"text_tokens": 4}, ValueError, "text, text_tokens: expected both"),
        ({"text": "first", "text_tokens": 0}, ValueError, "text_tokens: expected at least 1"),
        ({"text": "first", "text_tokens": 4.0}, TypeError, "text_tokens: expected an int"),
        ({"must_do_list": [0]}, ValueError, "must_do_list: "),
        ({"must_do_list": [4, 4]}, ValueError, "must_do_list: "),
        ({"must_do_list": [-1, 4]}, ValueError, "must_do_list: "),
        ({"must_do_list": [0, 1.5]}, TypeError, "must_do_list: "),
        ({"must_do_list": 5}, TypeError, "must_do_list: "),
        ({"dense_steps": -1}, ValueError, "dense_steps: expected at least 0"),
        ({"dense_steps": "1"}, TypeError, "dense_steps: expected an int"),
        ({"cross_attention": 1}, TypeError, "cross_attention: expected a bool"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, error, match):
    model = model_of("wan")
    with unchanged(model), pytest.raises(error, match=match):
        apply_lite_attention(model, **arguments)


def test_bad_models_and_names():
    with pytest.raises(TypeError, match="pipe.transformer, got object"):
        apply_lite_attention(object())
    with pytest.raises(ValueError, match="found none"):
        apply_lite_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="found none"):  # cross attention alone
        apply_lite_attention(pristine("wan").blocks[0].attn2.__class__(32, is_cross_attention=True))
    model, lite = wrapped("wan")
    processors = model.attn_processors
    with pytest.raises(ValueError, match="wrapped already"):
        apply_lite_attention(model)
    assert model.attn_processors == processors
    with pytest.raises(TypeError, match="name: expected a str"), lite.branch(1):
        pass
    # Ranges outside the keys are found when there are keys, and change nothing.
    attention, lite = direct(must_do_list=[0, 300])
    with pytest.raises(ValueError, match="must_do_list"):
        attention(*heads())
    assert lite.density() == 1
