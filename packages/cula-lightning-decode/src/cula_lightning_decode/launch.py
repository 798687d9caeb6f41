"""Finds the kernel of a call, and launches it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .config import Config, Problem
from .plan import select


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel for an architecture ("sm_80", "sm_90a", ...) as something that can be compiled."""
    return Unit(f"{__package__}.build", config, arch)


@once
def compile(config: Config, arch: str) -> Callable[..., None]:
    """Returns a callable for one config and architecture, reused for every size and stride."""
    return kernel(unit(config, arch))


@once
def kernel_for(
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    head_dim_k: int,
    head_dim_v: int,
    tokens: int,
    state_v_first: bool,
    indexed: bool,
    mode: str,
    stochastic: bool,
    padded: bool,
    device: torch.device,
) -> Callable[..., None]:
    """Returns the compiled kernel for the static facts of a call; compiles on first use (about a second).

    Raises ValueError for facts that no kernel serves, RuntimeError for a GPU that is too old.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"cula-lightning-decode needs compute capability 8.0 or newer; {device} has {major}.{minor}"
        )
    problem = Problem(
        dtype_name(dtype), dtype_name(state_dtype), head_dim_k, head_dim_v, tokens, state_v_first, indexed, mode,
        stochastic, padded,
    )  # fmt: skip
    if problem.illegal():
        raise ValueError(problem.illegal())
    arch = f"sm_{major}{minor}" + "a" * (major >= 9)
    return compile(select(problem, arch, tensors.multiprocessors(device)), arch)


def run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    num_accepted: Tensor | None,
    rounding_seed: Tensor | None,
    out: Tensor | None,
    scale: float,
    state_v_first: bool,
    mode: str,
    null_slot: int | None,
) -> None:
    """Launches one call on torch's current stream; the arguments have been checked."""
    batch, tokens, _, head_dim_k = k.shape
    head_dim_v = v.shape[3]
    device = k.device
    launch = kernel_for(
        k.dtype, state.dtype, head_dim_k, head_dim_v, tokens, state_v_first,
        state_indices is not None, mode, rounding_seed is not None, null_slot is not None, device,
    )  # fmt: skip
    if batch == 0:
        return
    given = (q, k, v, state, decay, state_indices, num_accepted, rounding_seed, out)
    arguments = (*given, scale, null_slot)
    if device.index == torch.cuda.current_device():
        launch(*arguments)
    else:
        with torch.cuda.device(device):
            launch(*arguments)
