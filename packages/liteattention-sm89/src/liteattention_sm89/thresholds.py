"""The thresholds of a module's calls: one for all, one for each step, or found by a search in every call."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

DEFAULT_THRESHOLD = -10.0
MODES = ("max", "length")


class Search(Protocol):
    """Finds the threshold of a call: `error_of(threshold)` is the error that the next call would make."""

    metric: str

    def search(self, error_of: Callable[[float], float]) -> float: ...


Policy: TypeAlias = "tuple[float, ...] | Search"


def effective(threshold: float, mode: str, keys: int) -> float:
    """The threshold of a single tile, log2 units.

    "max" limits what one dropped key may hold: it is the threshold itself. "length" limits what all dropped keys of a
    row may hold together, as a share of the row's largest probability: `min(0, threshold - log2(keys))`, because at
    most `keys` of them are dropped, each of them at most 2**effective.
    """
    if mode == "max":
        return float(threshold)
    return min(0.0, float(threshold) - math.log2(max(keys, 1)))


def check_mode(mode: str) -> str:
    """The mode: TypeError unless it is a string, ValueError unless it is one of `MODES`."""
    if not isinstance(mode, str):
        raise TypeError(f"threshold_mode: expected a str, got {type(mode).__name__}")
    if mode not in MODES:
        raise ValueError(f"threshold_mode: expected {' or '.join(map(repr, MODES))}, got {mode!r}")
    return mode


def check_range(threshold: float, mode: str) -> None:
    """ValueError for NaN, and in the mode "max" for finite positive thresholds."""
    bounds = ", at most 0 (more negative keeps more) or +-inf" if mode == "max" else ""
    # Comparisons alone: torch.compile cannot trace math.isnan of a symbol.
    if threshold != threshold or (bounds and 0 < threshold < math.inf):
        raise ValueError(f"threshold: expected log2 units{bounds}, got {threshold}")


def check_threshold(threshold: float, mode: str = "max") -> float:
    """The threshold as a float: TypeError unless it is a number, ValueError if it is none of the mode."""
    if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
        raise TypeError(f"threshold: expected a number, got {type(threshold).__name__}")
    value = float(threshold)
    check_range(value, mode)
    return value


def policy_of(config: Any, mode: str = "max") -> Policy:
    """What a config says: of an object with a `threshold`, a sequence of those, or a `Search`. TypeError otherwise.

    ValueError for thresholds that are none of the mode, and for configs that have a `threshold_mode`, another one.
    """
    search = hasattr(config, "search")
    configs = list(config) if isinstance(config, Iterable) and not search else [config]
    if not configs or not all(search or hasattr(item, "threshold") for item in configs):
        raise TypeError(f"config: expected thresholds or a calibration, got {config!r}")
    for item in configs:
        theirs = getattr(item, "threshold_mode", mode)
        if theirs != mode:
            raise ValueError(
                f"config: expected threshold_mode {mode!r}, the module's, got {theirs!r}"
            )
    return config if search else tuple(check_threshold(item.threshold, mode) for item in configs)


def at_step(thresholds: tuple[float, ...], step: int) -> float:
    """The threshold of a step, the last one with a warning if there are fewer."""
    if step >= len(thresholds):
        warnings.warn(
            f"step {step} has no threshold of its own, there are {len(thresholds)}; the last one serves. "
            "Is a reset_skip_state() missing?",
            RuntimeWarning,
            stacklevel=4,
        )
    return thresholds[min(step, len(thresholds) - 1)]
