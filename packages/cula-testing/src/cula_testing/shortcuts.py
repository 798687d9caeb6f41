"""Public functions that take CPU tensors for a GPU's, and what they launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]

from cula_core import arguments, shortcuts, tensors
from cula_core.shortcuts import Launcher


class Launches:
    """What was launched: the kernel, its numbers, and of each tensor in which memory it lies, and how."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []
        self._memory: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def begin(self, inputs: list[Tensor]) -> None:
        """Forgets what was launched; the next call has these tensors."""
        self.seen.clear()
        self._kept = list(inputs)
        self._memory = {x.untyped_storage().data_ptr(): f"input {i}" for i, x in enumerate(inputs)}

    def kernel(self, unit: Any) -> Launcher:
        """Stands in for `cula_core.compiled.libraries.kernel`."""

        def launch(*arguments: object) -> None:
            self.seen.append((unit, *map(self.described, arguments)))

        return Launcher(launch)

    def described(self, x: Any) -> Any:
        """Returns what tells an argument from others."""
        if isinstance(x, tuple):
            return tuple(map(self.described, x))
        if not isinstance(x, Tensor):
            return x
        self._kept.append(x)
        with torch._C.DisableTorchFunction():
            return self._of_tensor(x)

    def _of_tensor(self, x: Tensor) -> tuple:
        place = x.untyped_storage().data_ptr()
        name = self._memory.setdefault(place, f"memory {len(self._memory)}")
        return name, x.storage_offset(), x.dtype, tuple(x.shape), x.stride()


@contextmanager
def pretended_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[Launches]:
    """Inside, tensors on the CPU count as a GPU's, and kernels only say that they were launched."""
    launches = Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortcuts, "_first_device", -1)
        patch.setattr(shortcuts, "_current_device", lambda: -1)
        patch.setattr(shortcuts, "_alignment", 64)
        patch.setattr(shortcuts, "_empty_strided", _empty_strided_cpu)
        patch.setattr(arguments, "is_readable", lambda x: False)
        patch.setattr(tensors, "multiprocessors", lambda device: 132)
        patch.setattr(torch.cuda, "current_device", lambda: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        ours = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith(("cula", "liteattention")) and not name.startswith("cula_testing")
        ]
        clear = [
            value.cache_clear
            for module in ours
            for value in vars(module).values()
            if hasattr(value, "cache_clear") and value.__name__ in _KEPT
        ]
        for module in ours:
            if hasattr(module, "is_plain_cuda_call"):
                patch.setattr(module, "is_plain_cuda_call", lambda x: True)
            if module.__name__.endswith(".launch") and hasattr(module, "kernel"):
                patch.setattr(module, "kernel", launches.kernel)
        clear.append(shortcuts.forget)
        for forget in clear:
            forget()
        try:
            yield launches
        finally:
            for forget in clear:
                forget()


# Functions that keep kernels, or facts about the device.
_KEPT = frozenset(
    ("compile", "kernel_for", "_kernels_of", "_arch", "require_hopper", "_capability", "compile_forward",
     "compile_means", "compile_quantize", "_chosen")
)  # fmt: skip


def long_way(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a public function without its shortcuts."""
    long = function.__wrapped__  # type: ignore[attr-defined]
    return partial(long, function.__self__) if hasattr(function, "__self__") else long
