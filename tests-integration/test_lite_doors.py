"""`cula.lite.lite_attention` and `liteattention_sm89.lite_attention` are one function: same arguments, same results."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cula.lite
import liteattention_sm89

Call = dict[str, Any]
DOORS: tuple[Callable[..., Any], ...] = (
    cula.lite.lite_attention,
    liteattention_sm89.lite_attention,
)
OFFSETS_Q = torch.tensor([0, 130, 130, 200], dtype=torch.int32)
OFFSETS_K = torch.tensor([0, 70, 200, 300], dtype=torch.int32)
PACKED = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}


def operands(batch: int = 2) -> Call:
    shapes = {"q": (batch, 200, 4, 16), "k": (batch, 300, 2, 16), "v": (batch, 300, 2, 16)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def tiles(sequences: int, listed: float, keys: int = 300, block_n: int = 64) -> Tensor:
    return torch.rand(sequences, 4, 2, -(-keys // block_n)) < listed


def listing(**options: Any) -> Call:
    return operands() | {"read_mask": tiles(2, 0.7), "threshold": -1.0} | options


# An argument, and calls in which its value matters.
CALLS: dict[str, list[Callable[[], Call]]] = {
    "q": [operands],
    "k": [operands],
    "v": [lambda: operands() | {"v": torch.randn(2, 300, 2, 8, dtype=torch.float64)}],
    "read_mask": [
        lambda: listing(),
        lambda: listing(read_mask=liteattention_sm89.masks.pack(tiles(2, 0.7))),
        lambda: listing(read_mask=torch.zeros(2, 4, 2, 5, dtype=torch.bool)),
    ],
    "threshold": [lambda x=x: listing(threshold=x) for x in (0, -3.0, -math.inf, math.inf)]
    + [lambda: operands() | {"threshold": None}],
    "threshold_mode": [lambda: listing(threshold_mode="length", threshold=4.0)],
    "direction": [
        lambda: listing(direction=-1),
        lambda: listing(direction=torch.tensor([-1], dtype=torch.int32)),
    ],
    "scale": [lambda: listing(scale=0.7), lambda: listing(scale=-1)],
    "causal": [lambda: listing(causal=True), lambda: operands() | {"causal": True}],
    "must_do": [
        lambda: listing(must_do=tiles(1, 0.3)),
        lambda: listing(must_do=liteattention_sm89.masks.pack(tiles(2, 0.3))),
    ],
    "block_m": [lambda: listing(block_m=100)],
    "block_n": [lambda: listing(block_n=128, read_mask=tiles(2, 0.7, block_n=128))],
    "cu_seqlens_q": [lambda: operands(1) | PACKED],
    "cu_seqlens_k": [
        lambda: operands(1) | PACKED | {"read_mask": tiles(3, 0.7, 130), "causal": True}
    ],
    "max_seqlen_q": [lambda: operands(1) | PACKED | {"max_seqlen_q": 300}],
    "max_seqlen_k": [
        lambda: operands(1) | PACKED | {"max_seqlen_k": 200, "threshold_mode": "length"}
    ],
    "deterministic": [lambda: listing(deterministic=True)],
    "out": [lambda: listing(out=torch.full((2, 200, 4, 16), math.nan, dtype=torch.float64))],
}
# What only kernels have, and the package's own reference, is refused by that of `cula`.
KERNELS_ONLY: dict[str, Callable[[], Any]] = {
    "use_int8": lambda: True,
    "grad_mask": lambda: tiles(2, 0.5),
}


def test_the_signatures_are_one() -> None:
    ours, theirs = (dict(inspect.signature(door).parameters) for door in DOORS)
    assert ours.pop("impl").default == "auto"
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert (parameter.kind, parameter.default) == (theirs[name].kind, theirs[name].default)


@pytest.mark.parametrize("door", DOORS, ids=["cula", "package"])
def test_every_argument_is_documented_and_tried(door: Callable[..., Any]) -> None:
    arguments = re.search(r"Args:\n(.*?)\n\n    Returns:", inspect.getdoc(door) or "", re.DOTALL)
    arguments = arguments or re.search(r"Args:\n(.*?)\n\nReturns:", inspect.getdoc(door), re.DOTALL)
    described = re.findall(r"^    ([a-z_0-9, ]+): ", arguments[1], re.MULTILINE)
    described += re.findall(r"\. ([a-z_]+): ", arguments[1])
    names = {name for names in described for name in names.split(", ")}
    parameters = set(inspect.signature(door).parameters)
    assert parameters <= names
    assert parameters - {"impl"} == {*CALLS, *KERNELS_ONLY}


@pytest.mark.parametrize(
    "name, number", [(name, n) for name, calls in CALLS.items() for n in range(len(calls))]
)
def test_results_are_the_same(name: str, number: int) -> None:
    call = CALLS[name][number]()
    own = [{n: x.clone() if n == "out" else x for n, x in call.items()} for _ in DOORS]
    ours, theirs = (door(**arguments) for door, arguments in zip(DOORS, own, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        if other is None or other.dtype != torch.float64:
            assert one is other is None or (one.dtype == other.dtype and torch.equal(one, other))
        else:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    if name == "out":
        assert ours[0] is own[0]["out"] and theirs[0] is own[1]["out"]
    if call.get("read_mask") is not None:
        assert ours[2].dtype == call["read_mask"].dtype


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_same(name: str) -> None:
    call = CALLS[name][-1]()
    call.pop("out", None)
    leaves = [call[n].requires_grad_() for n in ("q", "k", "v")]
    found = []
    for door in DOORS:
        out, lse, _ = door(**call)
        loss = (out.square().sum() + lse[lse.isfinite()].sin().sum(),)
        found.append(torch.autograd.grad(loss, leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", KERNELS_ONLY)
def test_what_only_kernels_have_is_refused_with_a_hint(name: str) -> None:
    call = listing() | {name: KERNELS_ONLY[name]()}
    assert DOORS[1](**call)[0].isfinite().all()
    with pytest.raises(ValueError, match=rf"^{name}: expected .*liteattention-sm89 serve it"):
        DOORS[0](**call)


@pytest.mark.parametrize("name, wrong, error", [
    ("q", lambda x: x[0], ValueError), ("k", lambda x: x.half(), TypeError), ("v", lambda x: x[:, 1:], ValueError),
    ("read_mask", lambda _: tiles(2, 0.5)[:1], ValueError), ("read_mask", lambda _: tiles(2, 0.5).long(), TypeError),
    ("threshold", lambda _: 0.5, ValueError), ("threshold_mode", lambda _: "sum", ValueError),
    ("direction", lambda _: 0, ValueError), ("direction", lambda _: torch.ones(1), TypeError),
    ("scale", lambda _: math.nan, ValueError), ("causal", lambda _: 1, TypeError),
    ("must_do", lambda _: tiles(2, 0.5)[..., :3], ValueError), ("grad_mask", lambda _: tiles(3, 0.5), ValueError),
    ("block_m", lambda _: 0, ValueError), ("block_n", lambda _: 64.0, TypeError),
    ("cu_seqlens_q", lambda _: OFFSETS_Q, ValueError), ("cu_seqlens_k", lambda _: OFFSETS_K, ValueError),
    ("max_seqlen_q", lambda _: 200, ValueError), ("max_seqlen_k", lambda _: 300, ValueError),
    ("use_int8", lambda _: 1, TypeError), ("deterministic", lambda _: None, TypeError),
    ("out", lambda _: torch.zeros(2, 200, 4, 16), TypeError),
    ("out", lambda _: torch.zeros(2, 200, 4, 8, dtype=torch.float64), ValueError),
])  # fmt: skip
def test_both_doors_refuse_the_same(
    name: str, wrong: Callable[[Any], Any], error: type[Exception]
) -> None:
    call = listing()
    call[name] = wrong(call.get(name))
    for door in DOORS:
        with pytest.raises(error, match=f"^{name}: expected ") as caught:
            door(**call)
        assert type(caught.value) is error
