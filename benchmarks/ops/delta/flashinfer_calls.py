"""FlashInfer's decode kernels of the gated delta rule and of KDA on the problems of this family.

Its KDA kernel and all of its kernels for bf16 states take [V, K] alone. The one for [K, V] takes no slots, so row n has
state n. A state per token is for several tokens; the KDA kernel has no other way to take several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Setting
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.problem import Inputs
from benchmarks.ops.installed import missing

_gdn_missing = missing("flashinfer.gdn_decode")
_kda_missing = missing("flashinfer.kda_decode")


def supports(problem: Setting, task: str) -> str | None:
    """Why there is no kernel for a task, or None."""
    p = problem.params
    several, first = p["T"] > 1, delta.v_first(problem)
    if delta.has_channels(problem):
        if p["state"] != "bf16" or not first:
            return "its KDA kernels take bf16 states [V, K]"
        if several and task != "slots":
            return "its KDA kernels write a state for every token"
        return _kda_missing()
    if p["state"] == "fp16":
        return "takes no fp16 states"
    if not first and (several or p["state"] != "fp32"):
        return "its kernel for [K, V] is for one token and fp32 states"
    if p["state"] == "bf16" and task in ("verify", "slots"):
        return "not called for bf16 states"
    return _gdn_missing()


def call(problem: Setting, x: Inputs, task: str, out: Tensor | None = None) -> Callable[[], Any]:
    """What is timed; the output is allocated by the call unless there is one."""
    bind = _kda if delta.has_channels(problem) else _gdn
    run = bind(problem, x, task)
    return lambda: run(torch.empty_like(x.v) if out is None else out)


def _gdn(problem: Setting, x: Inputs, task: str) -> Callable[[Tensor], Any]:
    from flashinfer import gdn_decode

    given = {
        "q": x.q,
        "k": x.k,
        "v": x.v,
        "A_log": x.A_log,
        "a": x.g,
        "dt_bias": x.dt_bias,
        "b": x.beta,
    }
    if not delta.v_first(problem):
        return lambda o: gdn_decode.gated_delta_rule_decode(**given, state=x.state, output=o)
    if task == "write" and (problem.params["T"] == 1 or problem.params["state"] == "bf16"):
        given |= {"state": None, "initial_state": x.state, "initial_state_indices": x.slots}
        return lambda o: gdn_decode.gated_delta_rule_decode_pretranspose(**given, output=o)
    if task == "slots":
        assert x.table is not None and x.accepted is not None
        begins = x.table.gather(1, x.accepted.long()[:, None] - 1)[:, 0].contiguous()
        given |= {"initial_state": x.token_pool, "initial_state_indices": begins}
        given |= {"ssm_state_indices": x.table}
    else:
        given |= {"initial_state": x.state, "initial_state_indices": x.slots}
    unchanged = task == "verify"
    return lambda o: gdn_decode.gated_delta_rule_mtp(
        **given, output=o, disable_state_update=unchanged
    )


def _kda(problem: Setting, x: Inputs, task: str) -> Callable[[Tensor], Any]:
    """Rows are packed sequences of equal length, which is how the function takes slots."""
    from flashinfer.kda_decode import recurrent_kda

    batch, tokens = problem.params["B"], problem.params["T"]
    packed = [t.reshape(1, batch * tokens, *t.shape[2:]) for t in (x.q, x.k, x.v, x.g, x.beta)]
    given: dict[str, Any] = {
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "initial_state": x.state,
        "ssm_state_indices": x.slots,
        "use_gate_in_kernel": True,
        "beta_is_logit": True,
        "cu_seqlens": torch.arange(
            0, batch * tokens + 1, tokens, dtype=torch.int32, device=x.q.device
        ),
    }
    if task == "slots":
        given |= {"initial_state": x.token_pool, "ssm_state_indices": x.table}
        given |= {"num_spec_tokens": tokens - 1, "num_accepted_tokens": x.accepted}
    return lambda o: recurrent_kda(*packed, **given, output=o.view(packed[2].shape))
