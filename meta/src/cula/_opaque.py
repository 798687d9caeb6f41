"""The reference as `torch.compile` sees it: one operator per function, so that one graph serves every batch and length.

The reference walks over chunks, tokens and tiles in Python; a trace of it would hold for one length only. The operator
`cula::<function>` hides the walk, and `cula::<function>_backward` computes it again and goes back through it, so that a
compiled graph keeps the inputs alone. An eager call does not go through operators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from cula import reference
from cula._check import outside_autocast
from cula_core.reference.common import work_dtype

# What has gradients.
FUNCTIONS = (
    "chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule",
    "chunk_simple_gla", "lightning_attn_fwd", "lightning_attn_fwd_varlen", "lite_attention",
)  # fmt: skip
# Parameters with other annotations, and these, change no value of the reference.
_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "bool": "bool", "float": "float", "float | None": "float?",
    "int": "SymInt", "int | None": "SymInt?", "str": "str", "int | Tensor": "Tensor",
}  # fmt: skip
_IDLE = (
    "cu_seqlens_cpu", "chunk_indices", "safe_gate", "disable_recompute", "exact_state", "num_splits", "segment_tokens",
    "deterministic",
)  # fmt: skip
# What inference alone has, and leaves to a trace.
_INFERENCE = (
    "out", "state_checkpoints", "checkpoint_every_n_tokens", "checkpoint_rows", "checkpoint_offsets",
    "return_intermediate_states",
)  # fmt: skip


# Definitions of operators that no graph has asked for.
_undefined: dict[str, Callable[[], None]] = {}


def defined(function: str) -> str:
    """The name of a function's operator, which the first graph defines: that takes as long as an import of cula."""
    load(function)
    if (define := _undefined.pop(function, None)) is not None:
        define()
    return function


defined._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def load(function: str) -> Callable[..., Any]:
    """The reference of a public function, whose products autocast leaves in their precision."""
    plain = getattr(reference, function)

    @functools.wraps(plain)
    def exact(*args: Any, **options: Any) -> Any:
        with outside_autocast((args[0] if args else options["q"]).device.type):
            return plain(*args, **options)

    return _with_operator(function, exact, plain) if function in FUNCTIONS else exact


@contextmanager
def autograd_anywhere() -> Iterator[None]:
    """Records for autograd inside an operator too, which a compiled graph calls where autograd does not look."""
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
        yield


def _with_operator(
    function: str, exact: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    parameters = inspect.signature(plain).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    types = {n: _TYPES[p.annotation] for n, p in parameters.items() if p.annotation in _TYPES}
    types = {n: kind for n, kind in types.items() if n not in (*_IDLE, *_INFERENCE)}
    results = 3 if function == "lite_attention" else 2

    _undefined[function] = functools.partial(_define, function, types, exact)

    @functools.wraps(plain)
    def run(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return exact(*args, **options)
        given = {**defaults, **dict(zip(parameters, args)), **options}
        if _writes(given):
            return exact(*args, **options)
        if "direction" in given:
            if not isinstance(given["direction"], Tensor):
                given["direction"] = torch.full((1,), given["direction"], dtype=torch.int32)
            if given["read_mask"] is not None:  # the caller may reuse it before the backward
                given["read_mask"] = given["read_mask"].clone()
        operator = getattr(torch.ops.cula, defined(function)).default
        found = operator(*(given[name] for name in types))
        return (*found, *(None,) * (results - len(found)))

    return run


def _writes(given: dict[str, Any]) -> bool:
    """Whether a call writes what the caller owns, returns inner states, or has results whose size is in a tensor."""
    if any(not (given.get(name) is None or given[name] is False) for name in _INFERENCE):
        return True
    if given.get("state_pool") is not None and given["update_state_pool"]:
        return True
    lengths = given.get("max_seqlen_q"), given.get("max_seqlen_k")
    return given.get("cu_seqlens_q") is not None and None in lengths


def _define(function: str, types: dict[str, str], exact: Callable[..., Any]) -> None:
    """Defines both operators of a function. types: of its arguments in the schema, by name."""
    arguments = ", ".join(f"{kind} {name}" for name, kind in types.items())
    forward, backward = f"cula::{function}", f"cula::{function}_backward"
    torch.library.define(forward, f"({arguments}) -> Tensor[]")
    torch.library.define(backward, f"(Tensor?[] grads, bool[] wanted, {arguments}) -> Tensor[]")

    def compute(inputs: Any) -> list[Tensor]:
        return [x for x in exact(**dict(zip(types, inputs))) if x is not None]

    def run(*inputs: Any) -> list[Tensor]:
        with torch.no_grad():
            return [x.contiguous() for x in compute(inputs)]

    def run_backward(grads: list[Tensor | None], wanted: list[bool], *inputs: Any) -> list[Tensor]:
        with autograd_anywhere():
            leaves = [x.detach().requires_grad_(w) if w else x for x, w in zip(inputs, wanted)]
            pairs = [(y, dy) for y, dy in zip(compute(leaves), grads) if dy is not None]
            pairs = [(y, dy) for y, dy in pairs if y.requires_grad]
            asked = [x for x, w in zip(leaves, wanted) if w]
            found = torch.autograd.grad(
                [y for y, _ in pairs], asked, [dy for _, dy in pairs], allow_unused=True, materialize_grads=True
            )  # fmt: skip
        return [x.clone(memory_format=torch.contiguous_format) for x in found]

    def fake(*inputs: Any) -> list[Tensor]:
        given = dict(zip(types, inputs))
        return _tiles(**given) if function == "lite_attention" else _tokens(**given)

    def fake_backward(_: Any, wanted: list[bool], *inputs: Any) -> list[Tensor]:
        return [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x, w in zip(inputs, wanted)
            if w
        ]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]

    def differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        inputs = [rest if x is None else x for x, rest in zip(ctx.saved_tensors, ctx.rest)]
        wanted = list(ctx.needs_input_grad)
        found = iter(
            getattr(torch.ops.cula, f"{function}_backward").default(grads, wanted, *inputs)
        )
        return tuple(next(found) if w else None for w in wanted)

    torch.library.impl(forward, "default", run)
    torch.library.impl(backward, "default", run_backward)
    torch.library.register_fake(forward, fake)
    torch.library.register_fake(backward, fake_backward)
    torch.library.register_autograd(forward, differentiate, setup_context=keep)
    torch.library.register_autograd(backward, _no_second_derivative)


def _tokens(
    q: Tensor, k: Tensor, v: Tensor, output_final_state: bool, state_v_first: bool,
    cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None, state_pool: Tensor | None = None, **_: Any,
) -> list[Tensor]:  # fmt: skip
    """Memory for the results of linear attention."""
    heads, dims = max(q.shape[2], v.shape[2]), (q.shape[3], v.shape[3])
    o = v.new_empty(*v.shape[:2], heads, v.shape[3])
    if not output_final_state:
        return [o]
    states = state_pool if initial_state is None else initial_state
    dtype = work_dtype(q) if states is None else states.dtype
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, heads, *(dims[::-1] if state_v_first else dims))
    return [o, v.new_empty(shape, dtype=dtype)]


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, read_mask: Tensor | None, threshold: float | None, block_m: int, block_n: int,
    cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None, **_: Any,
) -> list[Tensor]:  # fmt: skip
    """Memory for the results of skip-list attention."""
    rows, heads = q.shape[1:3]
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(() if cu_seqlens_q is not None else q.shape[:1], dtype=work_dtype(q))
    lse = lse.new_empty(*lse.shape, heads, rows)
    if threshold is None:
        return [out, lse]
    grid = reference.lite.tile_grid(
        rows if max_seqlen_q is None else max_seqlen_q,
        k.shape[1] if max_seqlen_k is None else max_seqlen_k,
        block_m,
        block_n,
    )
    if read_mask is not None and read_mask.dtype == torch.bool:
        return [out, lse, q.new_empty(sequences, heads, *grid, dtype=torch.bool)]
    return [out, lse, q.new_empty(sequences, heads, grid[0], -(-grid[1] // 32), dtype=torch.int32)]


def _no_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError("cula: the derivative of a gradient is not implemented inside torch.compile")
