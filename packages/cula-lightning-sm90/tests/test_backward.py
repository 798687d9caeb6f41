"""Gradients on the CPU, against autograd through the recurrence: the operator, and what calls it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gradient_oracle import gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cula_lightning_sm90 import (
    chunk_lightning_attn,
    chunk_simple_gla,
    lightning_attn_fwd_varlen,
    ops,
)
from cula_lightning_sm90.call import Call
from cula_lightning_sm90.ops import lightning_attn_fwd
from cula_testing.tensors import int32

H, HV, K, V = 2, 4, 5, 3
DENSE, PACKED = (66, 66), (66, 0, 1, 64, 5)


def make(
    lengths: tuple[int, ...], packed: bool, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Inputs of every kind, and gradients of the results, with states [N, HV, K, V]."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": normal(batch, tokens, H, K), "k": normal(batch, tokens, H, K), "v": normal(batch, tokens, HV, V),
        "do": normal(batch, tokens, HV, V), "initial": normal(len(lengths), HV, K, V),
        "dht": normal(len(lengths), HV, K, V),
        "g": -normal(batch, tokens, HV).abs(), "gamma": -torch.tensor([0.0, 0.01, 0.3, 2.0]),
    }  # fmt: skip


def spans(lengths: tuple[int, ...], packed: bool) -> list[tuple[int, int, int]]:
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    if not packed:
        return [(n, 0, length) for n, length in enumerate(lengths)]
    return [(0, end - length, end) for end, length in zip(ends, lengths)]


def expected(
    x: dict[str, Any], lengths: tuple[int, ...], packed: bool, decays: tuple[str, ...] = (), **options: Any
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, the initial state if there is one, and of the decays that are named."""
    log_decay = x["v"].new_zeros(x["v"].shape[:3], dtype=torch.float64)
    for name in ("g", "gamma"):
        if x[name] is not None:
            log_decay = log_decay + x[name].double()
    fixed = {"bounds": spans(lengths, packed), "scale": K**-0.5} | options
    tensors = {name: x[name] for name in ("q", "k", "v", "initial")} | {"log_decay": log_decay}
    *grads, dg = gradients(tensors, x["do"], x["dht"], **fixed)
    return [*grads, *(dg if name == "g" else dg.sum((0, 1)) for name in decays)]


def found(
    function: Any, x: dict[str, Any], wanted: tuple[str, ...], turned: bool = False, **options: Any
):
    """What autograd finds with the inputs `wanted`, and the results. turned: states are [V, K]."""
    leaves = {name: x[name].clone().requires_grad_() for name in wanted}
    given = dict(leaves)
    for name in ("initial", "state_pool"):
        if name in given and turned:
            given[name] = given[name].mT.contiguous()
    if "initial" in given:
        given["initial_state"] = given.pop("initial")
    o, final = function(**given, **options)
    if turned and final is not None:
        final = final.mT
    pairs = [(y, dy) for y, dy in ((o, x["do"]), (final, x["dht"])) if dy is not None]
    torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
    return [leaf.grad for leaf in leaves.values()]


def assert_near(got: list[Tensor], want: list[Tensor], limit: float = 1e-12) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape and (a.double() - b.double()).norm() <= limit * (
            b.double().norm() + 1e-30
        )


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("decays", ["none", "gamma", "g", "both"])
@pytest.mark.parametrize("lengths, packed", [(DENSE, False), (PACKED, True)])
def test_gradients(lengths, packed, decays, state, l2norm):
    x: dict[str, Any] = make(lengths, packed)
    x |= {
        "g": x["g"] if decays in ("g", "both") else None,
        "gamma": x["gamma"] if decays in ("gamma", "both") else None,
    }
    cu = int32(0, *torch.tensor(lengths).cumsum(0).tolist()) if packed else None
    wanted: tuple[str, ...] = ("q", "k", "v", "initial")
    if not state:
        x |= {"initial": None, "dht": None}
        wanted = wanted[:3]
    options = {"g": x["g"], "g_gamma": x["gamma"], "cu_seqlens": cu, "output_final_state": state}
    options |= {"use_qk_l2norm_in_kernel": l2norm}
    want = expected(x, lengths, packed, l2norm=l2norm)
    for turned in (False, True) if state else (False,):
        assert_near(
            found(chunk_simple_gla, x, wanted, turned, state_v_first=turned, **options), want
        )


def rates(kind: str, x: dict[str, Tensor]) -> Tensor:
    """Log decays per token: of one size, or of sizes that hide each other."""
    uniform = torch.rand(
        x["g"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    if kind == "mixed":
        return torch.where(uniform < 0.05, -20.0, torch.where(uniform > 0.97, -1e4, -1e-4))
    low, high = {"gentle": (-0.1, 0.0), "strong": (-5.0, -2.0), "none": (0.0, 0.0)}[kind]
    return low + (high - low) * uniform


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("decays", [("g",), ("gamma",), ("g", "gamma")], ids=str)
@pytest.mark.parametrize("kind", ["gentle", "strong", "mixed", "none"])
@pytest.mark.parametrize("lengths, packed", [((150, 150), False), ((70, 0, 1, 150), True)], ids=str)
def test_gradients_of_decays(lengths, packed, kind, decays, state):
    x: dict[str, Any] = make(lengths, packed)
    x["g"] = rates(kind, x) if "g" in decays else None
    x["gamma"] = x["gamma"] if "gamma" in decays else None
    if not state:
        x |= {"initial": None, "dht": None}
    cu = int32(0, *torch.tensor(lengths).cumsum(0).tolist()) if packed else None

    def run(gamma=None, **given):
        return chunk_simple_gla(**given, g_gamma=gamma, cu_seqlens=cu, output_final_state=state)

    want = expected(x, lengths, packed, decays)
    got = found(run, x, ("q", "k", "v", *(("initial",) if state else ()), *decays))
    assert_near(got[: -len(decays)], want[: -len(decays)])
    # A chunk that forgets all but 1e-7 of what lies before it is taken to forget it all; g_gamma is float32.
    assert_near(got[-len(decays) :], want[-len(decays) :], 1e-6)


@pytest.mark.parametrize("state, turned", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", ["gentle", "mixed", "none"])
@pytest.mark.parametrize(
    "lengths, packed", [((192, 192), False), ((70, 0, 1, 150, 128, 129), True)], ids=str
)
def test_gradients_of_decays_from_states(lengths, packed, kind, state, turned, monkeypatch):
    """Sequences of several intervals after which both passes leave states, ends at an interval and behind it."""
    monkeypatch.setattr("cula_lightning_sm90.decays.EVERY", 64)
    x: dict[str, Any] = make(lengths, packed) | {"gamma": None}
    x["g"] = rates(kind, x)
    wanted: tuple[str, ...] = ("q", "k", "v", "initial", "g")
    if not state:
        x |= {"initial": None, "dht": None}
        wanted = ("q", "k", "v", "g")
    cu = int32(0, *torch.tensor(lengths).cumsum(0).tolist()) if packed else None
    options = {"cu_seqlens": cu, "output_final_state": state, "state_v_first": turned}
    got = found(chunk_simple_gla, x, wanted, turned, **options)
    assert_near(got, expected(x, lengths, packed, ("g",)), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gentle", "strong", "mixed", "none"])
def test_gradients_of_decays_from_16_bits(dtype, kind):
    """However small the ones beside others: token by token within a hundredth, or fp32's noise of the largest."""
    x: dict[str, Any] = make((200, 200), False, dtype) | {
        "gamma": None,
        "initial": None,
        "dht": None,
    }
    x["g"] = rates(kind, x).float()
    want = expected(x, (200, 200), False, ("g",))
    got = found(chunk_simple_gla, x, ("q", "k", "v", "g"))
    assert got[3].dtype == torch.float32
    assert_near(got, want, 5e-3)
    small = want[3].abs() < 1e-3 * want[3].abs().max()
    assert (
        (got[3] - want[3])[small].abs().max() <= 1e-5 * want[3].abs().max() if small.any() else True
    )


def test_a_decay_alone_wants_a_gradient():
    x: dict[str, Any] = make(DENSE, False) | {"g": None, "initial": None, "dht": None}
    decay = (-x["gamma"]).requires_grad_()
    o, _ = lightning_attn_fwd(x["q"], x["k"], x["v"], decay)
    o.backward(x["do"])
    assert_near([-decay.grad], expected(x, DENSE, False, ("gamma",))[3:], 1e-6)


@pytest.mark.parametrize("used", ["do", "dht"])
def test_one_result_alone_has_a_gradient(used):
    """Gradients of a result that nobody used are zero, with or without a state that wants one."""
    x: dict[str, Any] = make(DENSE, False) | {"g": None}
    x["dht" if used == "do" else "do"] = None
    want = expected(x, DENSE, False)
    options = {"decay": -x["gamma"], "output_final_state": True}
    assert_near(found(lightning_attn_fwd, x, ("q", "k", "v", "initial"), **options), want)
    if used == "do":
        del options["output_final_state"]
        frozen = found(
            lightning_attn_fwd, x, ("q", "k", "v"), initial_state=x["initial"], **options
        )
        assert_near(frozen, want[:3])


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-6])
def test_scales(scale):
    x: dict[str, Any] = make(DENSE, False) | {"g": None}
    want = expected(x, DENSE, False, scale=scale)
    options = {"decay": -x["gamma"], "output_final_state": True, "scale": scale}
    assert_near(found(lightning_attn_fwd, x, ("q", "k", "v", "initial"), **options), want)


def test_a_layer():
    x: dict[str, Any] = make(PACKED, True) | {"g": None, "initial": None, "dht": None}
    x["gamma"] = -2 * torch.arange(HV) * (1 - 3 / 12)
    cu = int32(0, *torch.tensor(PACKED).cumsum(0).tolist())
    options = {"layer_idx": 3, "num_layers": 12, "cu_seqlens": cu}
    got = found(chunk_lightning_attn, x, ("q", "k", "v"), **options)
    assert_near(got, expected(x, PACKED, True))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("rows", [(5, 0, -1, 3, 6), (5, 0, 2, 3, 6), None])
def test_a_pool_that_is_read(rows, known, turned):
    """Its rows get the gradients of the sequences that begin there, others zero; padding has none."""
    x: dict[str, Any] = make(PACKED, True) | {"g": None}
    pool = torch.randn(7, HV, K, V, dtype=torch.float64)
    live = [row not in (-1, 2) for row in rows or ()] or [True] * 5
    slots = list(rows or range(5))
    options: dict[str, Any] = {
        "decay": -x["gamma"], "cu_seqlens": int32(0, *torch.tensor(PACKED).cumsum(0).tolist()), "null_slot": 2,
        "update_state_pool": False, "state_v_first": turned,
    }  # fmt: skip
    if rows is None:
        live = [n != 2 for n in range(5)]  # row 2 means padding there too
    else:
        options["initial_state_indices"] = int32(*rows)
    began = torch.tensor([True, True, True, not known, True])
    if known:
        options["has_initial_state"] = began
    x["initial"] = torch.stack(
        [pool[row] * (flag and alive) for row, flag, alive in zip(slots, began, live)]
    )
    want = expected(x, PACKED, True, live=live)
    of_pool = torch.zeros_like(pool)
    for n, row in enumerate(slots):
        if live[n] and began[n]:
            of_pool[row] = want[3][n]
    got = found(
        lightning_attn_fwd_varlen,
        x | {"state_pool": pool},
        ("q", "k", "v", "state_pool"),
        turned,
        **options,
    )
    assert_near(got, [*want[:3], of_pool])


def test_no_tokens():
    """A state passes through, and so does its gradient."""
    for cu in (None, int32(0), int32(0, 0, 0)):
        sequences = 1 if cu is None else len(cu) - 1
        q, k, v = (torch.zeros(1, 0, heads, 4, requires_grad=True) for heads in (H, H, HV))
        g = torch.zeros(1, 0, HV, requires_grad=True)
        state = torch.randn(sequences, HV, 4, 4, requires_grad=True)
        o, final = chunk_simple_gla(
            q, k, v, g, initial_state=state, output_final_state=True, cu_seqlens=cu
        )
        (o.sum() + 2 * final.sum()).backward()
        assert (
            torch.equal(state.grad, torch.full_like(state, 2))
            and q.grad.shape == q.shape
            and g.grad.shape == g.shape
        )


@pytest.mark.parametrize(
    "dtype, limit, largest", [(torch.bfloat16, 5e-3, 1e30), (torch.float16, 1e-3, 1e3)]
)
@pytest.mark.parametrize("size", [1e-6, 1.0, None])
@pytest.mark.parametrize("l2norm", [False, True])
def test_small_and_large_gradients(dtype, limit, largest, size, l2norm):
    """In float16 too: a power of two brings them to where its products are exact."""
    x: dict[str, Any] = make(DENSE, False, dtype) | {"g": None}
    size = size or largest
    x["do"] = (x["do"].float() * size).to(dtype)
    x["initial"], x["dht"] = x["initial"].float(), x["dht"].float() * size
    want = expected(x, DENSE, False, l2norm=l2norm)
    options = {"decay": -x["gamma"], "output_final_state": True, "use_qk_l2norm_in_kernel": l2norm}
    got = found(lightning_attn_fwd, x, ("q", "k", "v", "initial"), **options)
    # The results themselves are rounded; below 6e-8 float16 has nothing.
    smallest = 3e-8 if dtype == torch.float16 else 0.0
    for a, b in zip(got, want):
        error = (a.double() - b).norm()
        assert error <= limit * b.norm() + smallest * b.numel() ** 0.5, (error / b.norm(), size)


def test_infinities_stay_where_they_are():
    """One sequence's overflow is not its neighbours'."""
    x = make(PACKED, True, torch.float16)
    cu = int32(0, *torch.tensor(PACKED).cumsum(0).tolist())
    x["do"][0, 3] = torch.inf
    options = {
        "decay": -x["gamma"],
        "cu_seqlens": cu,
        "update_state_pool": False,
        "output_final_state": False,
    }
    for grad in found(lightning_attn_fwd_varlen, x | {"dht": None}, ("q", "k", "v"), **options):
        assert not grad[0, :66].isfinite().all() and grad[0, 66:].isfinite().all()


def test_states_of_16_bits_and_views():
    x: dict[str, Any] = make(DENSE, False, torch.bfloat16) | {"g": None}
    want = expected(x, DENSE, False)
    wide = {
        n: torch.full((*x[n].shape[:3], 16), float("nan"), dtype=x[n].dtype)
        for n in ("q", "k", "v")
    }
    views = x | {n: wide[n][..., 4 : 4 + x[n].shape[3]].copy_(x[n]) for n in wide}
    views["do"] = x["do"].transpose(1, 2).contiguous().transpose(1, 2)
    options = {"decay": -x["gamma"], "output_final_state": True}
    got = found(lightning_attn_fwd, views, ("q", "k", "v", "initial"), **options)
    assert [d.dtype for d in got] == [torch.bfloat16] * 4
    assert_near(got, want, 5e-3)


def test_a_checkpoint_of_activations():
    x = make(DENSE, False)
    run = partial(chunk_simple_gla, g=x["g"], use_qk_l2norm_in_kernel=True)
    whole = found(run, x | {"dht": None}, ("q", "k", "v"))

    def again(q, k, v):
        return checkpoint(run, q, k, v, use_reentrant=False)

    assert all(map(torch.equal, found(again, x | {"dht": None}, ("q", "k", "v")), whole))


def test_gradients_of_gradients_are_refused():
    x = make(DENSE, False)
    q = x["q"].requires_grad_()
    (grad,) = torch.autograd.grad(
        chunk_simple_gla(q, x["k"], x["v"])[0].square().sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable|twice"):
        grad.sum().backward()


def test_the_operator_keeps_its_contract():
    x = make(PACKED, True, torch.float32)
    cu = int32(0, *torch.tensor(PACKED).cumsum(0).tolist())
    operator = torch.ops.cula_lightning_sm90.prefill_backward.default
    rest = (
        x["g"].float(),
        x["gamma"],
        x["initial"],
        None,
        cu,
        0.3,
        1,
        False,
        True,
        False,
        None,
        0,
        True,
    )
    for given in ((x["do"], x["dht"]), (x["do"], None), (None, x["dht"])):
        arguments = (*given, x["q"], x["k"], x["v"], *rest)
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_one_graph_for_every_length():
    count = []

    def backend(graph, example):
        from torch._dynamo.backends.debugging import aot_eager

        count.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    run = torch.compile(chunk_simple_gla, fullgraph=True, backend=backend)
    for length in (30, 70, 90):
        x = make((length,) * 3, False, torch.float32)
        options = {"output_final_state": True}
        wanted = ("q", "k", "v", "initial", "g")
        x["g"] = x["g"].float()
        assert all(
            map(
                torch.equal,
                found(run, x, wanted, **options),
                found(chunk_simple_gla, x, wanted, **options),
            )
        )
    assert len(count) == 2
    torch._dynamo.reset()


# ---- on a GPU: side by side ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, heads, batch, packed, options, beside",
    [
        (8192, 16, 1, False, {}, True),  # 32 of 44 multiprocessors each
        (8192, 11, 2, False, {}, True),
        (8192, 12, 2, False, {}, False),
        (8192, 24, 1, False, {}, False),
        (8192, 8, 1, False, {}, False),  # two segments each would fit
        (8192, 8, 1, False, {"num_splits": 1}, True),
        (2047, 8, 1, False, {}, True),  # too short to be cut
        (2047, 8, 1, False, {"num_splits": 2}, False),
        (2047, 8, 1, False, {"segment_tokens": 1024}, False),
        (8192, 16, 1, True, {}, True),
        (0, 16, 1, False, {}, True),
    ],
)
def test_passes_run_side_by_side_where_a_third_of_the_card_is_enough_for_each(
    monkeypatch, tokens, heads, batch, packed, options, beside
):
    ran = []
    monkeypatch.setattr(ops, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(ops, "_run_on_gpu", lambda *given: ran.append(given))
    monkeypatch.setattr(ops, "side_by_side", lambda device, *work: [do() for do in work])
    x = torch.empty(batch, tokens, heads, 128, device="meta", dtype=torch.bfloat16)
    given = {"num_splits": None, "segment_tokens": 0} | options
    ends = torch.empty(4, device="meta") if packed else None
    call = Call(
        x, x, x, None, None, None, None, None, None, None, ends, x, 1.0, 1, False, False, False, 0, **given
    )  # fmt: skip
    calls = [call._replace(scale=n) for n in range(3)]
    ops._run_all_on_gpu(calls)
    assert ran == [(call, 44) if beside else (call,) for call in calls]
