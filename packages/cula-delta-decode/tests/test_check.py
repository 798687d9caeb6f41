"""Every wrong argument, one at a time: the exception, what it says, and that nothing has changed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from wrong_fused import (
    CHANNELS,
    CONVOLUTION_NAMES,
    FILL,
    FILL_WRONG,
    FUSED,
    FUSED_WRONG,
    NORM_NAMES,
)

import cula_delta_decode
from cula_delta_decode import GatedNorm, Replay, ShortConvolution, ops
from cula_testing.refusals import (
    CPU,
    CUDA,
    ELSEWHERE,
    Arguments,
    Table,
    assert_refused,
    cases,
    contents,
    resized,
)
from cula_testing.tensors import column, every_other, int32, shifted, turned

BATCH, TOKENS, HEADS, HEADS_V, DIM_K, DIM_V, POOL, RECORDS = 2, 3, 2, 4, 64, 128, 5, 8
# The sets of good arguments, and the function that takes them.
FUNCTIONS = {
    "decode": "delta_rule_decode",
    "packed": "delta_rule_decode",
    "replay": "delta_rule_decode",
    "fused": "delta_rule_decode",
    "tokens": "delta_rule_decode",
    "commit": "delta_rule_commit",
    "flush": "delta_rule_flush",
    "new": "new_replay",
    "new ring": "new_convolution_ring",
    "fill": "fill_convolution_ring",
}
DECODE, PACKED, REPLAY, TOKEN, COMMIT = (
    ("decode",),
    ("packed",),
    ("replay",),
    ("tokens",),
    ("commit",),
)
FLUSH, NEW = ("flush",), ("new",)
MADE = (*NEW, "new ring")
DECODES = DECODE + PACKED + REPLAY + TOKEN + FUSED
BOTH, STEPS, EVERY = DECODE + COMMIT, DECODES + COMMIT, tuple(FUNCTIONS)
RINGS = REPLAY + FLUSH
STATES = tuple(mode for mode in EVERY if mode != "fill")  # what takes a pool of states
LAUNCHED = tuple(mode for mode in STATES if mode != "new ring")  # and looks at its address
RING_NAMES = {"k": "ring_k", "u": "ring_u", "decay": "ring_decay", "cursor": "cursor"}
_TABLE = Table(BOTH)
change, several, value = _TABLE.change, _TABLE.several, _TABLE.value
no_tensor, away, entry = _TABLE.no_tensor, _TABLE.away, _TABLE.entry


def ring(
    label: str, field: str, how: Callable[[Tensor], Any], error, says: str, got: str, modes=RINGS
):
    """A wrong tensor of a replay."""
    name = RING_NAMES[field]
    return several(
        f"replay.{field} {label}",
        {name: lambda a: how(a[name])},
        error,
        f"replay.{field}",
        says,
        got,
        modes,
    )


def longer(*sizes: tuple[str, int]) -> dict[str, Callable]:
    """Other sizes in a dimension, by name of the argument."""
    return {name: resized(name, (dim, size)) for name, dim, size in sizes}  # type: ignore[misc]


def tokens_are(count: int) -> dict[str, Callable]:
    """Another number of tokens."""
    return {name: resized(name, (1, count)) for name in ("q", "k", "v", "g", "beta", "out")}


LAST = "a contiguous last dimension"
FLOATS = "float32 or bfloat16 or float16"
VK, KV = "[pool, HV, V, K] = [pool, 4, 128, 64]", "[pool, HV, K, V] = [pool, 4, 64, 128]"
NO_GATE = "None unless there are g and use_gate_in_kernel"
WRITTEN = "slots that differ because they are written"
FLAGS = (
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "use_qk_l2norm_in_kernel",
)

VALUES = [
    *(value(flag, 1, TypeError, "a bool", "int") for flag in (*FLAGS, "state_v_first")),
    *(value(flag, None, TypeError, "a bool", "NoneType") for flag in (*FLAGS, "state_v_first")),
    value("commit", 1, TypeError, "a bool", "int", DECODE),
    value("commit", None, TypeError, "a bool", "NoneType", DECODE),
    value("scale", "1", TypeError, "a float or None", "str", DECODE),
    value("scale", True, TypeError, "a float or None", "bool", DECODE),
    value("scale", math.inf, ValueError, "a finite number", "inf", DECODE),
    value("scale", math.nan, ValueError, "a finite number", "nan", DECODE),
    value("lower_bound", "-5", TypeError, "a float or None", "str"),
    value("lower_bound", True, TypeError, "a float or None", "bool"),
    value("lower_bound", -math.inf, ValueError, "a finite number", "-inf"),
    value("lower_bound", 0.0, ValueError, "a number below 0", "0.0"),
    value("lower_bound", 3, ValueError, "a number below 0", "3"),
    entry("a lower bound without a gate",
          lambda a: {"lower_bound": -5.0, "use_gate_in_kernel": False, "A_log": None, "dt_bias": None,
                     "g": -a["g"].abs()},
          ValueError, "lower_bound", "None unless use_gate_in_kernel is True", "-5.0"),
    *(
        wrong
        for name in ("softplus_beta", "softplus_threshold")
        for wrong in (
            value(name, None, TypeError, "a float", "NoneType"),
            value(name, "1", TypeError, "a float", "str"),
            value(name, True, TypeError, "a float", "bool"),
            value(name, math.nan, ValueError, "a finite number", "nan"),
            value(name, math.inf, ValueError, "a finite number", "inf"),
        )
    ),
    value("softplus_beta", 0.0, ValueError, "a number above 0", "0.0"),
    value("softplus_beta", -1, ValueError, "a number above 0", "-1"),
    entry("A_log without a gate", lambda a: {"g": None, "dt_bias": None}, ValueError, "A_log", NO_GATE, "a tensor"),
    entry("dt_bias without a gate", lambda a: {"g": None, "A_log": None}, ValueError, "dt_bias", NO_GATE, "a tensor"),
    entry("A_log beside log decays",
          lambda a: {"use_gate_in_kernel": False, "dt_bias": None, "g": -a["g"].abs()},
          ValueError, "A_log", NO_GATE, "a tensor"),
    entry("dt_bias beside log decays",
          lambda a: {"use_gate_in_kernel": False, "A_log": None, "g": -a["g"].abs()},
          ValueError, "dt_bias", NO_GATE, "a tensor"),
    entry("allow_neg_eigval without a sigmoid",
          lambda a: {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False},
          ValueError, "allow_neg_eigval", "False unless", "use_beta_sigmoid_in_kernel=False"),
    entry("allow_neg_eigval without beta", lambda a: {"allow_neg_eigval": True, "beta": None},
          ValueError, "allow_neg_eigval", "False unless", "no beta"),
    change("A_log of int32", "A_log", Tensor.int, TypeError, "float32 or", "int32"),
    change("dt_bias of int32", "dt_bias", Tensor.int, TypeError, "float32 or", "int32"),
    value("null_slot", True, TypeError, "an int or None", "bool"),
    value("null_slot", 1.0, TypeError, "an int or None", "float"),
    value("null_slot", 1 << 31, ValueError, "a 32-bit integer", str(1 << 31)),
    value("max_tokens", 3, ValueError, "None without cu_seqlens", "3"),
    value("replay", (None,) * 4, TypeError, "a Replay", "tuple", DECODE),
    value("convolution", (None,) * 4, TypeError, "a ShortConvolution", "tuple", DECODE),
    value("norm", 3, TypeError, "a GatedNorm", "int", DECODE),
    entry("num_accepted for nothing", lambda a: {"num_accepted": a["state_indices"]}, ValueError, "num_accepted",
          "None without replay or [N, slots] state_indices", "Tensor", DECODE),
    entry("output slots that are not used", lambda a: {"output_state_indices": a["state_indices"], "commit": False},
          ValueError, "output_state_indices", "None unless commit is True", "a tensor", DECODE),
    entry("token_states without indices", lambda a: {"token_states": a["state"].clone()}, ValueError,
          "token_state_indices", "a tensor with token_states", "None", DECODE),
    *(
        change(f"{name} requires a gradient", name, lambda x: x.clone().requires_grad_(), ValueError, "no gradient",
               "requires_grad=True", DECODE if name in ("q", "out") else BOTH)
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state", "out")
    ),
]  # fmt: skip
WRONG = [
    *(no_tensor(name, [1.0], DECODES if name in ("q", "out") else STEPS) for name in ("q", "k", "v", "out")),
    *(no_tensor(name, None, DECODES if name == "q" else STEPS) for name in ("q", "k", "v")),
    *(no_tensor(name, 0.5, STEPS) for name in ("g", "beta", "A_log", "dt_bias")),
    no_tensor("state", None, STATES),
    no_tensor("state", 1.0, STATES),
    no_tensor("state_indices", [0, 1], tuple(m for m in EVERY if m not in MADE)),
    no_tensor("output_state_indices", [0, 1], DECODE),
    no_tensor("num_accepted", [1, 1], ("commit", "replay", "flush", "tokens")),
    no_tensor("num_accepted", None, COMMIT),
    no_tensor("token_states", 1.0, TOKEN),
    no_tensor("token_state_indices", [[0]], TOKEN),
    no_tensor("cu_seqlens", [0, 3, 5], PACKED),

    change("k of int32", "k", Tensor.int, TypeError, "bfloat16 or float16", "int32"),
    several("float32 activations", {n: lambda a, n=n: a[n].float() for n in ("q", "k", "v", "out")},
            TypeError, "k", "bfloat16 or float16", "float32", devices=CUDA),
    change("q of another dtype", "q", Tensor.half, TypeError, "the dtype of k, bfloat16", "float16", DECODES),
    change("v of another dtype", "v", Tensor.half, TypeError, "the dtype of k, bfloat16", "float16", STEPS),
    change("out of another dtype", "out", Tensor.float, TypeError, "the dtype of k, bfloat16", "float32", DECODES),
    change("q of 3 dimensions", "q", lambda q: q[0], ValueError, "[B, T, H, K]", "2, 64]", DECODES),
    change("k of 3 dimensions", "k", lambda k: k[0], ValueError, "[B, T, H, K]", "2, 64]", STEPS),
    change("v of 3 dimensions", "v", lambda v: v[0], ValueError, "[B, T, HV, V]", "4, 128]", STEPS),
    change("q of another batch", "q", lambda q: q[:1], ValueError, "k, [2, 3, 2, 64]", "[1, 3, 2, 64]", DECODE),
    change("q of fewer tokens", "q", lambda q: q[:, :2], ValueError, "the shape of k", "2, 2, 64]", DECODES),
    change("q of fewer heads", "q", lambda q: q[:, :, :1], ValueError, "the shape of k", "1, 64]", DECODES),
    several("q of another K", {"q": resized("q", (3, 128))}, ValueError, "q", "the shape of k", "128]", DECODES),
    change("v without V", "v", lambda v: v[..., 0], ValueError, "[B, T, HV, V]", ", 4]", STEPS),
    change("v of another batch", "v", lambda v: v[:1], ValueError, "B, T = 2, 3 as in k", "[1, 3, 4, 128]"),
    change("v of fewer tokens", "v", lambda v: v[:, :2], ValueError, "as in k", "2, 4, 128]", STEPS),
    several("no tokens", tokens_are(0), ValueError, "k", "1 to 8 tokens", "0", BOTH + REPLAY),
    several("nine tokens", tokens_are(9), ValueError, "k", "1 to 8 tokens", "9", BOTH + REPLAY),
    several("K = 96", longer(("q", 3, 96), ("k", 3, 96), ("g", 3, 96), ("dt_bias", 1, 96), ("state", 3, 96)),
            ValueError, "k", "a head dimension K in (64, 128)", "96", devices=CUDA),
    several("V = 32", longer(("v", 3, 32), ("out", 3, 32), ("state", 2, 32)),
            ValueError, "v", "a head dimension V in (64, 128)", "32", devices=CUDA),
    several("K = 0", longer(("q", 3, 0), ("k", 3, 0), ("g", 3, 0), ("dt_bias", 1, 0), ("state", 3, 0)),
            ValueError, "k", "a head dimension K of at least 1", "0", devices=CPU),
    several("V = 0", longer(("v", 3, 0), ("out", 3, 0), ("state", 2, 0)),
            ValueError, "v", "a head dimension V of at least 1", "0", devices=CPU),
    several("HV = 3, H = 2",
            longer(("v", 2, 3), ("out", 2, 3), ("g", 2, 3), ("beta", 2, 3), ("A_log", 0, 3), ("dt_bias", 0, 3),
                   ("state", 1, 3)),
            ValueError, "v", "a multiple of H = 2", "3"),
    several("no query heads", longer(("q", 2, 0), ("k", 2, 0)), ValueError, "v", "a multiple of H = 0", "4"),
    several("no value heads",
            longer(("v", 2, 0), ("out", 2, 0), ("g", 2, 0), ("beta", 2, 0), ("A_log", 0, 0), ("dt_bias", 0, 0),
                   ("state", 1, 0)),
            ValueError, "v", "a multiple of H = 2", "0"),
    several("65536 rows",
            {n: lambda a, n=n: a[n][:1, :1].expand(65536, 1, *a[n].shape[2:])
             for n in ("q", "k", "v", "g", "beta")}
            | {"out": lambda a: None, "state_indices": lambda a: a["state_indices"][:1].expand(65536)}
            | {"num_accepted": lambda a: a["num_accepted"][:1].expand(65536).contiguous()},
            ValueError, "k", "at most 65535 rows", "65536 rows"),
    *(
        change(f"{name} every other element", name, every_other, ValueError, LAST, ", 2)",
               DECODES if name in ("q", "out") else STEPS)
        for name in ("q", "k", "v", "out", "g")
    ),
    change("out of fewer tokens", "out", lambda o: o[:, :2], ValueError, "the shape of v", "2, 4, 128]", DECODES),
    change("out of 3 dimensions", "out", lambda o: o[0], ValueError, "the shape of v", "4, 128]", DECODES),

    change("g per query head", "g", lambda g: g[:, :, :2, 0], ValueError, "[B, T, HV], [B, T, HV, K] or", "2]", STEPS),
    change("g of another K", "g", lambda g: g[..., :32], ValueError, "= [2, 3, 4] or [2, 3, 4, 64] or [2, 3, 256]",
           "[2, 3, 4, 32]"),
    change("g of fewer rows", "g", lambda g: g[:1], ValueError, "[2, 3, 4, 64]", "[1, 3, 4, 64]"),
    change("g of 2 dimensions", "g", lambda g: g[0, :, :, 0], ValueError, "[B, T, HV]", ", 4]", STEPS),
    change("g of int32", "g", Tensor.int, TypeError, FLOATS, "int32", STEPS),
    change("g of float64", "g", Tensor.double, TypeError, FLOATS, "float64", devices=CUDA),
    change("a flat g with gaps", "g", lambda g: every_other(g.flatten(2)), ValueError, LAST, "strides", STEPS),
    entry("log decays above 0",
          lambda a: {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "g": a["g"] * 0 + 0.5},
          ValueError, "g", "values <= 0 with use_gate_in_kernel=False", "0.5", STEPS, devices=CPU),
    change("beta per query head", "beta", lambda b: b[..., :2], ValueError, "[B, T, HV] =", "2]", STEPS),
    change("beta of 4 dimensions", "beta", lambda b: b[..., None], ValueError, "[B, T, HV] =", "4, 1]", STEPS),
    change("beta of int32", "beta", Tensor.int, TypeError, FLOATS, "int32", STEPS),
    change("beta of float64", "beta", Tensor.double, TypeError, FLOATS, "float64", devices=CUDA),
    change("A_log per query head", "A_log", lambda x: x[:2], ValueError, "[HV] = [4]", "[2]", STEPS),
    change("A_log of 4 dimensions", "A_log", lambda x: x[None, None, :, None], ValueError, "[HV] =", "[1, 1, 4, 1]"),
    change("A_log with gaps", "A_log", every_other, ValueError, "contiguous elements", "(2,)", STEPS),
    change("dt_bias per head beside gates per channel", "dt_bias", lambda x: x[:, 0].clone(), ValueError,
           "[HV * K] = [256] or [HV, K] = [4, 64]", "[4]", STEPS),
    entry("dt_bias per channel beside a gate per head", lambda a: {"g": a["g"][..., 0]}, ValueError, "dt_bias",
          "[HV] = [4]", "[4, 64]", STEPS),
    change("dt_bias turned", "dt_bias", turned, ValueError, "contiguous elements", "strides (1, 4)", STEPS),

    several("a [K, V] pool", {"state": lambda a: a["state"].mT.contiguous()}, ValueError, "state", VK,
            "[5, 4, 64, 128]", STEPS),
    entry("a [V, K] pool", lambda a: {"state_v_first": False}, ValueError, "state", KV, "[5, 4, 128, 64]", STEPS),
    change("state of 3 dimensions", "state", lambda s: s[0], ValueError, "[pool, HV, V, K]", "[4, 128, 64]", STATES),
    change("state of fewer heads", "state", lambda s: s[:, :2], ValueError, VK, "[5, 2, 128, 64]", STEPS),
    change("state of int8", "state", lambda s: s.to(torch.int8), TypeError, FLOATS, "int8", STATES),
    change("state of float64", "state", Tensor.double, TypeError, FLOATS, "float64", STATES, CUDA),
    several("state with gaps between rows", {"state": lambda a: resized("state", (3, 128))(a)[..., :64]},
            ValueError, "state", "dense matrices", "128, 1)", STATES),
    change("state every other element", "state", every_other, ValueError, "dense matrices", "128, 2)", STATES),
    entry("a pool smaller than the batch",
          lambda a: {"state": a["state"][:1], "state_indices": None},
          ValueError, "state", "at least N = 2 states", "1", DECODE + PACKED + COMMIT),
    change("state at an odd address", "state", shifted, ValueError, "multiples of 16 bytes", "strides", LAUNCHED, CUDA),

    *(
        wrong
        for name, modes in (
            ("state_indices", DECODE + PACKED + REPLAY + COMMIT + FLUSH),
            ("num_accepted", COMMIT + REPLAY + TOKEN + FLUSH),
            ("token_state_indices", TOKEN),
        )
        for wrong in (
            change(f"{name} of int64", name, Tensor.long, TypeError, "int32", "int64", modes),
            change(f"{name} of float32", name, Tensor.float, TypeError, "int32", "float32", modes),
            away(name, modes),
        )
    ),
    *(
        wrong
        for name, modes in (
            ("state_indices", DECODE + PACKED + COMMIT + REPLAY),
            ("num_accepted", COMMIT + REPLAY + TOKEN + FLUSH),
        )
        for wrong in (
            change(f"{name} too short", name, lambda i: i[:1], ValueError, "[N] = [2]", "[1]", modes),
            change(f"{name} too long", name, lambda i: i.repeat(2), ValueError, "[N] = [2]", "[4]", modes),
        )
    ),
    change("num_accepted of 2 dimensions", "num_accepted", lambda i: i[None], ValueError, "[N] = [2]", "[1, 2]",
           COMMIT + REPLAY + TOKEN + FLUSH),
    change("slots of 3 dimensions", "state_indices", lambda i: i[None, None], ValueError, "[N] = [2]", "[1, 1, 2]"),
    change("slots of no dimension", "state_indices", lambda i: i[0], ValueError, "[N] = [2]", "[]", BOTH),
    change("flushed slots of no dimension", "state_indices", lambda i: i[0], ValueError, "[N] = [1]", "[]", FLUSH),
    change("a table where a row has one slot", "state_indices", lambda i: i[:, None], ValueError, "[N] = [2]",
           "[2, 1]", COMMIT + FLUSH),
    change("a table beside a replay", "state_indices", lambda i: i[:, None], ValueError, "[N] with replay", "[2, 1]",
           REPLAY),
    change("a table of fewer rows", "state_indices", lambda i: i[:1], ValueError, "[N, slots] = [2, 3]", "[1, 3]",
           TOKEN),
    change("a table of no slots", "state_indices", lambda i: i[:, :0], ValueError, "[N, slots] = [2, 1]", "[2, 0]",
           TOKEN),
    value("num_accepted", None, ValueError, "a tensor with [N, slots] state_indices", "None", TOKEN),
    change("a slot behind the pool", "state_indices", lambda i: i + 3, ValueError, "below the 5 states of state", "5",
           DECODE + PACKED + REPLAY + COMMIT + FLUSH, CPU),
    change("a slot twice", "state_indices", torch.zeros_like, ValueError, WRITTEN, "0 twice",
           DECODE + PACKED + REPLAY + COMMIT + FLUSH, CPU),
    change("a chosen slot behind the pool", "state_indices", lambda i: i + 2, ValueError, "below the 5 states", "5",
           TOKEN, CPU),

    *(
        entry(f"output slots {label}", lambda a, make=make: {"output_state_indices": make(a["state_indices"])},
              error, "output_state_indices", says, got, DECODE, devices)
        for label, make, error, says, got, devices in (
            ("of int64", Tensor.long, TypeError, "int32", "int64", ("cpu", "cuda")),
            ("too short", lambda i: i[:1], ValueError, "[N] = [2]", "[1]", ("cpu", "cuda")),
            ("of 2 dimensions", lambda i: i[:, None], ValueError, "[N] = [2]", "[2, 1]", ("cpu", "cuda")),
            ("elsewhere", lambda i: i.to(ELSEWHERE[i.device.type]), ValueError, "a tensor on ", "", ("cpu", "cuda")),
            ("behind the pool", lambda i: i + 3, ValueError, "below the 5 states of state", "5", CPU),
            ("twice", lambda i: i * 0 + 1, ValueError, WRITTEN, "1 twice", CPU),
            ("where another row begins", lambda i: i.flip(0), ValueError, "slots at which no other row begins",
             "0 in row 0", CPU),
        )
    ),

    entry("an output slot at which two rows begin",
          lambda a: {"state_indices": int32(1, 1), "output_state_indices": int32(2, 1)},
          ValueError, "output_state_indices", "slots at which no other row begins", "1 in row 1", DECODE, CPU),
    change("token_states of another dtype", "token_states", Tensor.half, TypeError, "float32", "float16", TOKEN),
    change("token_states in the other layout", "token_states", lambda s: s.mT.contiguous(), ValueError, "4, 128, 64]",
           "[7, 4, 64, 128]", TOKEN),
    change("token_states turned", "token_states", turned, ValueError, "the layout of state", "strides", TOKEN),
    change("token_states with gaps", "token_states", every_other, ValueError, "dense matrices", "128, 2)", TOKEN),
    change("token_states at an odd address", "token_states", shifted, ValueError, "multiples of 16", "", TOKEN, CUDA),
    away("token_states", TOKEN),
    change("token slots of fewer tokens", "token_state_indices", lambda i: i[:, :2], ValueError, "[N, T] = [2, 3]",
           "[2, 2]", TOKEN),
    change("token slots of fewer rows", "token_state_indices", lambda i: i[:1], ValueError, "[N, T] = [2, 3]",
           "[1, 3]", TOKEN),
    change("token slots of 1 dimension", "token_state_indices", lambda i: i[0], ValueError, "[N, T] = [2, 3]",
           "[3]", TOKEN),
    change("token slots behind the pool", "token_state_indices", lambda i: i + 1, ValueError,
           "below the 7 states of token_states", "7", TOKEN, CPU),
    change("a token's slot twice", "token_state_indices", lambda i: i.clamp(max=5), ValueError, WRITTEN, "5 twice",
           TOKEN, CPU),
    entry("token slots of state behind the pool", lambda a: {"token_states": None}, ValueError, "token_state_indices",
          "below the 5 states of state", "6", TOKEN, CPU),
    entry("token slots of state where another row begins",
          lambda a: {"token_states": None, "token_state_indices": int32(1, 0, 4, 3, -1, -1).view(2, 3)},
          ValueError, "token_state_indices", "slots at which no other row begins", "3 in row 1", TOKEN, CPU),
    entry("a token's slot that the last state takes",
          lambda a: {"token_states": None, "token_state_indices": int32(1, 3, 4, -1, -1, -1).view(2, 3),
                     "commit": True},
          ValueError, "token_state_indices", WRITTEN, "3 twice", TOKEN, CPU),

    value("cu_seqlens", torch.tensor([0, 3, 5]), TypeError, "int32", "int64", PACKED),
    change("cu_seqlens of 2 dimensions", "cu_seqlens", lambda x: x[None], ValueError, "[N + 1]", "[1, 3]", PACKED),
    change("cu_seqlens of nothing", "cu_seqlens", lambda x: x[:0], ValueError, "[N + 1]", "[0]", PACKED),
    change("cu_seqlens with gaps", "cu_seqlens", every_other, ValueError, "contiguous elements", "(2,)", PACKED),
    away("cu_seqlens", PACKED),
    entry("cu_seqlens beside a batch", lambda a: {"cu_seqlens": torch.zeros_like(a["state_indices"])}, ValueError,
          "cu_seqlens", "None unless B = 1", "B = 2", BOTH),
    *(
        value("cu_seqlens", int32(*numbers), ValueError, "rise from 0 to at most T = 6", str([*numbers]), PACKED, CPU)
        for numbers in ((1, 3, 5), (0, 3, 7), (0, 3, 2), (0, -1, 2))
    ),
    value("cu_seqlens", int32(0, 4, 5), ValueError, "rows of at most 3 tokens", "4", PACKED, CPU),
    value("max_tokens", 0, ValueError, "1 to 8", "0", PACKED + MADE),
    value("max_tokens", 9, ValueError, "1 to 8", "9", PACKED + MADE),
    value("max_tokens", 2.0, TypeError, "an int", "float", PACKED + MADE),
    value("max_tokens", True, TypeError, "an int", "bool", PACKED + MADE),

    value("commit", False, ValueError, "True with replay", "False", REPLAY),
    value("replay", 3, TypeError, "a Replay", "int", RINGS),
    value("replay", None, TypeError, "a Replay", "NoneType", FLUSH),
    *(
        entry(f"{name} beside a replay", lambda a, name=name: {name: a["state_indices"].clone()}, ValueError, name,
              "None with replay", "Tensor", REPLAY)
        for name in ("output_state_indices", "token_states", "token_state_indices")
    ),
    *(ring("is none", f, lambda x: None, TypeError, "a torch.Tensor", "NoneType") for f in RING_NAMES),
    *(ring("of a smaller pool", f, lambda x: x[:3], ValueError, "[pool, ", "[3, ") for f in RING_NAMES),
    *(ring("elsewhere", f, lambda x: x.to(ELSEWHERE[x.device.type]), ValueError, "a tensor", "") for f in RING_NAMES),
    *(ring("with gaps", f, every_other, ValueError, "contiguous elements", "strides") for f in RING_NAMES),
    ring("of float16", "k", Tensor.half, TypeError, "bfloat16", "float16", REPLAY),
    ring("of int32", "k", Tensor.int, TypeError, "bfloat16 or float16", "int32"),
    ring("of bfloat16", "u", Tensor.bfloat16, TypeError, "float32", "bfloat16"),
    ring("of bfloat16", "decay", Tensor.bfloat16, TypeError, "float32", "bfloat16"),
    ring("of int64", "cursor", Tensor.long, TypeError, "int32", "int64"),
    ring("of 3 dimensions", "k", lambda x: x[0], ValueError, "[pool, L, H, K]", "[8, 2, 64]"),
    ring("of another K", "k", lambda x: x[..., :32].contiguous(), ValueError, "= [5, 8, 2, 64]", "[5, 8, 2, 32]"),
    ring("of fewer heads", "k", lambda x: x[:, :, :1].contiguous(), ValueError, "= [5, 8, 2, 64]", "[5, 8, 1, 64]",
         REPLAY),
    ring("of heads that do not divide", "k", lambda x: resized("x", (2, 3))({"x": x}), ValueError, "divides HV = 4",
         "3", FLUSH),
    ring("of no heads", "k", lambda x: x[:, :, :0], ValueError, "divides HV = 4", "0", FLUSH),
    ring("of another V", "u", lambda x: x[..., :64].contiguous(), ValueError, "= [5, 8, 4, 128]", "[5, 8, 4, 64]"),
    ring("of fewer records", "u", lambda x: x[:, :4].contiguous(), ValueError, "= [5, 8, 4, 128]", "[5, 4, 4, 128]"),
    ring("per head", "decay", lambda x: x[..., 0].contiguous(), ValueError, "[pool, L, HV, K] = [5, 8, 4, 64]",
         "[5, 8, 4]", REPLAY),
    entry("decays per channel beside a gate per head",
          lambda a: {"g": a["g"][..., 0], "dt_bias": a["dt_bias"][:, 0].clone()},
          ValueError, "replay.decay", "[pool, L, HV] = [5, 8, 4]", "[5, 8, 4, 64]", REPLAY),
    ring("of fewer heads", "decay", lambda x: x[:, :, :2].contiguous(), ValueError, "[5, 8, 4, 64]", "[5, 8, 2, 64]"),
    ring("of fewer columns", "cursor", lambda x: x[..., :8].contiguous(), ValueError, "[pool, HV, V / 8] = [5, 4, 16]",
         "[5, 4, 8]"),
    *(
        several(f"{count} records", {n: resized(n, (1, count)) for n in ("ring_k", "ring_u", "ring_decay")},
                ValueError, "replay.k", f"a power of two from {least} to 64 records", str(count), modes)
        for count, least, modes in ((4, 6, REPLAY), (12, 6, REPLAY), (128, 6, REPLAY), (1, 2, FLUSH), (24, 2, FLUSH))
    ),

    value("heads", 3, ValueError, "divides HV = 4", "3", MADE),
    value("heads", 0, ValueError, "divides HV = 4", "0", MADE),
    value("heads", -2, ValueError, "divides HV = 4", "-2", MADE),
    value("heads", 2.0, TypeError, "an int", "float", MADE),
    value("heads", True, TypeError, "an int", "bool", MADE),
    value("channels", 1, TypeError, "a bool", "int", NEW),
    value("state_v_first", 1, TypeError, "a bool", "int", MADE + FLUSH),
    value("dtype", torch.int32, TypeError, "bfloat16 or float16", "int32", MADE),
    value("dtype", "bfloat16", TypeError, "bfloat16 or float16", "str", MADE),
    value("dtype", torch.float32, TypeError, "bfloat16 or float16", "float32", MADE, CUDA),
    *(value("records", n, ValueError, "from 6 to 64 records", str(n), NEW) for n in (4, 12, 128, 0, -8)),
    value("records", 8.0, TypeError, "an int", "float", NEW),
    value("null_slot", "0", TypeError, "an int or None", "str", FLUSH + FILL),
    entry("a flushed [K, V] pool of 3 dimensions", lambda a: {"state": a["state"][0], "state_v_first": False},
          ValueError, "state", "[pool, HV, K, V]", "[4, 128, 64]", MADE + FLUSH),
    change("a flushed pool of no heads", "state", lambda s: s[:, :0], ValueError, "heads HV of at least 1", "0",
           MADE + FLUSH),
    change("a flushed pool without K", "state", lambda s: s[..., :0], ValueError, "dimension K of at least 1", "0",
           MADE + FLUSH, CPU),
    several("a pool on a device of no kind", {"state": lambda a: a["state"].to("meta")}, ValueError, "state",
            "a tensor on a CUDA device or the CPU", "meta", NEW + FLUSH),
    change("a flushed state that requires a gradient", "state", lambda x: x.clone().requires_grad_(), ValueError,
           "no gradient", "requires_grad=True", FLUSH),

    *FUSED_WRONG,
    *FILL_WRONG,
    away("q", DECODES),
    *(away(name, STEPS) for name in ("v", "g", "beta", "A_log", "dt_bias", "state")),
    away("out", DECODES),
    several("k on a device of no kind", {"k": lambda a: a["k"].to("meta")}, ValueError, "k",
            "a tensor on a CUDA device or the CPU", "meta"),
    several("an empty batch and a wrong gate",
            {n: lambda a, n=n: a[n][:0] for n in ("q", "k", "v", "g", "beta", "out", "state_indices", "num_accepted")}
            | {"A_log": lambda a: a["A_log"].int()},
            TypeError, "A_log", "float32 or", "int32"),
    *VALUES,
]  # fmt: skip


def good_arguments(mode: str, device: torch.device | str) -> Arguments:
    """What the function of a mode takes, a replay by its tensors; and q, which says where all are."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    batch, tokens = (1, BATCH * TOKENS) if mode == "packed" else (BATCH, TOKENS)
    state = normal(POOL, HEADS_V, DIM_V, DIM_K, dtype=torch.float32)
    q = normal(batch, tokens, HEADS, DIM_K)
    if mode == "new ring":
        options = {"heads": HEADS, "max_tokens": TOKENS, "dtype": torch.bfloat16}
        return {"q": q, "state": state} | options
    if mode == "fill":
        return {
            "q": q,
            "ring": normal(POOL, 8, 12),
            "inputs": normal(BATCH, 3, 12),
            "positions": int32(1, 9).to(device),
            "state_indices": int32(2, 0).to(device),
        }
    if mode == "new":
        options = {"heads": HEADS, "max_tokens": TOKENS, "channels": True, "records": RECORDS}
        return {"q": q, "state": state, "dtype": torch.bfloat16} | options
    found: Arguments = {
        "q": q,
        "k": normal(batch, tokens, HEADS, DIM_K),
        "v": normal(batch, tokens, HEADS_V, DIM_V),
        "g": normal(batch, tokens, HEADS_V, DIM_K),
        "beta": normal(batch, tokens, HEADS_V),
        "A_log": normal(HEADS_V, dtype=torch.float32),
        "dt_bias": normal(HEADS_V, DIM_K, dtype=torch.float32),
        "state": state,
        "state_indices": int32(2, 0).to(device),
    }
    if FUNCTIONS[mode] == "delta_rule_decode":
        found["out"] = torch.full_like(found["v"], 9.0)
    if mode in ("commit", "replay", "flush", "tokens"):
        found["num_accepted"] = int32(1, 3).to(device)
    if mode == "packed":
        found |= {"cu_seqlens": int32(0, 3, 5).to(device), "max_tokens": TOKENS}
    if mode == "tokens":
        found |= {
            "state_indices": int32(3, -1, 0, 1, -7, 2).view(2, 3).to(device),
            "token_states": normal(7, HEADS_V, DIM_V, DIM_K, dtype=torch.float32),
            "token_state_indices": int32(5, 6, -1, 0, 1, 2).view(2, 3).to(device),
            "commit": False,
        }
    if mode == "fused":
        found |= {
            "past": normal(POOL, 8, CHANNELS),
            "past_positions": int32(0, 9).to(device),
            "taps": normal(CHANNELS, 4, dtype=torch.float32),
            "tap_bias": normal(CHANNELS, dtype=torch.float32),
            "gate": normal(BATCH, TOKENS, HEADS_V, DIM_V),
            "norm_weight": normal(DIM_V),
            "eps": 1e-6,
            "activation": "silu",
        }
    if mode in RINGS:
        replay = cula_delta_decode.new_replay(state, HEADS, max_tokens=TOKENS, channels=True)
        found |= {RING_NAMES[field]: x for field, x in zip(Replay._fields, replay)}
    return found


def call(mode: str, **given: Any) -> Any:
    """Calls the function of a mode, with those of the arguments that it has."""
    public = getattr(cula_delta_decode, FUNCTIONS[mode])
    for option, kind, names in (
        ("replay", Replay, RING_NAMES),
        ("convolution", ShortConvolution, CONVOLUTION_NAMES),
        ("norm", GatedNorm, NORM_NAMES),
    ):
        parts = [given.pop(name) for name in names.values() if name in given]
        if parts and option not in given:
            given[option] = kind(*parts)
    known = inspect.signature(public).parameters
    return public(**{name: x for name, x in given.items() if name in known})


@pytest.mark.parametrize("wrong, mode", cases(WRONG, "cpu"))
def test_wrong_arguments_are_refused(wrong, mode):
    assert_refused(partial(call, mode), wrong, good_arguments(mode, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong, mode", cases(WRONG, "cuda"))
def test_wrong_cuda_arguments_are_refused(cuda, wrong, mode):
    assert_refused(partial(call, mode), wrong, good_arguments(mode, cuda))
    torch.cuda.synchronize()


def test_calls_without_the_dispatcher_are_checked_too(monkeypatch):
    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda k: type(k) is Tensor)
    for name in ("_decode_cuda", "_commit_cuda", "_flush_cuda"):
        monkeypatch.setattr(ops, name, None)
    for case in cases(WRONG, "cpu"):
        wrong, mode = case.values
        assert_refused(partial(call, mode), wrong, good_arguments(mode, "cpu"))


def test_numbers_reach_the_launcher_as_floats(monkeypatch):
    seen: list[tuple] = []
    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda k: type(k) is Tensor)
    monkeypatch.setattr(ops, "_decode_cuda", lambda *given: seen.append(given))
    numbers = {"scale": 2, "lower_bound": -5, "softplus_beta": 3, "softplus_threshold": 7}
    call("decode", **good_arguments("decode", "cpu") | numbers)
    found = [x for x in seen[0] if type(x) is float]
    assert found == [0.0, 2.0, -5.0, 3.0, 7.0]  # the first is the eps of no norm
    good = good_arguments("decode", "cpu")
    call("decode", **good | {"norm": GatedNorm(good["v"], torch.ones(DIM_V), 1)})
    assert [x for x in seen[1] if type(x) is float][0] == 1.0


WRITES = {
    "decode": {"state", "out"},
    "packed": {"state", "out"},
    "replay": {"out", "ring_k", "ring_u", "ring_decay", "cursor"},
    "tokens": {"token_states", "out"},
    "commit": {"state"},
    "fused": {"state", "past", "out"},
    "flush": set(),
    "new": set(),
    "new ring": set(),
    "fill": {"ring"},
}


@pytest.mark.parametrize("mode", EVERY)
def test_the_good_arguments_are_good(mode):
    """Otherwise the tests above would prove little."""
    good = good_arguments(mode, "cpu")
    before = contents(good)
    call(mode, **good)
    changed = {n for n, raw in contents(good).items() if not torch.equal(raw, before[n])}
    assert changed == WRITES[mode]


def gapped_activations(a: Arguments) -> Arguments:
    names = [name for name in ("q", "k", "v", "out") if name in a]
    return {
        n: torch.zeros(2, 7, 9, 300, dtype=a[n].dtype)[:, 1:7:2, 3 : 3 + a[n].shape[2], 5 : 5 + a[n].shape[3]]
        for n in names
    }  # fmt: skip


def per_head(a: Arguments) -> Arguments:
    """A gate per head."""
    return {"g": a["g"][..., 0], "dt_bias": a["dt_bias"][:, 0].clone()}


ALLOWED: dict[str, tuple[tuple[str, ...], Callable[[Arguments], Arguments]]] = {
    "activations of float16": (STEPS, lambda a: {
        n: a[n].half() for n in ("q", "k", "v", "out", "ring_k", "past", "gate") if n in a}),
    "activations with gaps": (BOTH, gapped_activations),
    "a gate per head of any stride": (BOTH + TOKEN, per_head),
    "a flat gate": (STEPS, lambda a: {"g": a["g"].flatten(2), "dt_bias": a["dt_bias"].flatten()}),
    "beta of any stride and dtype": (STEPS, lambda a: {"beta": every_other(a["beta"].float())}),
    "gates of float64": (STEPS, lambda a: {"g": a["g"].double()}),
    "gates of float16": (STEPS, lambda a: {"g": a["g"].half(), "beta": a["beta"].half()}),
    "parameters of other dtypes": (STEPS, lambda a: {"A_log": a["A_log"].double(), "dt_bias": a["dt_bias"].half()}),
    "no decay and no strength": (BOTH + TOKEN, lambda a: {"g": None, "beta": None, "A_log": None, "dt_bias": None}),
    "a gate alone": (STEPS, lambda a: {"beta": None, "A_log": None, "dt_bias": None}),
    "log decays": (STEPS, lambda a: {
        "g": -a["g"].abs(), "A_log": None, "dt_bias": None, "use_gate_in_kernel": False}),
    "the gate of padding is NaN": (STEPS, lambda a: {
        "g": a["g"] * math.nan, "A_log": None, "dt_bias": None, "use_gate_in_kernel": False}),
    "the safe gate": (STEPS, lambda a: {"lower_bound": -5}),
    "integers": (DECODES, lambda a: {"scale": 2, "softplus_beta": 2, "softplus_threshold": -3}),
    "twice the sigmoid": (STEPS, lambda a: {"allow_neg_eigval": True}),
    "a pool of any size and pitch": (BOTH, lambda a: {"state": torch.zeros(9, 6, DIM_V, DIM_K)[::2, 1:5]}),
    "a transposed pool": (STEPS + FLUSH + NEW, lambda a: {"state": a["state"].mT, "state_v_first": False} | (
        {"token_states": a["token_states"].mT} if "token_states" in a else {})),
    "a pool of float64": (BOTH, lambda a: {"state": a["state"].double()}),
    "slots of any stride": (STEPS + FLUSH, lambda a: {"state_indices": every_other(a["state_indices"])}),
    "counts of any stride": (
        COMMIT + REPLAY + TOKEN + FLUSH, lambda a: {"num_accepted": column(a["num_accepted"])}),
    "no slots": (DECODE + PACKED + REPLAY + COMMIT, lambda a: {"state_indices": None}),
    "a flush of the whole pool": (FLUSH, lambda a: {"state_indices": None, "num_accepted": None}),
    "only padding": (DECODE + PACKED + REPLAY + COMMIT + FLUSH, lambda a: {"state_indices": int32(-1, -1)}),
    "a null slot twice": (DECODE + PACKED + REPLAY + COMMIT + FLUSH, lambda a: {
        "state_indices": int32(9, 9), "null_slot": 9}),
    "everything certain": (REPLAY, lambda a: {"num_accepted": None}),
    "a state for two rows": (DECODE, lambda a: {
        "state_indices": int32(1, 1), "output_state_indices": int32(2, 3)}),
    "a state back where it came from": (DECODE, lambda a: {"output_state_indices": a["state_indices"]}),
    "results that nobody wants": (DECODE, lambda a: {"output_state_indices": int32(-1, -1)}),
    "a result of padding where another goes": (DECODE, lambda a: {
        "state_indices": int32(1, -1), "output_state_indices": int32(2, 2)}),
    "a state that is only read": (DECODE, lambda a: {"state_indices": int32(1, 1), "commit": False}),
    "slots behind the pool that are not chosen": (TOKEN, lambda a: {
        "state_indices": int32(3, 77, 78, 79, 80, 2).view(2, 3)}),
    "tokens in the slots of their row": (TOKEN, lambda a: {
        "token_states": None, "token_state_indices": int32(3, 1, 0, 4, -1, 2).view(2, 3)}),
    "the tokens of padding": (TOKEN, lambda a: {
        "state_indices": int32(-1, 0, 0, 0, 0, -1).view(2, 3), "token_state_indices": int32(*[99] * 6).view(2, 3)}),
    "tokens that a packed row lacks": (PACKED, lambda a: {
        "commit": False, "token_states": a["state"].clone(),
        "token_state_indices": int32(0, 1, 2, 3, 4, 99).view(2, 3)}),
    "tokens of no row": (PACKED, lambda a: {"cu_seqlens": int32(0, 0, 1)}),
    "no packed rows": (PACKED, lambda a: {"cu_seqlens": int32(0), "state_indices": int32()}),
    "the longest rows": (PACKED, lambda a: {"max_tokens": None, "cu_seqlens": int32(0, 6, 6)}),
    "two records": (REPLAY, lambda a: {
        n: a[n][:, :1] for n in ("q", "k", "v", "g", "beta", "out")
    } | {n: a[n][:, :2].contiguous() for n in ("ring_k", "ring_u", "ring_decay")}),
    "no rows": (BOTH + FUSED, lambda a: {
        n: a[n][:0]
        for n in ("q", "k", "v", "g", "beta", "out", "state_indices", "num_accepted", "past_positions", "gate")
        if n in a}),
    "padding beside an empty pool": (BOTH + FUSED + FILL, lambda a: {"state_indices": int32(-1, -9)} | {
        n: a[n][:0] for n in ("state", "past", "ring") if n in a}),
    "any head dimensions": (BOTH, lambda a: {
        n: resized(n, *dims)(a) for n, dims in {
            "q": [(3, 5)], "k": [(3, 5)], "v": [(3, 7)], "g": [(3, 5)], "dt_bias": [(1, 5)], "out": [(3, 7)],
            "state": [(2, 7), (3, 5)],
        }.items() if n in a}),
    "numbers of the CPU": (STEPS, lambda a: {
        n: a[n].double()
        for n in ("q", "k", "v", "out", "state", "token_states", "ring_k", "ring_u", "ring_decay", "past", "gate")
        if n in a}),
    "weights of float64": (FUSED, lambda a: {n: a[n].double() for n in ("taps", "tap_bias", "norm_weight")}),
    "weights of 16 bits": (FUSED, lambda a: {
        "taps": a["taps"].bfloat16(), "tap_bias": None, "norm_weight": a["norm_weight"].half()}),
    "a convolution without a norm": (FUSED, lambda a: {"norm": None}),
    "a norm without a convolution": (FUSED, lambda a: {"convolution": None}),
    "a norm beside slots of tokens": (TOKEN, lambda a: {"norm": GatedNorm(a["v"], torch.ones(DIM_V), 0, "sigmoid")}),
    "an activated gate of any strides": (FUSED, lambda a: {"gate": gapped_activations(a)["out"]}),
    "longer rings": (FUSED, lambda a: {"past": a["past"].repeat(1, 4, 1)}),
    "a fill of one": (FILL, lambda a: {"inputs": every_other(a["inputs"])[:, -1:], "state_indices": None}),
    "a fill of padding": (FILL, lambda a: {"state_indices": int32(-1, 7), "null_slot": 7}),
    "rings of any dtype of activations": (NEW, lambda a: {"dtype": torch.float64, "records": None}),
}  # fmt: skip


@pytest.mark.parametrize(
    "label, mode", [(label, mode) for label, (modes, _) in ALLOWED.items() for mode in modes]
)
def test_unusual_arguments_are_accepted(label, mode):
    good = good_arguments(mode, "cpu")
    call(mode, **good | ALLOWED[label][1](good))


@pytest.mark.parametrize("rows", [65535, 65536])
def test_rows_that_a_grid_holds(rows):
    """Nothing is computed: the tensors have no values."""
    with FakeTensorMode():
        k, v = torch.empty(rows, 1, 1, 64), torch.empty(rows, 1, 1, 64)
        arguments = {
            "q": k,
            "k": k,
            "v": v,
            "g": None,
            "beta": None,
            "state": torch.empty(rows, 1, 64, 64),
        }
        if rows == 65535:
            assert call("decode", **arguments).shape == v.shape
        else:
            with pytest.raises(ValueError, match="^k: expected at most 65535 rows"):
                call("decode", **arguments)


@pytest.mark.parametrize("dims", [(80, 128), (128, 80), (96, 32)])
def test_head_dimensions_are_free_on_the_cpu_alone(dims):
    """A GPU's tensors are made up here: they have no memory, and the check looks at none."""
    wrong, size = ("k", dims[0]) if dims[0] != 128 else ("v", dims[1])
    shapes = {"q": (2, 1, 2, dims[0]), "k": (2, 1, 2, dims[0]), "v": (2, 1, 4, dims[1])}
    shapes["state"] = (3, 4, dims[1], dims[0])

    def tensors(device: str) -> Arguments:
        made = {n: torch.zeros(s, dtype=torch.bfloat16, device=device) for n, s in shapes.items()}
        return made | {"g": None, "beta": None}

    call("decode", **tensors("cpu"))
    with (
        FakeTensorMode(),
        pytest.raises(ValueError, match=f"^{wrong}: expected a head .*got {size}$"),
    ):
        call("decode", **tensors("cuda"))
