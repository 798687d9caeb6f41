"""Every wrong argument, one at a time: the exception, what it says, and that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from delta_rule_targets import chunk_kda, kda_workspace_bytes
from torch import Tensor

from cula_core.delta_rule.config import BLOCK_BYTES
from cula_testing.kda.contract import (
    BOTH,
    DENSE,
    DIM,
    HEADS_V,
    NO_GATE,
    PACKED,
    UNTRAINED,
    WRONG,
    good_arguments,
)
from cula_testing.kda.inputs import inputs
from cula_testing.refusals import Arguments, assert_refused, by_name, cases, contents
from cula_testing.tensors import column, every_other, gapped, int32, spaced, turned


@pytest.mark.parametrize("wrong, mode", cases([*WRONG, *UNTRAINED], "cpu"))
def test_wrong_arguments_are_refused(wrong, mode):
    assert_refused(chunk_kda, wrong, good_arguments(mode, "cpu"))


@pytest.mark.parametrize("mode", BOTH)
def test_the_good_arguments_are_good(mode):
    """Otherwise the tests above would prove little."""
    arguments = good_arguments(mode, "cpu")
    before = contents(arguments)
    chunk_kda(**arguments)
    changed = {n for n, raw in contents(arguments).items() if not torch.equal(raw, before[n])}
    assert changed == {"out"} | ({"state_pool"} if mode == "packed" else set())


@pytest.mark.parametrize("mode", BOTH)
def test_arguments_that_may_be_left_out(mode):
    required = ("q", "k", "v", "g", "beta")
    good = good_arguments(mode, "cpu")
    a = {name: good[name] for name in required}
    a["g"] = -a["g"].abs()
    o, state = chunk_kda(*a.values())
    assert o.shape == a["v"].shape and state is None


TOKEN_TENSORS = ("q", "k", "v", "out")
ALLOWED: dict[str, tuple[tuple[str, ...], Callable[[Arguments], Arguments]]] = {
    "activations of float16": (BOTH, lambda a: by_name(a, Tensor.half, *TOKEN_TENSORS)),
    "activations of float32": (BOTH, lambda a: by_name(a, Tensor.float, *TOKEN_TENSORS)),
    "all of float64": (
        BOTH,
        lambda a: by_name(
            a, Tensor.double, *TOKEN_TENSORS, "g", "beta", "A_log", "dt_bias", "initial_state", "state_pool"
        ),
    ),
    "float32 states of float64": (BOTH, lambda a: by_name(a, Tensor.double, *TOKEN_TENSORS)),
    "activations with gaps": (BOTH, lambda a: by_name(a, gapped, *TOKEN_TENSORS, "g")),
    "dimensions that no kernel takes": (
        DENSE,
        lambda a: by_name(a, lambda x: x[..., :3], "q", "k", "g")
        | by_name(a, lambda x: x[..., :5], "v", "out")
        | by_name(a, lambda x: x[:6], "dt_bias")
        | by_name(a, lambda x: x[..., :3, :5].contiguous(), "initial_state"),
    ),
    "a strength of any strides": (BOTH, lambda a: by_name(a, lambda b: every_other(b.mT).mT.half(), "beta")),
    "indices of any stride": (
        PACKED,
        lambda a: by_name(a, column, "initial_state_indices")
        | {"output_state_indices": column(int32(2, 4, 0))},
    ),
    "a bias [HV, K]": (BOTH, lambda a: by_name(a, lambda b: spaced(b.view(HEADS_V, DIM)), "dt_bias")),
    "gate parameters of bfloat16": (BOTH, lambda a: by_name(a, Tensor.bfloat16, "A_log", "dt_bias")),
    "no rate and no bias": (BOTH, lambda a: {"A_log": None, "dt_bias": None}),
    "an integer bound": (BOTH, lambda a: {"lower_bound": -1}),
    "a bound that is not safe": (BOTH, lambda a: {"lower_bound": -50.0, "safe_gate": False}),
    "no bound": (BOTH, lambda a: {"lower_bound": None, "safe_gate": False}),
    "log decays": (BOTH, lambda a: NO_GATE | {"g": -a["g"].abs()}),
    "safe log decays": (BOTH, lambda a: NO_GATE | {"g": -a["g"].abs(), "safe_gate": True}),
    "a bound of log decays": (
        BOTH, lambda a: NO_GATE | {"g": -a["g"].abs(), "safe_gate": True, "lower_bound": -1.0}
    ),
    "cu_seqlens of int64": (PACKED, lambda a: by_name(a, Tensor.long, "cu_seqlens")),
    "no copy of cu_seqlens": (PACKED, lambda a: {"cu_seqlens_cpu": None}),
    "a pool of any size and pitch": (PACKED, lambda a: {"state_pool": torch.zeros(9, 6, DIM, DIM)[::2, 1:3]}),
    "transposed states": (BOTH, lambda a: by_name(a, turned, "initial_state", "state_pool")),
    "a pool of a dense batch": (
        DENSE,
        lambda a: {"state_pool": a["initial_state"], "initial_state": None, "initial_state_indices": int32(1, -7)},
    ),
    "a pool that is only read": (PACKED, lambda a: {"update_state_pool": False}),
    "no pool to update": (DENSE, lambda a: {"update_state_pool": False}),
    "a row of a pool that is only read twice": (
        PACKED, lambda a: {"update_state_pool": False, "initial_state_indices": int32(2, 0, 2)}
    ),
    "padding twice": (PACKED, lambda a: {"initial_state_indices": int32(-1, 2, -1)}),
    "only padding beside an empty pool": (
        PACKED, lambda a: {"state_pool": a["state_pool"][:0], "initial_state_indices": int32(-1, -9, -2)}
    ),
    "no indices": (PACKED, lambda a: {"initial_state_indices": None}),
    "states [V, K]": (
        BOTH,
        lambda a: {"state_v_first": True} | by_name(a, lambda s: s.mT.contiguous(), "initial_state", "state_pool"),
    ),
    "an integer scale": (BOTH, lambda a: {"scale": 2}),
    "a scale of zero": (BOTH, lambda a: {"scale": 0.0}),
    "no recomputing": (BOTH, lambda a: {"disable_recompute": True}),
    "never cut": (BOTH, lambda a: {"use_intracard_cp": False}),
    "operands of float16": (BOTH, lambda a: {"operand_dtype": torch.float16}),
    "operands of bfloat16": (BOTH, lambda a: {"operand_dtype": torch.bfloat16}),
    "a large workspace": (BOTH, lambda a: {"workspace": torch.zeros(1 << 20, dtype=torch.uint8)}),
    "the smallest workspace": (BOTH, lambda a: {"workspace": torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8)}),
}  # fmt: skip


@pytest.mark.parametrize(
    "label, mode", [(label, mode) for label, (modes, _) in ALLOWED.items() for mode in modes]
)
def test_unusual_arguments_are_accepted(label, mode):
    good = good_arguments(mode, "cpu")
    o, _ = chunk_kda(**good | ALLOWED[label][1](good))
    assert torch.isfinite(o).all()


@pytest.mark.parametrize("batch, lengths", [(1, (2048,)), (2, None), (1, (2048, 0, 1))])
def test_sequences_that_can_be_cut_are_accepted(batch, lengths):
    tokens = 2048 if lengths is None else sum(lengths)
    given = inputs(batch, tokens, 1, 1, dim_k=2, dim_v=2, gate="log", lengths=lengths)
    sequences = None if lengths is None else len(lengths)
    size = kda_workspace_bytes(batch, tokens, 1, sequences)
    workspace = torch.empty(size, dtype=torch.uint8)
    o, _ = chunk_kda(**given, use_intracard_cp=True, workspace=workspace)
    assert torch.equal(o, chunk_kda(**given, use_intracard_cp=False)[0])


@pytest.mark.parametrize("mode", BOTH)
def test_gradients_are_no_matter_under_no_grad(mode):
    good = good_arguments(mode, "cpu") | {"out": None}
    expected, _ = chunk_kda(**good)
    again = good_arguments(mode, "cpu") | {"out": None}
    again |= by_name(again, Tensor.requires_grad_, "q", "k", "v", "g", "beta", "A_log", "dt_bias")
    with torch.no_grad():
        o, state = chunk_kda(**again)
    assert torch.equal(o, expected) and not o.requires_grad and not state.requires_grad


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((1, 1, 1), 59_904),
        ((1, 64, 3), 3 * 59_904),
        ((2, 65, 1), 4 * 59_904),
        ((1, 64, 2, 5), 12 * 59_904),
        ((0, 5, 3), 3 * 59_904),
        ((1, 0, 3, 0), 3 * 59_904),
    ],
)
def test_the_size_of_a_workspace(sizes, expected):
    """59,904 bytes per chunk and value head, where packed sequences may fill T // 64 + N chunks; one at least."""
    assert kda_workspace_bytes(*sizes) == expected


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ((1.0, 1, 1), TypeError, "batch: expected an int, got float"),
        ((True, 1, 1), TypeError, "batch: expected an int, got bool"),
        ((1, None, 1), TypeError, "tokens: expected an int, got NoneType"),
        ((1, 1, "1"), TypeError, "value_heads: expected an int, got str"),
        ((1, 1, 1, 2.0), TypeError, "sequences: expected an int or None, got float"),
        ((-1, 1, 1), ValueError, "batch: expected at least 0, got -1"),
        ((1, -1, 1), ValueError, "tokens: expected at least 0, got -1"),
        ((1, 1, 0), ValueError, "value_heads: expected at least 1, got 0"),
        ((1, 1, 1, -1), ValueError, "sequences: expected at least 0, got -1"),
        ((2, 1, 1, 3), ValueError, "sequences: expected None unless batch = 1, got 3 with batch = 2"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused(sizes, error, message):
    with pytest.raises(error) as caught:
        kda_workspace_bytes(*sizes)
    assert str(caught.value) == message
