"""Functions that several test files of this package use."""

from __future__ import annotations

import torch
from torch import Tensor

from cula_core.reference import lightning_decode as reference
from cula_testing.tensors import int32

# (mode, stochastic rounding)
MODES = (
    ("decode", False),
    ("verify", False),
    ("commit", False),
    ("decode", True),
    ("commit", True),
)


def rows(device: torch.device | str, *values: int) -> Tensor:
    """Returns one int32 per row of a batch."""
    return int32(*values).to(device)


def clone(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of all tensors."""
    return {name: tensor.clone() for name, tensor in inputs.items()}


def keys(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that a commit takes."""
    return {name: inputs[name] for name in ("k", "v", "state", "decay")}


def exact(inputs: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    """Returns outputs and pool in fp64, from the very numbers that the kernel gets."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    out = reference.linear_attention_decode(**wide, **options)
    return out, wide["state"]


def possible(case: dict) -> bool:
    """Whether a case with "mode" (one of MODES) and "state_dtype" is one that some kernel serves."""
    return case["state_dtype"] == "bfloat16" or not case["mode"][1]
