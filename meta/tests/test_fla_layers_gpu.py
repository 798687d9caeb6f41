"""Layers of flash-linear-attention with random weights, on a GPU: the same numbers and gradients on our kernels.

The layers were imported before `register()`, with the names of FLA's functions in them.
"""

from __future__ import annotations

import contextlib
import copy
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from fla_on_gpu import GRADIENT_BOUND, assert_near, launched, ours_among

import cula
from cula.integrations import fla_plugin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quick_fla")]

BOUND = 5e-3  # of a residual stream, to which two layers have added
DELTA = {"head_dim": 128, "expand_v": 1}
KDA = {"hidden_size": 2304, "num_heads": 32} | DELTA
# Module of fla.layers and class, its arguments in the sizes of a published model, the kernels of prefill and of decode.
LAYERS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "kda": ("kda.KimiDeltaAttention", KDA, "KdaPrepare", "DeltaDecode"),
    "kda of bounded gates": (
        "kda.KimiDeltaAttention", KDA | {"safe_gate": True, "lower_bound": -5.0}, "KdaPrepare", "DeltaDecode",
    ),
    "gated delta rule": (
        "gated_deltanet.GatedDeltaNet", {"hidden_size": 2048, "num_heads": 16, "num_v_heads": 32} | DELTA,
        "Recurrence", "DeltaDecode",
    ),
    "simple gla": (
        "simple_gla.SimpleGatedLinearAttention", {"hidden_size": 2048, "num_heads": 16},
        "LightningPrefill", "LightningPrefill",
    ),
}  # fmt: skip
# The function whose backward of FLA a layer needs.
GRADIENTS = {"gated delta rule": "chunk_gated_delta_rule", "simple gla": "chunk_simple_gla"}
FUNCTIONS = pytest.mark.parametrize("name", LAYERS)


class States(list):
    """What FLA's layers take as `past_key_values`: a dictionary for every layer."""

    def update(self, layer_idx: int, offset: int, **states: Any) -> None:
        if layer_idx == len(self):
            self.append(states)
        else:
            self[layer_idx] = states


class Block(torch.nn.Module):
    """Two layers on a residual stream, each behind a norm."""

    def __init__(self, name: str) -> None:
        super().__init__()
        (place, sizes, *_) = LAYERS[name]
        module, kind = place.split(".")
        layer = getattr(import_module(f"fla.layers.{module}"), kind)
        self.layers = torch.nn.ModuleList(layer(**sizes, layer_idx=i) for i in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(sizes["hidden_size"]) for _ in range(2))

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), **options)[0]
        return x


@pytest.fixture
def cuda():
    for package in ("fla.layers", "transformers"):
        if find_spec(package) is None:
            pytest.skip(
                f"no {package}: fla-core has functions, flash-linear-attention has the layers and needs both"
            )
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has a kernel for each of these layers")
    import fla.layers  # noqa: F401

    fla_plugin.register()
    yield torch.device("cuda", torch.cuda.current_device())
    fla_plugin.unregister()


def block_of(name, device):
    """Weights of bfloat16, but for rates and biases of gates, which stay float32 as in a model in training."""
    torch.manual_seed(0)
    with torch.device(device):
        block = Block(name).eval()
    for part, x in block.named_parameters():
        if not part.endswith(("A_log", "dt_bias")):
            x.data = x.data.bfloat16()
    return block


def tokens_of(block, batch, count, device):
    return torch.randn(batch, count, block.norms[0].weight.shape[0], device=device).bfloat16()


def without(bypass):
    return fla_plugin.bypassed() if bypass else contextlib.nullcontext()


@torch.no_grad()
@pytest.mark.parametrize("lengths", [None, (70, 129, 57)])
@FUNCTIONS
def test_prefill(cuda, name, lengths):
    block = block_of(name, cuda)
    x = tokens_of(block, 2 if lengths is None else 1, 256, cuda)
    packed = (
        {}
        if lengths is None
        else {"cu_seqlens": torch.tensor([0, *lengths], device=cuda).cumsum(0)}
    )
    found, kernels = launched(lambda: block(x, **packed))
    with fla_plugin.bypassed():
        expected, theirs = launched(lambda: block(x, **packed))
    assert LAYERS[name][2] in ours_among(kernels) and not ours_among(theirs), (kernels, theirs)
    assert_near(found, expected, BOUND)


@torch.no_grad()
@FUNCTIONS
def test_decode_goes_on_from_a_prefill(cuda, name):
    """The layers decode by FLA's recurrent functions, as they do for up to 64 tokens without gradients."""
    block = block_of(name, cuda)
    x = tokens_of(block, 3, 104, cuda)
    prefilled = States()
    block(x[:, :100], past_key_values=prefilled, use_cache=True)

    def generated():
        states = copy.deepcopy(prefilled)
        return [
            block(part, past_key_values=states, use_cache=True) for part in x[:, 100:].split(1, 1)
        ], states

    (found, states), kernels = launched(generated)
    with fla_plugin.bypassed():
        (expected, theirs), others = launched(generated)
    assert LAYERS[name][3] in ours_among(kernels) and not ours_among(others), (kernels, others)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, BOUND)
    for one, other in zip(states, theirs, strict=True):
        assert_near(one["recurrent_state"], other["recurrent_state"], BOUND)


@FUNCTIONS
def test_gradients_of_every_parameter(cuda, name):
    if name in GRADIENTS:
        told = cula.explain(
            GRADIENTS[name], dtype=torch.bfloat16, requires_grad=True, gate_dtype=torch.bfloat16
        )
        reason = next(row.reason for row in told.rows if row.name == "fla")
        if reason is not None:
            pytest.skip(f"FLA's own backward has nothing to compare with here: {reason}")
    block = block_of(name, cuda)
    x = tokens_of(block, 1, 320, cuda).requires_grad_()
    weights = torch.randn_like(x)
    wanted = dict(block.named_parameters()) | {"x": x}

    def gradients(bypass):
        with without(bypass):
            y = block(x)
            return torch.autograd.grad((y * weights).float().sum(), list(wanted.values()))

    found, kernels = launched(lambda: gradients(False))
    expected, theirs = launched(lambda: gradients(True))
    assert not ours_among(theirs), theirs
    assert LAYERS[name][2] in ours_among(kernels), kernels
    for part, one, other in zip(wanted, found, expected, strict=True):
        assert_near(one, other, GRADIENT_BOUND, part)
