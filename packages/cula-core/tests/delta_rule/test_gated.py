"""What the contract of gated delta rule prefill leaves to kernels: with limits it refuses what plain torch takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cula_core.delta_decode.slots import Limits
from cula_core.delta_rule.gated import check_chunk_gated_delta_rule as check
from cula_testing.gated.contract import good_arguments
from cula_testing.refusals import Arguments

LIMITS = Limits((128,), 1000)
NONE = (
    "cu_seqlens cu_seqlens_cpu chunk_indices cp_context initial_state state_pool state_indices output_state_indices "
    "null_slot has_initial_state state_checkpoints checkpoint_every_n_tokens checkpoint_rows checkpoint_offsets "
    "operand_dtype"
).split()
OTHERS = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "use_intracard_cp": "auto"}
FLAGS = {"state_v_first": False, "update_state_pool": True, "use_qk_l2norm_in_kernel": True}


def on_gpu(mode: str) -> Arguments:
    """Every argument of the contract, good, on a CUDA device that is not there."""
    given = dict.fromkeys(NONE) | OTHERS | FLAGS | good_arguments(mode)
    return {
        name: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x
        for name, x in given.items()
    }


def past(x: Tensor, elements: int) -> Tensor:
    """Matrices like those of x, which lie that many elements further apart."""
    strides = (x.stride(0) + elements, *x.stride()[1:])
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def of_64(a: Arguments) -> Arguments:
    """Heads of 64 channels of K and V."""
    names = ("q", "k", "v", "out")
    narrow = {name: a[name].new_empty(*a[name].shape[:3], 64) for name in names}
    return narrow | {"initial_state": None}


def trained(a: Arguments) -> Arguments:
    v = a["v"].requires_grad_()
    return {"v": v, "out": None, "initial_state": None}


@pytest.mark.parametrize("mode", ["dense", "packed"])
def test_kernels_may_be_asked_for_all_of_it(mode: str) -> None:
    with FakeTensorMode():
        check(**on_gpu(mode), limits=LIMITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_64, "q: expected a head dimension K of 128, got 64"),
        (
            lambda a: {"initial_state": past(a["initial_state"], 1)},
            "initial_state: expected an address and strides that are multiples of 16 bytes",
        ),
        (
            lambda a: {name: a[name].float() for name in ("q", "k", "v", "out")},
            "q: expected bfloat16 or float16, got float32",
        ),
        (trained, r"v: expected no gradient \(no backward; cula.lightning.chunk_gated_delta_rule"),
        (
            lambda a: {"use_intracard_cp": True},
            "use_intracard_cp: expected 'auto' or False unless a sequence has at least 2048 tokens",
        ),
    ],
)
def test_limits_bind_kernels_alone(change: Callable[[Arguments], Any], message: str) -> None:
    with FakeTensorMode():
        good = on_gpu("dense")
        wrong = good | change(good)
        check(**wrong)
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            check(**wrong, limits=LIMITS)


def test_a_grid_has_a_limit() -> None:
    with FakeTensorMode():
        expected = "^q: expected at most 1 sequences and heads, got 2 sequences of 4 heads"
        with pytest.raises(ValueError, match=expected):
            check(**on_gpu("dense"), limits=Limits((128,), 1))
