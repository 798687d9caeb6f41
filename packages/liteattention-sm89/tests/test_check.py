"""Every wrong argument, one at a time: the exception, what it says, and that nothing has changed."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from as_cuda import AsCuda
from torch import Tensor

from cula_testing.refusals import (
    ANYWHERE,
    CPU,
    CUDA,
    Arguments,
    Table,
    Wrong,
    assert_refused,
    cases,
    contents,
)
from cula_testing.tensors import every_other
from liteattention_sm89 import lite_attention
from liteattention_sm89.check import Extent, check_attention, is_aligned
from liteattention_sm89.config import MAX_WORDS

BATCH, PACKED = ("batch",), ("packed",)
BOTH = BATCH + PACKED
QKV, QKVO = ("q", "k", "v"), ("q", "k", "v", "out")
MASKS = ("read_mask", "must_do", "grad_mask")


_TABLE = Table(BOTH)
value, entry = _TABLE.value, _TABLE.entry


def change(label, name, how, *refusal) -> Wrong:
    """Returns an entry with one tensor of the good ones replaced by a function of itself."""
    return _TABLE.change(f"{name} {label}", name, how, *refusal)


def all_of(label, names, how, *refusal) -> Wrong:
    """Returns an entry with several tensors replaced together, so that only one rule is broken."""
    return entry(label, lambda a: {n: how(a[n]) for n in names}, *refusal)


def requiring(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def narrower(tensor: Tensor) -> Tensor:
    return tensor[..., :60].contiguous()


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def many_keys(tensor: Tensor) -> Tensor:
    return tensor[:, :1].expand(-1, 32 * MAX_WORDS * 64 + 1, -1, -1)


def offsets(*numbers: int) -> Callable[[Tensor], Tensor]:
    return lambda old: torch.tensor(numbers, dtype=old.dtype, device=old.device)


LAST, RISING = "a contiguous last dimension", "rising numbers from 0 to 150"
TO_BROADCAST = "broadcasts to [2, 4, "
UNPACKED = "None unless cu_seqlens_q and cu_seqlens_k are given"
WRONG = [
    *(value(name, wrong, TypeError, "a torch.Tensor", type(wrong).__name__)
      for name in QKV for wrong in (None, [1.0])),
    *(value(name, 3, TypeError, "a torch.Tensor", "int") for name in ("out", *MASKS)),
    *(value(name, [0, 9], TypeError, "a torch.Tensor", "list", PACKED) for name in ("cu_seqlens_q", "cu_seqlens_k")),
    change("of int32", "q", Tensor.int, TypeError, "bfloat16 or float16", "int32"),
    change("of float32", "q", Tensor.float, TypeError, "bfloat16 or float16", "float32", BOTH, CUDA),
    *(change("of float16", name, Tensor.half, TypeError, "the dtype of q, bfloat16", "float16")
      for name in ("k", "v", "out")),
    change("of 3 dimensions", "q", lambda x: x[0], ValueError, "4 dimensions [B, Sq, Hq, D]", "[150, 4, 64]"),
    change("of 3 dimensions", "k", lambda x: x[0], ValueError, "[B, Sk, Hkv, D] with B, D = ", "[130, 2, 64]"),
    change("of 3 dimensions", "v", lambda x: x[0], ValueError, "[B, Sk, Hkv, DV]", "[130, 2, 64]"),
    change("of no dimension", "v", lambda x: x[0, 0, 0, 0], ValueError, "[B, Sk, Hkv, DV]", "[]"),
    change("of another batch", "k", lambda x: x.repeat(3, 1, 1, 1), ValueError, " as in q", ", 130, 2, 64]"),
    change("of another width", "k", narrower, ValueError, ", 64 as in q", "130, 2, 60]"),
    change("of fewer tokens", "v", lambda x: x[:, :9], ValueError, "130, 2] as in k", "9, 2, 64]"),
    change("of fewer heads", "v", lambda x: x[:, :, :1], ValueError, "130, 2] as in k", "130, 1, 64]"),
    change("of another width", "v", narrower, ValueError, "a multiple of 8, up to 256", "60", BOTH, CUDA),
    change("with 3 heads over 2", "q", lambda x: x[:, :, :3], ValueError, "a multiple of Hkv = 2", "3"),
    change("without heads", "q", lambda x: x[:, :, :0], ValueError, "a multiple of Hkv = 2", "0"),
    all_of("no key heads", ("k", "v"), lambda x: x[:, :, :0], ValueError, "q", "a multiple of Hkv = 0", "4"),
    all_of("D = 0", QKVO, lambda x: x[..., :0], ValueError, "q", "a head dimension", "0"),
    all_of("D = 60", QKVO, narrower, ValueError, "q", "a multiple of 8, up to 256", "60", BOTH, CUDA),
    all_of("D = 264", QKVO, lambda x: x.repeat(1, 1, 1, 5)[..., :264], ValueError, "q", "up to 256", "264", BOTH, CUDA),
    change("of fewer tokens", "out", lambda x: x[:, :9], ValueError, "150, 4, 64]", "9, 4, 64]"),
    change("of 3 dimensions", "out", lambda x: x[0], ValueError, "150, 4, 64]", "[150, 4, 64]"),
    *(change("every other", name, every_other, ValueError, LAST, ", 2)") for name in QKVO),
    *(change("elsewhere", name, on_meta, ValueError, "a tensor on c", "meta")
      for name in ("k", "v", "out", *MASKS)),
    *(change("elsewhere", name, on_meta, ValueError, "a tensor on c", "meta", PACKED)
      for name in ("cu_seqlens_q", "cu_seqlens_k")),
    all_of("all on a device of no kind", QKVO, on_meta, ValueError, "q", "a CUDA device or the CPU", "meta"),
    *(entry(f"out and a gradient of {name}", lambda a, name=name: {name: requiring(a[name])}, ValueError, "out",
            "None where a gradient is wanted", "a tensor") for name in QKV),
    change("with a gradient", "out", requiring, ValueError, "no gradient", "requires_grad=True"),
    *(value(name, wrong, TypeError, "a bool", type(wrong).__name__)
      for name in ("causal", "deterministic", "use_int8") for wrong in (1, None, "no")),
    *(entry(f"use_int8 and a gradient of {name}", lambda a, name=name: {"use_int8": True, "out": None, name: requiring(
        a[name])}, ValueError, "use_int8", "False where a gradient is wanted", "True") for name in QKV),
    *(value(name, wrong, TypeError, "a number", type(wrong).__name__)
      for name in ("scale", "threshold") for wrong in ("1", True, torch.ones(()))),
    *(value("scale", wrong, ValueError, "a finite number", str(wrong)) for wrong in (math.inf, -math.inf, math.nan)),
    *(value("threshold", wrong, ValueError, "log2 units, at most 0", str(wrong)) for wrong in (math.nan, 0.5, 3)),
    *(value("threshold_mode", wrong, TypeError, "a str", type(wrong).__name__) for wrong in (None, 1, True)),
    *(value("threshold_mode", wrong, ValueError, "'max' or 'length'", repr(wrong)) for wrong in ("Max", "", "mass")),
    entry("NaN of length", lambda a: {"threshold": math.nan, "threshold_mode": "length"}, ValueError, "threshold",
          "log2 units", "nan"),
    entry("dense and a mode", lambda a: {"threshold": None, "read_mask": None, "must_do": None,
                                         "threshold_mode": "sum"}, ValueError, "threshold_mode", "'max' or", "'sum'"),
    *(value(name, wrong, TypeError, "an int", type(wrong).__name__)
      for name in ("block_m", "block_n") for wrong in (64.0, True, None)),
    *(value(name, wrong, ValueError, "", str(wrong)) for name in ("block_m", "block_n") for wrong in (0, -64)),
    value("block_m", 64, ValueError, "128", "64", BOTH, CUDA),
    *(value("block_n", wrong, ValueError, "64 or 128", str(wrong), BOTH, CUDA) for wrong in (32, 256)),
    *(value("direction", wrong, TypeError, "an int or an int32 tensor", type(wrong).__name__)
      for wrong in (1.0, True, None, "1")),
    *(value("direction", wrong, ValueError, "1 or -1", str(wrong)) for wrong in (0, 2)),
    value("direction", torch.ones(1, dtype=torch.int64), TypeError, "int32", "int64"),
    value("direction", torch.ones(1), TypeError, "int32", "float32"),
    value("direction", torch.ones(2, dtype=torch.int32), ValueError, "[1]", "[2]"),
    value("direction", torch.ones((), dtype=torch.int32), ValueError, "[1]", "[]"),
    value("direction", torch.ones(1, dtype=torch.int32, device="meta"), ValueError, "a tensor on c", "meta"),
    *(entry(f"dense and direction={wrong!r}", lambda a, wrong=wrong: {
        "threshold": None, "read_mask": None, "must_do": None, "direction": wrong}, error, "direction", says, got)
      for wrong, error, says, got in ((5, ValueError, "1 or -1", "5"), ("x", TypeError, "an int", "str"))),
    entry("dense and a read_mask", lambda a: {"threshold": None, "must_do": None}, ValueError, "read_mask",
          "None where threshold is None", "a mask"),
    entry("dense and a must_do", lambda a: {"threshold": None, "read_mask": None}, ValueError, "must_do",
          "None where threshold is None", "a mask"),
    *(change("of int64", name, Tensor.long, TypeError, "bool, or int32 words of 32 tiles", "int64") for name in MASKS),
    change("of bool words", "read_mask", Tensor.bool, ValueError, "[B, Hq, Mt, Nt] = [2, 4, ", ", 1]"),
    *(change("of five bool tiles", name, lambda x: x.bool().repeat(1, 1, 1, 5), ValueError, TO_BROADCAST, ", 5]")
      for name in MASKS[1:]),
    change("of 3 dimensions", "read_mask", lambda x: x[0], ValueError, "[B, Hq, Mt, W] = [2, 4, ", "[4, "),
    change("of key heads", "read_mask", lambda x: x[:, :2], ValueError, "[B, Hq, Mt, W] = [2, 4, ", "[2, 2, "),
    change("to broadcast", "read_mask", lambda x: x[:1], ValueError, "[B, Hq, Mt, W] = [2, 4, ", "[1, 4, "),
    change("a word too wide", "read_mask", lambda x: x.repeat(1, 1, 1, 2), ValueError, "[B, Hq, Mt, W]", ", 2]"),
    *(case for name in ("must_do", "grad_mask") for case in (
        change("of key heads", name, lambda x: x[:1, :1].expand(2, 2, -1, 1), ValueError, TO_BROADCAST, "[2, 2, "),
        change("too wide", name, lambda x: x.repeat(1, 1, 1, 2), ValueError, TO_BROADCAST, ", 2]"),
        change("of 5 dimensions", name, lambda x: x[None], ValueError, TO_BROADCAST, "[1, "),
    )),
    entry("dense and a wide grad_mask", lambda a: {"threshold": None, "read_mask": None, "must_do": None,
          "grad_mask": a["grad_mask"].repeat(1, 1, 1, 2)}, ValueError, "grad_mask", TO_BROADCAST, ", 2]"),
    entry("too many keys", lambda a: {"k": many_keys(a["k"]), "v": many_keys(a["v"]), "read_mask": None}, ValueError,
          "k", "at most 262144 keys per sequence with a list, block_n = 64", "262145", BATCH, CUDA),
    *(value(name, torch.zeros(3, dtype=torch.int32), ValueError, UNPACKED, "a value", BATCH)
      for name in ("cu_seqlens_q", "cu_seqlens_k")),
    *(value(name, 150, ValueError, UNPACKED, "a value", BATCH) for name in ("max_seqlen_q", "max_seqlen_k")),
    *(entry(f"{name} alone", lambda a, other=other: {other: None}, ValueError, name, UNPACKED, "a value", PACKED)
      for name, other in (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q"))),
    all_of("packed and B = 2", QKVO, lambda x: x.repeat(2, 1, 1, 1), ValueError, "cu_seqlens_q", "None unless B = 1",
           "B = 2", PACKED),
    *(case for name in ("cu_seqlens_q", "cu_seqlens_k") for case in (
        change("of float32", name, Tensor.float, TypeError, "int32 or int64", "float32", PACKED),
        change("of 2 dimensions", name, lambda x: x[None], ValueError, "[N + 1] with N >= 1", "[1, 3]", PACKED),
        change("of one", name, lambda x: x[:1], ValueError, "[N + 1] with N >= 1", "[1]", PACKED),
        change("every other", name, every_other, ValueError, "contiguous elements", "(2,)", PACKED),
    )),
    change("that fall", "cu_seqlens_q", offsets(0, 160, 150), ValueError, RISING, "[0, 160, 150]", PACKED, CPU),
    change("that start late", "cu_seqlens_q", offsets(1, 100, 150), ValueError, RISING, "[1, ", PACKED, CPU),
    change("that end early", "cu_seqlens_q", offsets(0, 100, 149), ValueError, RISING, ", 149]", PACKED, CPU),
    change("that end late", "cu_seqlens_k", offsets(0, 30, 131), ValueError, " to 130", ", 131]", PACKED, CPU),
    change("of int64", "cu_seqlens_k", Tensor.long, TypeError, "the dtype of cu_seqlens_q, int32", "int64", PACKED),
    change("of another N", "cu_seqlens_k", offsets(0, 30, 30, 130), ValueError, "of cu_seqlens_q, [3]", "[4]", PACKED),
    *(case for name in ("max_seqlen_q", "max_seqlen_k") for case in (
        *(value(name, wrong, TypeError, "an int", type(wrong).__name__, PACKED) for wrong in (100.0, True, "9")),
        value(name, -1, ValueError, "the length of the longest sequence", "-1", PACKED),
        value(name, 64, ValueError, "at least the length of the longest sequence", "64", PACKED),
        value(name, 99, ValueError, "at least the length of the longest sequence", "99", PACKED, CPU),
        value(name, None, ValueError, "the length of the longest sequence, an int", "None", PACKED, CUDA),
    )),
]  # fmt: skip


def good_arguments(kind: str, device: torch.device | str = "cpu") -> Arguments:
    """q of 150 and k of 130 tokens in all; packed, sequences of (100, 50) and (30, 100)."""
    batch, tiles = (2, 2) if kind == "batch" else (1, 1)
    q, k, v = (torch.randn(batch, n, h, 64).bfloat16() for n, h in ((150, 4), (130, 2), (130, 2)))
    a: Arguments = {"q": q, "k": k, "v": v, "out": torch.full_like(q, 9.0)}
    a["read_mask"] = torch.full((2, 4, tiles, 1), 3, dtype=torch.int32)
    a["must_do"] = torch.ones(1, 1, 1, 1, dtype=torch.int32)
    a["grad_mask"] = torch.full((2, 4, tiles, 1), 2, dtype=torch.int32)
    if kind == "packed":
        a["cu_seqlens_q"] = torch.tensor([0, 100, 150], dtype=torch.int32)
        a["cu_seqlens_k"] = torch.tensor([0, 30, 130], dtype=torch.int32)
    a = {name: x.to(device) for name, x in a.items()}
    if kind == "packed":
        a |= {"max_seqlen_q": 100, "max_seqlen_k": 100}
    return a | {
        "threshold": -3,
        "direction": -1,
        "scale": 0.2,
        "causal": True,
        "block_m": 128,
        "block_n": 64,
        "deterministic": True,
    }


def machine(device: str) -> contextlib.AbstractContextManager:
    return AsCuda() if device == "cuda" else contextlib.nullcontext()


def call(device: str, **arguments: Any) -> Any:
    with machine(device):
        return lite_attention(**arguments)


def cases_of(device: str) -> list:
    """Returns the entries that are refused on a kind of device."""
    return [
        pytest.param(*case.values, device, id=f"{device}-{case.id}")
        for case in cases(WRONG, device)
    ]


@pytest.mark.parametrize("wrong, kind, device", [*cases_of("cpu"), *cases_of("cuda")])
def test_wrong_arguments_are_refused(wrong, kind, device):
    assert_refused(partial(call, device), wrong, good_arguments(kind))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BOTH)
def test_wrong_arguments_are_refused_on_a_gpu(cuda, kind):
    good = good_arguments(kind, cuda)
    for wrong in WRONG:
        if kind in wrong.modes and "cuda" in wrong.devices:
            # A tensor that is given as it is stays on the CPU, and may be refused for that.
            if not any(
                isinstance(x, Tensor) and not x.is_cuda for x in wrong.change(good).values()
            ):
                assert_refused(lite_attention, wrong, good)
    torch.cuda.synchronize()


def checked(arguments: Arguments) -> Extent:
    call = inspect.signature(lite_attention).bind(**arguments)
    call.apply_defaults()
    return check_attention(**call.arguments)


@pytest.mark.parametrize("device", ANYWHERE)
@pytest.mark.parametrize("kind, extent", [("batch", (2, 150, 130)), ("packed", (2, 100, 100))])
def test_the_good_arguments_are_good(kind, extent, device):
    """Otherwise the tests above would prove little."""
    a = good_arguments(kind)
    before = contents(a)
    with machine(device):
        assert checked(a) == Extent(*extent)
    assert all(torch.equal(raw, before[name]) for name, raw in contents(a).items())
    lite_attention(**a)
    changed = {name for name, raw in contents(a).items() if not torch.equal(raw, before[name])}
    assert changed == {"out"}


@pytest.mark.parametrize("kind", BOTH)
def test_the_good_arguments_are_good_where_a_gradient_is_wanted(kind):
    a = good_arguments(kind) | {"out": None}
    a |= {n: requiring(a[n]) for n in QKV}
    before = contents(a)
    out, _, _ = lite_attention(**a)
    out.sum().backward()
    assert all(torch.equal(raw, before[name]) for name, raw in contents(a).items())
    assert all(a[n].grad.any() for n in QKV)


BARE = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ALLOWED: dict[str, tuple[Callable[[Arguments], Arguments], tuple[str, ...]]] = {
    "as little as possible": (lambda a: {n: x for n, x in a.items() if n in BARE}, ANYWHERE),
    "dense": (lambda a: a | dict.fromkeys(("threshold", *MASKS)), ANYWHERE),
    "float16": (lambda a: a | {n: a[n].half() for n in QKVO}, ANYWHERE),
    "D = 8": (lambda a: a | {n: a[n][..., :8] for n in QKVO}, ANYWHERE),
    "odd strides": (lambda a: a | {n: torch.cat((a[n], a[n][..., :3]), 3)[..., 3:] for n in QKVO}, ANYWHERE),
    "infinite thresholds": (lambda a: a | {"threshold": math.inf, "scale": -1}, ANYWHERE),
    **{f"{t} of length": (lambda a, t=t: a | {"threshold": t, "threshold_mode": "length"}, ANYWHERE)
       for t in (-3, 0, 3.5, 100, math.inf, -math.inf)},
    **{f"a {name} of no dimension": (lambda a, name=name: a | {name: a[name][0, 0, 0, 0]}, ANYWHERE)
       for name in ("must_do", "grad_mask")},
    "dense and a grad_mask": (lambda a: a | dict.fromkeys(("threshold", "read_mask", "must_do")), ANYWHERE),
    "a direction on the device": (lambda a: a | {"direction": torch.ones(1, dtype=torch.int32)}, ANYWHERE),
    "float64": (lambda a: a | {n: a[n].double() for n in QKVO}, CPU),
    "v of another width": (lambda a: a | {n: a[n][..., :5] for n in ("v", "out")}, CPU),
    "D = 3": (lambda a: a | {n: a[n][..., :3] for n in QKVO}, CPU),
    "tiles of another size": (lambda a: a | {"read_mask": None, "grad_mask": None, "block_m": 7, "block_n": 9}, CPU),
    "a gradient": (lambda a: a | {n: requiring(a[n]) for n in QKV} | {"out": None}, ANYWHERE),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "label, device", [(n, d) for n, (_, where) in ALLOWED.items() for d in where]
)
def test_what_else_is_allowed(kind, label, device):
    a = ALLOWED[label][0](good_arguments(kind))
    with machine(device):
        assert checked(a).sequences == 2
    if device == "cpu":
        lite_attention(**a)


def test_out_may_be_given_where_nobody_records_gradients():
    a = good_arguments("batch")
    with torch.no_grad(), AsCuda():
        assert checked(a | {n: requiring(a[n]) for n in QKV}).sequences == 2


def test_dense_attention_takes_any_number_of_keys():
    a = good_arguments("batch")
    a |= {n: many_keys(a[n]) for n in ("k", "v")} | dict.fromkeys(
        ("threshold", "read_mask", "must_do")
    )
    with AsCuda():
        assert checked(a).keys == 32 * MAX_WORDS * 64 + 1


def test_longest_lengths_are_found_on_a_cpu():
    a = good_arguments("packed")
    assert checked(a | {"max_seqlen_q": None, "max_seqlen_k": None}) == Extent(2, 100, 100)


@pytest.mark.parametrize("offset, strides, expected", [
    (0, (2048, 256, 64, 1), True), (8, (2048, 264, 8, 1), True), (0, (0, 0, 0, 1), True),
    (1, (2048, 256, 64, 1), False), (0, (2049, 256, 64, 1), False), (0, (2048, 257, 64, 1), False),
    (0, (2048, 256, 60, 1), False), (0, (0, 2**24, 64, 1), False), (0, (0, 2**24 - 8, 64, 1), True),
])  # fmt: skip
def test_what_a_kernel_can_read(offset, strides, expected):
    flat = torch.empty(offset + 2**24 + 4096, dtype=torch.bfloat16)
    assert is_aligned(flat.as_strided((2, 2, 2, 64), strides, offset)) is expected
