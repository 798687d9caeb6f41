"""Which implementation serves a call: discovery, resolution and explanation.

Kernel packages advertise a `_spec` module in the entry-point group "cula.kernels". The import names of the first-party
packages are probed as well, because a source tree on PYTHONPATH has no metadata. A spec that cannot be used is kept
with its error and shown by `explain`; it never stops a call that something else can serve.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import torch

from cula._env import configure_logging, env

GROUP = "cula.kernels"
FIRST_PARTY = (
    "cula_lightning_decode",
    "cula_lightning_sm90",
    "cula_cp_sm90",
    "cula_kda_sm100",
    "liteattention_sm89",
)
OPS: dict[str, tuple[str, ...]] = {
    "lightning.decode": ("linear_attention_decode", "linear_attention_commit"),
    "lightning.prefill": ("lightning_attn_fwd", "lightning_attn_fwd_varlen", "chunk_simple_gla"),
    "lightning.gated_delta_rule": ("chunk_gated_delta_rule",),
    "kda.prefill": ("chunk_kda",),
    "kda.decode": ("fused_recurrent_kda",),
    "lite.attention": ("lite_attention",),
}
# What a decision depends on beside the device: facts about every call, then the flags of each function by name.
COMMON_FACTS = ("dtype", "head_dim_k", "head_dim_v", "requires_grad", "state_dtype")
_DELTA_RULE_FACTS = (
    "gate_dtype",
    "beta_dtype",
    "varlen",
    "group",
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "state_v_first",
)
# decay_requires_grad: whether the constant decay of a head does; checkpoints: whether states on the way are written.
_PREFILL_FACTS = (
    "decay_requires_grad",
    "use_qk_l2norm_in_kernel",
    "exact_state",
    "checkpoints",
    "num_splits",
)
FACTS: dict[str, tuple[str, ...]] = {
    "linear_attention_decode": ("tokens", "state_v_first", "commit", "stochastic_rounding"),
    "linear_attention_commit": ("tokens", "state_v_first", "stochastic_rounding"),
    "lightning_attn_fwd": (
        "group",
        "initial_state",
        "output_final_state",
        "state_v_first",
        *_PREFILL_FACTS,
    ),
    "lightning_attn_fwd_varlen": (
        "varlen",
        "group",
        "state_pool",
        "output_final_state",
        "state_v_first",
        "update_state_pool",
        *_PREFILL_FACTS,
    ),
    "chunk_simple_gla": (
        "gate_dtype",
        "head_decay",
        "varlen",
        "group",
        "initial_state",
        "output_final_state",
        "state_v_first",
        *_PREFILL_FACTS,
    ),
    "chunk_gated_delta_rule": _DELTA_RULE_FACTS,
    "chunk_kda": (
        *_DELTA_RULE_FACTS,
        "safe_gate",
        "lower_bound",
        "return_intermediate_states",
        "use_intracard_cp",
    ),
    "fused_recurrent_kda": (*_DELTA_RULE_FACTS, "lower_bound"),
    "lite_attention": ("block_m", "block_n", "must_do"),
}
# Functions whose kernels, if they have no backward, are completed by FLA's, with the function that is the forward then.
_BACKWARD_OF_FLA = {
    **dict.fromkeys(OPS["lightning.prefill"], "chunk_simple_gla"),
    "chunk_kda": "chunk_kda",
}
# An `impl` for functions that promise a kernel: like "auto", but neither FLA nor the reference is considered.
KERNELS_ONLY = "auto among kernels"

_FLA_PRIORITY = 1000
_REFERENCE_PRIORITY = 2000
_logger = logging.getLogger("cula")


@dataclass(frozen=True)
class Implementation:
    """One way to run the functions of an op.

    archs is None when any device will do. `supports(**problem)` returns why a problem is refused, or None.
    `load(function)` returns a callable with the public signature without `impl`.
    """

    name: str
    ops: tuple[str, ...]
    archs: tuple[str, ...] | None
    priority: int
    supports: Callable[..., str | None]
    load: Callable[[str], Callable[..., Any]]
    kernel: bool = True


@dataclass(frozen=True)
class Broken:
    """A kernel package that is installed but whose spec cannot be used."""

    name: str
    error: str


@dataclass(frozen=True)
class Row:
    """One line of an explanation.

    reason is None when the implementation could serve; backward then names the one whose backward pass would follow it.
    """

    name: str
    priority: int | None
    chosen: bool
    reason: str | None
    backward: str | None = None

    @property
    def verdict(self) -> str:
        if self.chosen:
            return "chosen"
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


_loaded = _Loaded()
_slots: dict[tuple[Any, ...], str] = {}
# Callables of kernel packages, which check their arguments themselves.
self_checking: set[Callable[..., Any]] = set()


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
    configure_logging()
    op = next(op for op, functions in OPS.items() if function in functions)
    problem = dict(zip((*COMMON_FACTS, *FACTS[function]), facts, strict=True))
    name, target = _choose(op, function, impl, arch_of(device), {"function": function, **problem})
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
        TypeError: a fact that the function does not have.
        ValueError: no such op, or no implementation of the name `impl`.
    """
    op, function = _find_op(op, problem.pop("function", None))
    impl = problem.pop("impl", "auto")
    arch = problem.pop("arch", None) or _current_arch()
    known = tuple(dict.fromkeys((*COMMON_FACTS, "tokens", "varlen", *FACTS[function])))
    for name in problem:
        if name not in known:
            raise TypeError(
                f"{name}: expected one of {', '.join(known)} for {function}, got an unknown fact"
            )
    rows = tuple(_judge(op, function, impl, arch, {"function": function, **problem}))
    return Explanation(op, function, arch, rows, problem)


def implementations(op: str) -> tuple[Implementation, ...]:
    """Every implementation of an op that is installed or built in, best first."""
    return tuple(found for found in _discover()[0] if op in found.ops)


def broken() -> tuple[Broken, ...]:
    """Installed kernel packages that cannot be used, with the error."""
    return _discover()[1]


def refresh() -> None:
    """Forgets everything discovered and decided, so that the next call sees newly installed packages."""
    importlib.invalidate_caches()
    _discover.cache_clear()
    _load.cache_clear()
    _load_with_backward.cache_clear()
    _slots.clear()
    self_checking.clear()
    _log_once.cache_clear()


def _choose(
    op: str, function: str, impl: str, arch: str, problem: dict[str, Any]
) -> tuple[str, Callable[..., Any]]:
    rows: list[Row] = []
    for row in _judge(op, function, impl, arch, problem):
        if row.chosen:
            refused = "".join(f"; {other.name} refused: {other.reason}" for other in rows)
            found = next(i for i in implementations(op) if i.name == row.name)
            served = f"{op}.{function} on {arch} is served by {row.name}"
            if row.backward:
                _log_once(f"{served} with the backward of {row.backward}{refused}")
                slot = f"{row.name}_and_{row.backward}"
                return slot, _load_with_backward(found, function)
            _log_once(f"{served}{refused}")
            target = _load(found, function)
            if found.kernel:
                self_checking.add(target)
            return row.name, target
        rows.append(row)
    raise RuntimeError(_refusal(op, function, impl, arch, rows, problem))


def _judge(op: str, function: str, impl: str, arch: str, problem: dict[str, Any]) -> Iterator[Row]:
    """One row per implementation, best first; at most one is chosen. Lazy: nothing after the chosen one is loaded."""
    wanted = _wanted(op, impl)
    taken = False
    for found in implementations(op):
        reason, backward = _verdict(found, op, function, arch, wanted, problem)
        chosen = reason is None and not taken
        taken = taken or chosen
        yield Row(found.name, found.priority, chosen, reason, backward)
    for bad in broken():
        yield Row(bad.name, None, False, bad.error)


def _wanted(op: str, impl: str) -> str:
    """The name asked for, KERNELS_ONLY or "auto"."""
    if not isinstance(impl, str):
        raise TypeError(f"impl: expected a str, got {type(impl).__name__}")
    if impl == KERNELS_ONLY:
        return impl
    names = [found.name for found in implementations(op)]
    if impl == "auto":
        impl = env().impl
        if impl == "auto" or impl in names:
            return impl
        if any(impl == found.name for found in _discover()[0]):
            return "auto"
        known = sorted({found.name for found in _discover()[0]})
        raise ValueError(f"CULA_IMPL: expected 'auto' or one of {', '.join(known)}, got {impl!r}")
    if impl not in names:
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
    if found.archs is not None and arch not in found.archs:
        if not arch.startswith("sm"):
            return (
                f"needs a CUDA device ({', '.join(found.archs)}), the device here is {arch}",
                None,
            )
        return f"needs one of {', '.join(found.archs)}, the device here is {arch}", None
    try:
        reason = found.supports(op=op, arch=arch, **problem)
        if reason is None:
            _load(found, function)
        elif found.kernel and problem.get("requires_grad") and function in _BACKWARD_OF_FLA:
            reason = _why_no_backward(found, op, function, arch, problem, reason)
            return reason, "fla" if reason is None else None
        return reason, None
    except (
        Exception
    ) as error:  # the code of other packages: whatever it raises is its reason for not serving
        return f"{type(error).__name__}: {error}", None


def _why_no_backward(
    found: Implementation, op: str, function: str, arch: str, problem: dict[str, Any], reason: str
) -> str | None:
    """Why a kernel that refused a problem with gradients cannot serve with FLA's backward either, or None."""
    without = found.supports(op=op, arch=arch, **{**problem, "requires_grad": False})
    if without is not None:
        return without
    if "fla" in env().disable:
        return f"{reason}; fla: disabled by CULA_DISABLE"
    backward: str | None = _fla_backward().supports_backward(op=op, arch=arch, **problem)
    if backward is not None:
        return f"{reason}; fla: {backward}"
    _load_with_backward(found, function)
    return None


@functools.cache
def _load(found: Implementation, function: str) -> Callable[..., Any]:
    return found.load(function)


@functools.cache
def _load_with_backward(found: Implementation, function: str) -> Callable[..., Any]:
    forward = _load(found, _BACKWARD_OF_FLA[function])
    target: Callable[..., Any] = _fla_backward().with_backward(function, forward)
    return target


def _refusal(
    op: str, function: str, impl: str, arch: str, rows: list[Row], problem: dict[str, Any]
) -> str:
    if impl == KERNELS_ONLY:
        rows = [row for row in rows if row.reason != "not a kernel"]
        why = (
            "; ".join(f"{row.name}: {row.reason}" for row in rows)
            or "no kernel package for it is installed"
        )
        if problem["requires_grad"]:
            why += f"; an input requires gradients, which {function} gets from fla or the reference"
        return f"no kernel serves {op}.{function} on {arch}: {why}"
    asked = next((row for row in rows if row.name == _wanted(op, impl)), None)
    if asked is not None:
        return f"impl={asked.name!r} cannot serve {op}.{function} on {arch}: {asked.reason}"
    why = "; ".join(f"{row.name}: {row.reason}" for row in rows)
    return f"nothing serves {op}.{function} on {arch}: {why}"


@functools.cache
def _log_once(message: str) -> None:
    _logger.info(message)


@functools.cache
def _discover() -> tuple[tuple[Implementation, ...], tuple[Broken, ...]]:
    """All implementations, best first, and what could not be used."""
    found: list[Implementation] = []
    bad: list[Broken] = []
    seen: set[str] = set()
    for module_name in _spec_modules():
        try:
            implementation = _from_spec(importlib.import_module(module_name))
        except (
            Exception
        ) as error:  # an installed package that fails to import must not take the others with it
            bad.append(
                Broken(module_name.removesuffix("._spec"), f"{type(error).__name__}: {error}")
            )
            continue
        if implementation.name in seen:
            bad.append(
                Broken(
                    module_name.removesuffix("._spec"), f"the name {implementation.name!r} is taken"
                )
            )
            continue
        seen.add(implementation.name)
        found.append(implementation)
    found += (_fla(), _reference())
    return tuple(sorted(found, key=lambda i: (i.priority, i.name))), tuple(bad)


def _spec_modules() -> list[str]:
    """Names of the spec modules of installed kernel packages, each once."""
    names = [point.value for point in entry_points(group=GROUP)]
    names += [f"{package}._spec" for package in FIRST_PARTY if importable(package)]
    return list(dict.fromkeys(names))


def importable(package: str) -> bool:
    """Whether a top-level package is there, without importing it. A bare directory of that name does not count."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _from_spec(spec: ModuleType) -> Implementation:
    missing = [
        name
        for name in ("NAME", "OP", "ARCHS", "PRIORITY", "supports", "load")
        if not hasattr(spec, name)
    ]
    if missing:
        raise AttributeError(f"{spec.__name__} lacks {', '.join(missing)}")
    ops = (spec.OP,) if isinstance(spec.OP, str) else tuple(spec.OP)
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise ValueError(
            f"{spec.__name__}.OP: expected one of {', '.join(OPS)}, got {', '.join(unknown)}"
        )
    if spec.NAME in ("auto", "fla", "reference"):
        raise ValueError(f"{spec.__name__}.NAME: {spec.NAME!r} is reserved")
    if not isinstance(spec.PRIORITY, int) or not 0 <= spec.PRIORITY < _FLA_PRIORITY:
        raise ValueError(
            f"{spec.__name__}.PRIORITY: expected an int in [0, {_FLA_PRIORITY}), got {spec.PRIORITY!r}"
        )
    return Implementation(
        spec.NAME, ops, tuple(spec.ARCHS), spec.PRIORITY, spec.supports, spec.load
    )


def _fla() -> Implementation:
    def supports(**problem: Any) -> str | None:
        return _fla_module().supports(**problem)

    def load(function: str) -> Callable[..., Any]:
        return _fla_module().load(function)

    ops = tuple(op for op in OPS if op != "lite.attention")
    return Implementation("fla", ops, None, _FLA_PRIORITY, supports, load, kernel=False)


def _fla_module() -> ModuleType:
    return importlib.import_module("cula.integrations.fla")


def _fla_backward() -> ModuleType:
    return importlib.import_module("cula.integrations.fla_backward")


def _reference() -> Implementation:
    def supports(*, use_intracard_cp: bool | str = "auto", **_: Any) -> str | None:
        if use_intracard_cp is True:
            return "does not split sequences (use_intracard_cp=True)"
        return None

    def load(function: str) -> Callable[..., Any]:
        return getattr(importlib.import_module("cula.reference"), function)

    return Implementation(
        "reference", tuple(OPS), None, _REFERENCE_PRIORITY, supports, load, kernel=False
    )


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
    raise ValueError(f"op: expected one of {names}, got {op!r}")


def _current_arch() -> str:
    if torch.cuda.is_available():
        return arch_of(torch.device("cuda", torch.cuda.current_device()))
    return "cpu"
