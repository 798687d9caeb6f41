"""What a wrapped processor does with each scaled_dot_product_attention."""

from __future__ import annotations

import math
import threading
import warnings

import pytest
import torch
from as_cuda import AsCuda
from diffusers_helpers import (
    Attention,
    Direct,
    direct,
    heads,
)
from torch import nn
from torch.nn import functional

from liteattention_sm89 import masks
from liteattention_sm89.diffusers import apply_lite_attention


@pytest.mark.parametrize(
    "options, tiles",
    [
        ({}, {0}),
        ({"text": "first", "text_tokens": 70}, {0, 1}),
        ({"text": "last", "text_tokens": 41}, {0, 6, 7}),  # of 488 keys: from 447
        ({"text": "last", "text_tokens": 40, "must_do_list": [130, 131]}, {0, 2, 7}),
        ({"text": "first", "text_tokens": 1000}, set(range(8))),
        ({"must_do_list": (64, 192)}, {0, 1, 2}),
    ],
)
def test_text_stays_listed(options, tiles):
    attention, lite = direct(math.inf, **options)
    attention(*heads(queries=488))
    kept = masks.unpack(lite.layers[""].write_mask, 8)
    assert {n for n in range(8) if kept[..., n].all()} == tiles
    assert kept.sum() == len(tiles) * kept[..., 0].numel()


def test_text_is_kept_in_self_attention_alone():
    attention, lite = direct(math.inf, text="first", text_tokens=70, cross_attention=True)
    for queries, tiles in ((300, 2), (200, 1)):
        attention(*heads(queries=queries, keys=300))
        kept = masks.unpack(lite.layers[""].write_mask, 5)
        assert kept.any((0, 1, 2)).tolist() == [True] * tiles + [False] * (5 - tiles)


@pytest.mark.parametrize(
    "shape, arguments",
    [
        ({}, {}),
        ({"batch": 3}, {"scale": 0.7}),
        ({"heads": 4, "heads_kv": 2}, {"enable_gqa": True}),
        ({}, {"is_causal": True}),
        ({"batch": 2}, {"attn_mask": torch.arange(200).ne(90).view(1, 1, 1, 200)}),
        ({"batch": 2, "heads": 4, "heads_kv": 1},
         {"attn_mask": torch.arange(200) * 37 % 200 < torch.tensor([150, 3]).view(2, 1, 1, 1), "enable_gqa": True}),
    ],
)  # fmt: skip
def test_arguments_of_the_attention(shape, arguments, assert_close):
    attention, lite = direct()
    tensors = heads(**shape)
    expected = functional.scaled_dot_product_attention(*tensors, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert_close(attention(*tensors, **arguments), expected, 1e-6)
    # The other layout of the same numbers, and a last dimension that is not contiguous.
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert_close(attention(*strided, **arguments), expected, 1e-6)
    strided = [x.mT.contiguous().mT for x in tensors]
    assert_close(attention(*strided, **arguments), expected, 1e-6)
    assert lite.layers[""].state.key is not None


def test_padding_that_grows_starts_again():
    attention, _ = direct(math.inf)
    tensors = heads(queries=300)
    for length in (200, 200, 280):
        mask = (torch.arange(300) < length).view(1, 1, 1, 300)
        out = attention(*tensors, attn_mask=mask)
    torch.testing.assert_close(
        out, functional.scaled_dot_product_attention(*tensors, attn_mask=mask)
    )


@pytest.mark.parametrize(
    "shape, arguments, reason",
    [
        ({}, {"attn_mask": torch.zeros(1, 1, 1, 200)}, "mask"),
        ({}, {"attn_mask": torch.ones(200, 200, dtype=torch.bool).tril()}, "mask"),
        (None, {}, "B, H, S, D"),
        ({"keys": 100}, {"is_causal": True}, "is_causal"),
        ({"batch": 2}, {"dropout_p": 0.5}, "dropout"),
    ],
)
def test_what_cannot_be_served_is_left_to_the_model_and_said_once(shape, arguments, reason):
    attention, lite = direct(cross_attention=True)
    tensors = [x[0] for x in heads()] if shape is None else heads(**shape)
    torch.manual_seed(0)
    expected = functional.scaled_dot_product_attention(*tensors, **arguments)
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        assert torch.equal(attention(*tensors, **arguments), expected)
        attention(*tensors, **arguments)
    assert len(caught) == 1 and lite.layers[""].state.key is None


@pytest.mark.parametrize(
    "dtype, dim, reason",
    [
        (torch.bfloat16, 128, None),
        (torch.float16, 8, None),
        (torch.float32, 64, "the dtype is float32"),
        (torch.bfloat16, 20, "heads have 20"),
        (torch.bfloat16, 264, "heads have 264"),
    ],
)
def test_what_the_kernel_does_not_take_is_left_to_the_model(dtype, dim, reason):
    attention, lite = direct()
    tensors = [x.to(dtype) for x in heads(dim=dim)]
    calls = []
    layer = lite.layers[""]
    layer.forward = lambda query, *_, **__: calls.append(query) or query
    with warnings.catch_warnings(record=True) as caught, AsCuda():
        warnings.simplefilter("always")
        out = attention(*tensors)
    assert len(calls) == (reason is None)
    assert len(caught) == (reason is not None)
    if reason:
        assert reason in str(caught[0].message)
        assert torch.equal(out, functional.scaled_dot_product_attention(*tensors))
    with pytest.warns(RuntimeWarning, match="on meta"):
        attention(*(x.to("meta") for x in tensors))


def test_autocast_decides_the_dtype():
    attention, lite = direct()
    tensors = heads()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*tensors)
    assert out.dtype == lite.layers[""].state.key.dtype == torch.bfloat16
    expected = functional.scaled_dot_product_attention(*tensors)
    assert (out - expected).norm() < 1e-2 * expected.norm()


def test_parallel_configs_reach_the_processor():
    own = Direct()
    own._parallel_config = None
    attention = Attention(own)
    lite = apply_lite_attention(attention)
    attention.processor._parallel_config = config = object()
    assert own._parallel_config is attention.processor._parallel_config is config
    lite.remove()
    assert attention.processor is own
    attention, _ = direct()
    assert not hasattr(attention.processor, "_parallel_config")
    assert not hasattr(attention.processor, "_attention_backend")


def test_other_threads_and_calls_outside_are_not_redirected():
    elsewhere = []

    class Threaded(Direct):
        def __call__(self, attn, *tensors):
            other = threading.Thread(target=lambda: elsewhere.append(Direct()(attn, *tensors)))
            other.start()
            other.join()
            if len(elsewhere) == 3:
                raise RuntimeError("third call")
            return super().__call__(attn, *tensors)

    attention = Attention(Threaded())
    lite = apply_lite_attention(attention, math.inf, min_tokens=0)
    tensors = heads(queries=300)
    first, second = attention(*tensors), attention(*tensors)
    dense = functional.scaled_dot_product_attention(*tensors)
    assert torch.equal(elsewhere[0], dense) and torch.equal(elsewhere[1], dense)
    assert not torch.allclose(second, dense, atol=1e-2) and torch.allclose(first, dense, atol=1e-5)
    with pytest.raises(RuntimeError, match="third call"):
        attention(*tensors)
    assert torch.equal(functional.scaled_dot_product_attention(*tensors), dense)
    assert lite.layers[""].state.key is not None


def test_a_processor_without_the_attention_is_named():
    class Linear:
        def __call__(self, attn, query, key, value):
            return query @ (key.mT @ value)

    model = nn.ModuleDict({"inner": Attention(Linear())})
    apply_lite_attention(model, min_tokens=0)
    tensors = heads()
    with pytest.warns(RuntimeWarning, match="inner: its processor does not call") as caught:
        for _ in range(2):
            assert torch.equal(model["inner"](*tensors), Linear()(None, *tensors))
    assert len(caught) == 1
