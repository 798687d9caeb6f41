"""Which implementation serves a call, and why: resolution and explanation.

An implementation that cannot be used stops no call that something else can serve; `explain` shows its reason.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from cula import _discovery, _hints, _implementations
from cula._discovery import Broken, FirstParty
from cula._env import configure_logging, env
from cula._facts import COMMON_FACTS, FACTS, OPS, SERVED_AS
from cula._implementations import Implementation
from cula._installed import how_to_install, importable
from cula_core.spec import SM80_AND_NEWER

# Architectures that `explain` may be asked about wherever it runs.
_ARCHITECTURES = ("cpu", "sm70", "sm72", "sm75", *SM80_AND_NEWER)
# An `impl` for functions that promise a kernel: like "auto", but neither FLA nor the reference is considered.
KERNELS_ONLY = "auto among kernels"

_logger = logging.getLogger("cula")


@dataclass(frozen=True)
class Row:
    """One line of an explanation.

    reason is None when the implementation could serve; backward then names the one whose backward pass would follow it,
    if that is another one. A kernel package of this repository that could be installed has a row too.
    """

    name: str
    priority: int | None
    chosen: bool
    reason: str | None
    backward: str | None = None
    installed: bool = True

    @property
    def verdict(self) -> str:
        if self.chosen:
            return "chosen"
        if not self.installed:
            return "missing"
        return "refused" if self.reason else "available"


@dataclass(frozen=True)
class Explanation:
    """Which implementation serves a problem, and why the others do not. `str()` gives a table."""

    op: str
    function: str
    arch: str
    rows: tuple[Row, ...]
    problem: dict[str, Any] = field(default_factory=dict)

    @property
    def chosen(self) -> str | None:
        """Name of the implementation that serves, or None when there is none."""
        return next((row.name for row in self.rows if row.chosen), None)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        facts = ", ".join(f"{key}={value}" for key, value in self.problem.items())
        head = f"{self.op}.{self.function} on {self.arch}" + (f" ({facts})" if facts else "")
        lines = []
        for row in self.rows:
            note = row.reason or (f"with the backward of {row.backward}" if row.backward else "")
            lines.append(f"  {row.name:<{width}}  {row.verdict:<9}  {note}".rstrip())
        return "\n".join((head, *lines))

    __repr__ = __str__


def _constant(function: Callable[..., str]) -> Callable[..., str]:
    """Marks a function whose result a compiler's trace may take as a constant.

    What `torch.compiler.assume_constant_result` does, without its import of the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Loaded:
    """Holds every resolved callable as an attribute, where a compiler's trace can look it up and guard it."""


class Refused(RuntimeError):
    """No implementation serves a call, or not the one that was asked for."""


_loaded = _Loaded()
_slots: dict[tuple[Any, ...], str] = {}
# Of calls that want kernels alone, whose callers go on to something else.
_refusals: dict[tuple[Any, ...], str] = {}
# Callables of kernel packages, which check their arguments themselves.
self_checking: set[Callable[..., Any]] = set()
_packages: dict[Callable[..., Any], Implementation] = {}  # of these


def resolve(function: str, impl: str, device: torch.device, *facts: Any) -> Callable[..., Any]:
    """The callable that serves a call of a public function. Calls with the same arguments cost one dictionary look-up.

    Args:
        function: a function of `OPS`.
        impl: what the caller asked for.
        device: where the tensors are.
        *facts: values of `COMMON_FACTS`, then of `FACTS[function]`.

    Raises:
        TypeError, ValueError: `impl` (or CULA_IMPL) names no implementation of the op.
        RuntimeError: the implementation asked for, or every one under "auto", refuses; the message says why.
    """
    return getattr(_loaded, _slot((function, impl, device, *facts)))


def to_be_checked(target: Callable[..., Any]) -> bool:
    """Whether a call is to be checked before what `resolve` has chosen gets it: kernel packages check by themselves.

    In a graph that is being compiled every call is, which takes no time later: before torch 2.13 compilers cannot look
    up methods, which the functions of some packages are.
    """
    return torch.compiler.is_compiling() or target not in self_checking


def beside(target: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Another function of the kernel package that `resolve` has chosen; None if it has none of that name."""
    found = _packages.get(target)
    try:
        return None if found is None else _implementations.load(found, name)
    except AttributeError:
        return None


@_constant
def _slot(key: tuple[Any, ...]) -> str:
    try:
        return _slots[key]
    except KeyError:
        return _fill(key)
    except TypeError:
        raise _unhashable(key) from None


def _unhashable(key: tuple[Any, ...]) -> TypeError:
    """Which argument of a call cannot be part of a decision."""
    names = ("function", "impl", "device", *COMMON_FACTS, *FACTS[key[0]])
    for name, value in zip(names, key, strict=True):
        if type(value).__hash__ is None:
            expected = "a str" if name == "impl" else "a bool, an int or None"
            return TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    raise AssertionError(key)


def _fill(key: tuple[Any, ...]) -> str:
    function, impl, device, *facts = key
    if key in _refusals:
        raise Refused(_refusals[key])
    configure_logging()
    op = next(op for op, functions in OPS.items() if function in functions)
    problem = dict(zip((*COMMON_FACTS, *FACTS[function]), facts, strict=True))
    try:
        name, target = _choose(
            op, function, impl, arch_of(device), {"function": function, **problem}
        )
    except Refused as refusal:
        if impl == KERNELS_ONLY:
            _refusals[key] = str(refusal)
        raise
    slot = "_".join((function, name)).replace("-", "_")
    setattr(_loaded, slot, target)
    _slots[key] = slot
    return slot


@_constant
def arch_of(device: torch.device) -> str:
    """The architecture that implementations name: "sm90" and the like, or the type of a device that is not CUDA."""
    return _arch_of(device)


@functools.cache
def _arch_of(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return "sm{}{}".format(*torch.cuda.get_device_capability(device))
    return device.type


def explain(op: str, **problem: Any) -> Explanation:
    """Which implementation would serve an op, and for each other one why not.

    Args:
        op: an op ("kda.prefill"), a public function ("chunk_kda") or both ("kda.chunk_kda").
        **problem: facts about the call; what is left out is taken as unproblematic. `impl`, `arch` ("cpu", "sm90", ...;
            by default that of the current device), `dtype`, `state_dtype`, `head_dim_k`, `head_dim_v`, `tokens`,
            `varlen`, `requires_grad`, and the function's flags by name.

    Returns:
        an `Explanation`; print it for a table, or read `.chosen` and `.rows`.

    Raises:
        TypeError: a fact that the function does not have; the message names the functions that have it, if any.
        ValueError: no such op, no such architecture, or no implementation of the name `impl`.

    Example:
        >>> import cula
        >>> found = cula.explain("chunk_kda", arch="cpu", dtype="bfloat16")
        >>> found.chosen
        'reference'
        >>> [row.verdict for row in found.rows if row.name == "reference"]
        ['chosen']
    """
    op, function = _find_op(op, problem.pop("function", None))
    impl = problem.pop("impl", "auto")
    arch = _known_arch(problem.pop("arch", None))
    known = _hints.facts_of(function)
    if unknown := [name for name in problem if name not in known]:
        raise TypeError(
            f"{unknown[0]}: expected one of {', '.join(known)} for {function}, got an unknown fact"
            f"{_hints.elsewhere(function, unknown)}"
        )
    rows = tuple(_judge(op, function, _wanted(op, impl), arch, {"function": function, **problem}))
    return Explanation(op, function, arch, rows, problem)


def implementations(op: str) -> tuple[Implementation, ...]:
    """Every implementation of an op that is installed or built in, best first."""
    return tuple(found for found in _discovery.discover()[0] if op in found.ops)


def broken() -> tuple[Broken, ...]:
    """Installed kernel packages that cannot be used, with the error."""
    return _discovery.discover()[1]


def refresh() -> None:
    """Forgets everything discovered and decided, so that the next call sees newly installed packages."""
    importlib.invalidate_caches()
    _discovery.discover.cache_clear()
    _implementations.forget()
    _slots.clear()
    _refusals.clear()
    self_checking.clear()
    _packages.clear()
    log_once.cache_clear()


def _choose(
    op: str, function: str, impl: str, arch: str, problem: dict[str, Any]
) -> tuple[str, Callable[..., Any]]:
    wanted = _wanted(op, impl)
    rows: list[Row] = []
    for row in _judge(op, function, wanted, arch, problem):
        if row.chosen:
            found = next(i for i in implementations(op) if i.name == row.name)
            # Asked for, the reference is no surprise; nor is it where there is no GPU.
            fallen = row.name == "reference" and arch.startswith("sm") and wanted == "auto"
            refused = [*rows, *_unusable(op, arch, problem)] if fallen else rows
            because = "".join(
                f"; {other.name} {other.verdict}: {other.reason}" for other in refused
            )
            served = f"{op}.{function} on {arch} is served by {row.name}"
            if fallen:
                log_once(logging.WARNING, f"{served}, which is plain PyTorch and slow{because}")
            elif row.backward:
                log_once(logging.INFO, f"{served} with the backward of {row.backward}{because}")
                slot = f"{row.name}_and_{row.backward}"
                return slot, _implementations.load_with_backward(found, function)
            else:
                log_once(logging.INFO, f"{served}{because}")
            target = _implementations.load(found, function)
            if found.kernel:
                self_checking.add(target)
                _packages[target] = found
            return row.name, target
        rows.append(row)
    raise Refused(_refusal(op, function, wanted, arch, rows, problem))


def _judge(
    op: str, function: str, wanted: str, arch: str, problem: dict[str, Any]
) -> Iterator[Row]:
    """One row per implementation, best first; at most one is chosen. Lazy: nothing after the chosen one is loaded."""
    _check_disabled()
    taken = False
    for found in implementations(op):
        reason, backward = _verdict(found, op, function, arch, wanted, problem)
        chosen = reason is None and not taken
        taken = taken or chosen
        yield Row(found.name, found.priority, chosen, reason, backward)
    yield from _unusable(op, arch, problem)


def _unusable(op: str, arch: str, problem: dict[str, Any]) -> Iterator[Row]:
    """A row per kernel package of this repository that is not installed, then per package that is broken.

    A missing one says how to install it only where that would help.
    """
    dtype = str(problem.get("dtype")).removeprefix("torch.")
    for package in _discovery.FIRST_PARTY:
        if op not in package.ops or importable(package.module):
            continue
        useless = _wrong_arch(package.archs, arch)
        if useless is None and dtype not in ("None", "bfloat16", "float16"):
            useless = f"activations must be bfloat16 or float16, not {dtype}"
        reason = f", and {useless}" if useless else f": {how_to_install(package.name)}"
        yield Row(package.name, None, False, f"not installed{reason}", installed=False)
    for bad in broken():
        yield Row(bad.name, None, False, bad.error)


def _wrong_arch(archs: tuple[str, ...], arch: str) -> str | None:
    if arch in archs:
        return None
    if not arch.startswith("sm"):
        return f"needs a CUDA device ({', '.join(archs)}), the device here is {arch}"
    return f"needs one of {', '.join(archs)}, the device here is {arch}"


def _names(found: Iterable[Implementation | Broken | FirstParty]) -> list[str]:
    return [one.name for one in found]


def _every_name() -> list[str]:
    """What the environment may name: everything discovered, and the packages of this repository, installed or not."""
    return sorted(
        {*_names(_discovery.discover()[0]), *_names(broken()), *_names(_discovery.FIRST_PARTY)}
    )


def _check_disabled() -> None:
    known = _every_name()
    for name in sorted(env().disable):
        if name not in known:
            raise ValueError(f"CULA_DISABLE: expected names of {', '.join(known)}, got {name!r}")


def _wanted(op: str, impl: str) -> str:
    """The name asked for, KERNELS_ONLY or "auto"."""
    if not isinstance(impl, str):
        raise TypeError(f"impl: expected a str, got {type(impl).__name__}")
    if impl == KERNELS_ONLY:
        return impl
    names = _names(implementations(op))
    missing = [package.name for package in _discovery.FIRST_PARTY if op in package.ops]
    if impl == "auto":
        impl = env().impl
        if impl == "auto" or impl in names or impl in missing:
            return impl
        known = _every_name()
        if impl in known:
            return "auto"
        raise ValueError(f"CULA_IMPL: expected 'auto' or one of {', '.join(known)}, got {impl!r}")
    if impl not in names and impl not in missing:
        raise ValueError(
            f"impl: expected 'auto' or one of {', '.join(names)} for {op}, got {impl!r}"
        )
    return impl


def _verdict(
    found: Implementation, op: str, function: str, arch: str, wanted: str, problem: dict[str, Any]
) -> tuple[str | None, str | None]:
    """Why `found` does not serve, or None, and whose backward it would take."""
    if wanted == KERNELS_ONLY:
        if not found.kernel:
            return "not a kernel", None
    elif wanted not in ("auto", found.name):
        return f"{wanted} was asked for", None
    if found.name in env().disable:
        return "disabled by CULA_DISABLE", None
    wrong_arch = None if found.archs is None else _wrong_arch(found.archs, arch)
    if wrong_arch:
        return wrong_arch, None
    asked = {"op": op, "arch": arch, **problem}
    try:
        reason = found.supports(**asked)
        if reason is None:
            _implementations.load(found, function)
        elif problem.get("requires_grad") and _implementations.takes_the_backward_of_fla(
            found, function
        ):
            if "fla" in env().disable:
                without = found.supports(**{**asked, "requires_grad": False})
                return without or f"{reason}; fla: disabled by CULA_DISABLE", None
            reason = _implementations.why_no_backward(found, reason, asked)
            return reason, "fla" if reason is None else None
        return reason, None
    except (
        Exception
    ) as error:  # the code of other packages: whatever it raises is its reason for not serving
        return f"{type(error).__name__}: {error}", None


def _refusal(
    op: str, function: str, wanted: str, arch: str, rows: list[Row], problem: dict[str, Any]
) -> str:
    if wanted == KERNELS_ONLY:
        rows = [row for row in rows if row.reason != "not a kernel"]
        why = (
            "; ".join(f"{row.name}: {row.reason}" for row in rows)
            or "no kernel package for it is installed"
        )
        if problem["requires_grad"]:
            why += f"; an input requires gradients, which {function} gets from fla or the reference"
        return f"no kernel serves {op}.{function} on {arch}: {why}"
    asked = next((row for row in rows if row.name == wanted), None)
    if asked is not None:
        return f"impl={asked.name!r} cannot serve {op}.{function} on {arch}: {asked.reason}"
    why = "; ".join(f"{row.name}: {row.reason}" for row in rows)
    return f"nothing serves {op}.{function} on {arch}: {why}"


@functools.cache
def log_once(level: int, message: str) -> None:
    _logger.log(level, message)


def _find_op(op: str, function: str | None) -> tuple[str, str]:
    if isinstance(op, str):
        for name, functions in OPS.items():
            if op == name:
                if function is None or function in functions:
                    return name, function or functions[0]
                raise ValueError(
                    f"function: expected one of {', '.join(functions)} for {op}, got {function!r}"
                )
            for candidate in functions:
                if op in (candidate, f"{name.split('.')[0]}.{candidate}", f"{name}.{candidate}"):
                    return name, candidate
    names = ", ".join(f"{name} ({', '.join(functions)})" for name, functions in OPS.items())
    served, _ = SERVED_AS.get(op, (None, None)) if isinstance(op, str) else (None, None)
    hint = f"; {op} is served as {served}" if served else ""
    raise ValueError(f"op: expected one of {names}, got {op!r}{hint}")


def _known_arch(arch: str | None) -> str:
    """The architecture that `explain` was asked about; None: that of this machine."""
    here = _current_arch()
    if arch is None:
        return here
    named = (a for found in _discovery.discover()[0] for a in found.archs or ())
    known = tuple(dict.fromkeys((*_ARCHITECTURES, *named, here)))
    if arch not in known:
        raise ValueError(f"arch: expected one of {', '.join(known)}, got {arch!r}")
    return arch


def _current_arch() -> str:
    if torch.cuda.is_available():
        return arch_of(torch.device("cuda", torch.cuda.current_device()))
    return "cpu"
