"""Which NVIDIA GPUs the driver shows: no torch needed, so a session can refuse before it installs anything."""

from __future__ import annotations

import ctypes

# Compute capabilities that count as each architecture.
ARCHITECTURES = {
    "sm89": ((8, 9),),
    "sm90": ((9, 0),),
    "sm100": ((10, 0), (10, 3)),
}
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def capabilities() -> list[tuple[int, int]]:
    """(major, minor) of every visible GPU; empty without a driver or without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [
        (
            _attribute(driver, _CAPABILITY_MAJOR, ordinal),
            _attribute(driver, _CAPABILITY_MINOR, ordinal),
        )
        for ordinal in range(count.value)
    ]


def refusal(arch: str, found: list[tuple[int, int]]) -> str | None:
    """Why `arch` cannot be tested on the GPUs found, in one line, or None if it can."""
    if any(capability in ARCHITECTURES[arch] for capability in found):
        return None
    seen = ", ".join(sorted({f"sm{major}{minor}" for major, minor in found}))
    return f"needs an {arch} GPU; this machine has {seen or 'no NVIDIA GPU'}"


def _attribute(driver: ctypes.CDLL, attribute: int, ordinal: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), ordinal):
        raise RuntimeError(f"the driver lists GPU {ordinal} but does not open it")
    if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
        raise RuntimeError(f"the driver does not tell the compute capability of GPU {ordinal}")
    return value.value
