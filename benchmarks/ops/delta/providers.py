"""The implementations of decode with the gated delta rule and with KDA that are compared.

A task is what one of them does in a setting: "write", "verify" and "slots" as the modes are called; "replay", "commit"
(verify, then advance the states by the accepted tokens) and "slots" are ways to take a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CannotRun, CheckFailed, Provider, Setting
from benchmarks.ops import checks, in_place
from benchmarks.ops.delta import flashinfer_calls, flashinfer_replay
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.problem import Inputs, Result
from benchmarks.ops.installed import missing

_cula_missing = missing("cula_delta_decode")
_fla_missing = missing("fla.ops.kda")

Call = Callable[[], Any]


def _states_after(task: str, x: Inputs) -> Tensor:
    """The states after a task that wrote them where they belong, by row, or by row and token."""
    if task == "slots":
        assert x.token_pool is not None and x.table is not None
        return x.token_pool[x.table.flatten().long()]
    return x.state[x.slots.long()]


def _step(problem: Setting, several: str) -> str | None:
    """The task of an implementation without a replay in a step, which is `several` where there are several tokens."""
    mode = problem.params["mode"]
    if mode != "step":
        return mode
    return "write" if problem.params["T"] == 1 else several


# ---- ours ------------------------------------------------------------------------------------------------------------


def our_task(problem: Setting) -> str:
    mode = problem.params["mode"]
    return "replay" if mode == "step" else mode


def cula_call(task: str, problem: Setting, x: Inputs, out: Tensor | None = None) -> Call:
    """What is timed: a call of the public function, or two of them."""
    from cula_delta_decode import delta_rule_commit, delta_rule_decode

    tokens, state = (x.q, x.k, x.v, x.g, x.beta), x.state
    given: dict[str, Any] = delta.options(problem, x) | {"state_indices": x.slots}
    wanted = {**given, "out": out}
    if task == "slots":
        wanted |= {"state_indices": x.table, "token_state_indices": x.table}
        wanted |= {"num_accepted": x.accepted, "commit": False}
        state = x.token_pool
    elif task == "replay":
        wanted |= {"replay": x.rings, "num_accepted": x.accepted}
    elif task in ("verify", "commit"):
        wanted["commit"] = False

    def decode() -> Tensor:
        return delta_rule_decode(*tokens, state, **wanted)

    if task != "commit":
        return decode

    def verify_and_commit() -> Tensor:
        drafts = decode()
        delta_rule_commit(*tokens[1:], state, x.accepted, **given)
        return drafts

    return verify_and_commit


def finished(task: str, problem: Setting, x: Inputs, out: Tensor) -> Result:
    """The result of a call of ours that wrote `out`; after a replay the states first get what they lack."""
    from cula_delta_decode import delta_rule_flush

    if task == "replay":
        delta_rule_flush(
            x.state, x.rings, state_indices=x.slots, state_v_first=delta.v_first(problem)
        )
    return out, _states_after(task, x)


def _cula_result(task: str, problem: Setting, x: Inputs) -> Result:
    out = torch.full_like(x.v, float("nan"))
    cula_call(task, problem, x, out)()
    return finished(task, problem, x, out)


def _of_steps(task: str, several: bool) -> Callable[[Setting], str | None]:
    """Says why one of our ways to take a step is left out of a setting."""

    def supports(problem: Setting) -> str | None:
        if problem.params["mode"] != "step":
            return "the setting is no step"
        if (problem.params["T"] > 1) != several:
            return f"a step of {'one token' if several else 'several tokens'}"
        return _cula_missing()

    return supports


def _way(name: str, task: str, several: bool = True) -> Provider:
    return Provider(
        name,
        "variant",
        functools.partial(cula_call, task),
        functools.partial(delta.moved, task),
        supports=_of_steps(task, several),
    )


CULA = Provider(
    "cula",
    "ours",
    lambda problem, x: cula_call(our_task(problem), problem, x),
    lambda problem: delta.moved(our_task(problem), problem),
    supports=lambda problem: _cula_missing(),
)
WRITE = _way("cula_write", "write", several=False)
COMMIT = _way("cula_commit", "commit")
SLOTS = _way("cula_slots", "slots")

# ---- flash-linear-attention ------------------------------------------------------------------------------------------


def fla_call(problem: Setting, x: Inputs, states: Tensor | None = None) -> Call:
    """A call that leaves the states alone and returns new ones, in fp32; row n has state n of `states`."""
    task = _step(problem, "")
    shared = {
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "initial_state": x.state if states is None else states,
        "output_final_state": task == "write",
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": delta.v_first(problem),
    }
    if delta.has_channels(problem):
        from fla.ops.kda import fused_recurrent_kda

        return lambda: fused_recurrent_kda(x.q, x.k, x.v, x.g, x.beta, **shared)
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return lambda: fused_recurrent_gated_delta_rule(x.q, x.k, x.v, x.g, beta=x.beta, **shared)


def _fla_supports(problem: Setting) -> str | None:
    if _step(problem, "slots") == "slots":
        return "keeps no states of single tokens"
    return _fla_missing()


def fla_inplace_call(problem: Setting, x: Inputs, out: Tensor | None = None) -> Call:
    """The function below the public one, which serves vLLM: it takes slots and writes them."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    slots = _step(problem, "slots") == "slots"
    given = {
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "initial_state": x.token_pool if slots else x.state,
        "inplace_final_state": True,
        "state_v_first": delta.v_first(problem),
        "ssm_state_indices": x.table if slots else x.slots,
        "num_accepted_tokens": x.accepted if slots else None,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }

    def run() -> Tensor:
        o = torch.empty_like(x.v) if out is None else out
        return fused_recurrent_kda_fwd(x.q, x.k, x.v, x.g, x.beta, out=o, **given)[0]

    return run


def _fla_inplace_supports(problem: Setting) -> str | None:
    if not delta.has_channels(problem):
        return "there is one for KDA only"
    if _step(problem, "slots") == "verify":
        return "always writes states"
    if _step(problem, "slots") == "write" and problem.params["T"] > 1:
        return "writes a state for every token"
    return _fla_missing()


def _fla_inplace_result(problem: Setting, x: Inputs) -> Result:
    out = torch.full_like(x.v, float("nan"))
    fla_inplace_call(problem, x, out)()
    return out, _states_after(_step(problem, "slots") or "", x)


FLA = Provider(
    "fla",
    "peer",
    fla_call,
    lambda problem: delta.moved(_step(problem, "") or "", problem, written_state="fp32"),
    supports=_fla_supports,
)
FLA_INPLACE = Provider(
    "fla_inplace",
    "peer",
    fla_inplace_call,
    lambda problem: delta.moved(_step(problem, "slots") or "", problem),
    supports=_fla_inplace_supports,
)

# ---- FlashInfer ------------------------------------------------------------------------------------------------------


def _flashinfer_result(problem: Setting, x: Inputs) -> Result:
    out, task = torch.full_like(x.v, float("nan")), _step(problem, "slots") or ""
    if delta.v_first(problem):
        flashinfer_calls.call(problem, x, task, out)()
        return out, _states_after(task, x)
    by_row = dataclasses.replace(x, state=x.state[x.slots.long()])  # it takes no slots
    flashinfer_calls.call(problem, by_row, task, out)()
    return out, by_row.state


FLASHINFER = Provider(
    "flashinfer",
    "peer",
    lambda problem, x: flashinfer_calls.call(problem, x, _step(problem, "slots") or ""),
    lambda problem: delta.moved(_step(problem, "slots") or "", problem),
    supports=lambda problem: flashinfer_calls.supports(problem, _step(problem, "slots") or ""),
)

FLASHINFER_REPLAY = Provider(
    "flashinfer_replay",
    "peer",
    flashinfer_replay.call,
    flashinfer_replay.moved,
    supports=flashinfer_replay.supports,
)

# ---- all of them -----------------------------------------------------------------------------------------------------


def _ceiling_supports(problem: Setting) -> str | None:
    mode = problem.params["mode"]
    return None if mode in ("write", "step") else "states are not updated in place"


CEILING = in_place.ceiling(lambda x: x.state, delta.state_bytes, _ceiling_supports)
PROVIDERS = (CULA, WRITE, COMMIT, SLOTS, FLA, FLA_INPLACE, FLASHINFER, FLASHINFER_REPLAY, CEILING)


def _fla_result(problem: Setting, x: Inputs) -> Result:
    return fla_call(problem, x, x.state[x.slots.long()])()


# What the check of a provider compares: its task in a setting, and how it is run.
_CHECKED: dict[str, tuple[Callable[[Setting], str | None], Callable[[Setting, Inputs], Result]]] = {
    "cula": (our_task, lambda problem, x: _cula_result(our_task(problem), problem, x)),
    **{
        name: (lambda problem, t=task: t, functools.partial(_cula_result, task))
        for name, task in (
            ("cula_write", "write"),
            ("cula_commit", "commit"),
            ("cula_slots", "slots"),
        )
    },
    "fla": (lambda problem: _step(problem, ""), _fla_result),
    "fla_inplace": (lambda problem: _step(problem, "slots"), _fla_inplace_result),
    "flashinfer": (lambda problem: _step(problem, "slots"), _flashinfer_result),
}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares a provider with the fp64 recurrence on fresh inputs; the ceiling is compared with its own definition.

    Raises CannotRun where it is FlashInfer that fails: its kernels are written for other cards too, and for other
    versions of the compiler.
    """
    if provider.role == "ceiling":
        x = delta.make_inputs(problem, device, checks.SEED)
        return in_place.check(provider, lambda y: y.state, problem, x)
    if provider in (FLASHINFER, FLASHINFER_REPLAY):
        return _checked_flashinfer(provider, problem, device)
    return _checked(provider, problem, device)


def _checked(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    task_of, run = _CHECKED[provider.name]
    limits = (delta.OUTPUT_LIMIT, delta.STATE_LIMIT)
    if provider.role == "peer":
        limits = (delta.PEER_OUTPUT_LIMIT, delta.PEER_STATE_LIMIT)
    return delta.check_task(task_of(problem) or "", run, problem, device, limits)


def _checked_flashinfer(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    try:
        if provider is FLASHINFER_REPLAY:
            return flashinfer_replay.check(problem, device)
        return _checked(provider, problem, device)
    except CheckFailed as error:
        raise CannotRun(f"its result is wrong: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise CannotRun(f"fails: {type(error).__name__}: {reason}") from error
