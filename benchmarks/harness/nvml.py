"""The clock and the energy counter of the GPU that torch uses, from the driver's management library.

The library counts all GPUs of a machine, whichever of them CUDA_VISIBLE_DEVICES shows, so the GPU is found by its UUID.
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1


class Unreachable(RuntimeError):
    """The library, or the GPU in it, cannot be opened, or does not tell what is asked."""


class Meter:
    """Reads the GPU of a UUID, as torch writes it: hexadecimal digits, with or without GPU- before them."""

    def __init__(self, uuid: str) -> None:
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise Unreachable(f"{LIBRARY}: {error}") from None
        self._device = ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._device))
        self.sm_clock_mhz()

    def sm_clock_mhz(self) -> int:
        """The clock of the multiprocessors now."""
        value = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._device, SM_CLOCK, ctypes.byref(value))
        return value.value

    def joules(self) -> float | None:
        """What the whole card has used since the driver was loaded, or None where it does not count that.

        The counter moves in steps of many milliseconds.
        """
        value = ctypes.c_ulonglong()
        try:
            self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(value))
        except Unreachable:
            return None
        return value.value / 1e3

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise Unreachable(f"{name}: error {code}")


def current() -> Meter:
    """The meter of the first GPU that torch sees; Unreachable says why there is none."""
    import torch

    return Meter(str(torch.cuda.get_device_properties(0).uuid))
