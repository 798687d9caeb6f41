"""The functions with flash-linear-attention's names, on a CPU: the recurrence, its states, and what is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cula_core.reference.kda import recurrent_prefill
from cula_delta_decode import fused_recurrent_gated_delta_rule, fused_recurrent_kda
from cula_testing.comparing import assert_rounded_once

HEADS, VALUE_HEADS, K, V = 2, 4, 16, 24


def activations(
    batch: int, tokens: int, channels: bool, dtype=torch.float64, dims=(K, V)
) -> dict[str, Tensor]:
    """q, k, v, g and beta by name: decays and write strengths as they are."""
    dim_k, dim_v = dims
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    gates = (VALUE_HEADS, dim_k) if channels else (VALUE_HEADS,)
    return {
        "q": normal(batch, tokens, HEADS, dim_k),
        "k": normal(batch, tokens, HEADS, dim_k),
        "v": normal(batch, tokens, VALUE_HEADS, dim_v),
        "g": -normal(batch, tokens, *gates).abs(),
        "beta": normal(batch, tokens, VALUE_HEADS).sigmoid(),
    }


def states(rows: int, v_first: bool, dims=(K, V)) -> Tensor:
    matrix = dims[::-1] if v_first else dims
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, VALUE_HEADS, *matrix, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 8, 19])
@pytest.mark.parametrize("begins", [False, True])
def test_kda_is_the_recurrence(tokens, begins, v_first):
    x = activations(2, tokens, True)
    initial = states(2, v_first) if begins else None
    before = None if initial is None else initial.clone()
    expected, final = recurrent_prefill(
        *x.values(), initial_state=initial, l2norm=True, state_v_first=v_first
    )
    o, state = fused_recurrent_kda(
        **x, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=v_first
    )  # fmt: skip
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-12)
    assert initial is None or torch.equal(initial, before)


@pytest.mark.parametrize("how", ["g", "gk", "none"])
def test_the_gated_delta_rule_is_the_recurrence(how):
    x = activations(1, 11, how == "gk")
    offsets = torch.tensor([0, 4, 4, 11])
    g = x.pop("g")
    wide = (
        torch.zeros_like(x["v"][..., :1]) if how == "none" else g if how == "gk" else g[..., None]
    )
    expected, final = recurrent_prefill(
        x["q"], x["k"], x["v"], wide.expand(*x["v"].shape[:3], K), x["beta"], cu_seqlens=offsets
    )
    given = {} if how == "none" else {how: g}
    o, state = fused_recurrent_gated_delta_rule(
        **x, **given, output_final_state=True, cu_seqlens=offsets
    )
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-12)


def test_transposed_states_come_back_in_the_shape_that_was_asked_for():
    x = activations(2, 3, True)
    initial = states(2, True)
    expected = fused_recurrent_kda(
        **x, initial_state=initial, output_final_state=True, state_v_first=True
    )
    o, state = fused_recurrent_kda(
        **x, initial_state=initial.transpose(2, 3), output_final_state=True
    )
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1].transpose(2, 3))


def test_outputs_alone():
    x = activations(2, 3, True)
    out = torch.empty_like(x["v"])
    o, state = fused_recurrent_kda(**x, out=out)
    assert o is out and state is None
    assert torch.equal(o, fused_recurrent_kda(**x)[0])


def wide(*letters: int) -> Tensor:
    return torch.zeros(2, 3, *letters, dtype=torch.float64)


RAW = {"use_gate_in_kernel": True}
NO_GRADIENT = torch.zeros(2, VALUE_HEADS, K, V, dtype=torch.float64, requires_grad=True)
BOTH = [
    ({"q": None}, "q: expected a torch.Tensor, got NoneType"),
    ({"q": wide(HEADS, K).int()}, "q: expected bfloat16 or float16 or float32 or float64"),
    ({"k": wide(1, K)}, "k: expected the shape of q"),
    ({"v": wide(VALUE_HEADS, V).half()}, "v: expected the dtype of q, float64"),
    ({"v": wide(3, V)}, "v: expected a number of heads HV that is a multiple of H = 2"),
    ({"g": [1.0]}, "g: expected a torch.Tensor, got list"),
    ({"g": wide(HEADS)}, r"g: expected \[B, T, HV"),
    ({"beta": wide(1)}, r"beta: expected \[B, T, HV\]"),
    ({"beta": wide(VALUE_HEADS).int()}, "beta: expected float32 or bfloat16 or float16"),
    ({"initial_state": torch.zeros(1, VALUE_HEADS, K, V)}, "initial_state: expected one state for each of 2 seq"),
    ({"initial_state": torch.zeros(2, VALUE_HEADS, V, K)}, r"initial_state: expected \[N, HV, K, V\] = \["),
    ({"initial_state": torch.zeros(2, VALUE_HEADS, K, V).int()}, "initial_state: expected float32 or bfloat16"),
    ({"initial_state": NO_GRADIENT}, "initial_state: expected no gradient"),
    ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens: expected None unless B = 1"),
    ({"cu_seqlens": 3}, "cu_seqlens: expected a torch.Tensor, got int"),
    ({"scale": "1"}, "scale: expected a float"),
    ({"output_final_state": 1}, "output_final_state: expected a bool"),
    ({"state_v_first": 1}, "state_v_first: expected a bool"),
    ({"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel: expected a bool"),
    ({"use_gate_in_kernel": 1}, "use_gate_in_kernel: expected a bool"),
    ({"use_beta_sigmoid_in_kernel": 1}, "use_beta_sigmoid_in_kernel: expected a bool"),
    ({"A_log": torch.zeros(VALUE_HEADS)}, "A_log: expected None unless"),
    (RAW, "A_log: expected a tensor with use_gate_in_kernel"),
    (RAW | {"A_log": torch.zeros(HEADS)}, r"A_log: expected \[HV\] = \[4\]"),
    ({"dt_bias": torch.zeros(VALUE_HEADS)}, "dt_bias: expected None unless"),
    (RAW | {"A_log": torch.zeros(VALUE_HEADS), "dt_bias": torch.zeros(3)}, r"dt_bias: expected \[HV"),
    ({"allow_neg_eigval": True}, "allow_neg_eigval: expected False unless"),
    ({"out": wide(1, V)}, "out: expected the shape of v"),
    ({"out": wide(VALUE_HEADS, V).requires_grad_()}, "out: expected no gradient"),
]  # fmt: skip
OF_KDA = [
    ({"g": None}, "g: expected a torch.Tensor, got NoneType"),
    ({"g": wide(VALUE_HEADS)}, r"g: expected \[B, T, HV, K\] = \[2, 3, 4, 16\], got \[2, 3, 4\]"),
    ({"g": wide(VALUE_HEADS, K) + 1}, "g: expected values <= 0, got 1.0"),
    ({"g": wide(VALUE_HEADS, K) * math.nan}, "g: expected values <= 0, got nan"),
    ({"g": wide(VALUE_HEADS, K, 2)[..., 0]}, "g: expected a contiguous last dimension"),
    ({"beta": None}, "beta: expected a torch.Tensor, got NoneType"),
    ({"lower_bound": -5.0}, "lower_bound: expected None unless use_gate_in_kernel"),
    (RAW | {"lower_bound": 0.0}, "lower_bound: expected a number below 0"),
]
OF_THE_RULE = [
    ({"g": wide(VALUE_HEADS, K)}, r"g: expected \[B, T, HV\] = \[2, 3, 4\], got \[2, 3, 4, 16\]"),
    ({"g": wide(VALUE_HEADS) + 1}, "g: expected values <= 0, got 1.0"),
    ({"gk": torch.zeros(1)}, r"gk: expected \[B, T, HV, K\] = \[2, 3, 4, 16\], got \[1\]"),
    ({"gk": wide(VALUE_HEADS, K) + 1, "g": None}, "gk: expected values <= 0, got 1.0"),
    ({"gk": wide(VALUE_HEADS, K)}, r"gk: expected None beside g \(the kernel takes one of them\)"),
    ({"gv": wide(VALUE_HEADS, V)}, r"gv: expected None \(the kernel takes no gates over V\)"),
    ({"gv": wide(VALUE_HEADS, K)}, r"gv: expected \[B, T, HV, V\] = \[2, 3, 4, 24\]"),
    (RAW | {"g": None, "A_log": torch.zeros(VALUE_HEADS)}, "use_gate_in_kernel: expected False without g"),
    ({"beta": None, "use_beta_sigmoid_in_kernel": True}, "use_beta_sigmoid_in_kernel: expected False without beta"),
]  # fmt: skip


@pytest.mark.parametrize(
    "function, changes, message",
    [
        *((fused_recurrent_kda, *case) for case in BOTH + OF_KDA),
        *((fused_recurrent_gated_delta_rule, *case) for case in BOTH + OF_THE_RULE),
    ],
)
def test_what_does_not_fit_is_refused(function, changes, message):
    x = activations(2, 3, function is fused_recurrent_kda)
    out = torch.full_like(x["v"], 9.0)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        function(**x | {"out": out} | changes)
    assert (out == 9).all()


@pytest.mark.parametrize("function", [fused_recurrent_kda, fused_recurrent_gated_delta_rule])
def test_every_argument_is_refused_somewhere(function):
    table = BOTH + (OF_KDA if function is fused_recurrent_kda else OF_THE_RULE)
    blamed = {message.partition(":")[0] for _, message in table}
    assert blamed == set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": (2, 3, 2, 96), "k": (2, 3, 2, 96)}, "q: expected a head dimension K of 64 or 128, got 96"),
        ({"v": (2, 3, 4, 32)}, "v: expected a head dimension V of 64 or 128, got 32"),
        ({"q": (65536, 3, 2, 64), "k": (65536, 3, 2, 64), "v": (65536, 3, 4, 64)}, "q: expected at most 65535 seq"),
    ],
)  # fmt: skip
def test_limits_of_kernels_bind_a_gpu(changes, message):
    shapes = {"q": (2, 3, 2, 64), "k": (2, 3, 2, 64), "v": (2, 3, 4, 64)} | changes
    with FakeTensorMode(), pytest.raises(ValueError, match=f"^{message}"):
        new = {"dtype": torch.bfloat16, "device": "cuda"}
        fused_recurrent_gated_delta_rule(**{n: torch.empty(s, **new) for n, s in shapes.items()})


def test_gradients_are_refused():
    x = activations(2, 3, True)
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match="v: expected no gradient"):
        fused_recurrent_kda(**x)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, packed", [(1, False), (5, False), (19, False), (19, True)])
@pytest.mark.parametrize("channels", [False, True])
def test_kernels_are_the_recurrence(cuda, channels, tokens, packed, state_dtype):
    """KDA with a gate per channel, and the gated delta rule with one as gk, or one per head as g."""
    dims = (64, 128)
    x = activations(1 if packed else 2, tokens, channels, torch.bfloat16, dims)
    initial = states(2, False, dims).to(state_dtype)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    offsets = torch.tensor([0, 4, tokens]) if packed else None
    wide = {n: a.double() for n, a in x.items()}

    def rule(g, **given):
        return fused_recurrent_gated_delta_rule(**{"gk" if channels else "g": g}, **given)

    for function in (rule, *((fused_recurrent_kda,) if channels else ())):
        expected, state = function(
            **wide, **options, initial_state=initial.double(), cu_seqlens=offsets
        )
        given, begun = {n: a.to(cuda) for n, a in x.items()}, initial.to(cuda)
        packing = None if offsets is None else offsets.to(cuda)
        o, final = function(**given, **options, initial_state=begun, cu_seqlens=packing)
        assert_rounded_once(o.cpu(), expected)
        assert_rounded_once(final.cpu(), state)
        assert torch.equal(begun.cpu(), initial)


OP = torch.ops.cula_delta_decode.recurrent.default


def op_arguments(channels: bool, initial: bool, packed: bool, tokens: int = 3) -> tuple:
    """What the operator is called with; a final state where there is an initial one."""
    x = activations(1 if packed else 2, tokens, channels, torch.bfloat16)
    rows = 2
    state = states(rows, False).float() if initial else None
    offsets = torch.tensor([0, 1, tokens]) if packed else None
    return (
        *x.values(), torch.zeros(VALUE_HEADS), None, state, offsets, 0.25, None, 1.0, 20.0, True, True, False, True,
        False, torch.empty_like(x["v"]), None if state is None else torch.empty_like(state),
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels, initial", [(True, True), (False, False)])
def test_opcheck(channels, initial, packed):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OP, op_arguments(channels, initial, packed), test_utils=checks)


def test_opcheck_traced():
    torch.library.opcheck(
        OP, op_arguments(True, True, False), test_utils="test_aot_dispatch_dynamic"
    )
    written = [a.name for a in OP._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["out", "final_state"]


def two_steps(q, k, v, g, beta, state):
    """KDA and then the gated delta rule, with plain operators around them."""
    o, state = fused_recurrent_kda(q * 2, k, v, g, beta, initial_state=state, output_final_state=True)  # fmt: skip
    rest, state = fused_recurrent_gated_delta_rule(
        q, k, v, g[..., 0], beta=beta, initial_state=state, output_final_state=True
    )
    return o + rest, state


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_sees_one_graph(fresh_compiler, dynamic):
    compiled = torch.compile(two_steps, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (2, 3):
        x = activations(rows, 3, True)
        given = (*x.values(), states(rows, False))
        torch.testing.assert_close(compiled(*given), two_steps(*given), rtol=0, atol=0)


def test_one_token_of_every_packed_sequence_is_a_batch_of_views():
    """What the documents advise instead of cu_seqlens: the same numbers, and nothing is copied."""
    x = activations(1, 3, True)
    initial = states(3, False)
    options = {"initial_state": initial, "output_final_state": True}
    packed, final = fused_recurrent_kda(**x, **options, cu_seqlens=torch.arange(4))
    rows = {name: a.transpose(0, 1) for name, a in x.items()}
    o, state = fused_recurrent_kda(**rows, **options)
    assert torch.equal(o.transpose(0, 1), packed) and torch.equal(state, final)
