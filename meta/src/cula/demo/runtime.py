"""Where the demo computes: device, dtype and error bounds, timing, and which implementation serves a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

import cula

Advance = Callable[[int], None]
Result = TypeVar("Result")


class DeviceError(Exception):
    """The asked device is not there; the message is one line for the user."""


@dataclass(frozen=True)
class Machine:
    """Device, activation dtype, and the relative RMSE against fp64 allowed for that dtype."""

    device: torch.device
    dtype: torch.dtype
    bound: float

    @property
    def name(self) -> str:
        """The device, for the header of the report."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return "the CPU, one thread"

    @property
    def pair_bound(self) -> float:
        """Allowed distance of two results that may each be `bound` away from the truth."""
        return 2 * self.bound

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """An activation: cast to the compute dtype, on the device."""
        return tensor.to(self.device, self.dtype)

    def timed(self, work: Callable[[], Result], tokens: int) -> tuple[Result, float]:
        """Result of `work` and tokens per second; on a GPU the first, compiling call is not timed."""
        if self.device.type == "cuda":
            work()
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return result, tokens / max(time.perf_counter() - start, 1e-9)


def machine(device: str) -> Machine:
    """The machine for `--device`: fp32 on a CPU, bf16 (what the kernels take) on a GPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                "--device cuda: this torch finds no CUDA device; use --device cpu or auto"
            )
        return Machine(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, 5e-3)
    return Machine(torch.device("cpu"), torch.float32, 1e-5)


def oracle(tensor: torch.Tensor) -> torch.Tensor:
    """The values an implementation was given, as fp64 on the CPU: rounding of the inputs is not its error."""
    return tensor.detach().cpu().double()


def served_by(op: str, machine: Machine, **problem: object) -> str:
    """Name of the implementation that serves this problem on this machine."""
    arch = {"arch": "cpu"} if machine.device.type == "cpu" else {}
    return cula.explain(op, **arch, **problem).chosen or "none"


@contextmanager
def single_thread() -> Iterator[None]:
    """One CPU thread inside.

    The tensors here are small: on a busy machine, threads that wait for each other make them up to ten times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
