"""The implementations of a decode step with convolution and norm that are compared: one launch, or one for each part.

A chain has FLA's update of the convolution before the step and its gated RMSNorm behind it. The kernels of vLLM and of
SGLang are those of a module `vllm_decode`, which calls them without their engines.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.registry import CannotRun, CheckFailed, Provider, Setting
from benchmarks.ops import checks, in_place, tuning
from benchmarks.ops.delta import fused_problem as fused
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta import providers as step_providers
from benchmarks.ops.delta.fused_problem import Inputs, Result
from benchmarks.ops.delta.internals import fused as reference
from benchmarks.ops.installed import missing

Call = Callable[[], Any]

_cula_missing = missing("cula_delta_decode")
_fla_missing = missing("fla.ops.kda")
_vllm_decode_missing = missing("vllm_decode")


def _states(x: Inputs) -> Tensor:
    """The states of the pool by row."""
    return x.step.state[x.step.slots.long()]


def _by_row(x: Inputs) -> Tensor:
    """As many states as there are rows, those that belong to one."""
    return x.step.state[1 : 1 + len(x.mixed)]


# ---- ours ------------------------------------------------------------------------------------------------------------


def cula_call(problem: Setting, x: Inputs, out: Tensor | None = None) -> Call:
    """What is timed: one call, and one launch."""
    from cula_delta_decode import delta_rule_decode

    s = x.step
    given: dict[str, Any] = delta.options(problem, s) | {"state_indices": s.slots, "out": out}
    given["norm"] = fused.norm(problem, x)
    if fused.has_conv(problem):
        given["convolution"] = reference.ShortConvolution(x.ring, x.positions, x.weight)
    return lambda: delta_rule_decode(s.q, s.k, s.v, s.g, s.beta, s.state, **given)


def _cula_result(problem: Setting, x: Inputs) -> Result:
    out = torch.full(x.gate.shape, float("nan"), dtype=x.gate.dtype, device=x.gate.device)
    cula_call(problem, x, out)()
    kept = fused.windows(x, problem.params["T"]) if fused.has_conv(problem) else None
    return Result(out, _states(x), kept)


# ---- chains with FLA's kernels ---------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """What stands around a step: before() returns q, k and v, behind(o) the outputs, kept() the last inputs."""

    before: Callable[[], list[Tensor]]
    behind: Callable[[Tensor], Tensor]
    kept: Callable[[], Tensor | None]


def _parts(problem: Setting, x: Inputs, one: bool) -> _Parts:
    """FLA's kernels. One convolution has the channels of q, k and v, or each of them has its own, as in its layers."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    norm = fused.norm(problem, x)
    activation = {"silu": "swish", "sigmoid": "sigmoid"}[norm.activation]

    def behind(o: Tensor) -> Tensor:
        return rms_norm_gated(o, norm.gate, norm.weight, None, activation, eps=norm.eps)

    if not fused.has_conv(problem):
        given = [x.step.q, x.step.k, x.step.v]
        given = given if one else [part.contiguous() for part in given]
        return _Parts(lambda: given, behind, lambda: None)
    from fla.modules.causal_conv1d import causal_conv1d_update

    sizes = fused.sizes(problem)
    groups = [sum(sizes)] if one else sizes
    # A window has four columns, of which the first is what the next token pushes out.
    full = torch.nn.functional.pad(fused.windows(x).mT, (1, 0))
    caches = [part.contiguous() for part in full.split(groups, 1)]
    weights = [part.contiguous() for part in x.weight.split(groups)]
    inputs = x.mixed.split(groups, 2)

    def before() -> list[Tensor]:
        flat = tuple(
            causal_conv1d_update(x=part, cache=cache, weight=weight, activation="silu")[0]
            for part, cache, weight in zip(inputs, caches, weights)
        )
        return fused.heads(problem, flat[0].split(sizes, 2) if one else flat)

    return _Parts(before, behind, lambda: torch.cat(caches, 1)[..., 1:].mT)


def _cula_parts(problem: Setting, x: Inputs) -> tuple[Call, _Parts]:
    """Our step reads views, so one convolution serves."""
    from cula_delta_decode import delta_rule_decode

    s, parts = x.step, _parts(problem, x, one=True)
    given = delta.options(problem, s) | {"state_indices": s.slots}

    def run() -> Tensor:
        return parts.behind(delta_rule_decode(*parts.before(), s.g, s.beta, s.state, **given))

    return run, parts


def _cula_chain_result(problem: Setting, x: Inputs) -> Result:
    run, parts = _cula_parts(problem, x)
    return Result(run(), _states(x), parts.kept())


def _fla_parts(
    problem: Setting, x: Inputs, states: Tensor | None = None
) -> tuple[Callable[[], tuple[Tensor, Tensor | None]], _Parts]:
    """A call that returns outputs and, of GDN, new states; row n has state n of `states`.

    Its step copies views that are not dense, which those of one row are: several rows have three convolutions instead.
    """
    parts = _parts(problem, x, one=len(x.mixed) == 1)
    dense = _by_row(x) if states is None else states

    def run() -> tuple[Tensor, Tensor | None]:
        q, k, v = parts.before()
        step = dataclasses.replace(x.step, q=q, k=k, v=v)
        if delta.has_channels(problem):
            return parts.behind(step_providers.fla_inplace_call(problem, step)()), None
        o, final = step_providers.fla_call(problem, step, dense)()
        return parts.behind(o), final

    return run, parts


def _fla_chain_result(problem: Setting, x: Inputs) -> Result:
    run, parts = _fla_parts(problem, x, _states(x))
    out, final = run()
    return Result(out, _states(x) if final is None else final, parts.kept())


def _chain_supports(problem: Setting) -> str | None:
    if fused.has_conv(problem) and problem.params["T"] > 1:
        return "the update of a convolution takes one token"
    return _fla_missing()


@functools.lru_cache(maxsize=1)
def _tuned(setting: str) -> None:
    from fla.modules.causal_conv1d import ops
    from fla.modules.norm import fused_norm_gate

    for kernel in (ops.causal_conv1d_update_kernel, fused_norm_gate.layer_norm_gated_fwd_kernel):
        tuning.tune_anew(kernel)


def _prepare(problem: Setting) -> None:
    """Tunes FLA's kernels for a setting, once for both chains."""
    _tuned(problem.name)


def _fla_moved(problem: Setting) -> int:
    written = None if delta.has_channels(problem) else "fp32"
    return fused.moved(problem, written_state=written) + fused.between_bytes(problem)


# ---- kernels of serving engines --------------------------------------------------------------------------------------


def _engine_supports(gate: str, conv: bool) -> Callable[[Setting], str | None]:
    """Says why a kernel for states [V, K] and one kind of gate cannot run a setting, which needs `conv` or not."""

    def supports(problem: Setting) -> str | None:
        if problem.params["gate"] != gate:
            return f"a kernel for {gate.upper()}"
        if not delta.v_first(problem):
            return "takes states [V, K]"
        if conv and not fused.has_conv(problem):
            return "always has the convolution"
        if conv and problem.params["T"] > 1:
            return "takes one token"
        return _vllm_decode_missing()

    return supports


def _vllm_gdn_call(problem: Setting, x: Inputs, out: Tensor | None = None) -> Call:
    """It can store a state after every token: slots of 0 leave all but the last one out, as the others do."""
    import vllm_decode

    batch, tokens = problem.params["B"], problem.params["T"]
    integers = {"dtype": torch.int32, "device": x.mixed.device}
    slots = torch.zeros(batch, tokens, **integers)
    slots[:, -1] = x.step.slots
    offsets = torch.arange(0, (batch + 1) * tokens, tokens, **integers)
    accepted = torch.full((batch,), tokens, **integers)
    s, norm = x.step, fused.norm(problem, x)
    mixed, g, beta, gate = (t.flatten(0, 1) for t in (x.mixed, s.g, s.beta, x.gate))
    flat = None if out is None else out.flatten(0, 1)

    def run() -> Tensor:
        return vllm_decode.gdn_decode_post_conv_mtp(
            mixed, g, beta, s.A_log, s.dt_bias, slots, offsets, accepted, s.state, gate, norm.weight, out=flat,
            scale=delta.DIM**-0.5, norm_eps=norm.eps, output_gate_activation=norm.activation,
        )  # fmt: skip

    return run


def _vllm_gdn_result(problem: Setting, x: Inputs) -> Result:
    out = torch.full_like(x.gate, float("nan"))
    _vllm_gdn_call(problem, x, out)()
    return Result(out, _states(x), None)


def _weights_by_tap(problem: Setting, x: Inputs) -> Tensor:
    """The weights of the convolution in fp32: [3,4,H*K], of q, k and v."""
    return x.weight.float().unflatten(0, (3, -1)).mT.contiguous()


def window_pool(x: Inputs) -> Tensor:
    """The last inputs of the slots of a pool, [slots,3,C]; those of slots that no row has are zero."""
    pool = x.ring.new_zeros(len(x.ring), fused.KEPT, x.ring.shape[2])
    pool[x.step.slots.long()] = fused.windows(x)
    return pool


def _vllm_kda_call(
    problem: Setting, x: Inputs, out: Tensor | None = None, kept: Tensor | None = None
) -> Call:
    import vllm_decode

    s, norm, weights = x.step, fused.norm(problem, x), _weights_by_tap(problem, x)
    pool = window_pool(x) if kept is None else kept
    mixed, gate = x.mixed[:, 0], x.gate[:, 0]
    g, beta = s.g.view(1, *s.g[:, 0].shape), s.beta.view(1, *s.beta[:, 0].shape)
    flat = None if out is None else out.view(1, *gate.shape)

    def run() -> Tensor:
        return vllm_decode.kda_decode(
            mixed, weights, None, pool.mT, g, beta, s.A_log, s.dt_bias, s.slots, s.state, out=flat,
            output_gate=gate, norm_weight=norm.weight, norm_eps=norm.eps,
        )  # fmt: skip

    return run


def _sglang_call(
    problem: Setting, x: Inputs, out: Tensor | None = None, kept: Tensor | None = None
) -> Call:
    import vllm_decode

    s, norm, weights = x.step, fused.norm(problem, x), _weights_by_tap(problem, x)
    pool = window_pool(x) if kept is None else kept
    mixed, g, beta, gate = x.mixed[:, 0], s.g.flatten(1), s.beta[:, 0], x.gate.flatten(1)
    bias = torch.zeros(mixed.shape[1], device=mixed.device)
    flat = None if out is None else out.flatten(1)

    def run() -> Tensor:
        return vllm_decode.sgl_kda_decode(
            mixed, g, beta, pool, *weights, bias, s.A_log, s.dt_bias, gate, norm.weight, s.state, s.slots,
            delta.DIM**-0.5, norm.eps, out=flat,
        )  # fmt: skip

    return run


def _kda_result(call: Callable[..., Call]) -> Callable[[Setting, Inputs], Result]:
    """Runs a kernel with windows of its own."""

    def run(problem: Setting, x: Inputs) -> Result:
        out, kept = torch.full_like(x.gate, float("nan")), window_pool(x)
        call(problem, x, out, kept)()
        return Result(out, _states(x), kept[x.step.slots.long()])

    return run


# ---- all of them -----------------------------------------------------------------------------------------------------

CULA = Provider("cula", "ours", cula_call, fused.moved, supports=lambda problem: _cula_missing())
OURS_IN_CHAIN = Provider(
    "cula_chain",
    "variant",
    lambda problem, x: _cula_parts(problem, x)[0],
    lambda problem: fused.moved(problem) + fused.between_bytes(problem),
    supports=lambda problem: _cula_missing() or _chain_supports(problem),
    prepare=_prepare,
)
FLA_CHAIN = Provider(
    "fla_chain",
    "peer",
    lambda problem, x: _fla_parts(problem, x)[0],
    _fla_moved,
    supports=_chain_supports,
    prepare=_prepare,
)
VLLM_AFTER_CONV = Provider(
    "vllm_after_conv",
    "peer",
    _vllm_gdn_call,
    functools.partial(fused.moved, conv=False),
    supports=_engine_supports("gdn", conv=False),
)
VLLM = Provider(
    "vllm", "peer", _vllm_kda_call, fused.moved, supports=_engine_supports("kda", conv=True)
)
SGLANG = Provider(
    "sglang", "peer", _sglang_call, fused.moved, supports=_engine_supports("kda", conv=True)
)
CEILING = in_place.ceiling(_by_row, delta.state_bytes, lambda problem: None)
PROVIDERS = (CULA, OURS_IN_CHAIN, FLA_CHAIN, VLLM_AFTER_CONV, VLLM, SGLANG, CEILING)

_PEER_LIMITS = (delta.PEER_OUTPUT_LIMIT, delta.PEER_STATE_LIMIT)
# How a provider is checked: how it is run, and what is asked of it.
_CHECKED: dict[str, tuple[Callable[[Setting, Inputs], Result], dict[str, Any]]] = {
    "cula": (_cula_result, {}),
    "cula_chain": (_cula_chain_result, {"limits": _PEER_LIMITS}),
    "fla_chain": (_fla_chain_result, {"limits": _PEER_LIMITS}),
    "vllm_after_conv": (_vllm_gdn_result, {"limits": _PEER_LIMITS, "conv": False}),
    "vllm": (_kda_result(_vllm_kda_call), {"limits": _PEER_LIMITS, "rounded": False}),
    "sglang": (_kda_result(_sglang_call), {"limits": _PEER_LIMITS, "rounded": False}),
}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares a provider with the reference in fp64 on fresh inputs; the ceiling with its own definition.

    Raises CannotRun where a kernel of an engine fails or is wrong: it is left out there, with the reason.
    """
    if provider.role == "ceiling":
        x = fused.make_inputs(problem, device, checks.SEED)
        return in_place.check(provider, _by_row, problem, x)
    run, asked = _CHECKED[provider.name]
    if provider not in (VLLM_AFTER_CONV, VLLM, SGLANG):
        return fused.check_task(run, problem, device, **asked)
    try:
        return fused.check_task(run, problem, device, **asked)
    except CheckFailed as error:
        raise CannotRun(f"its result is wrong: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise CannotRun(f"fails: {type(error).__name__}: {reason}") from error
