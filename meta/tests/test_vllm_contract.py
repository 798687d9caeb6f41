"""Functions of vLLM 0.33 by cula have the parameters that its sources have, and the calls there fit them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from cula.integrations import _vllm_calls as calls
from cula.integrations import vllm

CONTRACT = json.loads(
    (Path(__file__).parents[2] / "tests-integration" / "contracts" / "vllm-0.33.0.json").read_text()
)
OPERATOR = CONTRACT["classes"][f"{vllm._GDN}.{vllm._OPERATOR}"]


def as_recorded(parameters: list[list[Any]]) -> list[tuple[str, str, Any]]:
    return [
        (n, kind, inspect.Parameter.empty if default is None else eval(default))
        for n, kind, default in parameters
    ]


def of_ours(name: str) -> list[tuple[str, str, Any]]:
    return [(n, kind.name, default) for n, kind, default in vllm._parameters(getattr(calls, name))]


PLACES = [f"{module}.{name}" for module, names in vllm._FUNCTIONS.items() for name in names]


@pytest.mark.parametrize("place", PLACES)
def test_parameters_are_those_of_vllm(place: str) -> None:
    assert of_ours(place.rpartition(".")[2]) == as_recorded(CONTRACT["functions"][place])


@pytest.mark.parametrize("method", ["forward_cuda", "forward_native"])
def test_parameters_are_those_of_the_operator(method: str) -> None:
    assert of_ours("chunk_gated_delta_rule") == as_recorded(OPERATOR["methods"][method])[1:]
    assert OPERATOR["bases"] == ["CustomOp"]
    assert f"{vllm._OPERATORS}.CustomOp.register_oot" in CONTRACT["functions"]


@pytest.mark.parametrize(
    "name, call", [(name, call) for name, found in CONTRACT["calls"].items() for call in found]
)
def test_calls_of_vllm_bind(name: str, call: list[Any]) -> None:
    _, positional, keywords = call
    inspect.signature(getattr(calls, name)).bind(*[None] * positional, **dict.fromkeys(keywords))


def test_what_is_served_is_recorded() -> None:
    assert set(CONTRACT["functions"]) == {*PLACES, f"{vllm._OPERATORS}.CustomOp.register_oot"}
