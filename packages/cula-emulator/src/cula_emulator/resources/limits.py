"""What a kernel may ask of an SM, and an assertion for tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .kernels import KernelResources

REGISTERS_PER_SM = 65_536
# Shared memory that one CTA may ask for, in bytes, static and dynamic together.
SHARED_LIMITS: Mapping[int, int] = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    121: 101_376,
}


def check(
    kernel: KernelResources,
    *,
    expect: Sequence[str] = (),
    spills: bool = False,
    stack: bool = False,
    shared_limit: bool | int = True,
    serialized: bool = False,
) -> None:
    """Asserts that a kernel is what it is meant to be; one AssertionError lists everything that is not.

    expect: instructions that must occur, as for `count`. spills, stack, serialized: whether to allow register spills,
    local memory, serialised WGMMA. shared_limit: True for the architecture's, or bytes, or False. Always: the registers
    of one CTA fit an SM, and every instruction is known.
    """
    wrong = [f"no {name} instruction" for name in expect if not kernel.count(name)]
    if kernel.spills and not spills:
        wrong.append(
            f"spills registers ({kernel.spill_stores} B stored, {kernel.spill_loads} B loaded)"
        )
    if kernel.stack_bytes != 0 and not stack:
        size = "unknown size" if kernel.stack_bytes is None else f"{kernel.stack_bytes} B"
        wrong.append(f"stack of {size}")
    if kernel.serialized and not serialized:
        wrong.append("WGMMA is serialised")
    if kernel.unknown:
        wrong.append(f"instructions without a name: {kernel.unknown}")
    if shared_limit is not False:
        limit = _limit(kernel.arch) if shared_limit is True else shared_limit
        asked = kernel.shared_bytes + (kernel.dynamic_shared_bytes or 0)
        if asked > limit:
            wrong.append(f"{asked} B of shared memory, the limit is {limit}")
    # Registers are handed out in eights per thread.
    if (
        kernel.threads
        and -(-kernel.registers // 8) * 8 * math.prod(kernel.threads) > REGISTERS_PER_SM
    ):
        wrong.append(
            f"{kernel.registers} registers for {math.prod(kernel.threads)} threads do not fit an SM"
        )
    if wrong:
        raise AssertionError(f"{kernel.name} ({kernel.arch}): " + "; ".join(wrong))


def _limit(arch: str) -> int:
    number = int("".join(filter(str.isdigit, arch)))
    if number not in SHARED_LIMITS:
        raise ValueError(
            f"the shared memory of {arch} is not in SHARED_LIMITS; pass shared_limit in bytes"
        )
    return SHARED_LIMITS[number]
