"""What skipping does to attention that a model really computed: recording calls, replaying them, measuring the error.

    with capture(model.blocks[3].attention, "layer3.pt"):      # records the q, k and v of a run
        pipeline(prompt)

    python -m liteattention_sm89.replay layer3.pt --threshold -4 -8 -12

A file is what `torch.save` makes of {"q": ..., "k": ..., "v": ...}, each a list of `[B, S, H, D]`, one per denoising
step, or one tensor `[steps, B, S, H, D]`; "scale" and "causal" may be there too. A .safetensors file has the stacked
tensors q, k and v, or q.0, q.1, ... one per step, and scale and causal in its metadata.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .calibration import LiteAttentionCalibConfig, LiteAttentionRunConfig
from .module import LiteAttention
from .ops import lite_attention
from .quality import Quality, check_shapes, compare, density
from .state import SkipState, check_int

__all__ = [
    "Capture",
    "Recorder",
    "Trajectory",
    "calibrated",
    "capture",
    "load",
    "replay",
    "threshold_for",
]

Step: TypeAlias = "tuple[Tensor, Tensor, Tensor]"

THRESHOLDS = (-2.0, -4.0, -6.0, -8.0, -10.0, -12.0, -14.0, -16.0)
NAMES = ("q", "k", "v")
_TIMED_CALLS = 10


@dataclass
class Trajectory:
    """What one module did, step by step.

    density, thresholds: of every step; no threshold for a module that does not skip. quality: of the steps that were
    measured. times: microseconds of every step, if timed. direction and mask: what the last step was called with; 1 and
    None for a module that does not skip. The mask is the module's buffer, which its next call overwrites.
    """

    density: list[float] = field(default_factory=list)
    thresholds: list[float | None] = field(default_factory=list)
    quality: dict[int, Quality] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    direction: int = 1
    mask: Tensor | None = None

    @property
    def last(self) -> Quality:
        """Of the last step that was measured."""
        return self.quality[max(self.quality)]

    @property
    def worst(self) -> Quality:
        """Of the step with the largest relative L1 error."""
        return max(self.quality.values(), key=lambda quality: (math.isnan(quality.l1), quality.l1))

    @property
    def mean_density(self) -> float:
        return sum(self.density) / len(self.density)


@torch.no_grad()
def replay(
    steps: Sequence[Step],
    modules: Mapping[str, LiteAttention],
    *,
    scale: float | None = None,
    causal: bool = False,
    refresh: int | None = None,
    every: int = 1,
    deep: bool = False,
    device: torch.device | str | None = None,
    timer: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[str, Trajectory]:
    """Runs every module over the steps, from a reset on, and compares what it computes with dense attention.

    refresh: the modules are reset again before every step whose number is a multiple of it. every: measures the last
    step and every `every`-th before it; `deep` asks for all of `Quality` in the last. device: where each step is moved
    to. timer: returns the microseconds of a call, and is given each step as it ran. RuntimeError for a module that
    calibrates: see `calibrated`.
    """
    check_int("every", every, 1)
    if refresh is not None:
        check_int("refresh", refresh, 1)
    _batch(steps)
    found = {name: Trajectory() for name in modules}
    for number, step in enumerate(steps):
        q, k, v = _moved(step, device)
        outs = {}
        for name, module in modules.items():
            if number == 0 or (refresh is not None and number % refresh == 0):
                module.reset_skip_state()
            track = found[name]
            skips = module.enable_skipping
            track.thresholds.append(module.threshold if skips else None)
            track.direction = module.state.direction if skips else 1
            outs[name] = module(q, k, v, scale, causal=causal)
            track.mask = module.read_mask if skips else None
            track.density.append(density(track.mask, q, k, causal=causal))
            if timer is not None:
                track.times.append(timer(_call((q, k, v), track, scale, causal)))
        if (len(steps) - 1 - number) % every == 0:
            results = [(out, found[name].mask) for name, out in outs.items()]
            whole = deep and number + 1 == len(steps)
            measured = compare(q, k, v, results, scale=scale, causal=causal, deep=whole)
            for name, quality in zip(outs, measured):
                found[name].quality[number] = quality
    return found


def _call(step: Step, track: Trajectory, scale: float | None, causal: bool) -> Callable[[], Any]:
    """The call as it ran, without a state that it would change."""
    options: dict[str, Any] = {"threshold": track.thresholds[-1], "direction": track.direction}
    return lambda: lite_attention(*step, track.mask, scale=scale, causal=causal, **options)


@torch.no_grad()
def calibrated(
    steps: Sequence[Step],
    target: float,
    *,
    scale: float | None = None,
    causal: bool = False,
    device: torch.device | str | None = None,
    **options: Any,
) -> list[LiteAttentionRunConfig]:
    """The thresholds, one per step, that `LiteAttentionCalibConfig` finds for a relative L1 error of `target`.

    Its target is for what each step's list adds, so that the errors of the steps add up. options: its further ones.
    """
    config = LiteAttentionCalibConfig(target_error=target, **options)
    module = LiteAttention(config=config, max_batch_size=_batch(steps))
    for step in steps:
        module(*_moved(step, device), scale, causal=causal)
    return [LiteAttentionRunConfig(threshold) for threshold in module.found_thresholds]


@torch.no_grad()
def threshold_for(
    steps: Sequence[Step],
    target: float,
    *,
    scale: float | None = None,
    causal: bool = False,
    device: torch.device | str | None = None,
    **options: Any,
) -> float:
    """The one threshold at which the worst of the steps has a relative L1 error of `target`, by bisection.

    Compared with dense attention by the same kernel. options: further ones of `LiteAttentionCalibConfig`, whose search
    and whose tolerance serve.
    """
    config = LiteAttentionCalibConfig(target_error=target, **options)
    dense = LiteAttention(enable_skipping=False, max_batch_size=_batch(steps))

    def worst_error(threshold: float) -> float:
        module = LiteAttention(threshold=threshold, max_batch_size=_batch(steps))
        worst = 0.0
        for step in steps:
            q, k, v = _moved(step, device)
            out, exact = (attend(q, k, v, scale, causal=causal) for attend in (module, dense))
            error = module.calc_error(out, exact)["L1"]
            if not error <= target * (1 + config.tolerance):
                return error
            worst = max(worst, error)
        return worst

    return config.search(worst_error)


def _batch(steps: Sequence[Step]) -> int:
    if not steps:
        raise ValueError("steps: expected at least one, got none")
    return max(len(q) for q, _, _ in steps)


def _moved(step: Step, device: torch.device | str | None) -> Step:
    q, k, v = (x if device is None else x.to(device) for x in step)
    return q, k, v


@dataclass
class Capture:
    """Recorded calls: q, k and v of every step, `[B, S, H, D]`, and how they were attended."""

    steps: list[Step]
    scale: float | None = None
    causal: bool = False

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a .pt file. ValueError if there are no steps, or of different shapes or dtypes."""
        _check_steps(self.steps, "steps")
        lists = {name: [step[i] for step in self.steps] for i, name in enumerate(NAMES)}
        torch.save({**lists, "scale": self.scale, "causal": self.causal}, path)


def _check_steps(steps: Sequence[Step], where: str) -> None:
    """ValueError unless there are steps, and all of them are like the first, which is a legal one."""
    if not steps:
        raise ValueError(f"{where}: expected at least one step, got none")
    for number, step in enumerate(steps):
        if len({x.dtype for x in step}) != 1 or not step[0].dtype.is_floating_point:
            got = ", ".join(str(x.dtype) for x in step)
            raise ValueError(
                f"{where}: expected q, k and v of one floating-point dtype, got {got} in step {number}"
            )
        try:
            check_shapes(*step)
        except ValueError as error:
            raise ValueError(f"{where}: step {number}: {error}") from None
        for name, x, first in zip(NAMES, step, steps[0]):
            if x.shape != first.shape or x.dtype != first.dtype:
                raise ValueError(
                    f"{where}: expected all steps alike, got {name} {list(first.shape)} {first.dtype} and, in "
                    f"step {number}, {list(x.shape)} {x.dtype}"
                )


class Recorder:
    """Keeps copies, in main memory, of what a `LiteAttention` module is called with: a context manager.

    with Recorder(module) as recorder:
        pipeline(prompt)
    recorder.capture().save("layer3.pt")

    state: only calls with this argument `state` are kept, by default those without one: one branch of guidance.
    limit: so many calls at most, the first ones. Ranges of `must_do_list` and `must_skip_list` are not recorded. A call
    with packed sequences, or with another scale or causality than the first one, is a ValueError.
    """

    def __init__(
        self, module: LiteAttention, state: SkipState | None = None, limit: int | None = None
    ) -> None:
        if not isinstance(module, LiteAttention):
            raise TypeError(f"module: expected a LiteAttention, got {type(module).__name__}")
        if state is not None and not isinstance(state, SkipState):
            raise TypeError(f"state: expected a SkipState or None, got {type(state).__name__}")
        if limit is not None:
            check_int("limit", limit, 1)
        self.module, self.state, self.limit = module, state, limit
        self.steps: list[Step] = []
        self._how: tuple[float | None, bool] | None = None
        self._hook: Any = None

    def __enter__(self) -> Recorder:
        if self._hook is not None:
            raise RuntimeError("Recorder: it is recording already")
        self._hook = self.module.register_forward_pre_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._hook = None

    def capture(self) -> Capture:
        """What was recorded so far."""
        scale, causal = self._how or (None, False)
        return Capture(list(self.steps), scale, causal)

    def _record(self, module: LiteAttention, args: tuple, kwargs: dict[str, Any]) -> None:
        call = _FORWARD.bind(module, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if given["state"] is not self.state:
            return
        if self.limit is not None and len(self.steps) >= self.limit:
            return
        if given["cu_seqlens_q"] is not None or given["cu_seqlens_k"] is not None:
            raise ValueError("cu_seqlens_q, cu_seqlens_k: packed calls cannot be recorded")
        how = given["scale"], bool(given["causal"])
        if self._how not in (None, how):
            raise ValueError(f"scale, causal: expected {self._how} as in the first call, got {how}")
        self._how = how
        tensors = (given[name].detach() for name in ("query", "key", "value"))
        q, k, v = (x.to("cpu", copy=True) for x in tensors)
        self.steps.append((q, k, v))


_FORWARD = inspect.signature(LiteAttention.forward)


@contextlib.contextmanager
def capture(
    module: LiteAttention, path: str | os.PathLike[str], **options: Any
) -> Iterator[Recorder]:
    """Records the calls of a module while the block runs and then saves them; `options` are those of `Recorder`."""
    with Recorder(module, **options) as recorder:
        yield recorder
    recorder.capture().save(path)


def load(path: str | os.PathLike[str]) -> Capture:
    """Reads a .pt (.pth) or .safetensors file, memory-mapped; the module's docstring has the format.

    FileNotFoundError if there is no file, ValueError if it is of another kind or does not hold what is expected.
    """
    path = Path(path)
    readers = {".pt": _read_torch, ".pth": _read_torch, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path}: expected a file ending in {', '.join(readers)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    content = readers[path.suffix](path)
    if missing := [name for name in NAMES if name not in content]:
        raise ValueError(f"{path}: expected q, k and v, got no {', '.join(missing)}")
    columns = [_list_of_steps(content[name], f"{path}: {name}") for name in NAMES]
    if len({len(column) for column in columns}) != 1:
        counts = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"{path}: expected as many steps of q, k and v, got {counts}")
    scale, causal = content.get("scale"), content.get("causal", False)
    if isinstance(scale, bool) or not isinstance(scale, (float, int, type(None))):
        raise ValueError(f"{path}: expected a number or None for scale, got {scale!r}")
    if not isinstance(causal, bool):
        raise ValueError(f"{path}: expected a bool for causal, got {causal!r}")
    steps = [(q, k, v) for q, k, v in zip(*columns)]
    _check_steps(steps, str(path))
    return Capture(steps, scale, causal)


def _list_of_steps(value: Any, where: str) -> list[Tensor]:
    if isinstance(value, Tensor):
        if value.dim() == 5:
            return list(value.unbind(0))
        value = [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(x, Tensor) for x in value):
        raise ValueError(f"{where}: expected a list of tensors or a tensor [steps, B, S, H, D]")
    return list(value)


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path}: expected a file of torch.save with tensors: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dict with q, k and v, got {type(content).__name__}")
    return content


_SAFE_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def _read_safetensors(path: Path) -> dict[str, Any]:
    """The format: eight bytes for the length of a JSON header, the header, and the bytes of the tensors."""
    size = path.stat().st_size
    content: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        how = header.pop("__metadata__", {})
        data = torch.from_file(str(path), False, size, dtype=torch.uint8)[8 + length :]
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            dtype = _SAFE_DTYPES.get(entry["dtype"])
            if name.partition(".")[0] not in NAMES:
                continue
            if dtype is None:
                raise ValueError(
                    f"{name} is {entry['dtype']}, not one of {', '.join(_SAFE_DTYPES)}"
                )
            if end - start != math.prod(entry["shape"]) * dtype.itemsize or end > len(data):
                raise ValueError(f"{name} has a size that does not fit its shape")
            raw = data[start:end]
            aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
            content[name] = aligned.view(dtype).view(entry["shape"])
        if "scale" in how and how["scale"] != "None":
            content["scale"] = float(how["scale"])
        content["causal"] = {"true": True, "false": False}[how.get("causal", "false").lower()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a safetensors file with q, k and v: {error}") from None
    for name in NAMES:
        if name not in content and f"{name}.0" in content:
            numbers = range(sum(key.startswith(name + ".") for key in content))
            if any(f"{name}.{i}" not in content for i in numbers):
                raise ValueError(f"{path}: expected {name}.0, {name}.1, ... without gaps")
            content[name] = [content[f"{name}.{i}"] for i in numbers]
    return content


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m liteattention_sm89.replay",
        description="Runs skip-list attention over recorded q, k and v and prints what it drops and what that costs.",
    )
    parser.add_argument("file", help=".pt or .safetensors; see the docstring of this module")
    parser.add_argument(
        "--threshold", type=float, nargs="+", default=list(THRESHOLDS), help="log2 units, at most 0"
    )
    parser.add_argument(
        "--target", type=float, nargs="+", default=[], metavar="L1",
        help="also the threshold at which the worst step has this relative L1 error",
    )  # fmt: skip
    parser.add_argument("--refresh", type=int, help="visit all tiles again every so many steps")
    parser.add_argument("--causal", action="store_true", default=None)
    parser.add_argument("--scale", type=float, help="by default the file's, or D ** -0.5")
    parser.add_argument("--device", help="by default cuda if there is one, or else cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    try:
        for line in _report(args):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    except (OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _report(args: argparse.Namespace) -> Iterator[str]:
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected cpu, torch sees no CUDA device")
    recorded = load(args.file)
    steps = recorded.steps
    attend: dict[str, Any] = {
        "scale": recorded.scale if args.scale is None else args.scale,
        "causal": recorded.causal if args.causal is None else args.causal,
        "device": device,
    }
    q, k, _ = steps[0]
    most = q.shape[0]
    modules = {f"{t:g}": LiteAttention(threshold=t, max_batch_size=most) for t in args.threshold}
    yield (
        f"{len(steps)} steps of q {list(q.shape)}, k {list(k.shape)}, {str(q.dtype).removeprefix('torch.')}"
        + ", causal" * attend["causal"]
    )
    for threshold in (threshold_for(steps, target, **attend) for target in args.target):
        modules[f"{threshold:.2f}"] = LiteAttention(threshold=threshold, max_batch_size=most)
    timer = _device_time if device.type == "cuda" else None
    modules["dense"] = LiteAttention(enable_skipping=False, max_batch_size=most)
    tracks = replay(steps, modules, refresh=args.refresh, timer=timer, **attend)
    columns = ["threshold", "density", "last", "L1", "worst", "L2", "dropped", "p99"]
    columns += ["us/step", "last", "speedup"] if timer else []
    yield "".join(f"{column:>11}" for column in columns)
    for name, track in tracks.items():
        last, worst = track.last, track.worst
        cells = [f"{track.mean_density:.4f}", f"{last.density:.4f}"]
        cells += [f"{x:.3%}" for x in (last.l1, worst.l1, last.l2, last.dropped, last.dropped_p99)]
        if timer:
            dense = tracks["dense"].times
            cells += [f"{sum(track.times) / len(steps):.0f}", f"{track.times[-1]:.0f}"]
            cells += [f"{sum(dense) / sum(track.times):.2f}"]
        yield "".join(f"{cell:>11}" for cell in [name, *cells])
    yield (
        "density: mean over the steps, then the last step. L1, L2: relative to dense attention in float32, last step; "
        "worst: the largest L1 of a step. dropped: probability on tiles left out, last step, mean and 99th percentile."
        + " speedup: of all steps together, over dense by the same kernel."
        * (timer is not None)
    )


def _device_time(call: Callable[[], Any]) -> float:
    """Microseconds of a call on the current device, back to back."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_TIMED_CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / _TIMED_CALLS


if __name__ == "__main__":
    sys.exit(main())
