"""What the contract of decode leaves to kernels: with their limits it refuses what plain torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cula_core.delta_decode import contract
from cula_core.delta_decode.recurrent import check_fused_recurrent_gated_delta_rule
from cula_core.delta_decode.slots import Limits
from cula_core.reference.delta_decode import empty_replay

LIMITS = Limits((64,), 8)


def decode_arguments(device: str, rows: int = 2, dim: int = 64) -> dict[str, Any]:
    """Arguments of a decode that every limit admits."""
    new: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    found: dict[str, Any] = dict.fromkeys(
        "state_indices output_state_indices scale A_log dt_bias lower_bound replay num_accepted token_states "
        "token_state_indices cu_seqlens max_tokens null_slot convolution norm out".split()
    )
    found |= {name: torch.zeros(rows, 1, 2, dim, **new) for name in ("q", "k", "v")}
    found |= {"g": torch.zeros(rows, 1, 2, **new), "beta": None, "softplus_beta": 1.0}
    found |= {"state": torch.zeros(rows, 2, dim, dim, device=device), "softplus_threshold": 20.0}
    flags = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel",
             "state_v_first", "commit")  # fmt: skip
    return found | dict.fromkeys(flags, True) | {"allow_neg_eigval": False}


@pytest.mark.parametrize(
    ("device", "sizes", "message"),
    [
        ("cpu", {"rows": 9}, "k: expected at most 8 rows and heads, got 9 rows of 2 heads"),
        ("cuda", {"dim": 32}, r"k: expected a head dimension K in \(64,\), got 32"),
        ("meta", {}, "k: expected a tensor on a CUDA device or the CPU, got meta"),
    ],
)
def test_limits_bind_kernels_alone(device: str, sizes: dict[str, int], message: str) -> None:
    with FakeTensorMode():
        x = decode_arguments(device, **sizes)
        contract.check_decode(**x)
        with pytest.raises(ValueError, match=f"^{message}"):
            contract.check_decode(**x, limits=LIMITS)


def test_only_kernels_need_aligned_states() -> None:
    with FakeTensorMode():
        x = decode_arguments("cuda")
        strides = (2 * 64 * 64 + 1, 64 * 64, 64, 1)
        x["state"] = torch.empty_strided((2, 2, 64, 64), strides, device="cuda")
        contract.check_decode(**x)
        with pytest.raises(ValueError, match="^state: expected an address and strides"):
            contract.check_decode(**x, limits=LIMITS)


def test_dtypes_on_a_gpu_are_those_of_kernels_for_everybody() -> None:
    with FakeTensorMode():
        x = decode_arguments("cuda")
        wide = {name: x[name].float() for name in ("q", "k", "v")}
        for limits in (None, LIMITS):
            with pytest.raises(TypeError, match="^k: expected bfloat16 or float16, got float32"):
                contract.check_decode(**x | wide, limits=limits)
            with pytest.raises(TypeError, match="^g: expected float32 or bfloat16 or float16, got"):
                contract.check_decode(**x | {"g": x["g"].double()}, limits=limits)


def test_states_after_tokens_lie_like_the_pool() -> None:
    """Whoever serves: with rows of a pool turned, those of the other one must be turned too."""
    x = decode_arguments("cpu")
    x |= {"commit": False, "token_state_indices": torch.zeros(2, 1, dtype=torch.int32)}
    x["token_state_indices"][1] = 1
    turned = x["state"].mT.contiguous().mT
    for state, tokens in ((x["state"], x["state"].clone()), (turned, turned.clone())):
        contract.check_decode(**x | {"state": state, "token_states": tokens})
    with pytest.raises(ValueError, match="^token_states: expected the layout of state"):
        contract.check_decode(**x | {"token_states": turned})


@pytest.mark.parametrize(
    ("packed", "longest", "expected"), [(False, None, 5), (True, None, 8), (True, 3, 3)]
)
def test_tokens_of_a_row(packed: bool, longest: int | None, expected: int) -> None:
    offsets = torch.tensor([0, 5]) if packed else None
    assert contract.row_tokens(torch.zeros(1, 5, 1, 4), offsets, longest) == expected


def test_rings_of_a_flush() -> None:
    state = torch.zeros(3, 2, 16, 16)
    replay = empty_replay(state, 1, max_tokens=2)
    contract.check_flush(state, replay, None, None, True, None)
    with pytest.raises(ValueError, match=r"^replay.u: expected \[pool, L, HV, V\], got \[4, 2, 16\]"):  # fmt: skip
        contract.check_flush(state, replay._replace(u=replay.u[0]), None, None, True, None)


def recurrent_arguments(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Arguments of a recurrence that every limit admits."""
    q = torch.zeros(2, 3, 2, 64, device=device, dtype=dtype)
    names = "gk gv beta A_log dt_bias scale initial_state cu_seqlens out"
    flags = "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval output_final_state \
             use_qk_l2norm_in_kernel state_v_first"
    found = dict.fromkeys(names.split()) | dict.fromkeys(flags.split(), False)
    return found | {"q": q, "k": q, "v": q, "g": torch.zeros(2, 3, 2, device=device)}


@pytest.mark.parametrize(
    ("name", "dims", "message"),
    [
        ("gv", (2, 64), "gv: expected None"),
        ("gk", (2, 64), "gk: expected None beside g"),
    ],
)
def test_gates_that_kernels_lack(name: str, dims: tuple[int, ...], message: str) -> None:
    x = recurrent_arguments("cpu") | {name: torch.zeros(2, 3, *dims)}
    assert check_fused_recurrent_gated_delta_rule(**x) == 2
    with pytest.raises(ValueError, match=f"^{message}"):
        check_fused_recurrent_gated_delta_rule(**x, limits=LIMITS)


def test_plain_torch_recurs_over_every_dtype_on_a_gpu() -> None:
    with FakeTensorMode():
        x = recurrent_arguments("cuda", torch.float32)
        x["initial_state"] = torch.zeros(2, 2, 64, 64, dtype=torch.float64, device="cuda")
        assert check_fused_recurrent_gated_delta_rule(**x) == 2
        with pytest.raises(TypeError, match="^q: expected bfloat16 or float16, got float32"):
            check_fused_recurrent_gated_delta_rule(**x, limits=LIMITS)


def test_gradients_are_for_plain_torch_unless_memory_is_written() -> None:
    x = recurrent_arguments("cpu")
    x["g"].requires_grad_()
    assert check_fused_recurrent_gated_delta_rule(**x, requires_grad=True) == 2
    with pytest.raises(ValueError, match="^g: expected no gradient"):
        check_fused_recurrent_gated_delta_rule(**x, limits=LIMITS, requires_grad=True)
    out: Tensor = torch.zeros_like(x["v"])
    with pytest.raises(ValueError, match="^out: expected None when gradients are required"):
        check_fused_recurrent_gated_delta_rule(**x | {"out": out}, requires_grad=True)
