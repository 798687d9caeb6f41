"""Every wrong argument, one at a time: the exception, what it says, and that nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cula_lightning_sm90
from cula_testing.refusals import (
    CPU,
    CUDA,
    Arguments,
    Table,
    Wrong,
    assert_refused,
    by_name,
    cases,
    contents,
    on_device,
    resized,
)
from cula_testing.tensors import column, every_other, gapped, shifted

TOKENS, HEADS, HEADS_V, DIM_K, DIM_V, POOL = 70, 2, 4, 64, 128, 5
DENSE, VARLEN = ("lightning_attn_fwd",), ("lightning_attn_fwd_varlen",)
LAYER, GLA = ("chunk_lightning_attn",), ("chunk_simple_gla",)
ALL = DENSE + VARLEN + LAYER + GLA
PACKED, DECAYED, STATED = VARLEN + GLA, DENSE + VARLEN, DENSE + LAYER + GLA
LAST = "a contiguous last dimension"
_TABLE = Table(ALL)
change, several, value = _TABLE.change, _TABLE.several, _TABLE.value
no_tensor, away, entry = _TABLE.no_tensor, _TABLE.away, _TABLE.entry


def flag(name: str, functions=ALL) -> list[Wrong]:
    return [
        value(name, wrong, TypeError, "a bool", type(wrong).__name__, functions)
        for wrong in (1, None)
    ]


def offsets(label: str, numbers: list[int], says: str, got: str, **more) -> Wrong:
    return several(
        f"cu_seqlens {label}", {"cu_seqlens": on_device(numbers)}, ValueError, "cu_seqlens", says, got, PACKED,
        **more,
    )  # fmt: skip


def of_states(name: str, shape: str, functions: tuple[str, ...]) -> list[Wrong]:
    """What may be wrong with a tensor of states. shape: the start of the expected shape, up to HV."""
    expected = f"{shape}, K, V] = [{shape.split(',')[0][1:]}, 4, 64, 128]"
    return [
        no_tensor(name, 1.0, functions),
        change(f"{name} of 3 dimensions", name, lambda s: s[0], ValueError, expected, "[4, 64, 128]", functions),
        change(f"{name} of fewer heads", name, lambda s: s[:, :2], ValueError, expected, ", 2, 64, 128]", functions),
        change(f"{name} [V, K]", name, lambda s: s.mT.contiguous(), ValueError, expected, "128, 64]", functions),
        change(f"{name} of float64", name, Tensor.double, TypeError, "float32 or bfloat16 or float16", "float64",
               functions),
        several(f"{name} with gaps", {name: lambda a: resized(name, (3, 256))(a)[..., :128]},
                ValueError, name, "dense matrices (last strides 128, 1, or 1, 64)", "256, 1)", functions),
        change(f"{name} every other", name, every_other, ValueError, "dense matrices", ", 2)", functions),
        change(f"{name} at an odd address", name, shifted, ValueError, "multiples of 16 bytes", "strides", functions,
               devices=CUDA),
        several(f"{name} with odd strides", {name: lambda a: torch.zeros(
            len(a[name]) * 32770, device=a["q"].device).as_strided(a[name].shape, (32769, 8192, 128, 1))},
                ValueError, name, "multiples of 16 bytes", "strides (32769, 8192, 128, 1)", functions, devices=CUDA),
        away(name, functions),
    ]  # fmt: skip


def rows(
    label: str,
    blamed: str,
    changes: dict[str, Any],
    error: type[Exception],
    says: str,
    got: str,
    functions: tuple[str, ...] = PACKED,
    **more: Any,
) -> Wrong:
    """Something wrong with a call whose checkpoints go to rows of the caller; tuples become int32 vectors."""

    def make(a: Arguments) -> Arguments:
        device = a["q"].device
        wrong = {"checkpoint_rows": (0, -1, 1), CHECKPOINTS: torch.zeros(4, 4, 64, 128)} | changes
        if blamed == "checkpoint_offsets" and blamed not in wrong:
            wrong[blamed] = (0, 0, 64)
        vectors = {
            n: torch.tensor(x, dtype=torch.int32) for n, x in wrong.items() if isinstance(x, tuple)
        }
        wrong |= vectors
        return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in wrong.items()}

    return entry(label, make, error, blamed, says, got, functions, **more)


CHECKPOINTS, EVERY = "state_checkpoints", "checkpoint_every_n_tokens"
WRONG = [
    *(no_tensor(name, wrong) for name in ("q", "k", "v") for wrong in (None, [1.0])),
    no_tensor("out", 3),
    no_tensor("decay", None, VARLEN),
    no_tensor("decay", 0.5, DECAYED),
    no_tensor("g", -0.5, GLA),
    no_tensor("g_gamma", -0.5, GLA),
    no_tensor("cu_seqlens", None, VARLEN),
    no_tensor("cu_seqlens", [0, 70], PACKED),
    no_tensor("initial_state_indices", [0, 1, 2], VARLEN),
    change("q of int32", "q", Tensor.int, TypeError, "bfloat16 or float16", "int32"),
    change("q of float32 on a GPU", "q", Tensor.float, TypeError, "bfloat16 or float16", "float32", devices=CUDA),
    change("q of 3 dimensions", "q", lambda q: q[0], ValueError, "4 dimensions [B, T, H, K]", "[70, 2, 64]"),
    change("k of fewer tokens", "k", lambda k: k[:, :9], ValueError, "the shape of q", "9, 2, 64]"),
    change("k of float16", "k", Tensor.half, TypeError, "the dtype of q, bfloat16", "float16"),
    change("v of float16", "v", Tensor.half, TypeError, "the dtype of q, bfloat16", "float16"),
    change("v of 3 dimensions", "v", lambda v: v[0], ValueError, "[B, T, HV, V]", "[70, 4, 128]"),
    change("v of fewer tokens", "v", lambda v: v[:, :9], ValueError, ", 70 as in q", "9, 4, 128]"),
    several("HV = 3, H = 2", {"v": resized("v", (2, 3))}, ValueError, "v", "a multiple of H = 2", "3"),
    several("no query heads", {"q": resized("q", (2, 0)), "k": resized("k", (2, 0))}, ValueError, "v",
            "a multiple of H = 0", "4"),
    several("no value heads", {"v": resized("v", (2, 0))}, ValueError, "v", "a multiple of H = 2", "0"),
    several("K = 0", {"q": resized("q", (3, 0)), "k": resized("k", (3, 0))}, ValueError, "q", "K of at least 1", "0",
            devices=CPU),
    several("V = 0", {"v": resized("v", (3, 0))}, ValueError, "v", "V of at least 1", "0", devices=CPU),
    several("K = 96", {"q": resized("q", (3, 96)), "k": resized("k", (3, 96))}, ValueError, "q", "K of 64 or 128",
            "96", devices=CUDA),
    several("V = 32", {"v": resized("v", (3, 32))}, ValueError, "v", "V of 64 or 128", "32", devices=CUDA),
    change("out of fewer tokens", "out", lambda o: o[:, :9], ValueError, "the shape of v", "9, 4, 128]"),
    change("out of float32", "out", Tensor.float, TypeError, "the dtype of q, bfloat16", "float32"),
    *(change(f"{name} every other element", name, every_other, ValueError, LAST, ", 2)")
      for name in ("q", "k", "v", "out")),
    *(away(name) for name in ("k", "v", "out")),
    several("all on a device of no kind", {n: lambda a, n=n: a[n].to("meta") for n in ("q", "k", "v")},
            ValueError, "q", "a tensor on a CUDA device or the CPU", "meta"),
    *(wrong for name, functions in (("decay", DECAYED), ("g_gamma", GLA)) for wrong in (
        change(f"{name} of bfloat16", name, Tensor.bfloat16, TypeError, "float32", "bfloat16", functions),
        change(f"{name} of float64", name, Tensor.double, TypeError, "float32", "float64", functions),
        change(f"{name} per query head", name, lambda d: d[:2], ValueError, "[HV] = [4]", "[2]", functions),
        change(f"{name} of 2 dimensions", name, lambda d: d[None], ValueError, "[HV] = [4]", "[1, 4]", functions),
        change(f"{name} every other", name, every_other, ValueError, "contiguous elements", "(2,)", functions),
        change(f"{name} of the wrong sign", name, lambda d: -d, ValueError, "values ", "0.", functions, devices=CPU),
        change(f"{name} is NaN", name, lambda d: d * math.nan, ValueError, "= 0", "nan", functions, devices=CPU),
        away(name, functions),
    )),
    change("g of int32", "g", Tensor.int, TypeError, "float32 or bfloat16 or float16 or float64", "int32", GLA),
    change("g per query head", "g", lambda g: g[..., :2], ValueError, "[B, T, HV] = [1, 70, 4]", "[1, 70, 2]", GLA),
    change("g of 4 dimensions", "g", lambda g: g[..., None], ValueError, "[B, T, HV]", "[1, 70, 4, 1]", GLA),
    away("g", GLA),
    change("cu_seqlens of float32", "cu_seqlens", Tensor.float, TypeError, "int32 or int64", "float32", PACKED),
    change("cu_seqlens of 2 dimensions", "cu_seqlens", lambda c: c[None], ValueError, "[N + 1]", "[1, 4]", PACKED),
    change("cu_seqlens of nothing", "cu_seqlens", lambda c: c[:0], ValueError, "[N + 1]", "[0]", PACKED),
    change("cu_seqlens every other", "cu_seqlens", every_other, ValueError, "contiguous elements", "(2,)", PACKED),
    change("no sequence for 70 tokens", "cu_seqlens", lambda c: c[:1], ValueError, "N >= 1 for T = 70", "[1]", PACKED),
    away("cu_seqlens", PACKED),
    several("cu_seqlens of a dense batch",
            {n: lambda a, n=n: torch.cat((a[n], a[n])) for n in ("q", "k", "v", "g", "out")},
            ValueError, "cu_seqlens", "None unless B = 1", "B = 2", PACKED),
    entry("cu_seqlens of a dense batch", lambda a: {"cu_seqlens": on_device([0, 70, 140])(a)}, ValueError,
          "cu_seqlens", "None unless B = 1", "B = 2", LAYER),
    offsets("that fall", [0, 50, 30, 70], "rise from 0 to T = 70", "[0, 50, 30, 70]", devices=CPU),
    offsets("that start late", [1, 30, 30, 70], "rise from 0 to T = 70", "[1, 30, 30, 70]", devices=CPU),
    offsets("that end early", [0, 30, 30, 69], "rise from 0 to T = 70", "[0, 30, 30, 69]", devices=CPU),
    offsets("that end late", [0, 30, 30, 71], "rise from 0 to T = 70", "[0, 30, 30, 71]", devices=CPU),
    offsets("too many to show", [0] * 20, "rise from 0 to T = 70", "0] ...", devices=CPU),
    no_tensor("cu_seqlens_cpu", [0, 30, 30, 70], GLA),
    *(entry(f"cu_seqlens_cpu {label}", lambda a, more=more: more, error, "cu_seqlens_cpu", says, got, GLA)
      for label, more, error, says, got in (
        ("alone", {"cu_seqlens": None, "cu_seqlens_cpu": torch.tensor([0, 70])}, ValueError,
         "None without cu_seqlens", "Tensor"),
        ("too short", {"cu_seqlens_cpu": torch.tensor([0, 70])}, ValueError, "the shape of cu_seqlens, [4]", "[2]"),
        ("of float32", {"cu_seqlens_cpu": torch.zeros(4)}, TypeError, "int32 or int64", "float32"),
        ("not on the CPU", {"cu_seqlens_cpu": torch.zeros(4, dtype=torch.int32, device="meta")}, ValueError,
         "a tensor on the CPU", "meta"),
    )),
    value("scale", "1", TypeError, "a float or None", "str"),
    value("scale", True, TypeError, "a float or None", "bool"),
    value("scale", math.inf, ValueError, "a finite number", "inf"),
    value("scale", math.nan, ValueError, "a finite number", "nan"),
    entry("scale is a tensor", lambda a: {"scale": torch.ones(())}, TypeError, "scale", "a float", "Tensor"),
    *flag("output_final_state"),
    *flag("state_v_first"),
    *flag("use_qk_l2norm_in_kernel"),
    *flag("exact_state"),
    *flag("update_state_pool", VARLEN),
    *of_states("initial_state", "[N, HV", STATED),
    *of_states("state_pool", "[pool, HV", VARLEN),
    several("a state too few", {"initial_state": lambda a: a["initial_state"][:1]}, ValueError, "initial_state",
            "one state for each of ", "1", STATED),
    several("a state too many", {"initial_state": lambda a: a["initial_state"].repeat(2, 1, 1, 1)}, ValueError,
            "initial_state", "one state for each of ", "", STATED),
    entry("a pool smaller than the batch", lambda a: {"state_pool": a["state_pool"][:2], "initial_state_indices": None},
          ValueError, "state_pool", "at least N = 3 states", "2", VARLEN),
    entry("indices without a pool", lambda a: {"state_pool": None}, ValueError, "initial_state_indices",
          "None without a state_pool", "Tensor", VARLEN),
    *(change(f"indices {label}", "initial_state_indices", how, error, says, got, VARLEN) for label, how, error, says,
      got in (
        ("of int64", Tensor.long, TypeError, "int32", "int64"),
        ("of float32", Tensor.float, TypeError, "int32", "float32"),
        ("too short", lambda i: i[:1], ValueError, "[N] = [3]", "[1]"),
        ("of 2 dimensions", lambda i: i[None], ValueError, "[N] = [3]", "[1, 3]"),
    )),
    several("indices beyond the pool", {"initial_state_indices": on_device([0, 5, 1], torch.int32)}, ValueError,
            "initial_state_indices", "below the 5 rows of state_pool", "5", VARLEN, devices=CPU),
    away("initial_state_indices", VARLEN),
    *(value("null_slot", wrong, TypeError, "an int or None", type(wrong).__name__, VARLEN) for wrong in (0.0, True)),
    value("null_slot", 1 << 31, ValueError, "a 32-bit integer", "2147483648", VARLEN),
    entry("null_slot without a pool", lambda a: {"state_pool": None, "initial_state_indices": None, "null_slot": 0},
          ValueError, "null_slot", "None without a state_pool", "int", VARLEN),
    entry("a row twice beside padding", lambda a: {"initial_state_indices": torch.tensor([2, 0, 2], dtype=torch.int32),
          "null_slot": 0}, ValueError, "initial_state_indices", "a row of state_pool once", "[2, 0, 2]", VARLEN, CPU),
    *(entry(f"has_initial_state {label}", lambda a, how=how: {"has_initial_state": how(a["q"].device)}, error,
            "has_initial_state", says, got, VARLEN) for label, how, error, says, got in (
        ("of a list", lambda d: [True] * 3, TypeError, "a torch.Tensor", "list"),
        ("of int32", lambda d: torch.ones(3, dtype=torch.int32, device=d), TypeError, "bool", "int32"),
        ("too short", lambda d: torch.ones(2, dtype=torch.bool, device=d), ValueError, "[N] = [3]", "[2]"),
        ("elsewhere", lambda d: torch.ones(3, dtype=torch.bool, device="meta"), ValueError, "a tensor on", "meta"),
    )),
    entry("has_initial_state without a pool", lambda a: {"state_pool": None, "initial_state_indices": None,
          "has_initial_state": torch.ones(3, dtype=torch.bool)}, ValueError, "has_initial_state",
          "None without an initial_state or a state_pool", "a tensor", VARLEN, CPU),
    entry("checkpoints without an interval", lambda a: {EVERY: None}, ValueError, EVERY, "beside state_checkp", "None"),
    entry("an interval without checkpoints", lambda a: {CHECKPOINTS: None}, ValueError, CHECKPOINTS,
          f"a tensor beside {EVERY}", "None"),
    no_tensor(CHECKPOINTS, 1.0),
    *(value(EVERY, wrong, TypeError, "an int or None", type(wrong).__name__) for wrong in (64.0, True, "64")),
    *(value(EVERY, wrong, ValueError, "a positive multiple of 64", str(wrong)) for wrong in (0, -64, 32, 100)),
    entry("checkpoints of another interval", lambda a: {EVERY: 128}, ValueError, CHECKPOINTS,
          "[B, T // n, HV, K, V] = [", ", 1, 4, 64, 128]"),
    change("checkpoints of 4 dimensions", CHECKPOINTS, lambda c: c[0], ValueError, "[B, T // n", "[1, 4, 64, 128]"),
    change("checkpoints [V, K]", CHECKPOINTS, lambda c: c.mT.contiguous(), ValueError, "[B, T // n", "128, 64]"),
    change("checkpoints of bfloat16", CHECKPOINTS, Tensor.bfloat16, TypeError, "float32", "bfloat16"),
    change("checkpoints every other", CHECKPOINTS, every_other, ValueError, "a contiguous tensor", ", 2)"),
    change("checkpoints at an odd address", CHECKPOINTS, shifted, ValueError, "a multiple of 16 bytes", "",
           devices=CUDA),
    away(CHECKPOINTS),
    rows("rows without checkpoints", "checkpoint_rows", {EVERY: None, CHECKPOINTS: None}, ValueError,
         "None without checkpoint_every_n_tokens or checkpoint_offsets", "Tensor"),
    rows("two kinds of checkpoints", "checkpoint_offsets", {}, ValueError, "None beside checkpoint_every_n_tokens",
         "Tensor"),
    *(rows(f"{name} {label}", name, {EVERY: None, "checkpoint_offsets": (0, 64, 64), name: wrong}, error, says, got)
      for name in ("checkpoint_rows", "checkpoint_offsets") for label, wrong, error, says, got in (
        ("of a list", [0, 1, 2], TypeError, "a torch.Tensor", "list"),
        ("of float32", torch.zeros(3), TypeError, "int32 or int64", "float32"),
        ("too short", (0, 0), ValueError, "[N] = [3]", "[2]"),
    )),
    rows("offsets in no memory", CHECKPOINTS, {EVERY: None, "checkpoint_offsets": (0, 0, 64), CHECKPOINTS: None,
         "checkpoint_rows": None}, ValueError, "a tensor, or an updated state_pool with rows", "None"),
    rows("offsets into a pool that is read", CHECKPOINTS, {EVERY: None, "checkpoint_offsets": (0, 0, 64), CHECKPOINTS:
         None, "update_state_pool": False}, ValueError, "a tensor, or an updated state_pool with rows", "None", VARLEN),
    rows("checkpoints in memory that is too small", CHECKPOINTS, {EVERY: None, "checkpoint_offsets": (0, 0, 64),
         CHECKPOINTS: torch.zeros(2, 4, 64, 128), "checkpoint_rows": None}, ValueError,
         "a row for each of 3 sequences without checkpoint_rows", "2"),
    rows("checkpoints behind their memory", "checkpoint_rows", {"checkpoint_rows": (0, 0, 4)}, ValueError,
         "below the 4 of state_checkpoints", "4", devices=CPU),
    *(value("num_splits", wrong, TypeError, "an int or None", type(wrong).__name__) for wrong in (2.0, True, "auto")),
    *(value("num_splits", wrong, ValueError, "at least 1", str(wrong)) for wrong in (0, -1)),
    *(value("segment_tokens", wrong, TypeError, "an int or None", type(wrong).__name__)
      for wrong in (1024.0, True, "auto")),
    *(value("segment_tokens", wrong, ValueError, "a multiple of 64, at least 1024, or None", str(wrong))
      for wrong in (0, 960, 1025, -1024)),
    entry("segments of two kinds", lambda a: {"segment_tokens": 1024, "num_splits": 1}, ValueError, "segment_tokens",
          "None with num_splits=1", "1024"),
    *(value(name, wrong, TypeError, "an int", type(wrong).__name__, LAYER)
      for name in ("layer_idx", "num_layers") for wrong in (1.0, True, None)),
    value("layer_idx", -1, ValueError, "0 to 3", "-1", LAYER),
    value("layer_idx", 4, ValueError, "0 to 3", "4", LAYER),
    value("num_layers", 0, ValueError, "at least 1", "0", LAYER),
    *(entry(f"{name} requires a gradient beside {blamed}", lambda a, name=name, without=without: {
        name: a[name].clone().requires_grad_()} | dict.fromkeys(without), ValueError, blamed,
            "None when gradients are required", "a tensor", functions)
      for blamed, without in (("out", ()), (CHECKPOINTS, ("out",)))
      for name, functions in (("q", ALL), ("k", ALL), ("v", ALL), ("g", GLA), ("decay", DECAYED),
                              ("g_gamma", GLA), ("initial_state", STATED), ("state_pool", VARLEN))),
    entry("q requires a gradient beside an updated pool", lambda a: {"q": a["q"].clone().requires_grad_()} |
          dict.fromkeys(("out", CHECKPOINTS, EVERY)), ValueError, "state_pool", "None when gradients are required",
          "a tensor", VARLEN),
    *(change(f"{name} requires a gradient", name, lambda x: x.clone().requires_grad_(), ValueError,
             "None when gradients are required", "a tensor", ALL) for name in (CHECKPOINTS, "out")),
    several("an empty batch and a wrong decay",
            {n: lambda a, n=n: a[n][:0] for n in ("q", "k", "v", "out", "initial_state", CHECKPOINTS)}
            | {"decay": lambda a: a["decay"].double()}, TypeError, "decay", "float32", "float64", DENSE),
]  # fmt: skip


def good_arguments(make_inputs, function: str, device: torch.device | str) -> Arguments:
    packed = function in PACKED
    batch, sequences = (1, 3) if packed else (2, 2)
    inputs = make_inputs(
        batch, TOKENS, HEADS, HEADS_V, DIM_K, DIM_V, dtype=torch.bfloat16, device=device,
        states=POOL if function in VARLEN else sequences,
    )  # fmt: skip
    a: Arguments = {name: inputs[name] for name in ("q", "k", "v")}
    a["state_pool" if function in VARLEN else "initial_state"] = inputs["state"]
    if function in DECAYED:
        a["decay"] = inputs["decay"]
    if function in LAYER:
        a |= {"layer_idx": 1, "num_layers": 4}
    if function in GLA:
        a |= {"g": inputs["g"], "g_gamma": -inputs["decay"]}
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 2, 2, 70], dtype=torch.int32, device=device)
    if function in VARLEN:
        a["initial_state_indices"] = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    a[CHECKPOINTS] = torch.full((batch, 1, HEADS_V, DIM_K, DIM_V), 9.0, device=device)
    return a | {EVERY: 64, "output_final_state": True, "out": torch.full_like(a["v"], 9.0)}


def call(function: str, arguments: Arguments) -> Any:
    return getattr(cula_lightning_sm90, function)(**arguments)


@pytest.mark.parametrize("wrong, function", cases(WRONG, "cpu"))
def test_wrong_arguments_are_refused(make_inputs, wrong, function):
    public = getattr(cula_lightning_sm90, function)
    assert_refused(public, wrong, good_arguments(make_inputs, function, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong, function", cases(WRONG, "cuda"))
def test_wrong_cuda_arguments_are_refused(make_inputs, cuda, wrong, function):
    public = getattr(cula_lightning_sm90, function)
    assert_refused(public, wrong, good_arguments(make_inputs, function, cuda))
    torch.cuda.synchronize()


@pytest.mark.parametrize("function", ALL)
def test_the_good_arguments_are_good(make_inputs, function):
    """Otherwise the tests above would prove little."""
    arguments = good_arguments(make_inputs, function, "cpu")
    before = contents(arguments)
    call(function, arguments)
    changed = {n for n, raw in contents(arguments).items() if not torch.equal(raw, before[n])}
    expected = {"out", CHECKPOINTS}
    assert changed == expected | ({"state_pool"} if function in VARLEN else set())


@pytest.mark.parametrize("function", ALL)
def test_arguments_that_may_be_left_out(make_inputs, function):
    optional = (
        "initial_state",
        "state_pool",
        "initial_state_indices",
        CHECKPOINTS,
        EVERY,
        "out",
        "g",
        "g_gamma",
    )
    a = {
        name: x
        for name, x in good_arguments(make_inputs, function, "cpu").items()
        if name not in optional
    }
    o, state = call(function, a)
    assert o.shape == a["v"].shape and state.shape[1:] == (HEADS_V, DIM_K, DIM_V)


ALLOWED: dict[str, tuple[tuple[str, ...], Callable[[Arguments], Arguments]]] = {
    "activations of float16": (ALL, lambda a: by_name(a, Tensor.half, "q", "k", "v", "out")),
    "activations of float32": (ALL, lambda a: by_name(a, Tensor.float, "q", "k", "v", "out")),
    "all of float64": (
        ALL,
        lambda a: by_name(
            a, Tensor.double, "q", "k", "v", "out", "g", "initial_state", "state_pool", CHECKPOINTS
        ),
    ),
    "states of 16 bits": (
        ALL,
        lambda a: by_name(a, Tensor.half, "initial_state", "state_pool", CHECKPOINTS),
    ),
    "activations with gaps": (ALL, lambda a: by_name(a, gapped, "q", "k", "v", "out")),
    "dimensions that no kernel takes": (
        DENSE,
        lambda a: by_name(a, lambda x: x[..., :3], "q", "k")
        | by_name(a, lambda x: x[..., :5], "v", "out")
        | by_name(a, lambda x: x[..., :3, :5].contiguous(), "initial_state", CHECKPOINTS),
    ),
    "a gate with gaps": (GLA, lambda a: by_name(a, lambda g: g.mT.contiguous().mT.half(), "g")),
    "cu_seqlens of int64 and a copy": (
        GLA,
        lambda a: {"cu_seqlens": a["cu_seqlens"].long(), "cu_seqlens_cpu": a["cu_seqlens"]},
    ),
    "a pool of any size and pitch": (
        VARLEN,
        lambda a: {"state_pool": torch.zeros(9, 6, DIM_K, DIM_V)[::2, 1:5]},
    ),
    "a transposed pool": (VARLEN, lambda a: by_name(a, lambda s: s.mT.contiguous().mT, "state_pool")),
    "only padding beside an empty pool": (
        VARLEN,
        lambda a: {
            "state_pool": a["state_pool"][:0],
            "initial_state_indices": torch.tensor([-1, -9, -2], dtype=torch.int32),
        },
    ),
    "indices of any stride": (
        VARLEN,
        lambda a: by_name(a, column, "initial_state_indices"),
    ),
    "no indices": (VARLEN, lambda a: {"initial_state_indices": None}),
    "states [V, K]": (
        ALL,
        lambda a: {"state_v_first": True}
        | by_name(a, lambda s: s.mT.contiguous(), "initial_state", "state_pool", CHECKPOINTS),
    ),
    "checkpoints in rows of the caller": (
        PACKED,
        lambda a: {CHECKPOINTS: torch.zeros(9, HEADS_V, DIM_K, DIM_V)[::2], "checkpoint_rows": torch.tensor([0, 1, 4])},
    ),
    "a checkpoint per sequence, in the pool": (
        VARLEN,
        lambda a: {CHECKPOINTS: None, EVERY: None, "checkpoint_rows": torch.tensor([-1, -1, 4]),
                   "checkpoint_offsets": torch.tensor([0, 0, 64], dtype=torch.int32)},
    ),
    "no checkpoint in so few tokens": (
        ALL,
        lambda a: by_name(a, lambda c: c[:, :0], CHECKPOINTS) | {EVERY: 128},
    ),
    "an integer scale": (ALL, lambda a: {"scale": 2}),
    "a scale of zero": (ALL, lambda a: {"scale": 0.0}),
    "every flag": (ALL, lambda a: {"use_qk_l2norm_in_kernel": True, "exact_state": True}),
    "one split": (ALL, lambda a: {"num_splits": 1}),
    "more splits than chunks": (ALL, lambda a: {"num_splits": 1000}),
    "segments longer than sequences": (ALL, lambda a: {"segment_tokens": 4096}),
    "the last layer": (LAYER, lambda a: {"layer_idx": 3}),
    "a packed layer": (
        LAYER,
        lambda a: by_name(a, lambda x: x[:1], "q", "k", "v", "out", CHECKPOINTS)
        | {"cu_seqlens": torch.tensor([0, 1, 70])},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "label, function", [(label, f) for label, (functions, _) in ALLOWED.items() for f in functions]
)
def test_unusual_arguments_are_accepted(make_inputs, label, function):
    good = good_arguments(make_inputs, function, "cpu")
    o, _ = call(function, good | ALLOWED[label][1](good))
    assert torch.isfinite(o).all()


@pytest.mark.parametrize("function", ALL)
def test_gradients_are_no_matter_under_no_grad(make_inputs, function):
    good = good_arguments(make_inputs, function, "cpu")
    expected, _ = call(function, good | {"out": None})
    again = good_arguments(make_inputs, function, "cpu")
    again |= by_name(again, Tensor.requires_grad_, "q", "k", "v", "g", "initial_state")
    with torch.no_grad():
        o, state = call(function, again | {"out": None})
    assert torch.equal(o, expected) and not o.requires_grad and not state.requires_grad
