"""The chunked backward is the derivative of the recurrence, however sequences are cut, packed, stored or gated."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from cula_core.reference import kda_backward as reference
from cula_core.reference.common import normalized
from cula_core.reference.gates import log_decay, write_strength
from cula_core.reference.kda import recurrent_prefill
from cula_core.reference.kda_backward import Gradients, chunk_kda_backward
from cula_testing.kda.inputs import LOWER_BOUNDS, inputs

EXACT = 1e-10
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TOKENS = ("q", "k", "v", "g", "beta")
RAGGED = (0, 70, 1, 0, 64, 15)
DOUBLE = torch.float64


def settings(gate: str = "safe", **more) -> dict:
    options = {
        "scale": 0.3, "gate": gate, "lower_bound": LOWER_BOUNDS[gate], "l2norm": True, "beta_sigmoid": True,
        "neg_eigval": False, "state_v_first": False,
    }  # fmt: skip
    return options | more


def problem(
    lengths: tuple[int, ...] | None = None, batch: int = 1, tokens: int = 0, heads: tuple[int, int] = (1, 2),
    kind: str = "typical", gate: str = "safe", **more,
) -> dict:  # fmt: skip
    """Inputs in fp64, and gradients of the outputs and the final states, do and dht."""
    more = {"dim_k": 4, "dim_v": 3, "logits": True} | more
    tokens = tokens if lengths is None else sum(lengths)
    x = inputs(batch, tokens, *heads, kind, DOUBLE, gate, lengths=lengths, initial=True, **more)
    for seed, name in ((1, "v"), (2, "initial_state")):
        generator = torch.Generator().manual_seed(seed)
        d = torch.randn(x[name].shape, generator=generator, dtype=DOUBLE)
        x["do" if name == "v" else "dht"] = d
    return {n: y.double() if y is not None and y.is_floating_point() else y for n, y in x.items()}


def by_tokens(x: dict, options: dict) -> tuple[Tensor, Tensor]:
    """The recurrence as autograd can follow it: outputs and final states."""
    q, k, g, beta = x["q"], x["k"], x["g"], x["beta"]
    if options["l2norm"]:
        q, k = normalized(q), normalized(k)
    if options["gate"] != "log":
        bound = options["lower_bound"] if options["gate"] == "safe" else None
        g = log_decay(g, x["A_log"], x["dt_bias"], bound)
    if options["beta_sigmoid"]:
        beta = write_strength(beta, options["neg_eigval"])
    q, k = (y.repeat_interleave(g.shape[2] // y.shape[2], 2) for y in (q, k))
    q, k, v, decays, beta = (y.flatten(0, 1) for y in (q, k, x["v"], g.exp(), beta))
    batch, tokens = x["q"].shape[:2]
    offsets = x["cu_seqlens"]
    bounds = range(0, batch * tokens + 1, tokens) if offsets is None else offsets.tolist()
    outputs, finals = [], []
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        if x["initial_state"] is not None:
            state = x["initial_state"][n].mT if options["state_v_first"] else x["initial_state"][n]
        for t in range(start, stop):
            state = decays[t, :, :, None] * state
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
            outputs.append(options["scale"] * torch.einsum("hk,hkv->hv", q[t], state))
        finals.append(state.mT if options["state_v_first"] else state)
    return torch.stack(outputs).view(x["v"].shape), torch.stack(finals)


def by_autograd(x: dict, options: dict) -> Gradients:
    """What `backward` should return."""
    leaves = {
        name: None if x[name] is None else x[name].clone().requires_grad_() for name in LEAVES
    }
    pairs = [
        (y, d) for y, d in zip(by_tokens(x | leaves, options), (x["do"], x["dht"])) if d is not None
    ]
    wanted = [leaf for leaf in leaves.values() if leaf is not None]
    results, grads = zip(*pairs)
    found = iter(torch.autograd.grad(results, wanted, grads, materialize_grads=True))
    return Gradients(*(None if leaf is None else next(found) for leaf in leaves.values()))


def backward(x: dict, options: dict, **more) -> Gradients:
    given = x if x["do"] is not None else x | {"do": torch.zeros_like(x["v"])}
    return chunk_kda_backward(**given, **options, **more)


def assert_near(found: Gradients, wanted: Gradients, bound: float = EXACT) -> None:
    """Within `bound` of the largest number of each gradient, in fp64."""
    for name, a, b in zip(Gradients._fields, found, wanted, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype == DOUBLE, name
            size = b.abs().max().clamp(min=1e-3).item() if b.numel() else 1.0
            assert torch.allclose(a, b, rtol=0.0, atol=bound * size), name


def check(x: dict, options: dict) -> Gradients:
    found = backward(x, options)
    assert_near(found, by_autograd(x, options))
    return found


# Inputs, options, and what is None.
CASES = {
    "four chunks": ({"tokens": 250}, {}, ()),
    "ragged, empty and one-token sequences": ({"lengths": RAGGED}, {}, ()),
    "a batch": ({"batch": 3, "tokens": 70}, {}, ()),
    "one token": ({"tokens": 1, "batch": 2}, {}, ()),
    "softplus": ({"lengths": RAGGED, "gate": "softplus", "kind": "resets"}, {}, ()),
    "log decays": ({"tokens": 130, "gate": "log", "kind": "resets"}, {}, ()),
    "no rate, no bias": ({"tokens": 70}, {}, ("A_log", "dt_bias")),
    "strengths given": ({"tokens": 130, "logits": False}, {"beta_sigmoid": False}, ()),
    "negative eigenvalues": ({"tokens": 130}, {"neg_eigval": True}, ()),
    "no norm": ({"tokens": 130, "normalized": True}, {"l2norm": False}, ()),
    "three value heads per key head": ({"lengths": RAGGED, "heads": (2, 6)}, {}, ()),
    "V first": ({"lengths": RAGGED, "state_v_first": True}, {"state_v_first": True}, ()),
    "no initial state": ({"lengths": RAGGED}, {}, ("initial_state",)),
    "no gradient of the outputs": ({"lengths": RAGGED}, {}, ("do",)),
    "no gradient of the states": ({"lengths": RAGGED}, {}, ("dht",)),
}


@pytest.mark.parametrize("make, options, absent", CASES.values(), ids=list(CASES))
def test_equals_autograd(make, options, absent):
    x = problem(**make) | dict.fromkeys(absent)
    check(x, settings(make.get("gate", "safe"), **options))


def test_a_bias_may_be_a_table():
    x, options = problem(tokens=70), settings()
    found = backward(x | {"dt_bias": x["dt_bias"].view(2, 4)}, options)
    assert torch.equal(found.ddt_bias.flatten(), backward(x, options).ddt_bias)


@pytest.mark.parametrize(
    "kind", ["moderate", "mixed", "near_zero", "strong", "correlated_weak", "equal_keys"]
)
def test_kinds(kind):
    check(problem(tokens=200, kind=kind), settings())


def test_a_strength_of_zero():
    """Its token writes nothing, and what a strength would change is found all the same."""
    x = problem(tokens=90, logits=False)
    x["beta"][:, 7] = 0.0
    x["beta"][:, 70:75, 1] = 0.0
    found = check(x, settings(beta_sigmoid=False))
    assert found.dbeta[:, 7].abs().min() > 1e-3 and not found.dv[:, 7].abs().max() > EXACT


def test_any_split_into_calls_is_the_same():
    """The gradient of a part's initial state is that of the final state of the part before."""
    x, options = problem(batch=2, tokens=150), settings()
    whole = backward(x, options)
    for cut in (1, 64, 100, 149):
        first, last = (
            {n: x[n][:, part] for n in (*TOKENS, "do")}
            for part in (slice(0, cut), slice(cut, None))
        )
        given = {**{name: x[name] for name in TOKENS}, "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
        before = {name: y[:, :cut] if name in TOKENS else y for name, y in given.items()}
        _, between = recurrent_prefill(**before, initial_state=x["initial_state"], **options)
        behind = backward(x | last | {"initial_state": between}, options)
        front = backward(x | first | {"dht": behind.dh0}, options)
        tokens = [torch.cat(pair, 1) for pair in zip(front[:5], behind[:5])]
        assert_near(
            Gradients(*tokens, *(a + b for a, b in zip(front[5:7], behind[5:7])), front.dh0), whole
        )


def test_packed_sequences_equal_one_by_one():
    x, options = problem(RAGGED), settings()
    found = backward(x, options)
    bounds = x["cu_seqlens"].tolist()
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        alone = {name: x[name][:, start:stop] for name in (*TOKENS, "do")}
        alone |= {name: x[name][n : n + 1] for name in ("initial_state", "dht")}
        one = backward(x | alone | {"cu_seqlens": None}, options)
        # BLAS may sum in another order where a matrix begins elsewhere in memory.
        close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            close(getattr(found, name)[:, start:stop], getattr(one, name))
        close(found.dh0[n : n + 1], one.dh0)


def test_no_token_at_all():
    x, options = problem(tokens=3), settings()
    found = backward(x | {name: x[name][:, :0] for name in (*TOKENS, "do")}, options)
    assert torch.equal(found.dh0, x["dht"]) and found.dq.shape == (1, 0, 1, 4)
    assert not found.dA_log.any() and not found.ddt_bias.any()
    found = backward(
        x | {name: x[name][:0] for name in (*TOKENS, "do", "initial_state", "dht")}, options
    )
    assert found.dv.shape == (0, 3, 2, 3) and found.dh0.shape == (0, 2, 4, 3)


def test_the_steps_give_outputs_and_states():
    """`prepare` and `walk` are a forward."""
    x, options = (
        problem(tokens=100, heads=(1, 1), gate="log", normalized=True, logits=False),
        settings("log", l2norm=False),
    )
    o, final = recurrent_prefill(**{n: x[n] for n in (*TOKENS, "initial_state")}, **options)
    q, k, v, g, beta = (x[name][0].transpose(0, 1) for name in TOKENS)
    beta = write_strength(beta)
    r = beta.sqrt()[..., None]
    rows = (slice(0, 64), slice(64, 100))
    chunks = [reference.prepare(0.3 * q[:, p], (r * k)[:, p], g[:, p]) for p in rows]
    states, zs, last = reference.walk(chunks, [(r * v)[:, p] for p in rows], x["initial_state"][0])
    torch.testing.assert_close(last, final[0], rtol=0, atol=EXACT)
    for p, chunk, s, z in zip(rows, chunks, states, zs):
        torch.testing.assert_close(
            chunk.qg @ s + chunk.Aqk @ z, o[0, p].transpose(0, 1), rtol=0, atol=EXACT
        )


@pytest.mark.parametrize("kind", ["moderate", "mixed", "near_zero", "equal_keys"])
def test_fp32_is_computed_in_fp32(relative_rmse, kind):
    x = problem(tokens=300, kind=kind, dim_k=32, dim_v=32)
    exact = backward(x, settings())
    single = {n: y.float() if y is not None and y.is_floating_point() else y for n, y in x.items()}
    for name, a, b in zip(Gradients._fields, backward(single, settings()), exact):
        assert a.dtype == torch.float32, name
        assert relative_rmse(a, b) < 2e-5, name
