"""Wrong arguments of gated delta rule prefill, one at a time: heads, gates, pools, checkpoints and choices.

What it shares with every function of `cula`, such as packing and the dtypes of activations, other tables have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..refusals import ANYWHERE, CPU, Arguments, Error, Table, Wrong, on_device, resized
from ..tensors import int32, spaced, turned
from .cases import Case, arguments

TOKENS, POOL, EVERY = 140, 5, 64
# q, k and v have 4, 1 and 2 heads, so that states have those of q.
HEADS = (4, 1, 2)
# A dense batch of 2 with initial states, and 3 packed sequences on a pool.
DENSE, PACKED = ("dense",), ("packed",)
BOTH = DENSE + PACKED
_TABLE = Table(BOTH)
change, several, values, value = _TABLE.change, _TABLE.several, _TABLE.values, _TABLE.value
no_tensor, away = _TABLE.no_tensor, _TABLE.away
FLOATS = "float32 or bfloat16 or float16 or float64"
IN_PLACE = "no gradients with it, it is updated in place (see update_state_pool)"


def indices(name: str) -> list[Wrong]:
    """What may be wrong with rows of the pool."""
    return [
        no_tensor(name, [0, 1, 2], PACKED),
        away(name, PACKED),
        change(f"{name} of int64", name, Tensor.long, TypeError, "int32", "int64", PACKED),
        change(f"{name} too short", name, lambda x: x[:1], ValueError, "[N] = [3]", "[1]", PACKED),
        change(f"{name} of 2 dimensions", name, lambda x: x[None], ValueError, "[N] = [3]", "[1, 3]", PACKED),
        several(f"{name} beyond the pool", {name: on_device([0, 5, 1], torch.int32)}, ValueError, name,
                "values below the 5 states of state_pool", "5", PACKED, devices=CPU),
        Wrong(f"{name} without a pool", lambda a: {name: int32(0, 1).to(a["q"].device)}, ValueError, name,
              "None without a state_pool", "Tensor", DENSE),
    ]  # fmt: skip


def buffer(
    label: str, how: Callable[[Tensor], Tensor], says: str, got: str, error: Error = ValueError
) -> Wrong:
    """Another buffer for checkpoints."""
    return change(label, "state_checkpoints", how, error, says, got, PACKED)


def once(
    label: str,
    changes: dict[str, Any],
    argument: str,
    says: str,
    got: str,
    error: Error = ValueError,
    devices: tuple[str, ...] = ANYWHERE,
) -> Wrong:
    """Something wrong with checkpoints that are kept once per sequence; changes: numbers of indices, or values."""

    def change(a: Arguments) -> Arguments:
        good = {
            "checkpoint_every_n_tokens": None,
            "checkpoint_offsets": (64, 0, 0),
            "checkpoint_rows": (0, 1, -1),
        }
        given = good | {"state_checkpoints": a["state_checkpoints"][0]} | changes
        return {
            n: int32(*x).to(a["q"].device) if isinstance(x, tuple) else x for n, x in given.items()
        }

    return _TABLE.entry(label, change, error, argument, says, got, PACKED, devices)  # fmt: skip


NO_GATE: dict[str, Any] = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}


def log_decay(bad: float) -> Wrong:
    """Decays that no state may have."""

    def change(a: Arguments) -> Arguments:
        return NO_GATE | {"g": torch.full_like(a["g"], bad)}

    label = f"a log decay of {bad}"
    return Wrong(label, change, ValueError, "g", "values <= 0", str(bad), BOTH, CPU)


WRONG = [
    several("heads of k that states are no multiple of", {"k": resized("k", (2, 3))}, ValueError, "k",
            "a number of heads HK that divides HS = max(HQ, HV) = 4", "3"),
    several("more heads of k than of states", {"k": resized("k", (2, 8))}, ValueError, "k", "divides HS", "8"),
    several("no heads of k", {"k": resized("k", (2, 0))}, ValueError, "k", "divides HS", "0"),
    several("heads of v beside those of q", {"v": resized("v", (2, 3))}, ValueError, "v",
            "a number of heads HV that is a multiple of HQ = 4 or divides it", "3"),
    several("no heads of v", {"v": resized("v", (2, 0))}, ValueError, "v", "multiple of HQ = 4", "0"),
    several("no heads of q", {"q": resized("q", (2, 0))}, ValueError, "q", "at least one head", "0"),
    change("k of fewer tokens", "k", lambda k: k[:, :9], ValueError, "[B, T, HK, K] with B, T, K = ", ", 9, 1, "),
    several("k of another K", {"k": resized("k", (3, 8))}, ValueError, "k", " as in q", ", 1, 8]"),
    change("k of 3 dimensions", "k", lambda k: k[0], ValueError, "4 dimensions [B, T, HK, K]", ", 1, "),
    change("out like v", "out", lambda o: o[:, :, :2], ValueError, "[B, T, HS, V] = [", ", 2, "),
    *(change(f"{name} per head of v", name, lambda x: x[:, :, :2], ValueError, "[B, T, HS] = [", ", 2]")
      for name in ("g", "beta")),
    *(change(f"{name} per head of v", name, lambda x: x[:2], ValueError, "[HS] = [4]", "[2]")
      for name in ("A_log", "dt_bias")),
    *(change(f"{name} of int32", name, Tensor.int, TypeError, FLOATS, "int32") for name in ("g", "beta", "A_log")),
    values("use_gate_in_kernel", ValueError, "False without g", "True", g=None),
    values("use_beta_sigmoid_in_kernel", ValueError, "False without beta", "True", beta=None),
    *(values(name, ValueError, "None unless there are g and use_gate_in_kernel", "a tensor",
             **NO_GATE | {"g": None, name: torch.zeros(4)}) for name in ("A_log", "dt_bias")),
    values("A_log", ValueError, "a tensor with use_gate_in_kernel", "None", A_log=None),
    *(log_decay(bad) for bad in (0.5, math.nan)),
    values("allow_neg_eigval", ValueError, "False unless there are beta and use_beta_sigmoid_in_kernel",
           "True with use_beta_sigmoid_in_kernel=False", use_beta_sigmoid_in_kernel=False),
    *(value(name, wrong, TypeError, "a float", type(wrong).__name__)
      for name in ("softplus_beta", "softplus_threshold") for wrong in (None, "1", True)),
    value("softplus_threshold", math.inf, ValueError, "a finite number", "inf"),
    value("softplus_beta", 0.0, ValueError, "a number above 0", "0.0"),
    *(value(name, 1, TypeError, "a bool", "int")
      for name in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_qk_l2norm_in_kernel",
                   "output_final_state", "state_v_first", "update_state_pool")),

    no_tensor("state_pool", 1.0, PACKED),
    away("state_pool", PACKED),
    change("a pool of fewer heads", "state_pool", lambda s: s[:, :2], ValueError, "[pool, HS, K, V] = [pool, 4, ",
           "[5, 2, ", PACKED),
    change("initial states of fewer heads", "initial_state", lambda s: s[:, :2], ValueError, "[N, HS, K, V] = [N, 4, ",
           "[2, 2, ", DENSE),
    change("a pool of float64", "state_pool", Tensor.double, TypeError, "float32 or bfloat16 or float16", "float64",
           PACKED),
    change("a pool with gaps", "state_pool", spaced, ValueError, "dense matrices", "strides", PACKED),
    Wrong("a pool beside initial states", lambda a: {"state_pool": a["initial_state"].clone()}, ValueError,
          "state_pool", "None beside an initial_state", "Tensor", DENSE),
    Wrong("a pool smaller than the batch", lambda a: {"state_pool": a["state_pool"][:2], "state_indices": None},
          ValueError, "state_pool", "at least N = 3 states when there are no indices", "2", PACKED),
    *indices("state_indices"),
    *indices("output_state_indices"),
    several("a row where two begin and end", {"state_indices": on_device([2, 0, 2], torch.int32),
            "output_state_indices": lambda a: None}, ValueError, "state_indices", "slots that differ", "2 twice",
            PACKED, devices=CPU),
    several("a row where two end", {"output_state_indices": on_device([3, 3, 3], torch.int32)}, ValueError,
            "output_state_indices", "slots that differ because they are written", "3 twice", PACKED, devices=CPU),
    several("a row where one ends and another begins", {"output_state_indices": on_device([0, 1, 4], torch.int32)},
            ValueError, "output_state_indices", "slots at which no other row begins", "0 in row 0", PACKED, CPU),
    values("output_state_indices", ValueError, "None unless update_state_pool is True", "a tensor", PACKED,
           update_state_pool=False),
    *(value("null_slot", wrong, TypeError, "an int or None", type(wrong).__name__, PACKED) for wrong in (0.0, True)),
    value("null_slot", 1 << 31, ValueError, "a 32-bit integer", "2147483648", PACKED),
    value("null_slot", 0, ValueError, "None without a state_pool", "int", DENSE),
    no_tensor("has_initial_state", [True, True, True], PACKED),
    away("has_initial_state", PACKED),
    change("has_initial_state of int32", "has_initial_state", Tensor.int, TypeError, "bool", "int32", PACKED),
    change("has_initial_state too short", "has_initial_state", lambda x: x[:2], ValueError, "[N] = [3]", "[2]", PACKED),
    Wrong("has_initial_state of nothing", lambda a: {"initial_state": None, "has_initial_state": torch.ones(
        2, dtype=torch.bool, device=a["q"].device)}, ValueError, "has_initial_state",
          "None without an initial_state or a state_pool", "a tensor", DENSE),

    no_tensor("state_checkpoints", 1.0, PACKED),
    away("state_checkpoints", PACKED),
    *(value("checkpoint_every_n_tokens", n, error, says, got, PACKED)
      for n, error, says, got in (
        (None, ValueError, "a multiple of 64 beside state_checkpoints", "None"),
        (64.0, TypeError, "an int or None", "float"),
        (32, ValueError, "a positive multiple of 64", "32"), (-64, ValueError, "a positive multiple of 64", "-64"),
    )),
    value("state_checkpoints", None, ValueError, "a tensor beside checkpoint_every_n_tokens", "None", PACKED),
    values("state_checkpoints", ValueError, "[B, T // n, HS, K, V] = [1, 1, 4, ", "[1, 2, 4, ", PACKED,
           checkpoint_every_n_tokens=128),
    buffer("checkpoints of fewer heads", lambda x: x[:, :, :2], "[1, 2, 4, ", "[1, 2, 2, "),
    buffer("checkpoints of bfloat16", Tensor.bfloat16, "float32", "bfloat16", TypeError),
    buffer("checkpoints turned", turned, "a contiguous tensor", "strides"),
    once("both kinds of checkpoints", {"checkpoint_every_n_tokens": EVERY}, "checkpoint_offsets",
         "None beside checkpoint_every_n_tokens", "Tensor"),
    once("rows for no checkpoints", {"checkpoint_offsets": None, "state_checkpoints": None}, "checkpoint_rows",
         "None without checkpoint_every_n_tokens or checkpoint_offsets", "Tensor"),
    *(once(f"{name} of a list", {name: [0, 1, 2]}, name, "a torch.Tensor", "list", TypeError)
      for name in ("checkpoint_rows", "checkpoint_offsets")),
    *(once(f"{name} too short", {name: (0, 1)}, name, "[N] = [3]", "[2]")
      for name in ("checkpoint_rows", "checkpoint_offsets")),
    once("too few checkpoints", {"checkpoint_rows": None}, "state_checkpoints", "a row for each of 3 sequences", "2"),
    once("checkpoints beyond their memory", {"checkpoint_rows": (2, 0, 0)}, "checkpoint_rows",
         "below the 2 of state_checkpoints", "2", devices=CPU),
    once("checkpoints in a pool that is read", {"state_checkpoints": None, "update_state_pool": False,
         "output_state_indices": None}, "state_checkpoints", "a tensor, or an updated state_pool with rows", "None"),
    Wrong("checkpoints in states that are read", lambda a: {"state_checkpoints": a["state_pool"], "checkpoint_rows":
          int32(0, 1, 2).to(a["q"].device), "update_state_pool": False, "output_state_indices": None}, ValueError,
          "state_checkpoints", "other memory than that of states that are only read", "", PACKED),

    *(value("operand_dtype", wrong, TypeError, "torch.float16, torch.bfloat16 or None", repr(wrong))
      for wrong in (torch.float32, "float16", 16)),
    *(value("use_intracard_cp", wrong, ValueError, "'auto', True or False", repr(wrong)) for wrong in ("on", None, 1)),
    *(value("segment_tokens", wrong, TypeError, "an int or None", type(wrong).__name__)
      for wrong in (1024.0, True, "auto")),
    *(value("segment_tokens", wrong, ValueError, "a multiple of 64, at least 1024, or None", str(wrong))
      for wrong in (0, 960, 1000)),
    values("segment_tokens", ValueError, "None with use_intracard_cp=False", "1024", segment_tokens=1024,
           use_intracard_cp=False),
    no_tensor("chunk_indices", [[0, 0]], PACKED),
    Wrong("chunk_indices of a dense batch", lambda a: {"chunk_indices": int32(0, 0)[None].to(a["q"].device)},
          ValueError, "chunk_indices", "None without cu_seqlens", "a tensor", DENSE),
    value("cp_context", 1, NotImplementedError, "None", "int; sequences are not split over several GPUs"),
]  # fmt: skip
# Where there is a backward: what gradients exclude.
WRONG_WITH_GRADIENTS = [
    several("out beside gradients", {"q": lambda a: a["q"].clone().requires_grad_()}, ValueError, "out",
            "None when gradients are required", "a tensor"),
    several("checkpoints beside gradients", {"v": lambda a: a["v"].clone().requires_grad_(), "out": lambda a: None},
            ValueError, "state_checkpoints", "None when gradients are required", "a tensor", PACKED),
    several("a pool that is updated beside gradients", {
        "beta": lambda a: a["beta"].clone().requires_grad_(), "out": lambda a: None,
        "state_checkpoints": lambda a: None, "checkpoint_every_n_tokens": lambda a: None}, ValueError, "state_pool",
            IN_PLACE, "an input that requires them", PACKED),
]  # fmt: skip


def good_arguments(mode: str, device: torch.device | str = "cpu", dim: int = 128) -> Arguments:
    """Returns arguments of `chunk_gated_delta_rule` that are good in all implementations; K = V = dim."""
    packed = mode == "packed"
    lengths = (128, 0, 12) if packed else (TOKENS, TOKENS)
    a: Arguments = arguments(Case(HEADS, lengths, True, True, 0.5), dim, device=device)
    if not packed:
        del a["cu_seqlens"]
        a |= {n: a[n].unflatten(1, (2, TOKENS))[0] for n in ("q", "k", "v", "g", "beta")}
    heads = max(HEADS)
    a |= {"A_log": torch.zeros(heads, device=device), "dt_bias": torch.ones(heads, device=device)}
    a |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    a["out"] = torch.full((*a["v"].shape[:2], heads, dim), 9.0, dtype=a["v"].dtype, device=device)
    states = torch.randn(POOL if packed else 2, heads, dim, dim, device=device)
    if not packed:
        return a | {"initial_state": states}
    return a | {
        "state_pool": states,
        "state_indices": int32(2, -1, 0).to(device),
        "output_state_indices": int32(3, 1, 4).to(device),
        "has_initial_state": torch.tensor([True, True, False], device=device),
        "state_checkpoints": torch.full((1, TOKENS // EVERY, heads, dim, dim), 9.0, device=device),
        "checkpoint_every_n_tokens": EVERY,
    }
