"""cula in vLLM, with stand-ins for the modules of vLLM that it patches; the reference serves."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fla_stand_in import put_modules
from torch import Tensor
from vllm_cases import HV, H, K, V, columns, packed, pool, table

from cula import _registry
from cula.integrations import _vllm_calls, vllm

PACKED = "fused_recurrent_gated_delta_rule_packed_decode"
PLACES = [(module, name) for module, names in vllm._FUNCTIONS.items() for name in names]
SEEN: list[str] = []


class CustomOp:
    """vLLM's, as far as a plug-in meets it: a class that is registered in place of another is made instead of it."""

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(sys.modules[vllm._OPERATORS].op_registry_oot.get(cls.__name__, cls))

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._forward_method(*args, **named)

    __call__ = forward

    @classmethod
    def register_oot(cls, op: type) -> type:
        registry = sys.modules[vllm._OPERATORS].op_registry_oot
        assert cls.__name__ not in registry
        registry[cls.__name__] = op
        return op


def theirs(name: str, self_too: bool = False) -> Callable[..., Any]:
    """A function of vLLM with its parameters, which only says that it was called."""

    def function(*args: Any, **named: Any) -> str:
        SEEN.append(name)
        return f"vLLM's {name}"

    known = inspect.signature(getattr(_vllm_calls, name)).parameters.values()
    parameters = [p for p in known if p.name != "impl"]
    if self_too:
        parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    function.__name__ = name
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def operator() -> type:
    forward = theirs("chunk_gated_delta_rule", self_too=True)

    class ChunkGatedDeltaRule(CustomOp):
        forward_cuda = forward_native = forward

        def __init__(self) -> None:
            self.gdn_prefill_backend, self._forward_method = "triton", self.forward_native

        def __call__(self, *args: Any, **named: Any) -> Any:
            return self.forward(*args, **named)

    return ChunkGatedDeltaRule


def stand_ins() -> dict[str, dict[str, Any]]:
    modules: dict[str, dict[str, Any]] = {
        module: {name: theirs(name) for name in names} for module, names in vllm._FUNCTIONS.items()
    }
    modules[vllm._GDN][vllm._OPERATOR] = operator()
    return modules | {vllm._OPERATORS: {"op_registry_oot": {}}}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "cula")
    put_modules(monkeypatch, stand_ins())
    monkeypatch.delenv("CULA_VLLM", raising=False)
    _registry.log_once.cache_clear()
    SEEN.clear()
    torch.manual_seed(3)
    yield
    vllm.unregister()


def found(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


def decode(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Tensor]:
    """A call of vLLM's, and its pages."""
    p, (a, b) = pool(dtype), columns(3, HV)
    given = {
        "mixed_qkv": packed(3, H, HV), "a": a, "b": b, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV),
        "scale": 0.5, "initial_state": p.states, "out": torch.full((3, 1, HV, V), 9.0).bfloat16(),
        "ssm_state_indices": table([2, 0, 5]), "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return given, p.pages


def prefill() -> dict[str, Any]:
    return {
        "q": torch.randn(1, 5, H, K), "k": torch.randn(1, 5, H, K), "v": torch.randn(1, 5, HV, V),
        "g": -torch.rand(1, 5, HV), "beta": torch.rand(1, 5, HV), "initial_state": torch.randn(2, HV, V, K),
        "output_final_state": True, "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32),
    }  # fmt: skip


def test_functions_of_vllm_are_served() -> None:
    vllm.register("reference")
    given, pages = decode()
    twin = given | {"initial_state": given["initial_state"].clone(), "out": given["out"].clone()}
    out, state = found(vllm._GDN, PACKED)(**given)
    expected, after = getattr(_vllm_calls, PACKED)(**twin, impl="reference")
    assert not SEEN and out is given["out"] and state is given["initial_state"]
    assert torch.equal(out, expected) and torch.equal(state[1:], after[1:])


def test_the_operator_of_prefill_is_ours_and_stays_its_kind() -> None:
    vllm.register("reference")
    layer = found(vllm._GDN, vllm._OPERATOR)()
    assert isinstance(layer, found(vllm._GDN, vllm._OPERATOR))
    assert layer.gdn_prefill_backend == "triton"
    given = prefill()
    expected = _vllm_calls.chunk_gated_delta_rule(**given, impl="reference")
    torch.testing.assert_close(layer(**given), expected, rtol=0, atol=0)
    assert not SEEN
    assert layer(**given, core_attn_out=torch.empty(1)) == "vLLM's chunk_gated_delta_rule"


@pytest.mark.parametrize("module, name", PLACES)
def test_every_name_is_replaced_and_given_back(module: str, name: str, caplog) -> None:
    before = found(module, name)
    vllm.register()
    now = found(module, name)
    assert now is not before and inspect.signature(now) == inspect.signature(before)
    vllm.unregister()
    assert found(module, name) is before
    now()  # what was bound meanwhile goes on to vLLM
    assert SEEN == [name] and "is left to vLLM" not in caplog.text


def test_what_no_kernel_serves_is_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    vllm.register()  # kernels alone, and there is none for a CPU
    given, pages = decode()
    before, layer = pages.clone(), found(vllm._GDN, vllm._OPERATOR)()
    for _ in range(2):
        assert found(vllm._GDN, PACKED)(**given) == f"vLLM's {PACKED}"
        assert layer(**prefill()) == "vLLM's chunk_gated_delta_rule"
    assert bool((given["out"] == 9).all())
    assert torch.equal(pages.view(torch.uint8), before.view(torch.uint8))
    for name in (PACKED, vllm._OPERATOR):
        line = f"{name} is left to vLLM: no kernel serves"
        assert sum(line in message for message in caplog.messages) == 1


def test_wrong_operands_are_for_vllm_to_judge(caplog: pytest.LogCaptureFixture) -> None:
    vllm.register("reference")
    given, _ = decode()
    wrong = given | {"mixed_qkv": given["mixed_qkv"][:, 1:]}
    assert found(vllm._GDN, PACKED)(**wrong) == f"vLLM's {PACKED}"
    assert f"{PACKED} is left to vLLM: mixed_qkv: expected [L, 2 H K + HV V]" in caplog.text


@pytest.mark.parametrize("change", ["a parameter more", "another default", "another order", "gone"])
def test_a_changed_function_stays(monkeypatch, caplog, change: str) -> None:
    module = sys.modules[vllm._GDN]
    other = theirs(PACKED)
    parameters = list(inspect.signature(other).parameters.values())
    if change == "a parameter more":
        parameters.append(inspect.Parameter("later", inspect.Parameter.KEYWORD_ONLY))
    elif change == "another default":
        parameters[-1] = parameters[-1].replace(default=True)
    else:
        parameters[:2] = parameters[1::-1]
    other.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    if change == "gone":
        monkeypatch.delattr(module, PACKED)
    else:
        monkeypatch.setattr(module, PACKED, other)
    vllm.register("reference")
    said = "does not exist in this vLLM" if change == "gone" else "has other parameters than in"
    assert f"{vllm._GDN}.{PACKED} {said}" in caplog.text
    assert getattr(module, PACKED, other) is other
    assert f"{vllm._GDN}.fi_chunk_gated_delta_rule calls cula" in caplog.text


@pytest.mark.parametrize("change", ["changed", "taken", "gone"])
def test_an_operator_that_does_not_fit_stays(monkeypatch, caplog, change: str) -> None:
    module, registry = sys.modules[vllm._GDN], sys.modules[vllm._OPERATORS].op_registry_oot
    if change == "changed":
        monkeypatch.setattr(module.ChunkGatedDeltaRule, "forward_native", lambda self, q: q)
    elif change == "taken":
        registry[vllm._OPERATOR] = "theirs"
    else:
        monkeypatch.delattr(module, vllm._OPERATOR)
    vllm.register("reference")
    assert registry == ({vllm._OPERATOR: "theirs"} if change == "taken" else {})
    said = {
        "changed": "ChunkGatedDeltaRule.forward_native has other parameters",
        "taken": "another plug-in of vLLM has taken the place of ChunkGatedDeltaRule",
        "gone": "ChunkGatedDeltaRule.forward_cuda does not exist",
    }
    assert said[change] in caplog.text
    vllm.unregister()
    assert registry == ({vllm._OPERATOR: "theirs"} if change == "taken" else {})


def test_it_is_registered_once_and_again() -> None:
    assert not vllm.registered()
    vllm.register()
    once = found(vllm._GDN, PACKED)
    vllm.register("reference")
    assert vllm.registered() and found(vllm._GDN, PACKED) is once
    found(vllm._GDN, PACKED)(**decode()[0])
    assert not SEEN and sys.meta_path.count(vllm._finder) == 1
    vllm.unregister()
    vllm.unregister()
    assert not vllm.registered() and vllm._finder not in sys.meta_path
    assert not sys.modules[vllm._OPERATORS].op_registry_oot
    vllm.register("reference")
    assert isinstance(found(vllm._GDN, vllm._OPERATOR)(), found(vllm._GDN, vllm._OPERATOR))
    assert found(vllm._GDN, PACKED) is not once


@pytest.mark.parametrize("impl", ["", 3])
def test_what_is_no_name_registers_nothing(impl: Any) -> None:
    before = found(vllm._GDN, PACKED)
    with pytest.raises(TypeError, match="impl: expected the name of an implementation"):
        vllm.register(impl)
    assert not vllm.registered() and found(vllm._GDN, PACKED) is before


SOURCE = """
def linear_attention_decode(
    q, k, v, kv_cache, slope_rate, state_indices_tensor, q_start=0, q_end=None, slot_start=0, slot_end=None,
    block_size=32,
): return "vLLM's"
"""


def test_a_module_that_is_imported_later_is_served(monkeypatch, tmp_path: Path, caplog) -> None:
    name = "vllm.model_executor.layers.mamba.linear.bailing_linear_attn"
    folder = tmp_path
    for part in name.split(".")[:-1]:
        folder = folder / part
        folder.mkdir()
        (folder / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, ".".join(folder.relative_to(tmp_path).parts), False)
    (folder / "bailing_linear_attn.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    vllm.register("reference")
    module = importlib.import_module(name)
    assert f"{name}.linear_attention_decode calls cula" in caplog.text
    assert f"{name}.linear_attention_prefill_and_mix does not exist" in caplog.text
    p, x = pool(torch.float32, H, K, K), torch.randn(1, H, K)
    hidden = module.linear_attention_decode(x, x, x, p.states, torch.ones(H, 1, 1), table([1]))
    assert isinstance(hidden, Tensor) and p.others_are_untouched(1)
    vllm.unregister()
    assert module.linear_attention_decode(1, 2, 3, 4, 5, 6) == "vLLM's"
    for part in [m for m in sys.modules if m == "vllm" or m.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, part)


@pytest.mark.parametrize("value, asked", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_plug_in_asks_the_environment(monkeypatch, value: str | None, asked: bool) -> None:
    if value is not None:
        monkeypatch.setenv("CULA_VLLM", value)
    for _ in range(2):
        vllm.plugin()
    assert vllm.registered() == asked


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_plug_in_is_light(value: str) -> None:
    """vLLM calls it in processes that have no GPU, and before they may touch one."""
    code = """
import sys
from cula.integrations import vllm
assert "torch" not in sys.modules
vllm.plugin()
assert vllm.registered() == ("torch" in sys.modules)
assert "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()
assert not {"vllm", "torch._dynamo", "cula.kda", "cula.delta", "cula.lightning", "triton", "cutlass"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CULA_VLLM": value}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
