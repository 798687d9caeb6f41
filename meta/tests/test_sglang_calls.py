"""Calls of SGLang on CPU tensors as SGLang builds them, against loops over tokens in float64 and its own signatures."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cula.integrations import _sglang_calls as calls
from cula.integrations import sglang

RECORDED = json.loads(
    (Path(__file__).parents[2] / "tests-integration/contracts/sglang-0.5.23.json").read_text()
)
H, HV, K, V, SLOTS = 2, 4, 16, 8, 9
KINDS = pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# A bfloat16 pool is widened, and rounded where it is stored.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Pool:
    """A layer's states in a page of several layers; slot 0, which is reserved, holds NaN. It remembers what it held."""

    def __init__(self, dtype: torch.dtype, *state: int, slots: int = SLOTS) -> None:
        self.pages = random(slots, 3, *state, seed=7, dtype=dtype)
        self.pages[0] = float("nan")
        self.states = self.pages[:, 1]
        self.before = self.pages.clone()

    def begin(self, slot: int) -> Tensor:
        return self.before[slot, 1].double()

    def untouched_but(self, *slots: int) -> None:
        others = self.before.clone()
        others[list(slots), 1] = self.pages[list(slots), 1]
        assert torch.equal(bits(self.pages), bits(others))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None
) -> tuple[Tensor, Tensor]:
    """Log decays `[T, HV, 1 or K]` and strengths `[T, HV]` of raw gates."""
    channels = dt_bias.numel() // HV
    a, b, A_log = a.double().view(-1, HV, channels), b.double(), A_log.double().view(HV, 1)
    x = a + dt_bias.double().view(HV, -1)
    if bound is not None:
        return bound * torch.sigmoid(A_log.exp() * x), torch.sigmoid(b)
    return -A_log.exp() * torch.log1p(x.exp()), torch.sigmoid(b)


def walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule of one sequence, q, k `[T, H, K]`, v `[T, HV, V]`: outputs, and the state after each token."""
    o, states = [], [state]
    for t in range(len(q)):
        q_t, k_t = (
            x[t].double() / (x[t].double().square().sum(-1, True) + 1e-6).sqrt() for x in (q, k)
        )
        q_t, k_t = (x.repeat_interleave(HV // len(x), 0) for x in (q_t, k_t))
        state = state * g[t].exp()[:, None]
        error = v[t].double() - (state @ k_t[..., None])[..., 0]
        state = state + (beta[t][:, None] * error)[..., None] * k_t[:, None]
        states.append(state)
        o.append((state @ q_t[..., None])[..., 0] * K**-0.5)
    return torch.stack(o) if o else v.double(), torch.stack(states)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < TOLERANCE[dtype], error


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


class Case:
    """Operands of the delta rule for sequences packed one after another, with tokens of NaN behind them.

    q, k, v are views of one tensor, a and b have two rows more than these, and A_log the shape that models give it.
    """

    def __init__(
        self, kda: bool, lengths: list[int], behind: int = 0, bound: float | None = None
    ) -> None:
        self.heads, self.channels, self.bound = HV if kda else H, K if kda else 1, bound
        self.cu, self.length = offsets(lengths), sum(lengths)
        tokens, keys = self.length + behind, self.heads * K
        self.mixed = random(tokens, 2 * keys + HV * V + 8, seed=1)[:, : 2 * keys + HV * V]
        self.mixed[self.length :] = float("nan")
        q, k, v = self.mixed.unsqueeze(0).split((keys, keys, HV * V), -1)
        # Norms far from 1 show whether q and k are normalised once.
        q.mul_(1e-1)
        k.mul_(1e1)
        self.q, self.k = (x.unflatten(-1, (self.heads, K)) for x in (q, k))
        self.v = v.unflatten(-1, (HV, V))
        self.a = random(tokens + 2, HV * self.channels, seed=2)
        self.b = random(tokens + 2, HV, seed=3)
        self.a[self.length :] = self.b[self.length :] = float("nan")
        self.A_log, self.dt_bias = random(1, 1, HV, 1, seed=4), random(HV * self.channels, seed=5)
        self.kept = [x.clone() for x in self.inputs()]

    def inputs(self) -> tuple[Tensor, ...]:
        return self.mixed, self.a, self.b, self.A_log, self.dt_bias

    def activated(self) -> tuple[Tensor, Tensor]:
        """g and beta of the gated delta rule's prefill."""
        g, beta = gates(self.a, self.b, self.A_log, self.dt_bias, None)
        return g[None, ..., 0].float(), beta[None].float()

    def walk(self, n: int, state: Tensor) -> tuple[Tensor, Tensor]:
        here = slice(self.cu[n], self.cu[n + 1])
        g, beta = gates(self.a[here], self.b[here], self.A_log, self.dt_bias, self.bound)
        return walk(self.q[0, here], self.k[0, here], self.v[0, here], g, beta, state)

    def unchanged(self) -> None:
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(self.inputs(), self.kept))


# ---- prefill ---------------------------------------------------------------------------------------------------------

LENGTHS = [70, 0, 3, 131, 2, 1, 0]
ROWS = [4, 2, 7, 1, 0, 0, -1]
LIVE = [0, 1, 2, 3]


def extend(case: Case, pool: Tensor, rows: list[int], kda: bool, **options: Any) -> Any:
    where = {
        "ssm_states": pool, "cache_indices": torch.tensor(rows, dtype=torch.int32), "query_start_loc": case.cu,
        "impl": "reference",
    }  # fmt: skip
    if not kda:
        g, beta = case.activated()
        return calls.gdn_extend(case.q, case.k, case.v, g, beta, **where, **options)[0]
    return calls.kda_extend(
        case.q, case.k, case.v, case.a[None].unflatten(-1, (HV, K)), case.b[None], A_log=case.A_log,
        dt_bias=case.dt_bias, lower_bound=case.bound, beta_is_raw=True, **where, **options,
    )  # fmt: skip


@KINDS
@POOLS
def test_prefill_updates_the_slots_of_its_sequences_alone(kda: bool, dtype: torch.dtype) -> None:
    pool, case = Pool(dtype, HV, V, K), Case(kda, LENGTHS)
    o = extend(case, pool.states, ROWS, kda)
    for n in LIVE:
        expected, states = case.walk(n, pool.begin(ROWS[n]))
        if LENGTHS[n]:
            close(o[0, case.cu[n] : case.cu[n + 1]], expected, torch.float32)
        close(pool.states[ROWS[n]], states[-1], dtype)
    assert not o[0, case.cu[4] : case.length].any()
    pool.untouched_but(4, 7, 1)
    case.unchanged()


@KINDS
@POOLS
def test_prefill_keeps_states_for_the_prefix_cache(kda: bool, dtype: torch.dtype) -> None:
    pool, case = Pool(dtype, HV, V, K), Case(kda, LENGTHS)
    snapshots = torch.full((len(LENGTHS), HV, V, K), float("nan"))
    chunks = torch.tensor([1, -1, -1, 2, -1, -1, -1], dtype=torch.int32)
    options: dict[str, Any] = {"return_intermediate_states": True} if kda else {}
    extend(case, pool.states, ROWS, kda, track_state=snapshots, track_chunk_idx=chunks, **options)
    for n, tokens in ((0, 64), (3, 128)):
        close(snapshots[n], case.walk(n, pool.begin(ROWS[n]))[1][tokens], dtype)
    pool.untouched_but(4, 7, 1)


@pytest.mark.parametrize("bound", [None, -4.0])
def test_kda_prefill_has_both_gates_and_says_what_it_returns(bound: float | None) -> None:
    pool, case = Pool(torch.float32, HV, V, K), Case(True, [5, 67], bound=bound)
    o, h = extend(case, pool.states, [3, 6], True, return_intermediate_states=True)
    assert h is None
    for n, slot in enumerate((3, 6)):
        expected, states = case.walk(n, pool.begin(slot))
        close(o[0, case.cu[n] : case.cu[n + 1]], expected, torch.float32)
        close(pool.states[slot], states[-1], torch.float32)


def test_kda_prefill_takes_gates_that_are_activated() -> None:
    pool, case = Pool(torch.float32, HV, V, K), Case(True, [5, 9])
    g, beta = gates(case.a, case.b, case.A_log, case.dt_bias, None)
    o = calls.kda_extend(
        case.q, case.k, case.v, g[None].float().flatten(2), beta[None].float(), ssm_states=pool.states,
        cache_indices=torch.tensor([3, 6], dtype=torch.int32), query_start_loc=case.cu, impl="reference",
    )  # fmt: skip
    close(o[0, 5:14], case.walk(1, pool.begin(6))[0], torch.float32)


def test_gdn_prefill_writes_the_output_it_was_given() -> None:
    pool, case = Pool(torch.float32, HV, V, K), Case(False, [5, 3])
    whole = torch.zeros(1, 12, HV, V)
    o = extend(case, pool.states, [3, 6], False, output=whole[:, :8])
    assert o.data_ptr() == whole.data_ptr() and not whole[:, 8:].any()
    close(o[0, :5], case.walk(0, pool.begin(3))[0], torch.float32)


def test_gdn_prefill_only_reads_slots_that_several_items_share() -> None:
    pool, case = Pool(torch.float32, HV, V, K), Case(False, [5, 3, 4])
    o = extend(case, pool.states, [3, 3, 6], False, inplace_update=False)
    for n, slot in enumerate((3, 3, 6)):
        close(o[0, case.cu[n] : case.cu[n + 1]], case.walk(n, pool.begin(slot))[0], torch.float32)
    pool.untouched_but()


def test_a_gathered_pool_has_no_slot_for_padding() -> None:
    case, states = Case(False, [5, 3]), random(2, HV, V, K, seed=8)
    begin = states.double()
    o = extend(case, states, [0, 1], False)
    for n in range(2):
        expected, after = case.walk(n, begin[n])
        close(o[0, case.cu[n] : case.cu[n + 1]], expected, torch.float32)
        close(states[n], after[-1], torch.float32)


# ---- decode ----------------------------------------------------------------------------------------------------------


@POOLS
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize(
    ("kda", "bound"), [(False, None), (True, None), (True, -4.0)], ids=["gdn", "kda", "kda-bound"]
)
def test_decode(kda: bool, dtype: torch.dtype, packed: bool, bound: float | None) -> None:
    rows = [3, -1, 0, 0, 5]
    pool, case = Pool(dtype, HV, V, K), Case(kda, [1] * 5, bound=bound)
    where = {
        "A_log": case.A_log, "dt_bias": case.dt_bias, "ssm_states": pool.states,
        "cache_indices": torch.tensor(rows, dtype=torch.int32), "lower_bound": bound, "impl": "reference",
    }  # fmt: skip
    if packed:
        a = case.a.unflatten(-1, (HV, K)) if kda else case.a
        o = calls.packed_decode(
            case.mixed, a, case.b[None], scale=K**-0.5, num_v_heads=HV, head_v_dim=V, **where
        )
    else:
        a = case.a[:, None] if kda else case.a
        o = calls.decode(case.q, case.k, case.v, a, case.b, query_start_loc=case.cu, **where)
    assert o.shape == (1, 5, HV, V) and not o[0, 1:4].any()
    for n in (0, 4):
        expected, states = case.walk(n, pool.begin(rows[n]))
        close(o[0, n : n + 1], expected, torch.float32)
        close(pool.states[rows[n]], states[-1], dtype)
    pool.untouched_but(3, 5)
    case.unchanged()


@KINDS
@POOLS
def test_verification_leaves_the_pool_and_keeps_the_state_after_every_draft(
    kda: bool, dtype: torch.dtype
) -> None:
    lengths, rows, steps = [3, 1, 4, 0, 2, 1, 2], [3, 5, 8, 2, 0, 0, -1], 4
    pool, case = Pool(dtype, HV, V, K), Case(kda, lengths, behind=3)
    # Rows of padding share the last one of the buffer, and the table goes on.
    table = torch.tensor([2, 0, 1, 3, 4, 4, 4, 4], dtype=torch.int32)
    buffer = torch.full((5, steps, HV, V, K), float("nan"), dtype=dtype)
    found = calls.target_verify(
        case.A_log, case.dt_bias, case.q, case.k, case.v, case.a[None], case.b, ssm_states=pool.states,
        cache_indices=torch.tensor([*rows, 6], dtype=torch.int32), query_start_loc=case.cu,
        intermediate_states_buffer=buffer, intermediate_state_indices=table, cache_steps=steps,
        retrieve_parent_token=None, impl="reference",
    )  # fmt: skip
    written = torch.zeros(5, steps, dtype=torch.bool)
    for n in range(3):
        expected, states = case.walk(n, pool.begin(rows[n]))
        close(found[0, case.cu[n] : case.cu[n + 1]], expected, torch.float32)
        close(buffer[table[n], : lengths[n]], states[1:], dtype)
        written[table[n], : lengths[n]] = True
    assert buffer[~written].isnan().all()
    assert not found[0, case.cu[4] : case.length].any()
    pool.untouched_but()
    case.unchanged()


# ---- Lightning attention ---------------------------------------------------------------------------------------------


def lightning(lengths: list[int], dtype: torch.dtype, **meta: Any) -> tuple[Any, ...]:
    """q, k, v in float32 as after a rotary embedding, the decay of heads, and SGLang's meta."""
    q, k, v = (random(sum(lengths), HV, K, seed=seed) for seed in (1, 2, 3))
    given = {
        "batch_size": len(lengths), "q_offsets": offsets(lengths), "mask": None,
        "s_scales": torch.ones(len(lengths), dtype=torch.bool), **meta,
    }  # fmt: skip
    pool = Pool(dtype, HV, K, K)
    return q, k, v, pool, torch.linspace(0.01, 0.9, HV).view(HV, 1, 1), SimpleNamespace(**given)


def walk_lightning(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    o = []
    for t in range(len(q)):
        q_t, k_t, v_t = (x[t].to(torch.bfloat16).double() for x in (q, k, v))
        state = state * (-decay.double()).exp() + k_t[..., None] * v_t[:, None]
        o.append(scale * (q_t[:, None] @ state)[:, 0])
    return torch.stack(o), state


@POOLS
@pytest.mark.parametrize("scale", [None, 0.5])
def test_lightning_decode(dtype: torch.dtype, scale: float | None) -> None:
    rows = [3, -1, 0, 0, 5]
    slots = torch.tensor(rows, dtype=torch.int32)
    q, k, v, pool, decay, meta = lightning(
        [1] * 5, dtype, s_offsets=slots, s_scales=torch.ones(5, dtype=torch.int64)
    )
    o = calls.seg_la_fwd(q, k, v, pool.states, decay, meta, softmax_scale=scale, impl="reference")
    assert o.dtype == q.dtype and o.shape == q.shape and not o[1:4].any()
    for n in (0, 4):
        here = slice(n, n + 1)
        expected, state = walk_lightning(
            q[here], k[here], v[here], decay, pool.begin(rows[n]), scale or K**-0.5
        )
        close(o[here], expected, torch.bfloat16)
        close(pool.states[rows[n]], state, dtype)
    pool.untouched_but(3, 5)


@POOLS
def test_lightning_prefill(dtype: torch.dtype) -> None:
    lengths, rows = [70, 3, 2, 1, 5], [3, 5, 0, 0, -1]
    q, k, v, pool, decay, meta = lightning(
        lengths, dtype, s_offsets=torch.tensor(rows, dtype=torch.int32),
        s_scales=torch.tensor([True, False, True, True, True]),
    )  # fmt: skip
    # A new sequence begins from zero, whatever its slot holds.
    pool.states[5] = float("nan")
    o = calls.seg_la_fwd(q, k, v, pool.states, decay, meta, impl="reference")
    for n, begin in ((0, pool.begin(3)), (1, torch.zeros(HV, K, K).double())):
        here = slice(meta.q_offsets[n], meta.q_offsets[n + 1])
        expected, state = walk_lightning(q[here], k[here], v[here], decay, begin, K**-0.5)
        close(o[here], expected, torch.bfloat16)
        close(pool.states[rows[n]], state, dtype)
    assert not o[73:].any()
    pool.untouched_but(3, 5)


@POOLS
def test_lightning_prefill_keeps_states_for_the_prefix_cache(dtype: torch.dtype) -> None:
    """In slots of the pool itself, whose number is of either kind, -1 or of a sequence that is too short."""
    lengths, rows = [70, 3, 131, 64, 65], [3, 5, 1, 2, 0]
    q, k, v, pool, decay, meta = lightning(
        lengths, dtype, s_offsets=torch.tensor(rows, dtype=torch.int32),
        s_scales=torch.tensor([True, True, False, True, True]),
    )  # fmt: skip
    pool.states[1] = float("nan")
    tracked = {
        "track_lens": torch.tensor([64, 0, 128, 64, 64, 64], dtype=torch.int32),
        "track_state_indices": torch.tensor([8, 4, 7, -1, 6, 6]),
    }
    o = calls.seg_la_fwd(q, k, v, pool.states, decay, meta, **tracked, impl="reference")
    plain = Pool(dtype, HV, K, K)
    plain.states[1] = float("nan")
    same = calls.seg_la_fwd(q, k, v, plain.states, decay, meta, impl="reference")
    assert torch.equal(o, same) and torch.equal(pool.states[rows[:4]], plain.states[rows[:4]])
    for n, tokens, slot in ((0, 64, 8), (2, 128, 7)):
        here = slice(meta.q_offsets[n], meta.q_offsets[n] + tokens)
        begin = torch.zeros(HV, K, K).double() if n == 2 else pool.begin(rows[n])
        _, state = walk_lightning(q[here], k[here], v[here], decay, begin, K**-0.5)
        close(pool.states[slot], state, dtype)
    pool.untouched_but(*rows[:4], 7, 8)


# ---- refusals --------------------------------------------------------------------------------------------------------


def verify(**options: Any) -> None:
    case, pool = Case(True, [2, 1]), Pool(torch.float32, HV, V, K)
    given = {
        "cache_steps": 2, "retrieve_parent_token": None, "impl": "reference",
        "intermediate_states_buffer": torch.zeros(3, 2, HV, V, K), **options,
    }  # fmt: skip
    calls.target_verify(
        case.A_log, case.dt_bias, case.q, case.k, case.v, case.a, case.b, ssm_states=pool.states,
        cache_indices=torch.tensor([1, 2], dtype=torch.int32), query_start_loc=case.cu,
        intermediate_state_indices=torch.tensor([0, 1], dtype=torch.int32), **given,
    )  # fmt: skip


def packed(**options: Any) -> None:
    case, pool = Case(True, [1, 1]), Pool(torch.float32, HV, V, K)
    calls.packed_decode(
        case.mixed, case.a, case.b, A_log=case.A_log, dt_bias=case.dt_bias, scale=1.0, ssm_states=pool.states,
        cache_indices=torch.tensor([1, 2], dtype=torch.int32), num_v_heads=HV, head_v_dim=V, impl="reference",
        **options,
    )  # fmt: skip


def prefill(**options: Any) -> None:
    extend(Case(True, [2, 1]), Pool(torch.float32, HV, V, K).states, [1, 2], True, **options)


def segments(**options: Any) -> None:
    slots = torch.tensor([1, 2], dtype=torch.int32)
    mask = options.pop("mask", None)
    q, k, v, pool, decay, meta = lightning([3, 1], torch.float32, s_offsets=slots, mask=mask)
    calls.seg_la_fwd(q, k, v, pool.states, decay, meta, impl="reference", **options)


some = torch.zeros(2)
REFUSED: list[tuple[Callable[..., None], dict[str, Any], type[Exception], str]] = [
    (verify, {"retrieve_parent_token": some}, NotImplementedError, "retrieve_parent_token is not served"),
    (verify, {"cache_ring": True}, NotImplementedError, "cache_ring is not served"),
    (
        verify,
        {"intermediate_states_buffer": torch.zeros(3, 3, HV, V, K)[:, :2]},
        NotImplementedError,
        "intermediate_states_buffer with gaps",
    ),
    (verify, {"cache_steps": 9}, ValueError, "max_tokens: expected 1 to 8"),
    (verify, {"fused_accept_num_accepted": some}, TypeError, "fused_accept_num_accepted"),
    (packed, {"replayssm_d": some}, NotImplementedError, "replayssm_d is not served"),
    (packed, {"another": some}, TypeError, "another"),
    (prefill, {"is_spec_decode": True}, NotImplementedError, "is_spec_decode is not served"),
    (
        prefill,
        {"return_intermediate_states": True, "track_ssm_h_src": some},
        NotImplementedError,
        "return_intermediate_states is not served",
    ),
    (segments, {"caches": some}, NotImplementedError, "caches is not served"),
    (segments, {"mask": some}, NotImplementedError, "mask is not served"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "options", "error", "text"), REFUSED, ids=lambda x: getattr(x, "__name__", "")
)
def test_what_is_not_served_is_refused(
    call: Callable[..., None], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    call(**{} if call is not verify else {})  # the rest of the call is served
    with pytest.raises(error, match=text):
        call(**options)


# ---- recorded signatures ---------------------------------------------------------------------------------------------

SERVED = {
    "gdn_backend": {"extend": calls.gdn_extend},
    "kda_backend": {"extend": calls.kda_extend},
    "kda_prefill_graph": {"extend": calls.kda_extend},
    "lightning_backend": {"seg_la_fwd": calls.seg_la_fwd},
}
BOTH = {
    "packed_decode": calls.packed_decode,
    "decode": calls.decode,
    "target_verify": calls.target_verify,
}
RINGS = ("cache_ring", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")


def recorded_calls() -> list[Any]:
    found = []
    for name, sites in RECORDED["calls"].items():
        for module, positional, keywords in sites:
            ours = (SERVED[module.rpartition(".")[2]] | BOTH).get(name)
            # Without keywords it is the extend of a list.
            if ours is not None and keywords:
                found.append(
                    pytest.param(
                        ours, positional, keywords, id=f"{module.rpartition('.')[2]}-{name}"
                    )
                )
    return found


@pytest.mark.parametrize(("ours", "positional", "keywords"), recorded_calls())
def test_every_call_that_sglang_makes_has_a_function(
    ours: Callable[..., Any], positional: int, keywords: list[str]
) -> None:
    named = dict.fromkeys(word for word in keywords if word != "None")
    if "None" in keywords and ours is calls.target_verify:
        named |= dict.fromkeys(RINGS)
        named |= dict.fromkeys(
            ("intermediate_states_buffer", "intermediate_state_indices", "cache_steps")
        )
        named |= dict.fromkeys(("retrieve_parent_token",))
    inspect.signature(ours).bind(*[None] * positional, **named, impl="auto")


def test_the_calls_are_all_there() -> None:
    found = [(x.values[0].__name__, x.id.split("-")[0]) for x in recorded_calls()]
    for name in ("packed_decode", "decode", "target_verify"):
        assert {(name, "gdn_backend"), (name, "kda_backend")} <= set(found)
    assert {("gdn_extend", "gdn_backend"), ("kda_extend", "kda_prefill_graph")} <= set(found)
    assert ("seg_la_fwd", "lightning_backend") in found


@pytest.mark.parametrize("kind", sorted(sglang.PARAMETERS))
def test_the_parameters_that_are_demanded_are_those_recorded(kind: str) -> None:
    for name, known in sglang.PARAMETERS[kind].items():
        assert tuple(one[0] for one in RECORDED["functions"][name]) == known
