"""Thresholds per layer and denoising step: found once by calibration, kept in a TOML file, set on a model by name."""

from __future__ import annotations

import json
import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import nn

from .module import LiteAttention, SeqParallelLiteAttention
from .thresholds import DEFAULT_THRESHOLD, check_mode, check_threshold, policy_of

__all__ = [
    "LiteAttentionCalibConfig",
    "LiteAttentionRegistry",
    "LiteAttentionRunConfig",
    "dump",
    "load",
]

METRICS = ("L1", "Cossim", "RMSE")
MODES = ("const", "load", "calib")
# Where calibration starts: above log2 of the number of keys no threshold of the mode "length" differs from the next.
_HIGH = {"max": 0.0, "length": 20.0}


@dataclass(frozen=True)
class LiteAttentionRunConfig:
    """The threshold of a layer, or of one of its steps: log2 units of the mode, which must be that of the module.

    Example:
        >>> from liteattention_sm89 import LiteAttention, LiteAttentionRunConfig
        >>> LiteAttention(config=LiteAttentionRunConfig(-6.0)).threshold
        -6.0
        >>> LiteAttention(config=[LiteAttentionRunConfig(-12.0), LiteAttentionRunConfig(-6.0)])  # by step
        LiteAttention(enable_skipping=True, threshold=-12.0, -6.0)
    """

    threshold: float = DEFAULT_THRESHOLD
    threshold_mode: str = "max"

    def __post_init__(self) -> None:
        check_mode(self.threshold_mode)
        threshold = check_threshold(self.threshold, self.threshold_mode)
        object.__setattr__(self, "threshold", threshold)


@dataclass(frozen=True)
class LiteAttentionCalibConfig:
    """Finds, in every call, the threshold whose list makes the error `target_error` in the next call.

    The error compares the outputs with the list that the threshold writes and with the list of now, on the inputs of
    now. What it says of the next step holds as far as that step's inputs are alike. Every call runs the attention
    twice for each threshold that is tried, and waits for the device.

    target_error: above 0, in units of `metric`. metric: one of `LiteAttention.calc_error`: "L1" (relative), "Cossim" or
    "RMSE". low, high: the thresholds to choose from; high is 0 if it is None, 20 with threshold_mode="length".
    max_steps: the most that are tried. tolerance: how far from the target, as a share of it, an error may be to end the
    search. threshold_mode: that of the module.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import LiteAttention, LiteAttentionCalibConfig
        >>> config = LiteAttentionCalibConfig(target_error=0.01)
        >>> config.search(lambda threshold: 2.0**threshold)  # where the error is 2**threshold
        -6.5625
        >>> attention = LiteAttention(config=config)
        >>> q, k, v = torch.ones(3, 1, 256, 2, 64)  # all alike: the first key tile alone has the same output
        >>> out = attention(q, k, v)
        >>> attention.found_thresholds  # one per step
        [0.0]
    """

    target_error: float = 0.01
    metric: str = "L1"
    low: float = -20.0
    high: float | None = None
    max_steps: int = 30
    tolerance: float = 0.1
    threshold_mode: str = "max"

    def __post_init__(self) -> None:
        check_mode(self.threshold_mode)
        if self.high is None:
            object.__setattr__(self, "high", _HIGH[self.threshold_mode])
        for name in ("target_error", "tolerance"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
            if not 0 < float(value) < math.inf:
                raise ValueError(f"{name}: expected a finite number above 0, got {value}")
        if self.metric not in METRICS:
            raise ValueError(f"metric: expected one of {METRICS}, got {self.metric!r}")
        if not -math.inf < self._range[0] < self._range[1] < math.inf:
            raise ValueError(f"low, high: expected finite, low < high, got {self.low}, {self.high}")
        if isinstance(self.max_steps, bool) or not isinstance(self.max_steps, int):
            raise TypeError(f"max_steps: expected an int, got {type(self.max_steps).__name__}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps: expected at least 1, got {self.max_steps}")

    def search(self, error_of: Callable[[float], float]) -> float:
        """The threshold in [low, high] with the error that is asked for: bisection, because a higher one errs more.

        `high` where even that errs no more. If the errors jump past the target, the highest one tried that errs less;
        if there is none, `low`, with a warning.
        """
        least, most = (
            self.target_error * (1 - self.tolerance),
            self.target_error * (1 + self.tolerance),
        )
        low, high = self._range
        if error_of(high) <= most:
            return high
        good = False
        for _ in range(self.max_steps - 1):
            middle = (low + high) / 2
            error = error_of(middle)
            if least <= error <= most:
                return middle
            if error < least:
                low, good = middle, True
            else:
                high = middle
        if not good:
            warnings.warn(
                f"no threshold down to {self.low} has a {self.metric} error of {self.target_error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return low

    @property
    def _range(self) -> tuple[float, float]:
        low, high = (check_threshold(x, self.threshold_mode) for x in (self.low, self.high))  # type: ignore[arg-type]
        return low, high


Configs = Mapping[str, LiteAttentionRunConfig | Sequence[LiteAttentionRunConfig]]


class LiteAttentionRegistry:
    """The attention modules of a model, by name, and what they are to run with; made by `from_model`.

    modules: name -> `LiteAttention` that takes its thresholds from here. The parts of a `SeqParallelLiteAttention` are
    modules of their own: "NAME.lite_attention.0", ...

    Example:
        >>> import torch
        >>> from liteattention_sm89 import LiteAttention, LiteAttentionRegistry
        >>> model = torch.nn.ModuleDict({"first": LiteAttention(), "second": LiteAttention()})
        >>> registry = LiteAttentionRegistry.from_model(model, mode="const", threshold=-6.0)
        >>> sorted(registry.modules), model["first"].threshold
        (['first', 'second'], -6.0)
    """

    def __init__(
        self, modules: dict[str, LiteAttention], mode: str, filename: Path | None = None
    ) -> None:
        self.modules = modules
        self.mode = mode
        self.filename = filename

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        mode: str | None = None,
        threshold: float | None = None,
        filename: str | os.PathLike[str] | None = None,
        calib_config: LiteAttentionCalibConfig | Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> LiteAttentionRegistry:
        """Finds the `LiteAttention` modules of a model and sets their thresholds.

        Args:
            model: the modules in it must stay the same afterwards.
            mode: "const": `threshold` everywhere, -10 if it is None. "load": the thresholds in `filename`, one for
                each step or one for all; an entry of a `SeqParallelLiteAttention` serves all its parts. "calib": every
                module finds a threshold in every call by `calib_config` (or its fields as a mapping; the defaults if
                None), and `save_if_calib` writes them to `filename`. None: "const", with a warning. What a mode does
                not name is not looked at. Thresholds are of each module's `threshold_mode`, which the file and
                `calib_config` must agree with.
            force: replaces thresholds and configs that modules have of their own. Otherwise those stay, with a warning.

        Raises:
            ValueError: an unknown mode; no filename; a model without modules; a file that is not of the format, lacks a
                module that skips, or names one that is not there; thresholds of another mode than the module's. Then
                no module was changed.
            FileNotFoundError: there is no such file. RuntimeError: "load" on Python 3.10.
        """
        if mode is None:
            warnings.warn("mode: expected one, got None; 'const' serves", stacklevel=2)
            mode = "const"
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
        if mode != "const" and filename is None:
            raise ValueError(f"filename: expected one, for mode {mode!r}, got None")
        found = {name: m for name, m in model.named_modules() if isinstance(m, LiteAttention)}
        if not found:
            raise ValueError("model: expected LiteAttention modules in it, found none")
        path = None if filename is None else Path(filename)
        own = [name for name, module in found.items() if module.has_own_config and not force]
        modules = {name: module for name, module in found.items() if name not in own}
        configs: Mapping[str, Any]
        if mode == "load":
            assert path is not None
            configs = _entries(model, modules, own, load(path), path)
        elif mode == "calib":
            configs = {
                name: calib_config
                if isinstance(calib_config, LiteAttentionCalibConfig)
                else LiteAttentionCalibConfig(
                    **{"threshold_mode": module.threshold_mode} | dict(calib_config or {})
                )
                for name, module in modules.items()
            }
        else:
            value = DEFAULT_THRESHOLD if threshold is None else threshold
            configs = {
                name: LiteAttentionRunConfig(value, module.threshold_mode)
                for name, module in modules.items()
            }
        for name, config in configs.items():
            try:
                policy_of(config, modules[name].threshold_mode)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
        if own:
            warnings.warn(
                f"{', '.join(map(repr, own))}: the module's own threshold or config stays; force=True replaces it",
                stacklevel=2,
            )
        for name, config in configs.items():
            modules[name].configure(config, force=force)
        return cls(modules, mode, path)

    @property
    def config_output(self) -> dict[str, list[LiteAttentionRunConfig]]:
        """What calibration has found so far: name -> one config per step."""
        return {
            name: [
                LiteAttentionRunConfig(threshold, module.threshold_mode)
                for threshold in module.found_thresholds
            ]
            for name, module in self.modules.items()
            if module.found_thresholds
        }

    def save_if_calib(self) -> Path | None:
        """Writes what calibration found to the file, and returns its path; in other modes does nothing.

        Every module has the strictest thresholds of all runs since `from_model`, one per step. ValueError if a module
        that skips was never called; modules with skipping switched off are left out.
        """
        if self.mode != "calib" or self.filename is None:
            return None
        found = self.config_output
        missing = [n for n, m in self.modules.items() if m.enable_skipping and n not in found]
        if missing or not found:
            raise ValueError(
                f"nothing was calibrated for {missing or 'any module'}: run the model first"
            )
        partial = self.filename.with_name(self.filename.name + ".partial")
        partial.write_text(dump(found), encoding="utf-8", newline="\n")
        partial.replace(self.filename)
        return self.filename


def dump(configs: Configs) -> str:
    """The TOML text of name -> config, or configs by step; `load` reads back the same floats.

    The mode is written where it is not "max".
    """
    lines = [
        "# LiteAttention thresholds in log2 units: a table for every layer, or for each of its steps.",
        "",
    ]
    for name, config in configs.items():
        single = isinstance(config, LiteAttentionRunConfig)
        header = f"[{_quoted(name)}]" if single else f"[[{_quoted(name)}]]"
        for item in [config] if isinstance(config, LiteAttentionRunConfig) else config:
            lines += [
                header,
                f'_type = "{type(item).__name__}"',
                f"threshold = {item.threshold!r}",
                *(
                    []
                    if item.threshold_mode == "max"
                    else [f'threshold_mode = "{item.threshold_mode}"']
                ),
                "",
            ]
    return "\n".join(lines)


def load(filename: str | os.PathLike[str]) -> dict[str, Any]:
    """Name -> `LiteAttentionRunConfig`, or a list of them by step, from a file that `dump` describes.

    ValueError if the file is no TOML or holds anything else, RuntimeError on Python 3.10, which cannot read TOML.
    """
    path = Path(filename)
    with path.open("rb") as file:
        try:
            tables = _parsed(file)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return {
        name: [_config(path, name, item) for item in table]
        if isinstance(table, list) and table
        else _config(path, name, table)
        for name, table in tables.items()
    }


def _config(path: Path, name: str, table: Any) -> LiteAttentionRunConfig:
    wanted = {"_type", "threshold"}
    if not isinstance(table, dict) or table.keys() - {"threshold_mode"} != wanted:
        raise ValueError(f"{path}: {name!r}: expected a table of {sorted(wanted)}, got {table!r}")
    if table["_type"] != LiteAttentionRunConfig.__name__:
        raise ValueError(f"{path}: {name!r}: unknown type {table['_type']!r}")
    try:
        return LiteAttentionRunConfig(table["threshold"], table.get("threshold_mode", "max"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name!r}: {error}") from None


def _entries(
    model: nn.Module,
    modules: Mapping[str, LiteAttention],
    own: Sequence[str],
    loaded: Mapping[str, Any],
    path: Path,
) -> dict[str, Any]:
    """Module name -> its entry of the file: its own one, or that of the sequence-parallel module it is a part of."""
    whole = {
        part: name
        for name, module in model.named_modules()
        if isinstance(module, SeqParallelLiteAttention)
        for part in _names_of_parts(name, module)
    }
    entries, missing = {}, []
    for name, module in modules.items():
        entry = name if name in loaded else whole.get(name, name)
        if entry in loaded:
            entries[name] = loaded[entry]
        elif module.enable_skipping:
            missing.append(name)
    unknown = loaded.keys() - modules.keys() - set(own) - set(whole.values())
    if missing:
        raise ValueError(f"{path}: there is no entry for {missing}")
    if unknown:
        raise ValueError(f"{path}: there is no module for the entries {sorted(unknown)}")
    return entries


def _names_of_parts(name: str, module: SeqParallelLiteAttention) -> Iterator[str]:
    for part, child in module.named_modules(prefix=name):
        if isinstance(child, LiteAttention):
            yield part


def _quoted(name: str) -> str:
    # A JSON string is a TOML basic string, but for the one control character that JSON leaves as it is.
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parsed(file: BinaryIO) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:
        raise RuntimeError(
            "reading a thresholds file needs Python 3.11 or newer (tomllib)"
        ) from None
    return tomllib.load(file)
