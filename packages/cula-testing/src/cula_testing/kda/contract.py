"""Every wrong argument of KDA prefill, one at a time, and arguments that are good."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.config import BLOCK_BYTES

from ..refusals import (
    ANYWHERE,
    CPU,
    CUDA,
    ELSEWHERE,
    Arguments,
    Maker,
    Table,
    Wrong,
    assert_refused,
    cases,
    on_cpu,
    on_device,
    resized,
)
from ..tensors import every_other, int32, shifted, spaced
from .inputs import inputs
from .subject import Subject

TOKENS, HEADS, HEADS_V, DIM, POOL = 10, 1, 2, 128, 5
# A dense batch of 2 with initial states, and 3 packed sequences on a pool.
DENSE, PACKED = ("dense",), ("packed",)
BOTH = DENSE + PACKED
_TABLE = Table(BOTH)
change, several, values, value = _TABLE.change, _TABLE.several, _TABLE.values, _TABLE.value
no_tensor, away = _TABLE.no_tensor, _TABLE.away
LAST = "a contiguous last dimension"
FLOATS = "float32 or bfloat16 or float16 or float64"


def lengthened(tokens: int) -> dict[str, Callable[[Arguments], Tensor]]:
    """Every tensor of tokens that much longer, in no more memory."""

    def make(name: str) -> Callable[[Arguments], Tensor]:
        return lambda a: a[name][:, :1].expand(-1, tokens, *a[name].shape[2:])

    return {name: make(name) for name in ("q", "k", "v", "g", "beta", "out")}


def with_one(tensor: Tensor, value: float) -> Tensor:
    """Returns a copy of a tensor with another value in the middle."""
    changed = tensor.clone()
    changed.view(-1)[tensor.numel() // 2] = value
    return changed


def offsets(label: str, numbers: list[int], got: str) -> list[Wrong]:
    says = f"rise from 0 to T = {TOKENS}"
    return [
        several(f"cu_seqlens {label}", {"cu_seqlens": on_device(numbers), "cu_seqlens_cpu": lambda a: None}, ValueError,
                "cu_seqlens", says, got, PACKED, devices=CPU),
        several(f"cu_seqlens_cpu {label}", {"cu_seqlens": lambda a: resized("cu_seqlens", (0, len(numbers)))(a) if
                a["q"].is_cuda else on_cpu([0] * (len(numbers) - 1) + [TOKENS])(a), "cu_seqlens_cpu": on_cpu(numbers)},
                ValueError, "cu_seqlens_cpu", says, got, PACKED),
    ]  # fmt: skip


def of_states(name: str, shape: str, modes: tuple[str, ...]) -> list[Wrong]:
    """What may be wrong with a tensor of states. shape: the start of the expected shape, up to HV."""
    expected = f"{shape}, K, V] = [{shape.split(',')[0][1:]}, 2, 128, 128]"
    outer = 2 * DIM * DIM + 1
    return [
        no_tensor(name, 1.0, modes),
        change(f"{name} of 3 dimensions", name, lambda s: s[0], ValueError, expected, "[2, 128, 128]", modes),
        change(f"{name} of fewer heads", name, lambda s: s[:, :1], ValueError, expected, ", 1, 128, 128]", modes),
        several(f"{name} of another K", {name: resized(name, (2, 64))}, ValueError, name, expected, ", 64, 128]",
                modes),
        several(f"{name} [K, V] with state_v_first", {name: resized(name, (3, 64)), "state_v_first": lambda a: True},
                ValueError, name, f"{shape}, V, K] = ", ", 128, 64]", modes),
        change(f"{name} of float64", name, Tensor.double, TypeError, "float32 or bfloat16 or float16", "float64",
               modes),
        change(f"{name} with gaps", name, spaced, ValueError, "dense matrices (last strides 128, 1, or 1, 128)",
               "136, 1)", modes),
        change(f"{name} every other", name, every_other, ValueError, "dense matrices", ", 2)", modes),
        change(f"{name} at an odd address", name, shifted, ValueError, "multiples of 16 bytes", "strides", modes,
               devices=CUDA),
        several(f"{name} with odd strides", {name: lambda a: torch.zeros(
            len(a[name]) * outer, device=a["q"].device).as_strided(a[name].shape, (outer, DIM * DIM, DIM, 1))},
                ValueError, name, "multiples of 16 bytes", f"strides ({outer}, 16384, 128, 1)", modes, devices=CUDA),
        away(name, modes),
    ]  # fmt: skip


FLAGS = (
    "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "safe_gate", "disable_recompute", "return_intermediate_states", "state_v_first",
    "update_state_pool",
)  # fmt: skip
NO_GATE = {"use_gate_in_kernel": False, "safe_gate": False, "lower_bound": None}
NO_GATE |= {"A_log": None, "dt_bias": None}


def rows(*values: int, dtype: torch.dtype = torch.int32) -> Maker:
    return on_device(list(values), dtype)


def saved(*shape: int, dtype: torch.dtype = torch.float32) -> Maker:
    """Makes memory for states on the way."""
    return lambda a: torch.zeros(*shape, HEADS_V, DIM, DIM, dtype=dtype, device=a["q"].device)


def added(
    label: str,
    makers: Mapping[str, Maker],
    error: type[Exception],
    argument: str,
    says: str,
    got: str,
    modes: tuple[str, ...] = BOTH,
    devices: tuple[str, ...] = ANYWHERE,
) -> Wrong:
    """Returns an entry with arguments that good ones do not have."""
    return _TABLE.entry(
        label, lambda a: {n: make(a) for n, make in makers.items()}, error, argument, says, got, modes, devices
    )  # fmt: skip


EVERY = {"checkpoint_every_n_tokens": lambda a: 64}
ONCE = {"checkpoint_offsets": rows(64, 0, 64)}
STATES_OF_ENGINES = [
    *(value("null_slot", wrong, TypeError, "an int or None", type(wrong).__name__, PACKED) for wrong in (0.0, True)),
    value("null_slot", 1 << 31, ValueError, "a 32-bit integer", "2147483648", PACKED),
    value("null_slot", 0, ValueError, "None without a state_pool", "int", DENSE),
    added("a row of the pool twice beside padding", {"initial_state_indices": rows(2, 0, 2),
            "null_slot": lambda a: 0}, ValueError, "initial_state_indices", "a row of state_pool once", "[2, 0, 2]",
            PACKED, CPU),
    added("targets without a pool", {"output_state_indices": rows(0, 1)}, ValueError, "output_state_indices",
            "None without a state_pool", "Tensor", DENSE),
    no_tensor("output_state_indices", [0, 1, 2], PACKED),
    added("targets of int64", {"output_state_indices": rows(0, 1, 2, dtype=torch.int64)}, TypeError,
            "output_state_indices", "int32", "int64", PACKED),
    added("targets too short", {"output_state_indices": rows(0, 1)}, ValueError, "output_state_indices",
            "[N] = [3]", "[2]", PACKED),
    added("targets elsewhere", {"output_state_indices": lambda a: rows(0, 1, 2)(a).to(ELSEWHERE[a["q"].device.type])},
            ValueError, "output_state_indices", "a tensor on", "", PACKED),
    added("targets of a pool that is read", {"output_state_indices": rows(0, 1, 2), "update_state_pool": lambda a:
            False}, ValueError, "output_state_indices", "None unless update_state_pool is True", "a tensor", PACKED),
    added("targets beyond the pool", {"output_state_indices": rows(0, 1, 5)}, ValueError, "output_state_indices",
            "below the 5 states of state_pool", "5", PACKED, CPU),
    added("a target twice", {"output_state_indices": rows(4, 1, 4)}, ValueError, "output_state_indices",
            "slots that differ", "4 twice", PACKED, CPU),
    added("a target where another begins", {"output_state_indices": rows(0, 1, 4)}, ValueError,
            "output_state_indices", "slots at which no other row begins", "0 in row 0", PACKED, CPU),
    added("has_initial_state without states", {"has_initial_state": lambda a: torch.ones(2, dtype=torch.bool),
            "initial_state": lambda a: None}, ValueError, "has_initial_state",
            "None without an initial_state or a state_pool", "a tensor", DENSE, CPU),
    no_tensor("has_initial_state", [True, False, True], PACKED),
    added("has_initial_state of int32", {"has_initial_state": rows(0, 1, 1)}, TypeError, "has_initial_state", "bool",
            "int32", PACKED),
    added("has_initial_state too short", {"has_initial_state": rows(0, 1, dtype=torch.bool)}, ValueError,
            "has_initial_state", "[N] = [3]", "[2]", PACKED),
    added("has_initial_state elsewhere", {"has_initial_state": lambda a: rows(0, 1, 1, dtype=torch.bool)(a).to(
            ELSEWHERE[a["q"].device.type])}, ValueError, "has_initial_state", "a tensor on", "", PACKED),
    added("memory for no checkpoints", {"state_checkpoints": saved(2, 0)}, ValueError, "checkpoint_every_n_tokens",
            "a multiple of 64 beside state_checkpoints", "None", DENSE),
    added("checkpoints in no memory", EVERY, ValueError, "state_checkpoints",
            "a tensor beside checkpoint_every_n_tokens", "None"),
    *(added(f"checkpoints after every {wrong}", {"checkpoint_every_n_tokens": lambda a, w=wrong: w,
              "state_checkpoints": saved(2, 0)}, error, "checkpoint_every_n_tokens", says, str(got), DENSE)
      for wrong, error, says, got in ((32, ValueError, "a positive multiple of 64", 32),
                                      (0, ValueError, "a positive multiple of 64", 0),
                                      (64.0, TypeError, "an int or None", "float"))),
    added("checkpoints of another shape", EVERY | {"state_checkpoints": saved(2, 1)}, ValueError,
            "state_checkpoints", "[B, T // n, HV, K, V] = [2, 0, 2, 128, 128]", "[2, 1, 2, 128, 128]", DENSE),
    added("checkpoints of another dtype", EVERY | {"state_checkpoints": saved(2, 0, dtype=torch.bfloat16)},
            TypeError, "state_checkpoints", "float32", "bfloat16", DENSE),
    added("checkpoints that are no tensor", EVERY | {"state_checkpoints": lambda a: 1.0}, TypeError,
            "state_checkpoints", "a torch.Tensor", "float"),
    added("rows for no checkpoints", {"checkpoint_rows": rows(0, 1, 2)}, ValueError, "checkpoint_rows",
            "None without checkpoint_every_n_tokens or checkpoint_offsets", "Tensor", PACKED),
    added("two kinds of checkpoints", EVERY | ONCE | {"state_checkpoints": saved(3)}, ValueError,
            "checkpoint_offsets", "None beside checkpoint_every_n_tokens", "Tensor", PACKED),
    *(added(f"{name} {label}", {**ONCE, "state_checkpoints": saved(3), name: make}, error, name, says, got, PACKED)
      for name in ("checkpoint_rows", "checkpoint_offsets")
      for label, make, error, says, got in (
        ("of a list", lambda a: [0, 1, 2], TypeError, "a torch.Tensor", "list"),
        ("of float32", rows(0, 1, 2, dtype=torch.float32), TypeError, "int32 or int64", "float32"),
        ("too short", rows(0, 1), ValueError, "[N] = [3]", "[2]"),
        ("elsewhere", lambda a: rows(0, 1, 2)(a).to(ELSEWHERE[a["q"].device.type]), ValueError, "a tensor on", ""),
    )),
    added("offsets in no memory", ONCE, ValueError, "state_checkpoints",
            "a tensor, or an updated state_pool with rows", "None", PACKED),
    added("rows of a pool that is read", {**ONCE, "checkpoint_rows": rows(0, 1, 2), "update_state_pool": lambda a:
            False}, ValueError, "state_checkpoints", "a tensor, or an updated state_pool with rows", "None", PACKED),
    added("checkpoints in a pool that is read", EVERY | {"state_checkpoints": lambda a: a["state_pool"],
            "checkpoint_rows": rows(0, 1, 2), "update_state_pool": lambda a: False}, ValueError, "state_checkpoints",
            "other memory than that of states that are only read", "", PACKED),
    added("memory for too few checkpoints", {**ONCE, "state_checkpoints": saved(2)}, ValueError,
            "state_checkpoints", "a row for each of 3 sequences without checkpoint_rows", "2", PACKED),
    added("checkpoints beyond their memory", {**ONCE, "state_checkpoints": saved(2), "checkpoint_rows":
            rows(1, 7, 2)}, ValueError, "checkpoint_rows", "below the 2 of state_checkpoints", "2", PACKED, CPU),
    added("checkpoints of few heads", {**ONCE, "state_checkpoints": lambda a: saved(3)(a)[:, :1]}, ValueError,
            "state_checkpoints", "[N, HV, K, V] = [N, 2, 128, 128]", "[3, 1, 128, 128]", PACKED),
]  # fmt: skip
WRONG = [
    *(no_tensor(name, wrong) for name in ("q", "k", "v", "g", "beta") for wrong in (None, [1.0])),
    *(no_tensor(name, 3) for name in ("out", "A_log", "dt_bias", "workspace")),
    no_tensor("cu_seqlens", [0, TOKENS], PACKED),
    no_tensor("cu_seqlens_cpu", [0, TOKENS], PACKED),
    no_tensor("initial_state_indices", [0, 1, 2], PACKED),
    change("q of int32", "q", Tensor.int, TypeError, "bfloat16 or float16", "int32"),
    change("q of float32 on a GPU", "q", Tensor.float, TypeError, "bfloat16 or float16", "float32", devices=CUDA),
    change("q of 3 dimensions", "q", lambda q: q[0], ValueError, "4 dimensions [B, T, H, K]", "[10, 1, 128]"),
    change("k of fewer tokens", "k", lambda k: k[:, :9], ValueError, "the shape of q", "9, 1, 128]"),
    change("k of float16", "k", Tensor.half, TypeError, "the dtype of q, bfloat16", "float16"),
    change("v of float16", "v", Tensor.half, TypeError, "the dtype of q, bfloat16", "float16"),
    change("v of 3 dimensions", "v", lambda v: v[0], ValueError, "[B, T, HV, V]", "[10, 2, 128]"),
    change("v of fewer tokens", "v", lambda v: v[:, :9], ValueError, ", 10 as in q", "9, 2, 128]"),
    several("HV = 3, H = 2", {"q": resized("q", (2, 2)), "k": resized("k", (2, 2)), "v": resized("v", (2, 3))},
            ValueError, "v", "a multiple of H = 2", "3"),
    several("no query heads", {"q": resized("q", (2, 0)), "k": resized("k", (2, 0))}, ValueError, "v",
            "a multiple of H = 0", "2"),
    several("no value heads", {"v": resized("v", (2, 0))}, ValueError, "v", "a multiple of H = 1", "0"),
    several("K = 0", {"q": resized("q", (3, 0)), "k": resized("k", (3, 0))}, ValueError, "q", "K of at least 1", "0",
            devices=CPU),
    several("V = 0", {"v": resized("v", (3, 0))}, ValueError, "v", "V of at least 1", "0", devices=CPU),
    several("K = 64", {"q": resized("q", (3, 64)), "k": resized("k", (3, 64))}, ValueError, "q", "K of 128", "64",
            devices=CUDA),
    several("V = 256", {"v": resized("v", (3, 256))}, ValueError, "v", "V of 128", "256", devices=CUDA),
    change("out of fewer tokens", "out", lambda o: o[:, :9], ValueError, "the shape of v", "9, 2, 128]"),
    change("out of float32", "out", Tensor.float, TypeError, "the dtype of q, bfloat16", "float32"),
    *(change(f"{name} every other element", name, every_other, ValueError, LAST, ", 2)")
      for name in ("q", "k", "v", "g", "out")),
    change("dt_bias every other element", "dt_bias", every_other, ValueError, LAST, "(2,)"),
    *(away(name) for name in ("k", "v", "g", "beta", "out", "A_log", "dt_bias", "workspace")),
    several("all on a device of no kind", {n: lambda a, n=n: a[n].to("meta") for n in ("q", "k", "v")},
            ValueError, "q", "a tensor on a CUDA device or the CPU", "meta"),
    *(change(f"{name} of int32", name, Tensor.int, TypeError, FLOATS, "int32")
      for name in ("g", "beta", "A_log", "dt_bias")),
    several("g per query head", {"g": resized("g", (2, 1))}, ValueError, "g", "[B, T, HV, K] = [", ", 10, 1, 128]"),
    change("g of 3 dimensions", "g", lambda g: g[..., 0], ValueError, ", 10, 2, 128]", ", 10, 2]"),
    several("beta per query head", {"beta": resized("beta", (2, 1))}, ValueError, "beta", "[B, T, HV] = [", ", 10, 1]"),
    change("beta of 4 dimensions", "beta", lambda b: b[..., None], ValueError, ", 10, 2]", ", 10, 2, 1]"),
    change("A_log per query head", "A_log", lambda x: x[:1], ValueError, "[HV] = [2]", "[1]"),
    change("A_log of 2 dimensions", "A_log", lambda x: x[None], ValueError, "[HV] = [2]", "[1, 2]"),
    change("A_log every other", "A_log", every_other, ValueError, "contiguous elements", "(2,)"),
    change("dt_bias per head", "dt_bias", lambda x: x[:2], ValueError, "[HV * K] = [256] or [HV, K] = [2, 128]", "[2]"),
    change("dt_bias [K, HV]", "dt_bias", lambda x: x.view(2, 128).mT, ValueError, "[2, 128]", "[128, 2]"),
    *(values(name, ValueError, "None unless use_gate_in_kernel is True", "Tensor", **NO_GATE | {name: torch.zeros(1)})
      for name in ("A_log", "dt_bias")),
    values("A_log", ValueError, "a tensor with use_gate_in_kernel and no lower_bound", "None", A_log=None,
           lower_bound=None, safe_gate=False),
    *(value("lower_bound", wrong, TypeError, "a float or None", type(wrong).__name__) for wrong in ("-5", True)),
    *(value("lower_bound", wrong, ValueError, "a finite number", str(wrong)) for wrong in (-math.inf, math.nan)),
    *(value("lower_bound", wrong, ValueError, "a number below 0", str(wrong)) for wrong in (0, 0.0, 1.5)),
    value("lower_bound", -5.5, ValueError, "a number in [-5, 0) with safe_gate", "-5.5"),
    value("lower_bound", None, ValueError, "a float with use_gate_in_kernel and safe_gate", "None"),
    values("lower_bound", ValueError, "None unless use_gate_in_kernel or safe_gate is True", "-5.0",
           **NO_GATE | {"lower_bound": -5.0}),
    *(Wrong(f"a log decay of {bad}", lambda a, bad=bad: NO_GATE | {"g": with_one(-a["g"].abs(), bad)}, ValueError, "g",
            "values <= 0", str(bad), BOTH, CPU) for bad in (0.5, math.inf, math.nan)),
    *(value(name, wrong, TypeError, "a bool", type(wrong).__name__) for name in FLAGS for wrong in (1, None)),
    values("allow_neg_eigval", ValueError, "use_beta_sigmoid_in_kernel=True with it",
           "use_beta_sigmoid_in_kernel=False", use_beta_sigmoid_in_kernel=False),
    added("states before chunks of a pool", {"return_intermediate_states": lambda a: True}, ValueError,
          "return_intermediate_states", "False with state_pool", "True", PACKED),
    *(added(f"states before chunks and {name}", {"return_intermediate_states": lambda a: True, name: lambda a: True},
            ValueError, "return_intermediate_states", f"False with {name}", "True", DENSE)
      for name in ("return_intra", "disable_recompute")),
    added("states before chunks and in memory of the caller", EVERY | {"return_intermediate_states": lambda a: True,
            "state_checkpoints": saved(2, 0)}, ValueError, "return_intermediate_states", "False with state_checkpoints",
          "True", DENSE),
    value("cp_context", 1, NotImplementedError, "None", "int; sequences are not split over several GPUs"),
    change("cu_seqlens of float32", "cu_seqlens", Tensor.float, TypeError, "int32 or int64", "float32", PACKED),
    change("cu_seqlens of 2 dimensions", "cu_seqlens", lambda c: c[None], ValueError, "[N + 1]", "[1, 4]", PACKED),
    change("cu_seqlens of nothing", "cu_seqlens", lambda c: c[:0], ValueError, "[N + 1]", "[0]", PACKED),
    change("cu_seqlens every other", "cu_seqlens", every_other, ValueError, "contiguous elements", "(2,)", PACKED),
    change("no sequence for 10 tokens", "cu_seqlens", lambda c: c[:1], ValueError, "N >= 1 for T = 10", "[1]", PACKED),
    away("cu_seqlens", PACKED),
    several("cu_seqlens of a dense batch",
            {n: lambda a, n=n: torch.cat((a[n], a[n])) for n in ("q", "k", "v", "g", "beta", "out")},
            ValueError, "cu_seqlens", "None unless B = 1", "B = 2", PACKED),
    *offsets("that fall", [0, 5, 3, 10], "[0, 5, 3, 10]"),
    *offsets("that start late", [1, 3, 3, 10], "[1, 3, 3, 10]"),
    *offsets("that end early", [0, 3, 3, 9], "[0, 3, 3, 9]"),
    *offsets("that end late", [0, 3, 3, 11], "[0, 3, 3, 11]"),
    *offsets("too many to show", [0] * 20, "0] ..."),
    Wrong("cu_seqlens_cpu alone", lambda a: {"cu_seqlens_cpu": torch.tensor([0, TOKENS])}, ValueError,
          "cu_seqlens_cpu", "None without cu_seqlens", "Tensor", DENSE),
    several("cu_seqlens_cpu too short", {"cu_seqlens_cpu": on_cpu([0, 10])}, ValueError, "cu_seqlens_cpu",
            "the shape of cu_seqlens, [4]", "[2]", PACKED),
    change("cu_seqlens_cpu of float32", "cu_seqlens_cpu", Tensor.float, TypeError, "int32 or int64", "float32", PACKED),
    change("cu_seqlens_cpu not on the CPU", "cu_seqlens_cpu", lambda c: c.to("meta"), ValueError, "a tensor on the CPU",
           "meta", PACKED),
    value("scale", "1", TypeError, "a float or None", "str"),
    value("scale", True, TypeError, "a float or None", "bool"),
    value("scale", math.inf, ValueError, "a finite number", "inf"),
    value("scale", math.nan, ValueError, "a finite number", "nan"),
    value("scale", torch.ones(()), TypeError, "a float or None", "Tensor"),
    *of_states("initial_state", "[N, HV", DENSE),
    *of_states("state_pool", "[pool, HV", PACKED),
    several("a state too few", {"initial_state": lambda a: a["initial_state"][:1]}, ValueError, "initial_state",
            "one state for each of 2 sequences", "1", DENSE),
    several("a state too many", {"initial_state": lambda a: a["initial_state"].repeat(2, 1, 1, 1)}, ValueError,
            "initial_state", "one state for each of 2 sequences", "4", DENSE),
    Wrong("a pool beside an initial state", lambda a: {"state_pool": a["initial_state"].clone()}, ValueError,
          "state_pool", "None beside an initial_state", "Tensor", DENSE),
    Wrong("a pool smaller than the batch", lambda a: {"state_pool": a["state_pool"][:2], "initial_state_indices": None},
          ValueError, "state_pool", "at least N = 3 states", "2", PACKED),
    Wrong("indices without a pool", lambda a: {"state_pool": None}, ValueError, "initial_state_indices",
          "None without a state_pool", "Tensor", PACKED),
    Wrong("indices of initial states", lambda a: {"initial_state_indices": int32(0, 1).to(a["q"].device)}, ValueError,
          "initial_state_indices", "None without a state_pool", "Tensor", DENSE),
    *(change(f"indices {label}", "initial_state_indices", how, error, says, got, PACKED)
      for label, how, error, says, got in (
        ("of int64", Tensor.long, TypeError, "int32", "int64"),
        ("of float32", Tensor.float, TypeError, "int32", "float32"),
        ("too short", lambda i: i[:1], ValueError, "[N] = [3]", "[1]"),
        ("of 2 dimensions", lambda i: i[None], ValueError, "[N] = [3]", "[1, 3]"),
    )),
    several("indices beyond the pool", {"initial_state_indices": on_device([0, 5, 1], torch.int32)}, ValueError,
            "initial_state_indices", "below the 5 rows of state_pool", "5", PACKED, devices=CPU),
    several("a row of the pool twice", {"initial_state_indices": on_device([2, 0, 2], torch.int32)}, ValueError,
                  "initial_state_indices", "a row of state_pool once at most", "[2, 0, 2]", PACKED, devices=CPU),
    away("initial_state_indices", PACKED),
    *STATES_OF_ENGINES,
    *(value("operand_dtype", wrong, TypeError, "torch.float16, torch.bfloat16 or None", repr(wrong))
      for wrong in (torch.float32, "float16", 16)),
    *(value("use_intracard_cp", wrong, ValueError, "'auto', True or False", repr(wrong))
      for wrong in ("on", None, 1)),
    values("use_intracard_cp", ValueError, "'auto' or False unless a sequence has at least 2048 tokens",
           "True with at most 10", DENSE, use_intracard_cp=True, workspace=None),
    values("use_intracard_cp", ValueError, "'auto' or False unless a sequence has at least 2048 tokens",
           "True with at most 7", PACKED, use_intracard_cp=True, workspace=None),
    several("2047 tokens to cut", lengthened(2047) | {"use_intracard_cp": lambda a: True}, ValueError,
            "use_intracard_cp", "at least 2048 tokens", "2047", DENSE),
    several("packed sequences of 2047 tokens", lengthened(2049) | {
        "cu_seqlens": on_device([0, 1, 2, 2049]), "cu_seqlens_cpu": on_cpu([0, 1, 2, 2049]),
        "use_intracard_cp": lambda a: True}, ValueError, "use_intracard_cp", "at least 2048 tokens", "2047", PACKED),
    *(value("segment_tokens", wrong, TypeError, "an int or None", type(wrong).__name__)
      for wrong in (1024.0, True, "auto")),
    *(value("segment_tokens", wrong, ValueError, "a multiple of 64, at least 1024, or None", str(wrong))
      for wrong in (0, 960, 1025, -1024)),
    values("segment_tokens", ValueError, "None with use_intracard_cp=False", "1024", segment_tokens=1024,
           use_intracard_cp=False, workspace=None),
    change("workspace of int8", "workspace", lambda w: w.view(torch.int8), TypeError, "uint8", "int8"),
    change("workspace of 2 dimensions", "workspace", lambda w: w[None], ValueError, "1 dimension", "[1, "),
    change("workspace every other", "workspace", lambda w: torch.cat((w, w))[::2], ValueError, "contiguous elements",
           "(2,)"),
    change("workspace a byte too small", "workspace", lambda w: w[: 2 * BLOCK_BYTES - 1], ValueError,
           "at least 119808 bytes, one chunk of 64 tokens of every value head", "119807"),
    change("workspace at an odd address", "workspace", lambda w: torch.cat((w, w))[64:], ValueError,
           "a multiple of 128 bytes", "64 bytes past it", devices=CUDA),
    several("workspace too small to cut", lengthened(2048) | {
        "use_intracard_cp": lambda a: True, "workspace": lambda a: a["workspace"].new_empty(2 * 32 * 2 * 59904 - 1)},
            ValueError, "workspace", "at least 7667712 bytes with use_intracard_cp=True", "7667711", DENSE),
    several("workspace too small for segments", lengthened(2048) | {
        "segment_tokens": lambda a: 1024, "workspace": lambda a: a["workspace"].new_empty(2 * 32 * 2 * 59904 - 1)},
            ValueError, "workspace", "at least 7667712 bytes with segment_tokens", "7667711", DENSE),
    several("workspace too small to cut packed sequences", lengthened(2048) | {
        "cu_seqlens": on_device([0, 0, 0, 2048]), "cu_seqlens_cpu": on_cpu([0, 0, 0, 2048]),
        "use_intracard_cp": lambda a: True, "workspace": lambda a: a["workspace"].new_empty((32 + 3) * 2 * 59904 - 1)},
            ValueError, "workspace", "at least 4193280 bytes with use_intracard_cp=True", "4193279", PACKED),
    several("an empty batch and a wrong g",
            {n: lambda a, n=n: a[n][:0] for n in ("q", "k", "v", "beta", "out", "initial_state")}, ValueError, "g",
            "[B, T, HV, K] = [0, 10, 2, 128]", "[2, 10, 2, 128]", DENSE),
]  # fmt: skip


# Where there is no backward.
UNTRAINED = [
    *(change(f"{name} requires a gradient", name, lambda x: x.clone().requires_grad_(), ValueError,
             "no gradient (no backward; cula.kda.chunk_kda has one with flash-linear-attention)", "requires_grad=True",
             modes)
      for name, modes in (("q", BOTH), ("k", BOTH), ("v", BOTH), ("g", BOTH), ("beta", BOTH), ("A_log", BOTH),
                          ("dt_bias", BOTH), ("initial_state", DENSE), ("state_pool", PACKED), ("out", BOTH))),
    added("checkpoints that want a gradient", {**ONCE, "state_checkpoints": lambda a: saved(3)(a).requires_grad_()},
            ValueError, "state_checkpoints", "no gradient", "requires_grad=True", PACKED),
]  # fmt: skip


def good_arguments(mode: str, device: torch.device | str) -> Arguments:
    packed = mode == "packed"
    given = inputs(
        1 if packed else 2, TOKENS, HEADS, HEADS_V, gate="safe", logits=True, initial=True,
        lengths=(3, 0, 7) if packed else None, states=POOL if packed else 2, device=device,
    )  # fmt: skip
    a: Arguments = {name: x for name, x in given.items() if x is not None}
    a |= {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
    a |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    a |= {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if packed:
        a["state_pool"] = a.pop("initial_state")
        a["initial_state_indices"] = int32(2, -1, 0).to(device)
        a["cu_seqlens_cpu"] = a["cu_seqlens"].cpu()
    workspace = torch.full((2 * BLOCK_BYTES,), 9, dtype=torch.uint8, device=device)
    return a | {"workspace": workspace, "out": torch.full_like(a["v"], 9.0)}


class RefusalsOnGpu:
    """Wrong arguments on a GPU are refused before a kernel runs."""

    subject: Subject
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("wrong, mode", cases(WRONG, "cuda"))
    def test_wrong_cuda_arguments_are_refused(self, cuda, wrong, mode):
        assert_refused(self.subject.package.chunk_kda, wrong, good_arguments(mode, cuda))
        torch.cuda.synchronize()

    @pytest.mark.parametrize("wrong, mode", cases(UNTRAINED, "cuda"))
    def test_gradients_are_refused(self, cuda, wrong, mode):
        """All of them, or where there is a backward those beside memory of the caller's that is written."""
        if self.subject.target.backward:
            wrong = replace(
                wrong, argument="out", says="None when gradients are required", got="a tensor"
            )
        assert_refused(self.subject.package.chunk_kda, wrong, good_arguments(mode, cuda))
