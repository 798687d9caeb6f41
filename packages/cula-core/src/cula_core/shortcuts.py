"""Calls that are like earlier ones go straight to their kernels.

What a public function does before it launches (checks, plans, finding kernels) depends on dtypes, shapes, strides,
alignment and flags, but on no values of CUDA tensors. So when a call comes for the second time as far as these go, it
is written down: which tensors it allocates, which torch functions it calls, which kernels it launches with what. From
then on such a call runs that list alone, on its own tensors.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

try:  # part of torch.compile, and not of torch's promises
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # pragma: no cover
    TensorGuards = None  # type: ignore[assignment, misc]
try:  # takes half the time of what torch promises
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]
except ImportError:  # pragma: no cover

    def _empty_strided_cuda(
        sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")


_P = ParamSpec("_P")
_R = TypeVar("_R")
LIMIT = 512  # lists of a function; the oldest make room
# What the functions of a list may ask of tensors, because calls with the same answers have the same list.
_FACTS = frozenset(
    ("__get__", "__len__", "stride", "dim", "size", "numel", "data_ptr", "element_size", "is_contiguous", "get_device",
     "storage_offset", "is_floating_point")
)  # fmt: skip
_ALLOCATIONS = frozenset((torch.empty, torch.empty_like, Tensor.new_empty))
# What an argument or a result may be beside tensors and tuples of them.
_VALUES = frozenset(
    (float, str, torch.dtype, torch.device, torch.memory_format, torch.Size, slice, type(Ellipsis))
)
_UNKNOWN: tuple[tuple, list[Tensor]] = ((), [])
_NEW, _ONCE = 0, 1
_MISSED = object()
_here = threading.local()


class _Written(NamedTuple):
    """The list of a call as a function of its tensors, and as `_alike` says."""

    short: Callable[..., Any]
    alike: Callable[[tuple, dict[str, Any]], Any] | None


class Known(dict[tuple, "_Written | int | None"]):
    """Lists by the facts of a call: None if it cannot be written down, `_ONCE` if it came once."""

    latest: Callable[[tuple, dict[str, Any]], Any] | None = None  # to be tried first

    def clear(self) -> None:
        super().clear()
        self.latest = None


_every: list[Known] = []
# Tests without a GPU put other values here.
_first_device = 0
_alignment = 128  # of addresses, the most that a function may ask for
_current_device: Callable[[], int] = torch.cuda.current_device
_on_device: Callable[[int], AbstractContextManager[object]] = torch.cuda.device
_empty_strided: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] = _empty_strided_cuda


class Launcher:
    """What launches a kernel, and tells a list that is being written of it."""

    __slots__ = ("_launch",)

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __call__(self, *arguments: object) -> None:
        self._launch(*arguments)
        steps = getattr(_here, "steps", None)
        if steps is not None:
            steps.launched(self._launch, arguments)


def shortcut(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that does nothing on a GPU but by torch functions and by `Launcher`s.

    Arguments are tensors, tuples, and values that can be hashed. A call goes the long way, by the function itself,
    where tensors are not all on one CUDA device, are of another class or want a gradient, where something is being
    traced, or where the function looks at values. The device of the tensors is the current one during a call.
    `shortcuts` of the decorated function holds what was written down.
    """
    known = Known()
    _every.append(known)
    lock = threading.Lock()

    @functools.wraps(function)
    def call(*arguments: _P.args, **named: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return function(*arguments, **named)
        latest = known.latest
        if latest is not None:
            result = latest(arguments, named)
            if result is not _MISSED:
                return result
        facts, tensors = _facts(arguments, named)
        try:
            written = known.get(facts, _NEW)
        except TypeError:  # an argument has no hash
            written = None
        if isinstance(written, _Written):
            known.latest = written.alike
            return written.short(*tensors)
        if not facts:
            device = _elsewhere(arguments, named)
            if device is not None:
                with _on_device(device):
                    return call(*arguments, **named)
        # A tensor that is passed twice could not be told from two.
        if written is _ONCE and len(set(map(id, tensors))) == len(tensors):
            steps = _Steps(tensors)
            result = steps.write(function, arguments, named)
            short = steps.compiled(result)
            alike = short and _alike(short, arguments, named, tensors, steps.addressed)
            known[facts] = short and _Written(short, alike)
            return result
        result = function(*arguments, **named)
        if written is _NEW and facts:
            with lock:
                if len(known) >= LIMIT:
                    del known[next(iter(known))]
                known[facts] = _ONCE
        return result

    call.shortcuts = known  # type: ignore[attr-defined]
    return call


def forget() -> None:
    """Forgets the lists of all functions."""
    for known in _every:
        known.clear()


def _facts(arguments: tuple, named: dict[str, Any]) -> tuple[tuple, list[Tensor]]:
    """Returns all of a call that its checks and plans depend on, nothing if that is more than we know; its tensors."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _UNKNOWN
    gradients = torch.is_grad_enabled()
    facts: list[object] = [gradients, *named]
    tensors: list[Tensor] = []
    device = None
    waiting = [*arguments, *named.values()]
    try:
        for x in waiting:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                where = x.get_device()
                if where != device:
                    if device is not None or where < _first_device or where != _current_device():
                        return _UNKNOWN
                    device = where
                if gradients and x.requires_grad:
                    return _UNKNOWN
                past = x.data_ptr() % _alignment
                facts += x.dtype, x.shape, x.stride(), past % 16 or past and 16
                tensors.append(x)
            elif isinstance(x, tuple):
                facts += kind, len(x)
                waiting += x
            else:
                facts += kind, x
    except RuntimeError:  # a tensor without an address
        return _UNKNOWN
    return _UNKNOWN if device is None else ((device, *facts), tensors)


def _elsewhere(arguments: tuple, named: dict[str, Any]) -> int | None:
    """Returns the device of a call's first tensor if that is on another CUDA device than the current one."""
    for x in (*arguments, *named.values()):
        if type(x) is Tensor or type(x) is Parameter:
            where = x.get_device()
            return where if where >= _first_device and where != _current_device() else None
    return None


def _alike(
    short: Callable[..., Any],
    arguments: tuple,
    named: dict[str, Any],
    tensors: list[Tensor],
    addressed: set[int] | None,
) -> Callable[[tuple, dict[str, Any]], Any] | None:
    """Returns what makes such a call, or `_MISSED` one of other facts, in less time than it takes to ask for them.

    It compares all arguments with those of a call that was made, torch the tensors. Nothing where there are tuples.
    addressed: as `_Steps.addressed`.
    """
    if TensorGuards is None:
        return None
    places = [f"a{i}" for i in range(len(arguments))], [f"n{i}" for i in range(len(named))]
    space: dict[str, object] = {
        "short": short,
        "missed": _MISSED,
        "names": [*named],
        "same": TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        "gradients": torch.is_grad_enabled(),
        "gradients_now": torch.is_grad_enabled,
        "device_now": _current_device,
        "modes": torch._C._len_torch_function_stack,
        "modes_of_dispatch": torch._C._len_torch_dispatch_stack,
    }
    conditions, given = [], []
    for place, x in zip(places[0] + places[1], (*arguments, *named.values()), strict=True):
        if isinstance(x, Tensor):
            given.append(place)
        elif isinstance(x, tuple):
            return None
        elif x is None or type(x) is bool:
            conditions.append(f"{place} is {x}")
        else:
            space |= {f"{place}_kind": type(x), f"{place}_value": x}
            conditions.append(f"type({place}) is {place}_kind and {place} == {place}_value")
    past = {
        place: x.data_ptr() % _alignment
        for place, x in zip(given, tensors, strict=True)
        if addressed is None or id(x) in addressed or x.data_ptr() % _alignment
    }
    aligned = " | ".join(f"{place}.data_ptr()" for place, x in past.items() if not x)
    conditions += [
        f"same({', '.join(given)})",
        "gradients_now() is gradients",
        f"device_now() == {tensors[0].get_device()}",
        "not modes()",
        "not modes_of_dispatch()",
        *([f"not ({aligned}) % {_alignment}"] if aligned else []),
        *(f"{place}.data_ptr() % {_alignment} == {x}" for place, x in past.items() if x),
    ]
    exec(
        f"""def alike(arguments, named):
    if len(arguments) != {len(arguments)} or [*named] != names:
        return missed
    {"".join(place + ", " for place in places[0]) or "()"} = arguments
    {"".join(place + ", " for place in places[1]) or "()"} = named.values()
    if {" and ".join(conditions)}:
        try:
            return short({", ".join(given)})
        except {"()" if addressed is None else "ValueError"}:
            pass
    return missed""",
        space,
    )
    return space["alike"]  # type: ignore[return-value]


class _Steps(TorchFunctionMode):
    """The list of what a call does, while it is being written: a line of Python for each step."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._count = len(tensors)
        self._kept = list(tensors)  # while a tensor lives, none other has its id
        self._asked: set[int] = set()
        self._effects = 0
        self._names = {id(x): f"t{i}" for i, x in enumerate(tensors)}
        self._head = ", ".join(self._names.values())
        self._lines: list[str] = []
        self._space: dict[str, object] = {}
        self._possible = True

    @property
    def addressed(self) -> set[int] | None:
        """Which arguments' addresses the call has asked for, by their ids; None if that does not tell enough.

        It does where a call does nothing but launch one kernel: that refuses by itself, with a ValueError and before
        anything is changed, an address that it was not compiled for.
        """
        known = self._asked <= set(map(id, self._kept[: self._count]))
        return self._asked if known and self._effects == 1 else None

    def write(self, function: Callable[..., Any], arguments: tuple, named: dict[str, Any]) -> Any:
        """Makes a call, notes its steps and returns its result."""
        _here.steps = self
        try:
            with self:
                return function(*arguments, **named)
        finally:
            _here.steps = None

    def compiled(self, result: Any) -> Callable[..., Any] | None:
        """Returns what makes such a call from its tensors, if that is possible."""
        text = self._text(result)
        if not self._possible:
            return None
        self._lines.append(f"return {text}")
        # Memory is given back where the function itself would have: pieces of a call share it one after the other.
        last = {
            name: i for i, line in enumerate(self._lines) for name in re.findall(r"\bt\d+\b", line)
        }
        for name, i in last.items():
            if name not in self._head.split(", ") and i < len(self._lines) - 1:
                self._lines[i] += f"; del {name}"
        body = "".join(f"    {line}\n" for line in self._lines)
        space: dict[str, Any] = dict(self._space)
        exec(f"def short({self._head}):\n{body}", space)
        return space["short"]

    def launched(self, launch: Callable[..., None], arguments: tuple) -> None:
        """Notes that a kernel was launched."""
        self._line((), launch, arguments, {})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and self._names.get(id(found)) and not _writes(func, kwargs):
            pass  # nothing had to be done, as by x.float() where x is float32
        elif func in _ALLOCATIONS and found.device == self._kept[0].device:
            self._allocate(found)
        elif isinstance(found, Tensor):
            self._line((found,), func, args, kwargs or {})
        elif type(found) in (tuple, list) and all(isinstance(x, Tensor) for x in found):
            self._line(found, func, args, kwargs or {}, several=True)
        elif func is Tensor.data_ptr:
            self._asked.add(id(args[0]))
        elif func.__name__ not in _FACTS:
            self._possible = False
        return found

    def _allocate(self, found: Tensor) -> None:
        """Writes an allocation as torch makes it fastest."""
        facts = tuple(found.shape), found.stride(), found.dtype
        values = ", ".join(map(self._kept_as, facts))
        self._lines.append(f"{self._new(found)} = {self._kept_as(_empty_strided)}({values})")

    def _new(self, x: Tensor) -> str:
        self._kept.append(x)
        return self._names.setdefault(id(x), f"t{len(self._kept) - 1}")

    def _line(
        self,
        found: Sequence[Tensor],
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        several: bool = False,
    ) -> None:
        """Writes a line. found: what comes back, which is no argument yet; several: as a tuple."""
        self._effects += 1
        texts = [self._text(x) for x in args]
        texts += [f"{name}={self._text(x)}" for name, x in kwargs.items()]
        call = f"{self._kept_as(func)}({', '.join(texts)})"
        names = "".join(f"{self._new(x)}, " for x in found)
        if not found:
            self._lines.append(call)
        else:
            self._lines.append(f"{names if several else names[:-2]} = {call}")

    def _text(self, x: Any) -> str:
        """Returns what stands for a value in a line."""
        if isinstance(x, Tensor):
            self._possible = self._possible and id(x) in self._names
            return self._names.get(id(x), "")
        if type(x) in (tuple, list):
            return f"({''.join(self._text(item) + ', ' for item in x)})"
        if x is None or type(x) in (bool, int):
            return repr(x)
        # Anything else might hold a tensor of this call.
        self._possible = self._possible and type(x) in _VALUES
        return self._kept_as(x)

    def _kept_as(self, x: object) -> str:
        name = f"c{len(self._space)}"
        self._space[name] = x
        return name


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether a torch function writes to a tensor that it returns."""
    return func.__name__.endswith("_") or bool(kwargs and kwargs.get("out") is not None)
