"""Every wrong argument, one at a time: the exception, what it says, and that nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cula_lightning_decode
from cula_lightning_decode import ops
from cula_testing.refusals import (
    CPU,
    CUDA,
    ELSEWHERE,
    Arguments,
    Table,
    Wrong,
    assert_refused,
    cases,
    contents,
    resized,
)
from cula_testing.tensors import column, every_other, shifted

BATCH, TOKENS, HEADS, HEADS_V, DIM_K, DIM_V, POOL = 2, 3, 2, 4, 64, 128, 3
DECODE, COMMIT = ("decode",), ("commit",)
BOTH = DECODE + COMMIT
_TABLE = Table(BOTH)
change, several, value = _TABLE.change, _TABLE.several, _TABLE.value
no_tensor, away, entry = _TABLE.no_tensor, _TABLE.away, _TABLE.entry


def seed(label: str, value: Any, error: type[Exception], says: str, got: str) -> Wrong:
    """A wrong seed beside a bfloat16 state."""

    def arguments(a: Arguments) -> Arguments:
        moved = value.to(a["k"].device) if isinstance(value, Tensor) else value
        return {"state": a["state"].bfloat16(), "rounding_seed": moved}

    label = f"rounding_seed is {label}"
    return entry(label, arguments, error, "rounding_seed", says, got)


LAST = "a contiguous last dimension"
POOL_KV, POOL_VK = "[pool, HV, K, V] = [pool, 4, 64, 128]", "[pool, HV, V, K] = [pool, 4, 128, 64]"
tokens_are = {
    name: (lambda n: lambda count: resized(n, (1, count)))(name) for name in ("q", "k", "v", "out")
}

VALUES = [
    *(value("null_slot", wrong, TypeError, "an int or None", type(wrong).__name__) for wrong in (0.0, True)),
    value("null_slot", -(1 << 31) - 1, ValueError, "a 32-bit integer", "-2147483649"),
    value("state_v_first", 1, TypeError, "a bool", "int"),
    value("state_v_first", None, TypeError, "a bool", "NoneType"),
    value("scale", "1", TypeError, "a float or None", "str", DECODE),
    value("scale", True, TypeError, "a float or None", "bool", DECODE),
    value("scale", math.inf, ValueError, "a finite number", "inf", DECODE),
    value("scale", math.nan, ValueError, "a finite number", "nan", DECODE),
    entry("scale is a tensor", lambda a: {"scale": torch.ones(())}, TypeError, "scale", "a float", "Tensor", DECODE),
    value("commit", 1, TypeError, "a bool", "int", DECODE),
    value("commit", None, TypeError, "a bool", "NoneType", DECODE),
    value("rounding_seed", 5, ValueError, "None unless the state is bfloat16", "float32 state"),
    entry("rounding_seed that is not used", lambda a: {"rounding_seed": 5, "commit": False}, ValueError,
          "rounding_seed", "None unless the state is bfloat16", "float32 state", DECODE),
    seed("a float", 0.5, TypeError, "an int, an int64 tensor of one element or None", "float"),
    seed("a bool", True, TypeError, "an int, an int64 tensor of one element or None", "bool"),
    seed("a string", "7", TypeError, "an int, an int64 tensor of one element or None", "str"),
    seed("too large", 1 << 63, ValueError, "a 64-bit integer", str(1 << 63)),
    seed("too small", -(1 << 63) - 1, ValueError, "a 64-bit integer", str(-(1 << 63) - 1)),
    *(
        change(f"{name} requires a gradient", name, lambda x: x.clone().requires_grad_(), ValueError, "no gradient",
               "requires_grad=True", DECODE if name == "q" else BOTH)
        for name in ("q", "k", "v", "state", "decay")
    ),
]  # fmt: skip
WRONG = [
    no_tensor("q", None, DECODE),
    no_tensor("k", [1.0]),
    no_tensor("k", None),
    no_tensor("v", None),
    no_tensor("v", [1.0]),
    no_tensor("state", None),
    no_tensor("state", 1.0),
    no_tensor("decay", 0.5),
    no_tensor("out", 3, DECODE),
    no_tensor("state_indices", [0, 1]),
    no_tensor("num_accepted", None, COMMIT),
    no_tensor("num_accepted", 2, COMMIT),
    change("k of int32", "k", Tensor.int, TypeError, "bfloat16 or float16", "int32"),
    several(
        "float32 activations", {n: lambda a, n=n: a[n].float() for n in ("q", "k", "v", "out")},
        TypeError, "k", "bfloat16 or float16", "float32", devices=CUDA,
    ),
    several(
        "float64 activations", {n: lambda a, n=n: a[n].double() for n in ("q", "k", "v", "out")},
        TypeError, "k", "bfloat16 or float16", "float64", devices=CUDA,
    ),
    change("q of another dtype", "q", Tensor.half, TypeError, "the dtype of k, bfloat16", "float16", DECODE),
    change("v of another dtype", "v", Tensor.half, TypeError, "the dtype of k, bfloat16", "float16"),
    change("out of another dtype", "out", Tensor.half, TypeError, "the dtype of k, bfloat16", "float16", DECODE),
    change("out of float32", "out", Tensor.float, TypeError, "the dtype of k, bfloat16", "float32", DECODE),
    change("q of 3 dimensions", "q", lambda q: q[0], ValueError, "[B, T, H, K]", "[3, 2, 64]", DECODE),
    several("everything of 3 dimensions", {n: lambda a, n=n: a[n][0] for n in ("q", "k", "v")},
            ValueError, "q", "[B, T, H, K]", "[3, 2, 64]", modes=DECODE),
    change("k of 3 dimensions", "k", lambda k: k[0], ValueError, "[B, T, H, K]", "[3, 2, 64]"),
    change("v of 3 dimensions", "v", lambda v: v[0], ValueError, "[B, T, HV, V]", "[3, 4, 128]"),
    change("q of another batch", "q", lambda q: q[:1], ValueError, "[2, 3, 2, 64]", "[1, 3, 2, 64]", DECODE),
    change("q of fewer tokens", "q", lambda q: q[:, :2], ValueError, "[2, 3, 2, 64]", "[2, 2, 2, 64]", DECODE),
    change("q of fewer heads", "q", lambda q: q[:, :, :1], ValueError, "[2, 3, 2, 64]", "[2, 3, 1, 64]", DECODE),
    several("q of another K", {"q": resized("q", (3, 128))}, ValueError, "q", "[2, 3, 2, 64]", "128]",
            modes=DECODE),
    change("v of another batch", "v", lambda v: v[:1], ValueError, "B, T = 2, 3 as in k", "[1, 3, 4, 128]"),
    change("v of fewer tokens", "v", lambda v: v[:, :2], ValueError, "B, T = 2, 3 as in k", "[2, 2, 4, 128]"),
    several("no tokens", {n: make(0) for n, make in tokens_are.items()}, ValueError, "k", "1 to 8 tokens", "0"),
    several("nine tokens", {n: make(9) for n, make in tokens_are.items()}, ValueError, "k", "1 to 8 tokens", "9"),
    several(
        "K = 96", {"q": resized("q", (3, 96)), "k": resized("k", (3, 96)), "state": resized("state", (2, 96))},
        ValueError, "k", "(64, 128, 256)", "96", devices=CUDA,
    ),
    several(
        "V = 32", {"v": resized("v", (3, 32)), "out": resized("out", (3, 32)), "state": resized("state", (3, 32))},
        ValueError, "v", "(64, 128, 256)", "32", devices=CUDA,
    ),
    several(
        "K = 0", {"q": resized("q", (3, 0)), "k": resized("k", (3, 0)), "state": resized("state", (2, 0))},
        ValueError, "k", "a head dimension K of at least 1", "0", devices=CPU,
    ),
    several(
        "V = 0", {"v": resized("v", (3, 0)), "out": resized("out", (3, 0)), "state": resized("state", (3, 0))},
        ValueError, "v", "a head dimension V of at least 1", "0", devices=CPU,
    ),
    several(
        "HV = 3, H = 2",
        {"v": resized("v", (2, 3)), "out": resized("out", (2, 3)), "state": resized("state", (1, 3)),
         "decay": resized("decay", (0, 3))},
        ValueError, "v", "a multiple of H = 2", "3",
    ),
    several("no query heads", {"q": resized("q", (2, 0)), "k": resized("k", (2, 0))}, ValueError, "v",
            "a multiple of H = 0", "4"),
    several(
        "no value heads",
        {"v": resized("v", (2, 0)), "out": resized("out", (2, 0)), "state": resized("state", (1, 0)),
         "decay": resized("decay", (0, 0))},
        ValueError, "v", "a multiple of H = 2", "0",
    ),
    several(
        "65536 rows",
        {n: lambda a, n=n: a[n][:1, :1].expand(65536, *[-1] * 3) for n in ("q", "k", "v")}
        | {"out": lambda a: None}
        | {n: lambda a, n=n: a[n][:1].expand(65536).contiguous() for n in ("state_indices", "num_accepted")},
        ValueError, "k", "at most 65535 rows", "[65536, 1, 2, 64]",
    ),
    change("q every other element", "q", every_other, ValueError, LAST, "strides (768, 256, 128, 2)", DECODE),
    change("k every other element", "k", every_other, ValueError, LAST, "strides (768, 256, 128, 2)"),
    change("v every other element", "v", every_other, ValueError, LAST, "strides (3072, 1024, 256, 2)"),
    change("out every other element", "out", every_other, ValueError, LAST, "256, 2)", DECODE),
    change("out of fewer tokens", "out", lambda o: o[:, :2], ValueError, "[2, 3, 4, 128]", "[2, 2, 4, 128]", DECODE),
    change("out of 3 dimensions", "out", lambda o: o[0], ValueError, "[2, 3, 4, 128]", "[3, 4, 128]", DECODE),
    change("out without a row", "out", lambda o: o[:1], ValueError, "[2, 3, 4, 128]", "[1, 3, 4, 128]", DECODE),
    entry("a [K, V] pool", lambda a: {"state_v_first": True}, ValueError, "state", POOL_VK, "[3, 4, 64, 128]"),
    several("a [V, K] pool", {"state": lambda a: a["state"].transpose(2, 3).contiguous()}, ValueError, "state",
            POOL_KV, "[3, 4, 128, 64]"),
    change("state of 3 dimensions", "state", lambda s: s[0], ValueError, POOL_KV, "[4, 64, 128]"),
    change("state of fewer heads", "state", lambda s: s[:, :2], ValueError, POOL_KV, "[3, 2, 64, 128]"),
    change("state of int8", "state", lambda s: s.to(torch.int8), TypeError, "float32 or bfloat16 or float16", "int8"),
    change("state of float64", "state", Tensor.double, TypeError, "float32 or bfloat16 or float16", "float64",
           devices=CUDA),
    several("state with gaps between rows", {"state": lambda a: resized("state", (3, 256))(a)[..., :128]},
            ValueError, "state", "dense matrices (last strides 128, 1)", "strides (65536, 16384, 256, 1)"),
    change("state every other element", "state", every_other, ValueError, "dense matrices", "256, 2)"),
    entry("a pool smaller than the batch", lambda a: {"state": a["state"][:1], "state_indices": None},
          ValueError, "state", "at least B = 2 states", "1"),
    change("state at an odd address", "state", shifted, ValueError, "multiples of 16 bytes", "strides", devices=CUDA),
    entry("state with odd pool strides",
          lambda a: {"state": torch.zeros(POOL * 32770, device=a["k"].device).as_strided(
              (POOL, HEADS_V, DIM_K, DIM_V), (32769, 8192, 128, 1))},
          ValueError, "state", "multiples of 16 bytes", "strides (32769, 8192, 128, 1)", devices=CUDA),
    change("decay of bfloat16", "decay", Tensor.bfloat16, TypeError, "float32", "bfloat16"),
    change("decay of float64", "decay", Tensor.double, TypeError, "float32", "float64"),
    change("decay below 0", "decay", lambda d: d * 0 - 7, ValueError, "values >= 0 (a state is", "-7", devices=CPU),
    change("decay of NaN", "decay", lambda d: d * math.nan, ValueError, "values >= 0", "nan", devices=CPU),
    change("a row twice", "state_indices", torch.zeros_like, ValueError, "rows that differ because state is updated",
           "0 twice", devices=CPU),
    change("a row behind the pool", "state_indices", lambda i: i + 1, ValueError, "values below the 3 states", "3",
           devices=CPU),
    change("decay per query head", "decay", lambda d: d[:2], ValueError, "[HV] = [4]", "[2]"),
    change("decay of 2 dimensions", "decay", lambda d: d[None], ValueError, "[HV] = [4]", "[1, 4]"),
    change("decay of no dimension", "decay", lambda d: d[0], ValueError, "[HV] = [4]", "[]"),
    change("decay every other element", "decay", every_other, ValueError, "contiguous elements", "strides (2,)"),
    *(
        wrong
        for name, functions in (("state_indices", BOTH), ("num_accepted", COMMIT))
        for wrong in (
            change(f"{name} of int64", name, Tensor.long, TypeError, "int32", "int64", functions),
            change(f"{name} of float32", name, Tensor.float, TypeError, "int32", "float32", functions),
            change(f"{name} too short", name, lambda i: i[:1], ValueError, "[B] = [2]", "[1]", functions),
            change(f"{name} too long", name, lambda i: i.repeat(2), ValueError, "[B] = [2]", "[4]", functions),
            change(f"{name} of 2 dimensions", name, lambda i: i[None], ValueError, "[B] = [2]", "[1, 2]", functions),
            away(name, functions),
        )
    ),
    seed("an int32 tensor", torch.ones(1, dtype=torch.int32), TypeError, "int64", "int32"),
    seed("of two elements", torch.ones(2, dtype=torch.int64), ValueError, "one element, [1]", "[2]"),
    seed("of no dimension", torch.ones((), dtype=torch.int64), ValueError, "one element, [1]", "[]"),
    entry("rounding_seed on another device",
          lambda a: {"state": a["state"].bfloat16(),
                     "rounding_seed": torch.ones(1, dtype=torch.int64, device=ELSEWHERE[a["k"].device.type])},
          ValueError, "rounding_seed", "a tensor on ", ""),
    away("q", DECODE),
    away("v"),
    away("state"),
    away("decay"),
    away("out", DECODE),
    several("k on a device of no kind", {"k": lambda a: a["k"].to("meta")}, ValueError, "k",
            "a tensor on a CUDA device or the CPU", "meta"),
    several(
        "an empty batch and a wrong decay",
        {n: lambda a, n=n: a[n][:0] for n in ("q", "k", "v", "out", "state_indices", "num_accepted")}
        | {"decay": lambda a: a["decay"].double()},
        TypeError, "decay", "float32", "float64",
    ),
    *VALUES,
]  # fmt: skip


def good_arguments(make_inputs, device: torch.device | str) -> Arguments:
    """For both functions; `call` picks."""
    arguments: Arguments = make_inputs(
        BATCH, TOKENS, HEADS, HEADS_V, DIM_K, DIM_V, pool=POOL, dtype=torch.bfloat16, device=device
    )
    arguments["state_indices"] = torch.tensor([2, 0], dtype=torch.int32, device=device)
    arguments["num_accepted"] = torch.tensor([1, 3], dtype=torch.int32, device=device)
    return arguments | {"out": torch.full_like(arguments["v"], 9.0)}


def call(function: str, **arguments: Any) -> Any:
    foreign = ("num_accepted",) if function == "decode" else ("q", "scale", "out", "commit")
    public = getattr(cula_lightning_decode, f"linear_attention_{function}")
    return public(**{name: x for name, x in arguments.items() if name not in foreign})


@pytest.mark.parametrize("wrong, function", cases(WRONG, "cpu"))
def test_wrong_arguments_are_refused(make_inputs, wrong, function):
    assert_refused(partial(call, function), wrong, good_arguments(make_inputs, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong, function", cases(WRONG, "cuda"))
def test_wrong_cuda_arguments_are_refused(make_inputs, cuda, wrong, function):
    assert_refused(partial(call, function), wrong, good_arguments(make_inputs, cuda))
    torch.cuda.synchronize()


def test_calls_without_the_dispatcher_are_checked_too(make_inputs, monkeypatch):
    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda k: type(k) is Tensor)
    for name in ("_decode_cuda", "_commit_cuda"):
        monkeypatch.setattr(ops, name, None)
    for case in cases(WRONG, "cpu"):
        wrong, function = case.values
        assert_refused(partial(call, function), wrong, good_arguments(make_inputs, "cpu"))


@pytest.mark.parametrize("function", BOTH)
def test_the_good_arguments_are_good(make_inputs, function):
    """Otherwise the tests above would prove little."""
    arguments = good_arguments(make_inputs, "cpu")
    before = contents(arguments)
    call(function, **arguments)
    changed = {
        name for name, raw in contents(arguments).items() if not torch.equal(raw, before[name])
    }
    assert changed == ({"state", "out"} if function == "decode" else {"state"})


ALLOWED: dict[str, Callable[[Arguments], Arguments]] = {
    "activations of float16": lambda a: {n: a[n].half() for n in ("q", "k", "v", "out")},
    "activations with gaps": lambda a: {
        n: torch.zeros(2, 7, 9, 300, dtype=a[n].dtype)[:, 1:7:2, 3 : 3 + a[n].shape[2], 5 : 5 + a[n].shape[3]]
        for n in ("q", "k", "v", "out")
    },
    "one row of odd strides": lambda a: {
        n: a[n][:1].as_strided(a[n][:1].shape, (7, *a[n].stride()[1:])) for n in ("q", "k", "v", "out")
    }
    | {n: a[n].repeat(2)[::3][:1] for n in ("state_indices", "num_accepted")},
    "a pool of any size and pitch": lambda a: {"state": torch.zeros(9, 6, DIM_K, DIM_V)[::2, 1:5]},
    "a transposed pool": lambda a: {"state": a["state"].transpose(2, 3), "state_v_first": True},
    "one value head": lambda a: {
        "q": a["q"][:, :, :1], "k": a["k"][:, :, :1], "v": a["v"][:, :, :1], "out": a["out"][:, :, :1],
        "state": a["state"][:, :1], "decay": a["decay"].repeat(3)[::12],
    },
    "no indices": lambda a: {"state_indices": None},
    "an integer scale": lambda a: {"scale": 2},
    "a scale of zero": lambda a: {"scale": 0.0},
    "any head dimensions": lambda a: {
        "q": resized("q", (3, 5))(a), "k": resized("k", (3, 5))(a), "v": resized("v", (3, 7))(a),
        "out": resized("out", (3, 7))(a), "state": resized("state", (2, 5), (3, 7))(a).bfloat16(), "rounding_seed": 3,
    },
    "indices and counts of any stride": lambda a: {n: column(a[n]) for n in ("state_indices", "num_accepted")},
    "padding twice": lambda a: {"state_indices": torch.tensor([-1, -1], dtype=torch.int32)},
    "only padding": lambda a: {"state_indices": torch.tensor([-1, -9], dtype=torch.int32)},
    "the smallest seed": lambda a: {"state": a["state"].bfloat16(), "rounding_seed": -(1 << 63)},
    "the largest seed": lambda a: {"state": a["state"].bfloat16(), "rounding_seed": (1 << 63) - 1},
    "a seed on the device": lambda a: {"state": a["state"].bfloat16(), "rounding_seed": torch.tensor([3])},
    "no rows": lambda a: {
        n: a[n][:0] for n in ("q", "k", "v", "out", "state_indices", "num_accepted")
    },
    "padding beside an empty pool": lambda a: {
        "state": a["state"][:0], "state_indices": torch.tensor([-1, -9], dtype=torch.int32)
    },
}  # fmt: skip


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("label", ALLOWED)
def test_unusual_arguments_are_accepted(make_inputs, label, function):
    good = good_arguments(make_inputs, "cpu")
    call(function, **good | ALLOWED[label](good))


def test_a_row_that_is_only_read_may_be_read_twice(make_inputs):
    good = good_arguments(make_inputs, "cpu")
    rows = torch.tensor([1, 1], dtype=torch.int32)
    out = call("decode", **good | {"state_indices": rows, "commit": False}).clone()
    for row in range(BATCH):
        one = torch.tensor([1 if row == other else -1 for other in range(BATCH)], dtype=torch.int32)
        alone = call("decode", **good | {"state_indices": one, "commit": False})
        assert torch.equal(out[row], alone[row])


@pytest.mark.parametrize("dims", [(80, 128), (128, 80), (96, 32)])
def test_head_dimensions_are_free_on_the_cpu_alone(make_inputs, dims):
    """A GPU's tensors are made up here: they have no memory, and the check looks at none."""
    wrong, size = ("k", dims[0]) if dims[0] != 128 else ("v", dims[1])
    arguments = make_inputs(2, 1, 2, 4, *dims, pool=3, dtype=torch.bfloat16, device="cpu")
    call("decode", **arguments)
    with (
        FakeTensorMode(),
        pytest.raises(ValueError, match=f"^{wrong}: expected a head .*got {size}$"),
    ):
        on_gpu = {
            name: torch.empty_like(x, device="cuda") if isinstance(x, Tensor) else x
            for name, x in make_inputs(
                2, 1, 2, 4, *dims, pool=3, dtype=torch.bfloat16, device="cpu"
            ).items()
        }
        call("decode", **on_gpu)
