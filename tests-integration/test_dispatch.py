"""Kernel packages and `cula` side by side: one interface, and the same numbers on a CPU."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import torch

import cula
import noxfile
from cula._registry import OPS

SPECS = {name: import_module(f"{noxfile._import_name(name)}._spec") for name in noxfile.PACKAGES}
FUNCTIONS = [(name, function) for name, spec in SPECS.items() for function in OPS[spec.OP]]


def public(op: str, function: str) -> inspect.Signature:
    """The signature of the public function without `impl`."""
    signature = inspect.signature(getattr(import_module(f"cula.{op.partition('.')[0]}"), function))
    kept = [p for p in signature.parameters.values() if p.name != "impl"]
    return signature.replace(parameters=kept)


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_package_function_has_the_public_signature(name: str, function: str) -> None:
    theirs = inspect.signature(SPECS[name].load(function))
    ours = public(SPECS[name].OP, function)
    assert [(p.name, p.kind, p.default) for p in theirs.parameters.values()] == [
        (p.name, p.kind, p.default) for p in ours.parameters.values()
    ]


@pytest.mark.parametrize("name", noxfile.PACKAGES)
def test_explain_says_why_a_kernel_does_not_serve_a_cpu(name: str) -> None:
    told = cula.explain(SPECS[name].OP, arch="cpu")
    assert told.chosen == "reference"
    (row,) = [row for row in told.rows if row.name == name]
    assert row.reason and "CUDA" in row.reason


@pytest.mark.parametrize("arch", noxfile.ARCHITECTURES)
def test_auto_picks_a_package_on_every_architecture_of_its_extra(arch: str) -> None:
    for name, archs in noxfile.PACKAGES.items():
        if arch in archs:
            assert cula.explain(SPECS[name].OP, arch=arch).chosen == name


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode_of_the_package_and_of_cula_agree_to_the_bit_on_a_cpu(
    state_dtype: torch.dtype,
) -> None:
    from cula.lightning import linear_attention_decode
    from cula_lightning_decode import linear_attention_decode as of_the_package

    q = torch.randn(3, 2, 2, 64, dtype=torch.bfloat16)
    k = torch.randn(3, 2, 2, 64, dtype=torch.bfloat16)
    v = torch.randn(3, 2, 4, 64, dtype=torch.bfloat16)
    state = torch.randn(5, 4, 64, 64).to(state_dtype)
    decay = torch.linspace(0.0, 1.0, 4)
    rows = torch.tensor([4, -1, 0], dtype=torch.int32)
    states = state.clone(), state.clone()
    ours = linear_attention_decode(q, k, v, states[0], decay, state_indices=rows)
    theirs = of_the_package(q, k, v, states[1], decay, state_indices=rows)
    assert torch.equal(ours, theirs) and torch.equal(*states)
    assert not torch.equal(states[0], state) and not ours[1].any()
