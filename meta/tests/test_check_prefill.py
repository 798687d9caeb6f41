"""What Lightning prefill functions check beyond test_check.py: normalisation, checkpoints, splits, read-only pools."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cula import lightning

B, T, H, HV, K, V = 2, 130, 2, 4, 8, 6
EVERY = 64
META = torch.device("meta")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        lightning.lightning_attn_fwd,
        lightning.lightning_attn_fwd_varlen,
        lightning.chunk_lightning_attn,
        lightning.chunk_simple_gla,
    )
}


def good(function: str) -> dict[str, Any]:
    """Arguments that are accepted, with checkpoints that nobody has written yet."""
    batch = 1 if function == "lightning_attn_fwd_varlen" else B
    found: dict[str, Any] = {
        "q": torch.randn(batch, T, H, K),
        "k": torch.randn(batch, T, H, K),
        "v": torch.randn(batch, T, HV, V),
        "state_checkpoints": torch.full((batch, T // EVERY, HV, K, V), float("nan")),
        "checkpoint_every_n_tokens": EVERY,
    }
    match function:
        case "lightning_attn_fwd":
            return {**found, "decay": torch.rand(HV)}
        case "lightning_attn_fwd_varlen":
            return {
                **found,
                "decay": torch.rand(HV),
                "cu_seqlens": torch.tensor([0, 1, T]),
                "state_pool": torch.randn(5, HV, K, V),
                "initial_state_indices": torch.tensor([4, -1], dtype=torch.int32),
            }
        case "chunk_lightning_attn":
            return {**found, "layer_idx": 1, "num_layers": 4}
        case "chunk_simple_gla":
            return {**found, "g": -torch.rand(B, T, HV), "g_gamma": -torch.rand(HV)}
    raise AssertionError(function)


def buffer(change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return {"state_checkpoints": lambda args: change(args["state_checkpoints"])}


# Argument to blame, what to change (a value or a function of the good arguments), error, what was expected.
CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("use_qk_l2norm_in_kernel", {"use_qk_l2norm_in_kernel": 1}, TypeError, "a bool, got int"),
    ("exact_state", {"exact_state": None}, TypeError, "a bool, got NoneType"),
    ("num_splits", {"num_splits": 0}, ValueError, "at least 1, got 0"),
    ("num_splits", {"num_splits": -2}, ValueError, "at least 1, got -2"),
    ("num_splits", {"num_splits": True}, TypeError, "an int or None, got bool"),
    ("num_splits", {"num_splits": 2.0}, TypeError, "an int or None, got float"),
    ("segment_tokens", {"segment_tokens": 1000}, ValueError, "a multiple of 64, at least 1024, or None, got 1000"),
    ("segment_tokens", {"segment_tokens": 960}, ValueError, "a multiple of 64, at least 1024, or None, got 960"),
    ("segment_tokens", {"segment_tokens": 1024.0}, TypeError, "an int or None, got float"),
    ("segment_tokens", {"segment_tokens": True}, TypeError, "an int or None, got bool"),
    ("segment_tokens", {"segment_tokens": 1024, "num_splits": 1}, ValueError, "None with num_splits=1, got 1024"),
    ("num_splits", {"num_splits": [2]}, TypeError, "a bool, an int or None, got list"),
    ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": None}, ValueError,
     "a multiple of 64 beside state_checkpoints, got None"),
    ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": 64.0}, TypeError, "an int or None, got float"),
    ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": True}, TypeError, "an int or None, got bool"),
    ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": 0}, ValueError, "a positive multiple of 64, got 0"),
    ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": -64}, ValueError, "a positive multiple of 64, got -64"),
    ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": 96}, ValueError, "a positive multiple of 64, got 96"),
    ("state_checkpoints", {"state_checkpoints": None}, ValueError,
     "a tensor beside checkpoint_every_n_tokens, got None"),
    ("state_checkpoints", buffer(torch.Tensor.tolist), TypeError, "a torch.Tensor, got list"),
    ("state_checkpoints", buffer(lambda x: x.to(META)), ValueError, "a tensor on cpu, as q, got meta"),
    ("state_checkpoints", buffer(torch.Tensor.double), TypeError, "float32, got float64"),
    ("state_checkpoints", buffer(torch.Tensor.bfloat16), TypeError, "float32, got bfloat16"),
    ("state_checkpoints", buffer(lambda x: x[:, :1].contiguous()), ValueError, "[B, T // n, HV, K, V] = ["),
    ("state_checkpoints", {"checkpoint_every_n_tokens": 128}, ValueError, "[B, T // n, HV, K, V] = ["),
    ("state_checkpoints", buffer(lambda x: x.mT.contiguous()), ValueError, "2, 4, 8, 6], got ["),
    ("state_checkpoints", buffer(lambda x: x.mT.contiguous().mT), ValueError, "a contiguous tensor, got strides"),
    ("state_checkpoints", buffer(lambda x: x.requires_grad_()), ValueError, "None when gradients are required"),
    ("state_checkpoints", {"q": lambda args: args["q"].requires_grad_(), "state_pool": None,
                           "initial_state_indices": None}, ValueError, "None when gradients are required"),
]  # fmt: skip
POOL_CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("update_state_pool", {"update_state_pool": 1}, TypeError, "a bool, got int"),
    ("state_checkpoints", {"update_state_pool": False, "q": lambda args: args["q"].requires_grad_()}, ValueError,
     "None when gradients are required"),
    ("state_pool", {"state_checkpoints": None, "checkpoint_every_n_tokens": None,
                    "q": lambda args: args["q"].requires_grad_()}, ValueError,
     "no gradients with it, it is updated in place (see update_state_pool)"),
]  # fmt: skip
NO_EVERY = {"checkpoint_every_n_tokens": None}
ROWS = {
    "checkpoint_rows": torch.tensor([0, 4]),
    "state_checkpoints": torch.full((5, HV, K, V), float("nan")),
}
OFFSETS = {**ROWS, **NO_EVERY, "checkpoint_offsets": torch.tensor([0, 64], dtype=torch.int32)}
POOL_CASES += [
    ("checkpoint_rows", {**ROWS, **NO_EVERY}, ValueError,
     "None without checkpoint_every_n_tokens or checkpoint_offsets, got Tensor"),
    ("checkpoint_offsets", {**OFFSETS, "checkpoint_every_n_tokens": EVERY}, ValueError,
     "None beside checkpoint_every_n_tokens, got Tensor"),
    *((name, {**OFFSETS, name: wrong}, error, expected)
      for name in ("checkpoint_rows", "checkpoint_offsets")
      for wrong, error, expected in (
          ([0, 1], TypeError, "a torch.Tensor, got list"),
          (torch.tensor([0.0, 1.0]), TypeError, "int32 or int64, got float32"),
          (torch.tensor([0, 1, 2]), ValueError, "[N] = [2], got [3]"),
          (torch.zeros(2, dtype=torch.int32, device=META), ValueError, "a tensor on cpu, as q, got meta"),
      )),
    ("checkpoint_rows", {**OFFSETS, "checkpoint_rows": torch.tensor([0, 5])}, ValueError,
     "rows of states below the 5 of state_checkpoints, got 5"),
    ("state_checkpoints", {**OFFSETS, "state_checkpoints": ROWS["state_checkpoints"].double()}, TypeError,
     "float32, got float64"),
    ("state_checkpoints", {**OFFSETS, "checkpoint_rows": None, "state_checkpoints": ROWS["state_checkpoints"][:1]},
     ValueError, "a row for each of 2 sequences without checkpoint_rows, got 1"),
    ("state_checkpoints", {**OFFSETS, "checkpoint_rows": None, "state_checkpoints": None}, ValueError,
     "a tensor, or an updated state_pool with rows, got None"),
    ("state_checkpoints", {**OFFSETS, "state_checkpoints": None, "update_state_pool": False}, ValueError,
     "a tensor, or an updated state_pool with rows, got None"),
    ("state_checkpoints", {**OFFSETS, "state_checkpoints": lambda args: args["state_pool"],
                           "update_state_pool": False}, ValueError,
     "other memory than that of states that are only read, got state_checkpoints"),
]  # fmt: skip
EVERYWHERE = [(function, *case) for function in FUNCTIONS for case in CASES]
EVERYWHERE += [("lightning_attn_fwd_varlen", *case) for case in POOL_CASES]


@pytest.mark.parametrize(
    ("function", "blamed", "changes", "error", "expected"),
    EVERYWHERE,
    ids=[f"{case[0]}-{case[1]}-{i}" for i, case in enumerate(EVERYWHERE)],
)
def test_wrong_argument_is_named_and_nothing_changes(
    function: str, blamed: str, changes: dict[str, Any], error: type[Exception], expected: str
) -> None:
    base = good(function)
    arguments = dict(base)
    for name, value in changes.items():
        if name in inspect.signature(FUNCTIONS[function]).parameters:
            arguments[name] = value(base) if callable(value) else value
    before = {n: x._version for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=f"^{blamed}: expected .*{re.escape(expected)}") as caught:
        FUNCTIONS[function](**arguments)
    assert type(caught.value) is error
    assert before == {n: x._version for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    assert base["state_checkpoints"].isnan().all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_has_a_case(function: str) -> None:
    names = {
        "use_qk_l2norm_in_kernel",
        "exact_state",
        "state_checkpoints",
        "checkpoint_every_n_tokens",
        "num_splits",
        "segment_tokens",
        "update_state_pool",
        "checkpoint_rows",
        "checkpoint_offsets",
    }
    covered = {blamed for name, blamed, *_ in EVERYWHERE if name == function}
    taken = set(inspect.signature(FUNCTIONS[function]).parameters)
    assert covered - {"state_pool"} == names & taken
    assert names - taken <= {"update_state_pool", "checkpoint_rows", "checkpoint_offsets"}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_good_arguments_are_accepted(function: str) -> None:
    arguments = good(function)
    FUNCTIONS[function](**arguments, exact_state=True, num_splits=1, use_qk_l2norm_in_kernel=True)
    written = arguments["state_checkpoints"].isfinite().flatten(2).all(-1)
    # The packed sequence of 129 tokens is a padding slot.
    assert written.all() == (function != "lightning_attn_fwd_varlen")
    # Without a whole interval there is nothing to write, and the buffer has no rows.
    arguments["checkpoint_every_n_tokens"] = 192
    arguments["state_checkpoints"] = arguments["state_checkpoints"][:, :0]
    FUNCTIONS[function](**arguments)
    FUNCTIONS[function](**good(function), num_splits=1000)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoints_have_the_layout_of_states(function: str) -> None:
    base = good(function)
    flipped = {**good(function), **{n: x for n, x in base.items() if n != "state_checkpoints"}}
    flipped["state_checkpoints"] = base["state_checkpoints"].mT.contiguous()
    if "state_pool" in base:
        base["initial_state_indices"] = torch.tensor([4, 0], dtype=torch.int32)
        flipped["initial_state_indices"] = base["initial_state_indices"]
        flipped["state_pool"] = base["state_pool"].mT.contiguous()
    FUNCTIONS[function](**base)
    FUNCTIONS[function](**flipped, state_v_first=True)
    assert base["state_checkpoints"].isfinite().all()
    torch.testing.assert_close(flipped["state_checkpoints"].mT, base["state_checkpoints"])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checks_read_no_device(function: str) -> None:
    arguments = {
        n: x.to(META) if isinstance(x, torch.Tensor) else x for n, x in good(function).items()
    }
    o, _ = FUNCTIONS[function](**arguments)
    assert o.device == META


def test_gate_may_have_any_strides() -> None:
    arguments = good("chunk_simple_gla")
    o, _ = lightning.chunk_simple_gla(**arguments)
    arguments["g"] = torch.stack((arguments["g"], arguments["g"]), -1)[..., 0]
    assert torch.equal(lightning.chunk_simple_gla(**arguments)[0], o)


def test_read_only_pool_takes_gradients() -> None:
    arguments = good("lightning_attn_fwd_varlen")
    del arguments["state_checkpoints"], arguments["checkpoint_every_n_tokens"]
    before = arguments["state_pool"].clone()
    pool = arguments["state_pool"].requires_grad_()
    o, final = lightning.lightning_attn_fwd_varlen(**arguments, update_state_pool=False)
    (o.sum() + final.sum()).backward()
    assert pool.grad is not None and pool.grad[4].any() and not pool.grad[:4].any()
    assert torch.equal(pool, before) and not final[1].any() and not o[:, 1:].any()
