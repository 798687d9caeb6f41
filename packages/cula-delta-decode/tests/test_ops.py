"""The public functions and operators on a CPU, in torch's machinery, and what importing the package costs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cula_delta_decode
from cula_core.reference import delta_decode as reference
from cula_core.reference.delta_decode import Gates
from cula_delta_decode import (
    GatedNorm,
    Replay,
    ShortConvolution,
    delta_rule_commit,
    delta_rule_decode,
    delta_rule_flush,
    fill_convolution_ring,
    new_convolution_ring,
    new_replay,
)
from cula_testing.comparing import same
from cula_testing.interpreters import python
from cula_testing.tensors import every_other, int32, scattered

CHECKS = ("test_schema", "test_faketensor")
TRACED = "test_aot_dispatch_dynamic"  # far slower than the others
HEADS, HEADS_V, DIM_K, DIM_V, POOL = 1, 2, 16, 8, 5
OPS = torch.ops.cula_delta_decode


def make(
    rows: int = 3,
    tokens: int = 2,
    *,
    channels: bool = True,
    v_first: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """The tensors of a decode by name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width = (DIM_K,) if channels else ()
    matrix = (DIM_V, DIM_K) if v_first else (DIM_K, DIM_V)
    return {
        "q": normal(rows, tokens, HEADS, DIM_K).to(dtype),
        "k": normal(rows, tokens, HEADS, DIM_K).to(dtype),
        "v": normal(rows, tokens, HEADS_V, DIM_V).to(dtype),
        "g": normal(rows, tokens, HEADS_V, *width).to(dtype),
        "beta": normal(rows, tokens, HEADS_V).to(dtype),
        "state": normal(POOL, HEADS_V, *matrix).to(state_dtype),
        "A_log": normal(HEADS_V),
        "dt_bias": normal(HEADS_V, *width),
    }


def keys(a: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a commit."""
    return {name: x for name, x in a.items() if name != "q"}


def twin(a: dict[str, Any]) -> dict[str, Any]:
    """The same with another pool of the same numbers."""
    return a | {"state": a["state"].clone()}


# ---- the public functions are the reference --------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    "flags, gates",
    [
        ({}, Gates()),
        ({"lower_bound": -5.0, "allow_neg_eigval": True}, Gates(True, -5.0, neg_eigval=True)),
        ({"softplus_beta": 2.0, "softplus_threshold": 1.0}, Gates(True, None, 2.0, 1.0)),
        ({"use_beta_sigmoid_in_kernel": False}, Gates(beta_sigmoid=False)),
    ],
)
def test_every_function_is_the_reference(flags, gates, v_first):
    a = make(v_first=v_first)
    b = twin(a)
    slots = {"state_indices": int32(4, 1, 0), "null_slot": 1}
    ours = flags | {"state_v_first": v_first} | slots
    theirs = {"gates": gates, "state_v_first": v_first} | slots
    out = delta_rule_decode(**a, **ours, scale=0.3)
    expected = reference.delta_rule_decode(**b, **theirs, next_state=b["state"], scale=0.3)
    assert same(out, expected) and same(a["state"], b["state"])
    assert out.is_contiguous() and out.dtype == torch.bfloat16 and not out[1].any()

    before = a["state"].clone()
    assert same(
        delta_rule_decode(**a, **ours, commit=False), reference.delta_rule_decode(**b, **theirs)
    )
    assert same(a["state"], before)

    accepted = int32(1, 2, 2)
    assert delta_rule_commit(**keys(a), **ours, num_accepted=accepted) is None
    reference.delta_rule_commit(**keys(b), **theirs, num_accepted=accepted)
    assert same(a["state"], b["state"]) and not same(a["state"], before)

    ours_kept = new_replay(a["state"], HEADS, max_tokens=2, channels=True, state_v_first=v_first)
    theirs_kept = Replay(*(x.clone() for x in ours_kept))
    for _ in range(2):
        out = delta_rule_decode(**a, **ours, replay=ours_kept, num_accepted=accepted)
        expected = reference.delta_rule_decode(
            **b, **theirs, replay=theirs_kept, num_accepted=accepted
        )
        assert same(out, expected)
    pool = {"state_v_first": v_first} | slots
    assert delta_rule_flush(a["state"], ours_kept, accepted, **pool) is None
    reference.delta_rule_flush(b["state"], theirs_kept, accepted, **pool)
    assert same(a["state"], b["state"])
    assert all(same(x, y) for x, y in zip(ours_kept, theirs_kept))


def test_log_decays_without_normalization():
    a = make(channels=False)
    a |= {"A_log": None, "dt_bias": None, "g": -a["g"].abs(), "k": a["k"] / 8}
    b = twin(a)
    out = delta_rule_decode(**a, use_gate_in_kernel=False, use_qk_l2norm_in_kernel=False)
    gates = Gates(in_kernel=False)
    expected = reference.delta_rule_decode(**b, gates=gates, l2norm=False, next_state=b["state"])
    assert same(out, expected) and same(a["state"], b["state"])


def test_packed_rows_are_the_reference():
    a = make(1, 7)
    b = twin(a)
    given = {"cu_seqlens": int32(0, 3, 3, 5), "state_indices": int32(2, 0, 4), "max_tokens": 3}
    out = delta_rule_decode(**a, **given)
    assert same(out, reference.delta_rule_decode(**b, **given, next_state=b["state"]))
    assert same(a["state"], b["state"]) and not out[:, 5:].any()


def test_another_slot_takes_the_result():
    a = make(2)
    b = twin(a)
    slots = {"state_indices": int32(1, 1), "output_state_indices": int32(3, 0)}
    out = delta_rule_decode(**a, **slots)
    assert same(out, reference.delta_rule_decode(**b, **slots, next_state=b["state"]))
    assert same(a["state"], b["state"])


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_slots_of_tokens_may_be_those_of_the_state(v_first, turn):
    """Named or not, and whatever the order of its memory."""
    table = torch.tensor([[4, 1, -1], [3, 0, 2]], dtype=torch.int32)
    options = {"state_indices": table, "num_accepted": int32(1, 2), "token_state_indices": table}
    a = make(2, 3, v_first=v_first)
    b = twin(a)
    expected = reference.delta_rule_decode(
        **b, **options, token_states=b["state"], state_v_first=v_first
    )
    for named in (False, True):
        pool = a["state"].mT.contiguous().mT if turn else a["state"].clone()
        address = pool.data_ptr()
        given = {"token_states": pool} if named else {}
        out = delta_rule_decode(
            **a | {"state": pool}, **options, **given, commit=False, state_v_first=v_first
        )
        # A transposed pool takes the same arithmetic; only sums run in another order.
        assert torch.allclose(out, expected, rtol=2**-8) and torch.allclose(
            pool, b["state"], 1e-5, 1e-6
        )
        assert pool.data_ptr() == address


def test_states_of_tokens_may_have_a_pool_of_their_own():
    a = make(2, 3)
    kept = torch.full((9, *a["state"].shape[1:]), math.nan)
    table = torch.tensor([[8, 1, -1], [3, 0, 2]], dtype=torch.int32)
    before, serial = a["state"].clone(), a["state"].clone()
    delta_rule_decode(**a, token_states=kept, token_state_indices=table, commit=False)
    assert same(a["state"], before)
    for t in range(3):
        delta_rule_commit(
            **keys(a) | {"state": serial.copy_(before)}, num_accepted=int32(t + 1, t + 1)
        )
        for n in range(2):
            if table[n, t] >= 0:
                assert torch.equal(kept[table[n, t]], serial[n])
    assert kept[[4, 5, 6, 7]].isnan().all()


@pytest.mark.parametrize("v_first", [False, True])
def test_a_transposed_pool_is_updated_in_place(v_first):
    a = make(v_first=v_first)
    b = twin(a)
    turned = a["state"].mT.contiguous().mT
    address = turned.data_ptr()
    options = {"state_v_first": v_first}
    expected = delta_rule_decode(**b, **options)
    out = delta_rule_decode(**a | {"state": turned}, **options)
    # The same arithmetic; only sums run in another order.
    assert torch.allclose(out, expected, rtol=2**-8)
    delta_rule_commit(**keys(b), num_accepted=int32(1, 2, 0), **options)
    delta_rule_commit(**keys(a) | {"state": turned}, num_accepted=int32(1, 2, 0), **options)
    assert torch.allclose(turned, b["state"], 1e-5, 1e-6) and turned.data_ptr() == address

    replays = [
        new_replay(pool, HEADS, max_tokens=2, channels=True, **options)
        for pool in (b["state"], turned)
    ]
    delta_rule_decode(**b, replay=replays[0], **options)
    delta_rule_decode(**a | {"state": turned}, replay=replays[1], **options)
    delta_rule_flush(b["state"], replays[0], **options)
    delta_rule_flush(turned, replays[1], **options)
    assert torch.allclose(turned, b["state"], 1e-5, 1e-6)
    assert all(torch.allclose(x, y, 1e-5, 1e-6) for x, y in zip(*replays))


def test_views_are_taken_as_they_are():
    a = make()
    views = {name: scattered(a[name]) for name in ("q", "k", "v", "g")}
    views |= {"beta": every_other(a["beta"]), "state": a["state"].repeat_interleave(2, 0)[::2]}
    slots = int32(4, 0, 2)
    expected = delta_rule_decode(**a, state_indices=slots)
    out = delta_rule_decode(**a | views, state_indices=every_other(slots))
    assert same(out, expected) and same(views["state"], a["state"])


def test_out_is_honoured():
    a = make(2)
    expected = delta_rule_decode(**a, commit=False)
    storage = torch.full((2, 4, 5, 20), 7.0, dtype=torch.bfloat16)
    out = storage[:, ::2, 1:3, 3 : 3 + DIM_V]
    assert delta_rule_decode(**a, commit=False, out=out) is out
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert (storage == 7).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "state"])
def test_gradients_are_refused_but_not_under_no_grad(name):
    a = make(1)
    leaf = {n: x.clone() for n, x in a.items()}
    leaf[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected no gradient"):
        delta_rule_decode(**leaf)
    with torch.no_grad():
        out = delta_rule_decode(**leaf)
    assert torch.equal(out, delta_rule_decode(**a)) and not out.requires_grad
    assert torch.equal(leaf["state"], a["state"])


# ---- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    "options, records, decay",
    [
        ({}, 2, (HEADS_V,)),
        ({"max_tokens": 3}, 8, (HEADS_V,)),
        ({"max_tokens": 4, "channels": True}, 8, (HEADS_V, DIM_K)),
        ({"max_tokens": 8}, 16, (HEADS_V,)),
        ({"records": 64}, 64, (HEADS_V,)),
        ({"dtype": torch.float16, "records": 4}, 4, (HEADS_V,)),
    ],
)
def test_new_replay_is_empty(options, records, decay, v_first):
    pool = make(v_first=v_first)["state"]
    replay = new_replay(pool, HEADS, state_v_first=v_first, **options)
    assert isinstance(replay, Replay)
    shapes = [
        (records, HEADS, DIM_K),
        (records, HEADS_V, DIM_V),
        (records, *decay),
        (HEADS_V, DIM_V // 8),
    ]
    assert [x.shape[1:] for x in replay] == shapes
    dtype = options.get("dtype", torch.bfloat16)
    assert [x.dtype for x in replay] == [dtype, torch.float32, torch.float32, torch.int32]
    for x in replay:
        assert x.shape[0] == POOL and x.is_contiguous() and not x.any()


def test_new_replay_of_float64_is_wide():
    replay = new_replay(make()["state"].double(), HEADS, dtype=torch.float64)
    assert replay.u.dtype == replay.decay.dtype == torch.float64


def test_a_cursor_for_every_eighth_of_columns_begun():
    assert new_replay(torch.zeros(1, 2, 9, 4), 1).cursor.shape == (1, 2, 2)


@pytest.mark.parametrize("records", [None, 8, 64])
def test_replay_is_decode(records):
    """One token at a time, with the rings as large as wanted: the outputs, and the states once they are flushed."""
    steps = [make(3, 1, dtype=torch.float32, seed=step) for step in range(9)]
    pool, serial = steps[0]["state"].clone(), steps[0]["state"].clone()
    replay = new_replay(pool, HEADS, channels=True, dtype=torch.float32, records=records)
    for a in steps:
        out = delta_rule_decode(**a | {"state": pool}, replay=replay)
        assert torch.allclose(out, delta_rule_decode(**a | {"state": serial}), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(pool, serial)
    delta_rule_flush(pool, replay)
    assert torch.allclose(pool, serial, rtol=1e-4, atol=1e-5)


# ---- operators -------------------------------------------------------------------------------------------------------

NOTHING_FUSED = (None,) * 6 + (0.0, None)
MODES = (
    "decode",
    "redirected",
    "tokens",
    "own tokens",
    "packed",
    "replay",
    "convolved",
    "replay, convolved",
    "normed",
)
FLAGS = (None, 1.0, 20.0, True, True, False, True)


def convolution_of(a: dict[str, Any], v_first: bool = True, bias: bool = True) -> ShortConvolution:
    """Rings that a prefill has filled, for rows of slots 0, 1, ..."""
    generator = torch.Generator().manual_seed(7)
    rows, tokens = a["q"].shape[:2]
    ring = new_convolution_ring(
        a["state"], HEADS, max_tokens=tokens, dtype=a["q"].dtype, state_v_first=v_first
    )
    weight = torch.randn(ring.shape[2], 4, generator=generator)
    positions = 4 + torch.arange(rows, dtype=torch.int32)
    last = torch.randn(rows, 3, ring.shape[2], generator=generator).to(ring.dtype)
    fill_convolution_ring(ring, last, positions)
    return ShortConvolution(ring, positions, weight, weight[:, 0].clone() if bias else None)


def norm_of(a: dict[str, Any], activation: str = "silu") -> GatedNorm:
    return GatedNorm(a["v"] + 0.5, torch.linspace(0.5, 2, DIM_V), 1e-4, activation)


def decode_arguments(
    a: dict[str, Any], mode: str = "decode", v_first: bool = True
) -> tuple[Any, ...]:
    """The arguments of the operator in one of the ways that it is called."""
    rows, tokens = a["q"].shape[:2]
    slots, ends, accepted, kept, table, offsets = (None,) * 6
    rings: tuple = (None,) * 4
    fused: tuple = NOTHING_FUSED
    if "convolved" in mode:
        fused = (*convolution_of(a, v_first), *norm_of(a))
    elif mode == "normed":
        fused = (*NOTHING_FUSED[:4], *norm_of(a, "sigmoid"))
    if mode == "redirected":
        slots, ends = int32(4, -1, 0)[:rows], int32(1, 2, 3)[:rows]
    elif mode == "tokens":
        slots = table = torch.arange(rows * tokens, dtype=torch.int32).view(rows, tokens) % POOL
        accepted = torch.ones(rows, dtype=torch.int32)
        kept = a["state"].new_zeros(8, *a["state"].shape[1:])
    elif mode == "own tokens":
        table = torch.full((rows, tokens), -1, dtype=torch.int32)
    elif mode == "packed":
        offsets = int32(0, tokens)
    elif mode.startswith("replay"):
        rings = new_replay(
            a["state"], HEADS, max_tokens=tokens, channels=True, dtype=a["q"].dtype, state_v_first=v_first
        )  # fmt: skip
        accepted = torch.ones(rows, dtype=torch.int32)
    commit = mode not in ("tokens", "own tokens")
    return (
        *(a[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")), slots, ends, accepted, kept, table,
        offsets, *rings, *fused, 0.25, *FLAGS, v_first, commit, tokens, 3, torch.empty_like(a["v"]),
    )  # fmt: skip


def commit_arguments(a: dict[str, Any], v_first: bool = True) -> tuple[Any, ...]:
    tensors = (a[n] for n in ("k", "v", "g", "beta", "A_log", "dt_bias", "state"))
    return (*tensors, int32(2, 1, 0), int32(4, -1, 0), None, *FLAGS, v_first, 2, None)


def flush_arguments(a: dict[str, Any]) -> tuple[Any, ...]:
    replay = new_replay(a["state"], HEADS, max_tokens=2, channels=True)
    delta_rule_decode(**a, replay=replay)
    return a["state"], *replay, int32(2, 1, 0), int32(4, -1, 0), True, None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("v_first", [False, True])
def test_opcheck_decode(mode, v_first):
    a = make(1 if mode == "packed" else 3, v_first=v_first)
    torch.library.opcheck(
        OPS.decode.default, decode_arguments(a, mode, v_first), test_utils=CHECKS
    )  # fmt: skip


def test_opcheck_of_little():
    a = make() | {"g": None, "beta": None, "A_log": None, "dt_bias": None}
    torch.library.opcheck(OPS.decode.default, decode_arguments(a), test_utils=CHECKS)
    empty = make(0)
    torch.library.opcheck(OPS.decode.default, decode_arguments(empty), test_utils=CHECKS)


def test_opcheck_commit_and_flush():
    torch.library.opcheck(OPS.commit.default, commit_arguments(make()), test_utils=CHECKS)
    torch.library.opcheck(OPS.flush.default, flush_arguments(make()), test_utils=CHECKS)


def test_opcheck_traced():
    torch.library.opcheck(OPS.decode.default, decode_arguments(make(), "replay"), test_utils=TRACED)
    torch.library.opcheck(OPS.decode.default, decode_arguments(make(), "tokens"), test_utils=TRACED)
    fused = decode_arguments(make(), "replay, convolved")
    torch.library.opcheck(OPS.decode.default, fused, test_utils=TRACED)
    torch.library.opcheck(OPS.commit.default, commit_arguments(make()), test_utils=TRACED)
    torch.library.opcheck(OPS.flush.default, flush_arguments(make()), test_utils=TRACED)


def test_the_schemas_name_what_is_written():
    def written(op) -> list[str]:
        return [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]

    rings = ["ring_k", "ring_u", "ring_decay", "cursor", "inputs"]
    assert written(OPS.decode.default) == ["state", "token_states", *rings, "out"]
    assert written(OPS.commit.default) == ["state"]
    assert written(OPS.flush.default) == ["state", "cursor"]


def step(q, k, v, g, beta, state, A_log, dt_bias, slots, accepted, v_first=True):
    """A draft, its verification and the commit, with plain operators around them."""
    gate = {"A_log": A_log, "dt_bias": dt_bias, "state_v_first": v_first, "state_indices": slots}
    drafted = delta_rule_decode(q * 2, k, v, g, beta, state, **gate, commit=False, scale=0.25)
    delta_rule_commit(k, v, g, beta, state, accepted, **gate)
    return drafted + delta_rule_decode(q, k, v, g, beta, state, **gate)


@pytest.mark.parametrize("v_first, dynamic", [(False, False), (True, True)])
def test_torch_compile_sees_one_graph(fresh_compiler, v_first, dynamic):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (2, 3):
        a = make(rows, v_first=v_first, seed=rows)
        b = twin(a)
        given = {"slots": int32(4, -1, 0)[:rows], "accepted": int32(1, 2, 0)[:rows]}
        expected = step(**a, **given, v_first=v_first)
        out = compiled(**b, **given, v_first=v_first)
        assert torch.equal(out, expected) and torch.equal(b["state"], a["state"])


def replayed(a: dict[str, Any], replay: Replay, accepted: Tensor) -> Tensor:
    out = delta_rule_decode(**a, replay=replay, num_accepted=accepted)
    delta_rule_flush(a["state"], replay, accepted)
    return out + 1


def test_torch_compile_takes_a_replay(fresh_compiler):
    compiled = torch.compile(replayed, fullgraph=True, backend="aot_eager")
    a = make(POOL)
    b = twin(a)
    accepted = int32(1, 0, 2, 1, 2)
    ours, theirs = (new_replay(x["state"], HEADS, max_tokens=2, channels=True) for x in (a, b))
    for _ in range(2):
        assert torch.equal(compiled(b, theirs, accepted), replayed(a, ours, accepted))
    assert torch.equal(a["state"], b["state"])
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs))


def around(a: dict[str, Any], ring: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    """A step behind a prefill, with all that models have around it."""
    fill_convolution_ring(ring, torch.ones_like(ring[:, :3]), positions)
    convolution = ShortConvolution(ring, positions, weight)
    return delta_rule_decode(**a, convolution=convolution, norm=norm_of(a)) + 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_takes_convolution_and_norm(fresh_compiler, dynamic):
    compiled = torch.compile(around, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    a = make(POOL)
    b = twin(a)
    ours, theirs = convolution_of(a, bias=False), convolution_of(a, bias=False)
    for _ in range(2):
        expected = around(a, *ours[:3])
        assert torch.equal(compiled(b, *theirs[:3]), expected)
    assert torch.equal(a["state"], b["state"]) and torch.equal(ours.inputs, theirs.inputs)


def test_torch_compile_refuses_wrong_arguments(fresh_compiler):
    compiled = torch.compile(delta_rule_decode, fullgraph=True, backend="aot_eager")
    a = make()
    with pytest.raises(Exception, match="beta: expected .* got int32"):
        compiled(**a | {"beta": a["beta"].int()})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("v_first", [False, True])
def test_fake_tensors_of_any_device(device, v_first):
    """Shapes without values, for a GPU that need not exist; nothing may ask for an address."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        new = {"device": device, "dtype": torch.bfloat16}
        q, k = (torch.empty(3, 4, 2, 64, **new) for _ in range(2))
        v, g = torch.empty(3, 4, 6, 128, **new), torch.empty(3, 4, 6, **new)
        matrix = (128, 64) if v_first else (64, 128)
        state = torch.empty(7, 6, *matrix, device=device)
        slots = torch.empty(3, dtype=torch.int32, device=device)
        options = {"state_indices": slots, "state_v_first": v_first}
        out = delta_rule_decode(q, k, v, g, g, state, **options)
        assert out.shape == (3, 4, 6, 128) and out.dtype == torch.bfloat16
        assert out.device.type == device and out.is_contiguous()
        into = torch.empty_like(v)
        replay = new_replay(state, 2, max_tokens=4, state_v_first=v_first)
        given = {"replay": replay, "num_accepted": slots, "out": into}
        ring = new_convolution_ring(state, 2, max_tokens=4, state_v_first=v_first)
        assert ring.shape == (7, 8, 2 * 2 * 64 + 6 * 128) and ring.device.type == device
        if device == "cpu":  # PyTorch without CUDA does not index what lies on a GPU
            fill_convolution_ring(ring, torch.empty(3, 3, ring.shape[2], **new), slots, slots)
        weight = torch.empty(ring.shape[2], 4, **new)
        bias = torch.empty(ring.shape[2], **new)
        given["convolution"] = ShortConvolution(ring, slots, weight, bias)
        given["norm"] = GatedNorm(v, torch.empty(128, **new))
        assert delta_rule_decode(q, k, v, g, g, state, **options, **given) is into
        delta_rule_flush(state, replay, slots, **options)
        delta_rule_commit(k, v, g, g, state, slots, **options)
        with pytest.raises(TypeError, match="^state_indices: expected int32"):
            delta_rule_commit(k, v, g, g, state, slots, **options | {"state_indices": slots.long()})


# ---- imports ---------------------------------------------------------------------------------------------------------


def test_import_and_cpu_calls_need_neither_cutlass_nor_triton():
    python(
        """
import importlib.abc, sys
import torch
before = set(sys.modules)
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "triton", "tvm_ffi", "cuda", "cula", "fla"):
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Block())
import cula_delta_decode as c
x, g, state = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1), torch.zeros(1, 1, 64, 64)
replay = c.new_replay(state, 1, dtype=torch.float32)
c.delta_rule_decode(x, x, x, g, g, state, replay=replay)
c.delta_rule_flush(state, replay)
ring = c.new_convolution_ring(state, 1, dtype=torch.float32)
slots = torch.zeros(1, dtype=torch.int32)
c.fill_convolution_ring(ring, ring[:, :3], slots)
taps = c.ShortConvolution(ring, slots, torch.zeros(3 * 64, 4))
c.delta_rule_decode(x, x, x, g, g, state, convolution=taps, norm=c.GatedNorm(x, torch.ones(64)))
c.delta_rule_commit(x, x, g, g, state, torch.ones(1, dtype=torch.int32))
heavy = {m.partition(".")[0] for m in set(sys.modules) - before} & {"cutlass", "triton", "tvm_ffi"}
assert not heavy, heavy
assert "cula_delta_decode.launch" not in sys.modules
""",
        cula_delta_decode,
    )


def test_import_is_quick():
    """Under 0.2 s beyond torch, the best of three: a busy machine only ever adds."""
    code = """
import time, torch
start = time.perf_counter()
import cula_delta_decode
print(time.perf_counter() - start)
"""
    assert min(float(python(code, cula_delta_decode)) for _ in range(3)) < 0.2
