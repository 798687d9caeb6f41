"""The thresholds of a module's calls: one for all, one for each step, or found by a search in every call."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

DEFAULT_THRESHOLD = -10.0


class Search(Protocol):
    """Finds the threshold of a call: `error_of(threshold)` is the error that the next call would make."""

    metric: str

    def search(self, error_of: Callable[[float], float]) -> float: ...


Policy: TypeAlias = "tuple[float, ...] | Search"


def check_threshold(threshold: float) -> float:
    """The threshold as a float: TypeError unless it is a number, ValueError for NaN and finite positive ones."""
    if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
        raise TypeError(f"threshold: expected a number, got {type(threshold).__name__}")
    value = float(threshold)
    if math.isnan(value) or (value > 0 and math.isfinite(value)):
        raise ValueError(
            f"threshold: expected log2 units, at most 0 (more negative keeps more) or +-inf, got {value}"
        )
    return value


def policy_of(config: Any) -> Policy:
    """What a config says: of an object with a `threshold`, a sequence of those, or a `Search`. TypeError otherwise."""
    if hasattr(config, "search"):
        return config
    configs = list(config) if isinstance(config, Iterable) else [config]
    if not configs or not all(hasattr(item, "threshold") for item in configs):
        raise TypeError(f"config: expected thresholds or a calibration, got {config!r}")
    return tuple(check_threshold(item.threshold) for item in configs)


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
