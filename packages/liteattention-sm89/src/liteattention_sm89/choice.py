"""Whose kernels serve a call: those of a package that is made for the device, or this one's.

A package for one architecture names its `_spec` module in the entry-point group `liteattention.kernels`; a source tree
on PYTHONPATH has no metadata, so that of the device's own architecture is looked for by name as well. Such a package
has a module `launch` with the functions of this package's, and `supports` says why it refuses a problem. Forward and
backward choose separately: what one leaves for the other is the same.

LITEATTENTION_KERNEL, read when this module is imported, forces one package by its architecture, "sm89" or "sm90".
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from cula_core.shortcuts import forget

GROUP = "liteattention.kernels"
VARIABLE = "LITEATTENTION_KERNEL"
OWN = "sm89"

_asked: str | None = os.environ.get(VARIABLE) or None


@contextlib.contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """While it is entered, calls of the process are as with LITEATTENTION_KERNEL set to `kernel`; None: not set.

    For tests and benchmarks; not for several threads. A change forgets the shortcuts of every function, which lead to
    the kernels of earlier calls.
    """
    before = _asked
    _ask_for(kernel)
    try:
        yield
    finally:
        _ask_for(before)


def _ask_for(kernel: str | None) -> None:
    global _asked
    if kernel != _asked:
        _asked = kernel
        forget()


def launcher(
    name: str, q: Tensor, block_n: int, keys: int, packed: bool, int8: bool = False, deterministic: bool = False
) -> Callable[..., None]:  # fmt: skip
    """Returns `forward` or `backward`, by name, of the launch module that serves a call.

    keys: the most of a sequence. deterministic: every call must give the same bits. What was chosen for a problem is
    kept.

    Raises:
        RuntimeError: the package that the environment asks for refuses the problem, or is not there.
    """
    # Rounded up to a power of two, so that few problems differ.
    tiles = 1 << (-(-keys // block_n) - 1).bit_length() if keys > 0 else 0
    return _chosen(
        _asked, name, q.device, q.dtype, q.shape[3], block_n, tiles, packed, int8, deterministic
    )


@functools.cache
def _chosen(
    asked: str | None, name: str, device: torch.device, dtype: torch.dtype, dim: int, block_n: int, tiles: int,
    packed: bool, int8: bool, deterministic: bool,
) -> Callable[..., None]:  # fmt: skip
    if asked != OWN:
        capability = torch.cuda.get_device_capability(device)
        problem = {
            "capability": capability, "dtype": dtype, "head_dim_k": dim, "head_dim_v": dim, "block_n": block_n,
            "tiles": tiles, "packed": packed, "use_int8": int8, "backward": name == "backward",
            "deterministic": deterministic,
        }  # fmt: skip
        refusals = []
        for spec in _specs(asked or f"sm{capability[0]}{capability[1]}"):
            if asked is not None and not spec.NAME.endswith(f"-{asked}"):
                continue
            reason = spec.supports(**problem)
            if reason is None:
                return getattr(importlib.import_module(f"{spec.__package__}.launch"), name)
            refusals.append(reason)
        if asked is not None:
            why = "; ".join(refusals) or "no such package is installed"
            raise RuntimeError(f"{VARIABLE}={asked}: {why}")
    from . import launch

    return getattr(launch, name)


def _specs(arch: str) -> Iterator[ModuleType]:
    """The `_spec` modules of installed packages, each once, and that of a tree's package for an architecture."""
    names = dict.fromkeys(point.value for point in entry_points(group=GROUP))
    package = f"liteattention_{arch}"
    if arch.isalnum() and find_spec(package) and find_spec(f"{package}._spec"):
        names[f"{package}._spec"] = None
    for name in names:
        if not name.startswith(f"{__package__}."):
            yield importlib.import_module(name)
