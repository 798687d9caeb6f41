"""The torch operator of a backward pass, and calls that autograd follows to it. A package says what its kernels and its
function ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...operators import no_second_derivative, register_fake
from ...reference.common import work_dtype
from ...tensors import DENSE, aligned, dense_states, is_plain_cuda_call
from ..config import INTRACARD_CP

# What a call keeps until its backward. All but the last two have gradients.
KEPT = (
    "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu",
)  # fmt: skip
# What a forward pass may keep besides, so that it is not computed again: see `Kept`.
MORE = ("blocks", "factors")
# Of tokens are the first inputs of a call: q, k, v, g, beta.
_OF_TOKENS = 5


class Backward:
    """The operator `name`, a function of a call. It returns dense gradients of the call's first inputs: those of tokens
    in the dtype of their inputs, those of parameters and states in fp32, or fp64 with fp64 activations; of an input
    that is None no element."""

    def __init__(
        self,
        name: str,
        schema: str,
        call: type[Any],
        gradients: type[Any],
        *,
        on_cpu: Callable[[Any], Any],
        prepared: Callable[[Any], Any],
        launch: Callable[[Any, Any], None],
        launch_front: Callable[[Any, Tensor | None], tuple[Tensor, Tensor] | None],
    ) -> None:
        """call, gradients: named tuples of the arguments, and of one gradient or None for each of the first of them.
        on_cpu: returns the gradients of a call. prepared: returns a call as kernels read it; launch: has them write its
        gradients; launch_front: those of initial states alone, if there is memory for them, and returns blocks and
        factors if they are still there.
        """
        self._gradients, self._count = gradients, len(gradients._fields)
        self._prepared, self._launch, self._launch_front = prepared, launch, launch_front

        def serve_cpu(*values: Any) -> tuple[Tensor, ...]:
            own = call(*values)
            with torch.autocast("cpu", enabled=False):
                found = on_cpu(own)
            return self._results(own, found)

        torch.library.define(name, schema)
        torch.library.impl(name, "CPU", serve_cpu)
        torch.library.impl(name, "CUDA", lambda *values: self._run_on_gpu(call(*values)))
        register_fake(name, lambda *values: tuple(self._new_results(call(*values))))
        torch.library.register_autograd(name, no_second_derivative)
        package, _, function = name.partition("::")
        self._operator = getattr(getattr(torch.ops, package), function).default

    def __call__(self, call: Any) -> tuple[Tensor, ...]:
        # Where gradients of gradients may follow, the operator is there to refuse them.
        direct = is_plain_cuda_call(call.q) and not torch.is_grad_enabled()
        return self._run_on_gpu(call) if direct else self._operator(*call)

    def begin(self, call: Any, of_inputs: Callable[[tuple[Tensor, ...]], tuple] = tuple) -> Begun:
        """Begins a call on a GPU, whose initial states have gradients, before dht is known everywhere.

        of_inputs: returns gradients of a function's inputs, from the operator's results.
        """
        return Begun(call, lambda own: of_inputs(self._run_on_gpu(own)), self._front)

    def _front(self, call: Any) -> tuple[Tensor | None, Any]:
        """Returns the gradients of initial states, and the call with what need not be computed again. Where dht is
        None, nothing but the latter."""
        if call.v.numel() == 0:
            return None if call.dht is None else call.dht.to(torch.float32, copy=True), call
        ready, front = self._prepared(call), None
        if call.dht is not None:
            front = torch.empty_like(ready.initial_state, memory_format=DENSE)
        kept = self._launch_front(ready, front)
        return front, call if kept is None else call._replace(**dict(zip(MORE, kept)))

    def _run_on_gpu(self, call: Any) -> tuple[Tensor, ...]:
        if call.v.numel() == 0:  # states pass through
            *rest, dh0 = (x.zero_() for x in self._new_results(call))
            return *rest, dh0 if call.dht is None or not dh0.numel() else dh0.copy_(call.dht)
        ready = self._prepared(call)
        inputs = ready[: self._count]
        memory = (None if x is None else torch.empty_like(x, memory_format=DENSE) for x in inputs)
        found = self._gradients(*memory)
        self._launch(ready, found)
        return self._results(call, found)

    def _kinds(self, call: Any) -> list[tuple[Any, torch.dtype]]:
        """Returns the shape and the dtype of every result."""
        exact = work_dtype(call.q)
        return [
            ((0,), exact) if x is None else (x.shape, x.dtype if n < _OF_TOKENS else exact)
            for n, x in enumerate(call[: self._count])
        ]

    def _new_results(self, call: Any) -> list[Tensor]:
        return [call.q.new_empty(shape, dtype=dtype) for shape, dtype in self._kinds(call)]

    def _results(self, call: Any, found: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
        """Returns gradients, or None, as results."""

        def result(d: Tensor | None, shape: Any, dtype: torch.dtype) -> Tensor:
            if d is None:
                return call.q.new_empty(0, dtype=dtype)
            d = d.to(dtype).contiguous()
            return d if d.shape == shape else d.view(shape)

        return tuple(result(d, *kind) for d, kind in zip(found, self._kinds(call)))


class Begun:
    """A backward pass over slices of sequences that lie on several GPUs: it takes the gradients of the states behind
    them in two steps, because those behind slices that go on depend on other GPUs, some of which need `front` before.

    gives: what `finish` returns gradients of.
    """

    gives = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

    def __init__(
        self,
        call: Any,
        run: Callable[[Any], tuple[Tensor | None, ...]],
        front: Callable[[Any], tuple[Tensor | None, Any]],
    ) -> None:
        """call: without dht. run: returns the gradients of the inputs of a call. front: that of `Backward`."""
        self._call, self._run, self._front = call, run, front

    def prepare(self) -> None:
        """Does what depends on no gradient of a state, while others find `front`."""
        _, self._call = self._front(self._call)

    def front(self, dht: Tensor) -> Tensor:
        """Returns the gradients in front of slices [N, HV, K, V], where those behind them are dht."""
        found, self._call = self._front(self._call._replace(dht=dht))
        assert found is not None
        return found

    def finish(self, dht: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the inputs."""
        return self._run(self._call._replace(dht=dht))


def as_read(call: Any, **own: Tensor | None) -> Any:
    """Returns a call with q, k, v, do at multiples of 16 bytes, states and their gradients in fp32 and dense, and with
    other tensors of its own."""
    do = call.do if call.do.stride(3) == 1 else call.do.contiguous()
    states = {name: dense_states(getattr(call, name)) for name in ("initial_state", "dht")}
    q, k, v = aligned(call.q), aligned(call.k), aligned(call.v)
    return call._replace(q=q, k=k, v=v, do=aligned(do), **states, **own)


def cutting(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a call that say where sequences are cut, from options of the public function."""
    return {
        "intracard_cp": INTRACARD_CP[options["use_intracard_cp"]],
        "segment_tokens": options["segment_tokens"] or 0,
    }


def trained(
    function: Callable[..., tuple],
    given: dict[str, Any],
    rules: Callable[[Tensor, dict[str, Any]], Any],
    gradients: Callable[[dict[str, Any], Any, Tensor | None, Tensor | None], Iterable],
) -> tuple[Tensor, Tensor | None]:
    """Calls a function with arguments by name that are fit for training, so that autograd finds the way back.

    function: returns both results and nothing, or MORE, which is kept. rules: returns, of q and of the arguments that
    are not in KEPT, what the backward has to know of them. gradients: returns those of the first eight in KEPT, of what
    was kept by name, rules, and the gradients of both results.
    """
    options = {name: x for name, x in given.items() if name not in KEPT}
    kept = (given[name] for name in KEPT)
    return _Trained.apply(function, options, rules, gradients, *kept)


class _Trained(torch.autograd.Function):
    """The forward keeps its inputs, and what its function returns beside the results."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable, options: dict, rules: Callable, gradients: Callable, *kept: Any
    ) -> Any:  # fmt: skip
        o, final, *more = function(**dict(zip(KEPT, kept)), **options)
        ctx.save_for_backward(*kept, *more)
        ctx.rules, ctx.gradients = rules(kept[0], options), gradients
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        # Read once: under a checkpoint of activations a second time fails.
        kept = dict(zip((*KEPT, *MORE), ctx.saved_tensors))
        return *[None] * 4, *ctx.gradients(kept, ctx.rules, do, dht), None, None
