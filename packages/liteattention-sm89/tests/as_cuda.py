"""A stand-in for a GPU: CPU tensors that say they are on one, for what the host does before a launch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EMPTY = (torch.empty, torch.empty_like, Tensor.new_empty)


class AsCuda(TorchFunctionMode):
    """While it is entered every CPU tensor gives cuda:0 as its device, and is made on the CPU when asked for there.

    Fresh memory is filled with what nobody would have written.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            device = func(*args)
            return torch.device("cuda", 0) if device.type == "cpu" else device
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func in EMPTY:
            result.fill_(float("nan") if result.dtype.is_floating_point else 0x55555555)
        return result
