"""Which NVIDIA GPUs the driver shows: no torch needed, so a session can refuse before it installs anything."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

# Compute capabilities that count as each architecture.
ARCHITECTURES = {
    "sm89": ((8, 9),),
    "sm90": ((9, 0),),
    "sm100": ((10, 0), (10, 3)),
}
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76


class Gpu(NamedTuple):
    """What the driver says about a GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int


def found() -> list[Gpu]:
    """Every visible GPU; empty without a driver or without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_gpu(driver, ordinal) for ordinal in range(count.value)]


def capabilities() -> list[tuple[int, int]]:
    """(major, minor) of every visible GPU; empty without a driver or without a GPU."""
    return [gpu.capability for gpu in found()]


def refusal(arch: str, found: list[tuple[int, int]]) -> str | None:
    """Why `arch` cannot be tested on the GPUs found, in one line, or None if it can."""
    if any(capability in ARCHITECTURES[arch] for capability in found):
        return None
    seen = ", ".join(sorted({f"sm{major}{minor}" for major, minor in found}))
    return f"needs an {arch} GPU; this machine has {seen or 'no NVIDIA GPU'}"


def _gpu(driver: ctypes.CDLL, ordinal: int) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    if driver.cuDeviceGet(ctypes.byref(device), ordinal):
        raise RuntimeError(f"the driver lists GPU {ordinal} but does not open it")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device):
            raise RuntimeError(f"the driver does not tell attribute {number} of GPU {ordinal}")
        return value.value

    if driver.cuDeviceGetName(name, len(name), device) or driver.cuDeviceTotalMem_v2(
        ctypes.byref(memory), device
    ):
        raise RuntimeError(f"the driver does not tell name and memory of GPU {ordinal}")
    capability = (attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR))
    return Gpu(name.value.decode(), capability, attribute(_MULTIPROCESSORS), memory.value)
