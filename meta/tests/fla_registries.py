"""What stands in for the registries of flash-linear-attention 0.5 and 0.6 in tests, and for the functions they serve.

The functions have FLA's parameters, in its order, and only say that they were called.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from fla_stand_in import put_modules

SEEN: list[str] = []
_PREFILL = ["scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"]
_BETA = ["use_beta_sigmoid_in_kernel", "allow_neg_eigval"]
_CU = ["cu_seqlens", "cu_seqlens_cpu"]
_OLD = "transpose_state_layout"
_KDA_DECODE = (
    "q k v g beta A_log dt_bias initial_state scale output_final_state inplace_final_state".split()
)
_SLOTS = [
    "cu_seqlens",
    "ssm_state_indices",
    "num_accepted_tokens",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
]
_GDN_DECODE = ["q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias", *_PREFILL]
_GLA = ["q", "k", "v", "g", "g_gamma", *_PREFILL[:3]]
PARAMETERS: dict[str, dict[str, list[str]]] = {
    "0.6": {
        "chunk_kda": [
            "q", "k", "v", "g", "beta", *_PREFILL, "use_gate_in_kernel", *_BETA, "safe_gate", "lower_bound",
            "disable_recompute", "return_intermediate_states", "state_v_first", *_CU, "cp_context", "use_graph",
            "max_num_seqs", "kwargs",
        ],
        "fused_recurrent_kda_fwd": [*_KDA_DECODE, "state_v_first", *_SLOTS, *_BETA, "lower_bound", "out", "kwargs"],
        "chunk_gated_delta_rule": [
            "q", "k", "v", "g", "beta", *_PREFILL, *_BETA, "state_v_first", *_CU, "chunk_indices", "cp_context",
            "kwargs",
        ],
        "fused_recurrent_gated_delta_rule_fwd": [*_GDN_DECODE, *_BETA, "state_v_first", "cu_seqlens"],
        "ChunkSimpleGLAFunction": [*_GLA, "state_v_first", *_CU, "chunk_size"],
        "fused_chunk_simple_gla": [*_GLA, "cu_seqlens"],
        "fused_recurrent_simple_gla": [*_GLA, "reverse", "state_v_first", "cu_seqlens", "kwargs"],
    },
    "0.5": {
        "chunk_kda": [
            "q", "k", "v", "g", "beta", *_PREFILL, "use_gate_in_kernel", *_CU, "safe_gate", "lower_bound",
            "disable_recompute", "return_intermediate_states", "cp_context", _OLD, "kwargs",
        ],
        "fused_recurrent_kda_fwd": [*_KDA_DECODE, *_SLOTS, "lower_bound", "out", _OLD, "kwargs"],
        "ChunkGatedDeltaRuleFunction": [
            "q", "k", "v", "g", "beta", *_PREFILL[:3], *_CU, "use_qk_l2norm_in_kernel", "cp_context", _OLD,
            "use_gate_in_kernel", "A_log", "dt_bias",
        ],
        "fused_recurrent_gated_delta_rule_fwd": [*_GDN_DECODE, "cu_seqlens", "use_exp2", _OLD],
        "ChunkSimpleGLAFunction": [*_GLA, *_CU],
        "fused_chunk": [*_GLA, "cu_seqlens"],
        "fused_recurrent": ["q", "k", "v", "g", "g_gamma", "gk", "gv", *_PREFILL[:3], "reverse", "cu_seqlens"],
    },
}  # fmt: skip
_MODULES = {
    "chunk_kda": "fla.ops.kda.chunk",
    "fused_recurrent_kda_fwd": "fla.ops.kda.fused_recurrent",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk",
    "ChunkGatedDeltaRuleFunction": "fla.ops.gated_delta_rule.chunk",
    "fused_recurrent_gated_delta_rule_fwd": "fla.ops.gated_delta_rule.fused_recurrent",
    "ChunkSimpleGLAFunction": "fla.ops.simple_gla.chunk",
    "fused_chunk_simple_gla": "fla.ops.simple_gla.fused_chunk",
    "fused_chunk": "fla.ops.simple_gla.fused_chunk",
    "fused_recurrent_simple_gla": "fla.ops.simple_gla.fused_recurrent",
    "fused_recurrent": "fla.ops.simple_gla.fused_recurrent",
}
# What FLA asks backends about, by the operation under which it does; "" by the function itself.
_ASKED = {
    "0.6": {
        "chunk_kda": "",
        "fused_recurrent_kda_fwd": "kda",
        "chunk_gated_delta_rule": "gated_delta_rule",
        "fused_chunk_simple_gla": "",
        "fused_recurrent_simple_gla": "",
    },
    "0.5": {"chunk_kda": "kda"},
}


def theirs(name: str, parameters: list[str]) -> Any:
    """A function of FLA, or an autograd function, which only says that it was called."""

    def function(*args: Any, **named: Any) -> str:
        SEEN.append(name)
        return f"FLA's {name}"

    def signature(names: list[str]) -> inspect.Signature:
        kinds = {"kwargs": inspect.Parameter.VAR_KEYWORD}
        usual = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(n, kinds.get(n, usual)) for n in names])

    function.__name__ = name
    if not name.endswith("Function"):
        function.__signature__ = signature(parameters)  # type: ignore[attr-defined]
        return function

    def forward(*args: Any) -> None: ...

    forward.__signature__ = signature(["ctx", *parameters])  # type: ignore[attr-defined]
    return type(name, (), {"apply": staticmethod(function), "forward": staticmethod(forward)})


class _Backend:
    """FLA's base class, as far as a backend meets it."""

    priority = 5
    package_name: ClassVar[str | None] = None

    @classmethod
    def is_available(cls) -> bool:
        return cls.package_name is None

    def verify(self, function: str, *args: Any, **named: Any) -> tuple[bool, str | None]:
        verifier = getattr(self, f"{function}_verifier", None)
        return (True, None) if verifier is None else verifier(*args, **named)


class _NewBackend(_Backend):
    def is_enabled(self) -> bool:
        return os.environ.get("FLA_OTHER", "1") != "0"


class _OldBackend(_Backend):
    @classmethod
    def is_enabled(cls) -> bool:
        return os.environ.get("FLA_OTHER", "1") != "0"

    @classmethod
    def can_use(cls) -> bool:
        return cls.is_available() and cls.is_enabled()


class _Registry:
    """FLA's: the first backend that can be used and has the function serves."""

    def __init__(self) -> None:
        self._backends: dict[str, Any] = {}

    def register(self, backend: Any) -> None:
        self._backends[backend.backend_type] = backend

    def dispatch(self, default: Callable[..., Any]) -> Callable[..., Any]:
        name = default.__name__

        @functools.wraps(default)
        def wrapper(*args: Any, **named: Any) -> Any:
            for backend in sorted(self._backends.values(), key=lambda b: b.priority):
                old = hasattr(backend, "can_use")
                if not (
                    backend.can_use() if old else backend.is_available() and backend.is_enabled()
                ):
                    continue
                run = getattr(backend, name, None)
                if backend.verify(name, *args, **named)[0] and run is not None:
                    return run(*args, **named)
            return default(*args, **named)

        return wrapper


class Fla:
    """FLA of one release, whose modules can be imported."""

    def __init__(self, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = release
        self.parameters = {name: list(names) for name, names in PARAMETERS[release].items()}
        operations = {name: _Registry() for name in ("gated_delta_rule", "kda")}
        functions: dict[Callable[..., Any], _Registry] = {}
        modules: dict[str, dict[str, Any]] = {
            "fla": {},
            "fla.ops": {},
            **{f"fla.ops.{name}": {} for name in ("kda", "gated_delta_rule", "simple_gla")},
        }
        for name, parameters in self.parameters.items():
            found, asked = theirs(name, parameters), _ASKED[release].get(name)
            if asked is not None:
                registry = operations[asked] if asked else functions.setdefault(found, _Registry())
                found = registry.dispatch(found)
            modules.setdefault(_MODULES[name], {})[name] = found
        if release == "0.6":
            modules["fla.backends"] = {
                "BaseBackend": _NewBackend, "_DISPATCH_DISABLED": False,
                "_operation_registries": operations, "_function_registries": functions,
            }  # fmt: skip
        else:
            self.initialized: list[str] = []
            registries = type(
                "BackendRegistry",
                (),
                {"_registries": operations, "ensure_initialized": self.initialized.append},
            )
            modules["fla.ops.backends"] = {
                "BaseBackend": _OldBackend, "BackendRegistry": registries, "_DISPATCH_DISABLED": False,
            }  # fmt: skip
        put_modules(monkeypatch, modules)
        self.modules = modules
        SEEN.clear()

    def found(self, name: str) -> Any:
        """A function, or an autograd function, as FLA looks it up now."""
        return getattr(sys.modules[_MODULES[name]], name)

    def call(self, name: str, given: dict[str, Any], by_position: bool = False) -> Any:
        """As FLA calls it, with the names of today: an autograd function by position, the others by keyword."""
        parameters, given = self.parameters[name], dict(given)
        if _OLD in parameters and "state_v_first" in given:
            given[_OLD] = given.pop("state_v_first")
        if not by_position and not name.endswith("Function"):
            return self.found(name)(**given)
        flags = (
            "use_",
            "allow_",
            "safe_",
            "output_",
            "disable_",
            "return_",
            "reverse",
            "state_v_",
            _OLD,
        )
        defaults: dict[str, Any] = {n: False for n in parameters if n.startswith(flags)}
        defaults |= {"chunk_size": 64, "inplace_final_state": True}
        assert given.keys() <= set(parameters), given.keys() - set(parameters)
        function = self.found(name)
        last = max(parameters.index(n) for n in given) if by_position else len(parameters) - 1
        args = [given.get(n, defaults.get(n)) for n in parameters[: last + 1]]
        return getattr(function, "apply", function)(*args)


def single_rank(cu_seqlens: torch.Tensor) -> Any:
    """A context of FLA over one rank. There must be a process group of one rank."""
    return types.SimpleNamespace(
        group=None, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.cpu(), pre_num_ranks=0, post_num_ranks=0,
        is_first_rank=True, is_last_rank=True, layout="contiguous",
    )  # fmt: skip
