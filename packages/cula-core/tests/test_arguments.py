"""What single arguments are refused for. The contracts that are made of these have tests of every wrong argument."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cula_core import arguments
from cula_testing.tensors import every_other, int32, spaced, turned

X = torch.zeros(2, 3)
POOL = torch.zeros(3, 2, 4, 5)
V = torch.zeros(1, 7, 2, 5)
Q = torch.zeros(1, 7, 1, 4)

REFUSED = {
    "no tensor": (lambda: arguments.tensor("x", 1.0), TypeError, "x: expected a torch.Tensor, got float"),
    "an integer tensor": (
        lambda: arguments.floating("x", X.int()), TypeError,
        "x: expected float32 or bfloat16 or float16 or float64, got int32",
    ),
    "another device": (
        lambda: arguments.device("x", X.to("meta"), X, "k"), ValueError, "x: expected a tensor on cpu, as k, got meta",
    ),
    "a device of no kind": (
        lambda: arguments.leading("x", X.to("meta")), ValueError,
        "x: expected a tensor on a CUDA device or the CPU, got meta",
    ),
    "an integer activation": (
        lambda: arguments.leading("x", X.int()), TypeError,
        "x: expected bfloat16 or float16 or float32 or float64, got int32",
    ),
    "an activation of another dtype": (
        lambda: arguments.activation("x", X.half(), X, "k"), TypeError,
        "x: expected the dtype of k, float32, got float16",
    ),
    "an activation on another device": (
        lambda: arguments.activation("x", X.to("meta"), X, "k"), ValueError,
        "x: expected a tensor on cpu, as k, got meta",
    ),
    "an activation with gaps": (
        lambda: arguments.activation("x", every_other(X), X), ValueError,
        "x: expected a contiguous last dimension, got strides (6, 2)",
    ),
    "value heads that are no multiple": (
        lambda: arguments.value_heads("x", 3, 2), ValueError,
        "x: expected a number of heads HV that is a multiple of H = 2, got 3",
    ),
    "offsets of too few sequences": (
        lambda: arguments.offsets_vector("x", int32(0), Q, least=1), ValueError,
        "x: expected [N + 1] with N >= 1, got [1]",
    ),
    "gaps": (
        lambda: arguments.last_dim("x", every_other(X)), ValueError,
        "x: expected a contiguous last dimension, got strides (6, 2)",
    ),
    "a vector of another size": (
        lambda: arguments.vector("x", X[0], "H", 4), ValueError, "x: expected [H] = [4], got [3]",
    ),
    "a vector with gaps": (
        lambda: arguments.vector("x", every_other(X[0]), "H", 3), ValueError,
        "x: expected contiguous elements, got strides (2,)",
    ),
    "indices of int64": (
        lambda: arguments.int32_vector("x", torch.tensor([1]), "N", 1, X), TypeError, "x: expected int32, got int64",
    ),
    "a gradient": (
        lambda: arguments.no_gradients("no backward", x=X.clone().requires_grad_()), ValueError,
        "x: expected no gradient (no backward), got requires_grad=True",
    ),
    "no flag": (lambda: arguments.booleans(x=1), TypeError, "x: expected a bool, got int"),
    "no integer": (lambda: arguments.integer("x", 1.0), TypeError, "x: expected an int, got float"),
    "a flag as an integer": (lambda: arguments.integer("x", True), TypeError, "x: expected an int, got bool"),
    "no number": (lambda: arguments.number("x", "1"), TypeError, "x: expected a float or None, got str"),
    "a flag as a number": (lambda: arguments.number("x", True), TypeError, "x: expected a float or None, got bool"),
    "an infinite number": (lambda: arguments.number("x", math.inf), ValueError, "x: expected a finite number, got inf"),
    "a value of the other sign": (
        lambda: arguments.sign("x", torch.tensor([-1.0, 0.5]), -1), ValueError, "x: expected values <= 0, got 0.5",
    ),
    "NaN where a sign counts": (
        lambda: arguments.sign("x", torch.tensor([1.0, math.nan]), 1), ValueError, "x: expected values >= 0, got nan",
    ),
    "a copy of offsets with gaps": (
        lambda: arguments.offsets_copy(int32(0, 7), every_other(int32(0, 7)), 7), ValueError,
        "cu_seqlens_cpu: expected contiguous elements, got strides (2,)",
    ),
    "no head dimension": (
        lambda: arguments.attention(Q, Q, V[..., :0], None, None), ValueError,
        "v: expected a head dimension V of at least 1, got 0",
    ),
    "states of a dtype that is not served": (
        lambda: arguments.states("state", POOL.double(), V, 4, False, dtypes=arguments.FLOATING[:2]), TypeError,
        "state: expected float32 or bfloat16, got float64",
    ),
    "states on another device": (
        lambda: arguments.states("state", POOL.to("meta"), V, 4, False, lead_name="k"), ValueError,
        "state: expected a tensor on cpu, as k, got meta",
    ),
    "states with gaps": (
        lambda: arguments.states("x", spaced(POOL), V, 4, False), ValueError,
        "x: expected dense matrices (last strides 5, 1, or 1, 4), got strides (104, 52, 13, 1)",
    ),
    "states of the other layout": (
        lambda: arguments.states("x", POOL, V, 4, True), ValueError, "x: expected [N, HV, V, K] = [N, 2, 5, 4], got "
        "[3, 2, 4, 5]",
    ),
    "states of odd strides": (
        lambda: arguments.state_alignment("x", torch.zeros(3, 2, 3, 3)), ValueError,
        "x: expected an address and strides that are multiples of 16 bytes, got strides (18, 9, 3, 1)",
    ),
    "a row beyond the pool": (
        lambda: arguments.pool_rows("x", int32(0, 3), "pool", 3), ValueError,
        "x: expected indices below the 3 rows of pool, got 3",
    ),
    "a row twice": (
        lambda: arguments.pool_rows("x", int32(2, -1, 2), "pool", 3), ValueError,
        "x: expected a row of pool once at most, got [2, -1, 2]",
    ),
    "a pool beside an initial state": (
        lambda: arguments.state_or_pool(POOL[:1], POOL, None, Q, V, 1, False, True), ValueError,
        "state_pool: expected None beside an initial_state, got Tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("label", REFUSED)
def test_what_is_wrong_is_refused(label):
    check, error, message = REFUSED[label]
    with pytest.raises(error) as caught:
        check()
    assert type(caught.value) is error and str(caught.value) == message


def test_what_is_right_passes():
    arguments.tensor("x", X)
    arguments.last_dim("x", every_other(X)[..., :1])
    arguments.vector("x", every_other(X[0])[:1], "H", 1)
    arguments.no_gradients("none", x=X, y=None)
    with torch.no_grad():
        arguments.no_gradients("none", x=X.clone().requires_grad_())
    arguments.booleans(x=True, y=False)
    assert arguments.leading("x", X) == "cpu"
    arguments.activation("x", X[..., :2], X)
    arguments.value_heads("x", 6, 2)
    assert arguments.offsets_vector("x", int32(0, 9, 5), Q) == 2
    arguments.integer("x", -3)
    for good in (None, 0, 1.5, -3):
        arguments.number("x", good)
    arguments.sign("x", torch.tensor([-1.0, -0.0, -math.inf]), -1)
    arguments.states("x", turned(POOL), V, 4, False)
    arguments.states("x", POOL.double(), V.double(), 4, False)
    arguments.pool_rows("x", int32(-1, 2, -1), "pool", 3)
    arguments.pool_rows("x", int32(2, 2), "pool", 3, updated=False)
    arguments.pool_rows("x", int32(), "pool", 0)
    arguments.states("x", POOL.bfloat16(), V, 4, False, dtypes=(torch.bfloat16,))
    assert arguments.exact_dtypes(V) == (torch.float32,)
    assert arguments.exact_dtypes(V.double()) == (torch.float32, torch.float64)
    narrow = {torch.bfloat16, torch.float16}
    for v in (V, V.double()):
        assert set(arguments.state_dtypes(v)) == narrow | set(arguments.exact_dtypes(v))
    # Without head dimensions to choose from, any device will do.
    arguments.attention(*(x.to("meta") for x in (Q, Q, V, V)), None)


def test_values_are_read_on_the_cpu_alone():
    """Neither a tensor without values nor one that is being traced can be asked."""
    arguments.pool_rows("x", int32(7).to("meta"), "pool", 3)
    arguments.sign("x", torch.ones(1, device="meta"), -1)
    with FakeTensorMode():
        fake = torch.empty(3)
        assert not arguments.is_real(fake) and not arguments.is_readable(fake)
        arguments.sign("x", fake, -1)
    assert arguments.is_readable(X) and not arguments.is_readable(X.to("meta"))
