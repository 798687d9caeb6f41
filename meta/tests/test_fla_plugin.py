"""cula behind FLA's own functions, with a stand-in for FLA's registries and functions; the reference serves."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fla_stand_in import CU, HV, K, T, V, inputs, put_modules

from cula import _ranks, _registry, kda, lightning, reference
from cula.integrations import fla, fla_plugin

SEEN: list[str] = []
# The parameters of FLA 0.6.0, in its order.
_PREFILL = ["scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"]
_BETA = ["use_beta_sigmoid_in_kernel", "allow_neg_eigval"]
_CU = ["cu_seqlens", "cu_seqlens_cpu"]
PARAMETERS = {
    "chunk_kda": [
        *"q k v g beta".split(), *_PREFILL, "use_gate_in_kernel", *_BETA, "safe_gate", "lower_bound",
        "disable_recompute", "return_intermediate_states", "state_v_first", *_CU, "cp_context", "use_graph",
        "max_num_seqs",
    ],
    "chunk_gated_delta_rule": [
        *"q k v g beta".split(), *_PREFILL, *_BETA, "state_v_first", *_CU, "chunk_indices", "cp_context",
    ],
    "fused_recurrent_kda_fwd": [
        *"q k v g beta A_log dt_bias initial_state scale output_final_state inplace_final_state".split(),
        "state_v_first", "cu_seqlens", "ssm_state_indices", "num_accepted_tokens", "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel", *_BETA, "lower_bound", "out",
    ],
    "fused_recurrent_gated_delta_rule_fwd": [
        *"q k v g gk gv beta A_log dt_bias".split(), *_PREFILL, *_BETA, "state_v_first", "cu_seqlens",
    ],
    "fused_chunk_simple_gla": [
        *"q k v g g_gamma".split(), *_PREFILL[:3], "cu_seqlens",
    ],
    "apply": [
        *"q k v g g_gamma".split(), *_PREFILL[:3], "state_v_first", *_CU, "chunk_size",
    ],
}  # fmt: skip


class BaseBackend:
    env_var: str | None = None

    def is_enabled(self) -> bool:
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"


class Registry:
    """FLA's, as far as a backend meets it: the first that is willing and has the function serves."""

    def __init__(self) -> None:
        self._backends: dict[str, Any] = {}

    def dispatch(self, default: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(default)
        def wrapper(*args: Any, **named: Any) -> Any:
            for backend in sorted(self._backends.values(), key=lambda b: b.priority):
                if not backend.is_enabled():
                    continue
                verifier = getattr(backend, f"{default.__name__}_verifier", None)
                run = getattr(backend, default.__name__, None)
                if (verifier is None or verifier(*args, **named)[0]) and run is not None:
                    return run(*args, **named)
            return default(*args, **named)

        return wrapper


def theirs(name: str) -> Callable[..., Any]:
    """A function of FLA with its parameters, which only says that it was called."""

    def function(*args: Any, **named: Any) -> str:
        SEEN.append(name)
        return f"FLA's {name}"

    function.__name__ = name
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in PARAMETERS[name]]
    )
    return function


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    operations = {name: Registry() for name in ("gated_delta_rule", "kda")}
    functions: dict[Callable[..., Any], Registry] = {}

    def of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
        functions[function] = Registry()
        return functions[function].dispatch(function)

    def register(entry: Any) -> Callable[[type], type]:
        registry = operations[entry] if isinstance(entry, str) else functions[inspect.unwrap(entry)]

        def add(backend: type) -> type:
            registry._backends[backend.backend_type] = backend()
            return backend

        return add

    gla = types.SimpleNamespace(apply=theirs("apply"))
    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.backends": {
            "BaseBackend": BaseBackend, "register": register, "_DISPATCH_DISABLED": False,
            "_operation_registries": operations, "_function_registries": functions,
        },
        "fla.ops": {},
        "fla.ops.kda": {},
        "fla.ops.kda.chunk": {"chunk_kda": of_its_own(theirs("chunk_kda"))},
        "fla.ops.kda.fused_recurrent": {
            "fused_recurrent_kda_fwd": operations["kda"].dispatch(theirs("fused_recurrent_kda_fwd")),
        },
        "fla.ops.gated_delta_rule": {},
        "fla.ops.gated_delta_rule.chunk": {
            "chunk_gated_delta_rule": operations["gated_delta_rule"].dispatch(theirs("chunk_gated_delta_rule")),
        },
        "fla.ops.gated_delta_rule.fused_recurrent": {
            "fused_recurrent_gated_delta_rule_fwd": theirs("fused_recurrent_gated_delta_rule_fwd"),
        },
        "fla.ops.simple_gla": {},
        "fla.ops.simple_gla.chunk": {"ChunkSimpleGLAFunction": gla},
        "fla.ops.simple_gla.fused_chunk": {"fused_chunk_simple_gla": of_its_own(theirs("fused_chunk_simple_gla"))},
    }  # fmt: skip
    put_modules(monkeypatch, modules)
    monkeypatch.setattr(fla_plugin, "importable", lambda package: True)
    monkeypatch.setattr(fla, "_version", lambda: (0, 6))
    monkeypatch.delenv("CULA_FLA", raising=False)
    _registry.log_once.cache_clear()
    SEEN.clear()
    yield
    fla_plugin.unregister()


@pytest.fixture
def lookup() -> Callable[[str], Callable[..., Any]]:
    by_name = {
        place[1]: place for place in (*fla_plugin._FUNCTIONS, *fla_plugin._OPERATIONS.values())
    }
    by_name[fla_plugin._DECODE[1]] = fla_plugin._DECODE

    def find(name: str) -> Callable[..., Any]:
        if name == "apply":
            return fla_plugin._found(fla_plugin._GLA).apply
        return fla_plugin._found(by_name[name])

    return find


def arguments(name: str) -> dict[str, Any]:
    """A call of each function, packed and with initial states where it takes them, and what of it is not FLA's."""
    x = inputs()
    per_head = x["g"][..., 0]
    states = torch.randn(len(CU) - 1, HV, K, V)
    common = {"initial_state": states, "output_final_state": True, "cu_seqlens": CU.long()}
    raw = {"use_gate_in_kernel": True, "A_log": torch.randn(1, 1, HV, 1)}
    if name == "chunk_kda":
        return x | common | raw | {"dt_bias": torch.randn(HV * K), "use_qk_l2norm_in_kernel": True}
    if name == "fused_recurrent_kda_fwd":
        return x | common | {"inplace_final_state": False, "scale": 0.5}
    if name == "chunk_gated_delta_rule":
        return (
            x | common | {"g": per_head, "state_v_first": True, "initial_state": states.mT.clone()}
        )
    if name == "fused_recurrent_gated_delta_rule_fwd":
        return x | common | {"g": per_head, "A_log": torch.randn(HV), "scale": None}
    x |= {"q": torch.randn(1, T, HV, K).bfloat16(), "k": torch.randn(1, T, HV, K).bfloat16()}
    del x["beta"]
    return x | common | {"g": per_head, "g_gamma": None, "scale": None}


def ours(name: str, given: dict[str, Any]) -> Any:
    """What cula's own function gives for the same."""
    given = dict(given, impl="reference")
    for number in ("A_log", "dt_bias"):
        if number in given:
            given[number] = given[number].flatten()
    if name == "fused_recurrent_kda_fwd":
        del given["inplace_final_state"]
        return kda.fused_recurrent_kda(**given)
    if name == "fused_recurrent_gated_delta_rule_fwd":
        return lightning.fused_recurrent_gated_delta_rule(**given, use_gate_in_kernel=True)
    functions = {
        "chunk_kda": kda.chunk_kda,
        "chunk_gated_delta_rule": lightning.chunk_gated_delta_rule,
    }
    return functions.get(name, lightning.chunk_simple_gla)(**given)


def called(find: Callable[..., Any], name: str, given: dict[str, Any]) -> Any:
    """FLA's autograd function takes everything by position, the others take most by keyword."""
    if name != "apply":
        return find(name)(**given)
    order = PARAMETERS["apply"]
    rest = {"state_v_first": False, "cu_seqlens_cpu": None, "chunk_size": 64}
    return find(name)(*((given | rest)[n] for n in order))


@pytest.mark.parametrize("name", PARAMETERS)
def test_functions_of_fla_give_what_ours_give(lookup, name: str) -> None:
    fla_plugin.register("reference")
    given = arguments(name)
    before = given["initial_state"].clone()
    found, expected = called(lookup, name, given), ours(name, given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not SEEN and torch.equal(given["initial_state"], before)


@pytest.mark.parametrize("name", PARAMETERS)
def test_our_parameters_begin_as_those_of_fla(name: str) -> None:
    """So that calls by position mean the same."""
    special = {
        "fused_recurrent_gated_delta_rule_fwd": fla_plugin._fused_recurrent_gated_delta_rule_fwd,
        "apply": fla_plugin._chunk_simple_gla,
    }
    served = special.get(name) or fla_plugin._SERVED[name]
    mine = list(inspect.signature(served).parameters)
    assert mine[: len(PARAMETERS[name])] == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_no_kernel_serves_is_left_to_fla(lookup, name: str, caplog) -> None:
    caplog.set_level(logging.INFO, "cula")
    fla_plugin.register()  # kernels alone, and there is none for a CPU
    for _ in range(2):
        assert called(lookup, name, arguments(name)) == f"FLA's {name}"
    assert SEEN == [name] * 2
    assert sum("is left to FLA: no kernel serves" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    "name, asked",
    [
        ("chunk_kda", {"cp_context": object()}),
        ("chunk_kda", {"use_graph": True}),
        ("chunk_kda", {"max_num_seqs": 8}),
        ("chunk_kda", {"return_intermediate_states": True}),
        ("chunk_kda", {"chunk_size": 128}),
        ("chunk_kda", {"head_first": True}),
        ("chunk_kda", {"lower_bound": 1.0}),
        ("chunk_gated_delta_rule", {"cp_context": object()}),
        ("chunk_gated_delta_rule", {"state_v_first": True, "transpose_state_layout": True}),
        ("fused_recurrent_kda_fwd", {"inplace_final_state": True}),
        ("fused_recurrent_kda_fwd", {"ssm_state_indices": torch.zeros(4, dtype=torch.int32)}),
        ("fused_recurrent_kda_fwd", {"num_accepted_tokens": torch.ones(4, dtype=torch.int32)}),
        ("fused_recurrent_gated_delta_rule_fwd", {"gk": torch.zeros(1, T, HV, K)}),
        ("fused_recurrent_gated_delta_rule_fwd", {"gv": torch.zeros(1, T, HV, V)}),
    ],
)
def test_what_cula_does_not_have_is_left_to_fla(lookup, name: str, asked: dict[str, Any]) -> None:
    fla_plugin.register("reference")
    assert called(lookup, name, arguments(name) | asked) == f"FLA's {name}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_nothing_is_left_to_fla_in_a_context_of_ranks(lookup, name: str) -> None:
    """FLA would take a slice for whole sequences."""
    fla_plugin.register()
    _ranks.enter(object())
    try:
        with pytest.raises((TypeError, ValueError, NotImplementedError, _registry.Refused)):
            called(lookup, name, arguments(name))
    finally:
        _ranks.leave()
    assert not SEEN
    assert called(lookup, name, arguments(name)) == f"FLA's {name}"


def test_earlier_names_of_a_layout_and_other_chunks(lookup) -> None:
    fla_plugin.register("reference")
    given = arguments("chunk_gated_delta_rule")
    expected = ours("chunk_gated_delta_rule", given)
    given |= {"state_v_first": False, "transpose_state_layout": True, "chunk_size": 32}
    found = lookup("chunk_gated_delta_rule")(
        **given, chunk_indices=torch.zeros(1, 2, dtype=torch.int64)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_activations_and_states_of_any_strides(lookup) -> None:
    fla_plugin.register("reference")
    given = arguments("chunk_kda")
    expected = ours("chunk_kda", given)
    for name in ("q", "k", "v", "g", "initial_state"):
        given[name] = given[name].mT.contiguous().mT
    torch.testing.assert_close(lookup("chunk_kda")(**given), expected, rtol=0, atol=0)
    assert not SEEN


def test_final_states_are_float32(lookup) -> None:
    fla_plugin.register("reference")
    given = arguments("fused_recurrent_kda_fwd")
    given["initial_state"] = given["initial_state"].bfloat16()
    assert lookup("fused_recurrent_kda_fwd")(**given)[1].dtype == torch.float32


def test_gradients_go_through(lookup) -> None:
    fla_plugin.register("reference")
    x = {name: value.requires_grad_() for name, value in inputs().items()}
    o, _ = lookup("chunk_kda")(**x)
    twins = {name: value.detach().clone().requires_grad_() for name, value in x.items()}
    expected, _ = reference.chunk_kda(**twins)
    for one in (o, expected):
        one.float().square().sum().backward()
    for name, value in x.items():
        torch.testing.assert_close(value.grad, twins[name].grad, rtol=0, atol=0)


def test_a_context_and_a_variable_switch_it_off(lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    fla_plugin.register("reference")
    for name in PARAMETERS:
        with fla_plugin.bypassed():
            assert called(lookup, name, arguments(name)) == f"FLA's {name}"
    monkeypatch.setenv("CULA_FLA", "0")
    assert lookup("chunk_kda")(**arguments("chunk_kda")) == "FLA's chunk_kda"


def test_it_is_registered_once_and_taken_back(lookup) -> None:
    before = {name: lookup(name) for name in PARAMETERS}
    assert not fla_plugin.registered()
    for impl in (None, "reference"):
        fla_plugin.register(impl)
    assert fla_plugin.registered()
    lookup("chunk_kda")(**arguments("chunk_kda"))
    assert not SEEN
    fla_plugin.unregister()
    assert not fla_plugin.registered()
    for name, found in before.items():
        assert lookup(name) is found
        assert called(lookup, name, arguments(name)) == f"FLA's {name}"
    fla_plugin.unregister()


def test_a_function_with_other_parameters_stays(lookup, monkeypatch, caplog) -> None:
    monkeypatch.setitem(PARAMETERS, fla_plugin._DECODE[1], ["q", "k"])
    module = sys.modules[fla_plugin._DECODE[0]]
    other = theirs(fla_plugin._DECODE[1])
    monkeypatch.setattr(module, fla_plugin._DECODE[1], other)
    fla_plugin.register("reference")
    assert lookup(fla_plugin._DECODE[1]) is other and "has other parameters" in caplog.text


def test_fla_as_an_implementation_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """impl="fla" measures FLA, whatever is registered behind it."""
    asked = []
    monkeypatch.setitem(fla._FUNCTIONS, "chunk_kda", lambda: asked.append(fla_plugin._here.off))
    run = fla.load("chunk_kda")
    run()
    fla_plugin.register("reference")
    run()
    assert asked == [False, True] and not fla_plugin._here.off


@pytest.mark.parametrize(
    "patch, error, text",
    [
        (lambda m: m.setattr(fla_plugin, "importable", lambda _: False), ImportError, "pip install fla-core"),
        (lambda m: m.setattr(fla, "_version", lambda: (0, 5)), RuntimeError, "needs fla-core 0.6 or newer"),
        (lambda m: m.setattr(sys.modules["fla.backends"], "_DISPATCH_DISABLED", True), RuntimeError,
         "FLA_DISABLE_BACKEND_DISPATCH=1"),
    ],
)  # fmt: skip
def test_what_keeps_it_from_registering(monkeypatch, patch, error, text) -> None:
    patch(monkeypatch)
    with pytest.raises(error, match=text):
        fla_plugin.register()
    assert not fla_plugin.registered()


@pytest.mark.parametrize("value, code", [("1", 1), ("0", 0), ("", 0)])
def test_a_variable_asks_for_it_when_cula_is_imported(value: str, code: int) -> None:
    """Where FLA is not installed, that is an error that says so."""
    block = "import sys; sys.modules['fla'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{block}import cula"],
        env=os.environ | {"CULA_FLA": value}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("flash-linear-attention is not installed" in done.stderr) == bool(code)


def test_refusals_of_kernels_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for every layer of every step is judged once."""
    x = inputs()
    judged = []
    judge = _registry._judge
    monkeypatch.setattr(_registry, "_judge", lambda *a: judged.append(a) or judge(*a))
    _registry.refresh()
    for _ in range(3):
        with pytest.raises(_registry.Refused, match="no kernel serves kda.prefill.chunk_kda"):
            kda.chunk_kda(**x, impl=_registry.KERNELS_ONLY)
    assert len(judged) == 1
