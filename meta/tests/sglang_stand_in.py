"""What stands in for SGLang 0.5.23 in tests: its registry of hooks, flags, dispatchers and kernels.

Functions have the signatures that were recorded from SGLang; kernels only say that they were called.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import pkgutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fla_stand_in import put_modules

RECORDED = json.loads(
    (Path(__file__).parents[2] / "tests-integration/contracts/sglang-0.5.23.json").read_text()
)
LINEAR = "sglang.srt.layers.attention.linear"


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class LinearAttnKernelBackend(enum.Enum):
    TRITON = "triton"
    FLASHINFER = "flashinfer"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value: object) -> LinearAttnKernelBackend:
        return cls.CUSTOM

    def is_triton(self) -> bool:
        return self is self.TRITON

    def is_custom(self) -> bool:
        return self is self.CUSTOM


def hook_registry() -> type:
    """A class that wraps what dotted names stand for, wherever it is bound, once for each name."""

    class HookRegistry:
        hooks: dict[str, list[tuple[HookType, Callable[..., Any]]]] = {}
        patched: set[str] = set()

        @classmethod
        def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
            cls.hooks.setdefault(target, []).append((hook_type, hook))

        @classmethod
        def apply_hooks(cls) -> None:
            for target, hooks in cls.hooks.items():
                if target in cls.patched:
                    continue
                cls.patched.add(target)
                path, name = target.rsplit(".", 1)
                owner = pkgutil.resolve_name(path)
                original = wrapped = getattr(owner, name)
                for hook_type, hook in hooks:
                    wrapped = cls.wrap(wrapped, hook, hook_type)
                setattr(owner, name, wrapped)
                for module in list(sys.modules.values()):
                    if getattr(module, name, None) is original:
                        setattr(module, name, wrapped)

        @staticmethod
        def wrap(original: Any, hook: Any, hook_type: HookType) -> Callable[..., Any]:
            @functools.wraps(original)
            def after(*args: Any, **named: Any) -> Any:
                result = original(*args, **named)
                modified = hook(result, *args, **named)
                return result if modified is None else modified

            @functools.wraps(original)
            def around(*args: Any, **named: Any) -> Any:
                return hook(original, *args, **named)

            return after if hook_type is HookType.AFTER else around

    return HookRegistry


def recorded(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of SGLang with its parameters."""

    def function(*args: Any, **named: Any) -> Any:
        signature.bind(*args, **named)
        return answer(*args, **named)

    found = []
    for parameter, kind, default in RECORDED["functions"][name]:
        value = inspect.Parameter.empty if default is None else default
        found.append(inspect.Parameter(parameter, getattr(inspect.Parameter, kind), default=value))
    signature = inspect.Signature(found)
    function.__name__ = name.rpartition(".")[2]
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


class SGLang:
    """The modules, in sys.modules while a test runs. seen: the methods of SGLang's own kernels that were called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.logged: list[str] = []
        self.answers: dict[str, Any] = {}
        self.flags = SimpleNamespace(
            linear_attn_backend="triton", linear_attn_decode_backend=None, linear_attn_prefill_backend=None,
            linear_attn_verify_backend=None,
        )  # fmt: skip
        self.choices: list[str] = ["triton", "flashinfer"]
        self.HookRegistry: Any = hook_registry()
        gdn, kda = self.kernel("gdn", "GDN"), self.kernel("kda", "KDA")
        kda.supports_track_state_snapshot = True
        seg_la = recorded(f"{LINEAR}.lightning_backend.seg_la_fwd", self.theirs("seg_la_fwd"))
        modules: dict[str, dict[str, Any]] = {
            "sglang.srt.plugins.hook_registry": {"HookRegistry": self.HookRegistry, "HookType": HookType},
            "sglang.srt.arg_groups.choices": {
                "LINEAR_ATTN_KERNEL_BACKEND_CHOICES": self.choices,
                "add_linear_attn_kernel_backend_choices": self.choices.extend,
            },
            "sglang.srt.runtime_context": {"get_exec": lambda: SimpleNamespace(mamba=self.flags)},
            f"{LINEAR}.utils": {"resolve_linear_attn_backends": self.resolve},
            f"{LINEAR}.kernels.gdn_triton": {"TritonGDNKernel": gdn},
            f"{LINEAR}.kernels.kda_triton": {"TritonKDAKernel": kda},
            f"{LINEAR}.gdn_backend": {"GDNKernelDispatcher": self.dispatcher("gdn", gdn)},
            f"{LINEAR}.kda_backend": {"KDAKernelDispatcher": self.dispatcher("kda", kda)},
            f"{LINEAR}.lightning_backend": {"seg_la_fwd": seg_la},
        }  # fmt: skip
        packages = {name.rpartition(".")[0] for name in modules}
        while packages:
            modules |= {name: {} for name in packages if name not in modules}
            packages = {name.rpartition(".")[0] for name in packages} - {""}
        put_modules(patch, dict(sorted(modules.items())))

    def theirs(self, name: str) -> Callable[..., Any]:
        def answer(*args: Any, **named: Any) -> Any:
            self.seen.append(name)
            return self.answers.get(name, f"SGLang's {name}")

        return answer

    def kernel(self, kind: str, title: str) -> Any:
        path = f"{LINEAR}.kernels.{kind}_triton.Triton{title}Kernel"
        methods = {
            name: recorded(f"{path}.{name}", self.theirs(name))
            for name in ("packed_decode", "decode", "extend", "target_verify")
        }
        flags = {"supports_packed_decode": True, "supports_track_state_snapshot": False}
        return type(f"Triton{title}Kernel", (), flags | methods)

    def dispatcher(self, kind: str, kernel: Any) -> type:
        """A class that takes a kernel for each phase, and knows only Triton's."""

        def construct(
            self: Any, decode_backend: Any, prefill_backend: Any, verify_backend: Any
        ) -> None:
            for phase, backend in (
                ("decode", decode_backend),
                ("extend", prefill_backend),
                ("verify", verify_backend),
            ):
                if backend.is_custom():
                    raise ValueError(f"Unsupported {phase} backend: {backend}")
                setattr(self, f"{phase}_kernel", kernel())
            self.supports_packed_decode = kernel.supports_packed_decode
            if kind == "kda":
                self.supports_packed_decode_safe_gate = False

        title = f"{kind.upper()}KernelDispatcher"
        return type(
            title,
            (),
            {"__init__": recorded(f"{LINEAR}.{kind}_backend.{title}.__init__", construct)},
        )

    def resolve(self, prefill_default: str | None = None) -> SimpleNamespace:
        base = self.flags.linear_attn_backend
        return SimpleNamespace(
            decode=LinearAttnKernelBackend(self.flags.linear_attn_decode_backend or base),
            prefill=LinearAttnKernelBackend(self.flags.linear_attn_prefill_backend or prefill_default or base),
            verify=LinearAttnKernelBackend(self.flags.linear_attn_verify_backend or "triton"),
        )  # fmt: skip

    def load(self, kind: str) -> Any:
        """What happens when a model is loaded: a dispatcher of a kind, with the backends of the flags."""
        backends = pkgutil.resolve_name(f"{LINEAR}.utils.resolve_linear_attn_backends")()
        dispatcher = pkgutil.resolve_name(f"{LINEAR}.{kind}_backend.{kind.upper()}KernelDispatcher")
        return dispatcher(backends.decode, backends.prefill, backends.verify)

    @property
    def lightning(self) -> Any:
        """Its module for Lightning attention."""
        return sys.modules[f"{LINEAR}.lightning_backend"]


def module(name: str) -> types.ModuleType:
    return sys.modules[f"{LINEAR}.{name}"]
