"""Lightning prefill: constant decay, in-place state pool, padding slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cula.reference import lightning_attn_fwd, lightning_attn_fwd_varlen, recurrent_simple_gla

TOL = dict(rtol=1e-10, atol=1e-10)
K, V = 4, 3


def tokens(seed, batch, length, heads, value_heads):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, length, heads, K), (batch, length, heads, K), (batch, length, value_heads, V)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v, torch.rand(value_heads, generator=generator, dtype=torch.float64)


def states(seed, count, value_heads):
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(count, value_heads, K, V, generator=generator, dtype=torch.float64)


@given(
    seed=st.integers(0, 2**31),
    length=st.integers(0, 150),
    heads=st.sampled_from([(1, 1), (2, 4)]),
    v_first=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_dense_equals_the_recurrence_with_lambda(seed, length, heads, v_first):
    """S = exp(-decay) S + k v^T, o = scale q^T S, with the decay applied as a factor and not through a log gate."""
    q, k, v, decay = tokens(seed, 2, length, *heads)
    state = states(seed, 2, heads[1])
    o, final = lightning_attn_fwd(
        q,
        k,
        v,
        decay,
        0.25,
        state.mT if v_first else state,
        output_final_state=True,
        state_v_first=v_first,
    )
    factor = torch.exp(-decay)[:, None, None]
    group = heads[1] // heads[0]
    for t in range(length):
        for h in range(heads[1]):
            outer = k[:, t, h // group, :, None] * v[:, t, h, None, :]
            state[:, h] = factor[h] * state[:, h] + outer
            expected = 0.25 * torch.einsum("bk,bkv->bv", q[:, t, h // group], state[:, h])
            torch.testing.assert_close(o[:, t, h], expected, **TOL)
    torch.testing.assert_close(final.mT if v_first else final, state, **TOL)


def test_default_scale_and_no_final_state():
    q, k, v, decay = tokens(0, 1, 70, 1, 1)
    o, final = lightning_attn_fwd(q, k, v, decay)
    assert final is None
    torch.testing.assert_close(o, lightning_attn_fwd(q, k, v, decay, K**-0.5)[0], rtol=0, atol=0)


slots = st.lists(st.integers(0, 90), min_size=1, max_size=4).flatmap(
    lambda packed: st.tuples(
        st.just(packed),
        st.permutations(range(6)),
        st.lists(st.booleans(), min_size=len(packed), max_size=len(packed)),
    )
)


@given(seed=st.integers(0, 2**31), layout=slots, v_first=st.booleans())
@settings(max_examples=40, deadline=None)
def test_pool_larger_than_the_batch_with_padding_slots(seed, layout, v_first):
    packed, order, padding = layout
    q, k, v, decay = tokens(seed, 1, sum(packed), 1, 2)
    pool = states(seed, 6, 2)
    pool = pool.mT.contiguous() if v_first else pool
    before = pool.clone()
    rows = [-1 - n if dead else order[n] for n, dead in enumerate(padding)]
    cu_seqlens = torch.tensor([0, *packed], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    o, returned = lightning_attn_fwd_varlen(
        q,
        k,
        v,
        decay,
        cu_seqlens,
        state_pool=pool,
        initial_state_indices=torch.tensor(rows, dtype=torch.int32),
        state_v_first=v_first,
    )
    assert returned is pool
    bounds = cu_seqlens.tolist()
    for n, row in enumerate(rows):
        part = slice(bounds[n], bounds[n + 1])
        if row < 0:
            assert torch.equal(o[:, part], torch.zeros_like(o[:, part]))
            continue
        expected, final = recurrent_simple_gla(
            q[:, part],
            k[:, part],
            v[:, part],
            g_gamma=-decay,
            initial_state=before[row : row + 1],
            output_final_state=True,
            state_v_first=v_first,
        )
        torch.testing.assert_close(o[:, part], expected, **TOL)
        torch.testing.assert_close(pool[row], final[0], **TOL)
    untouched = [row for row in range(6) if row not in rows]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("rows", [[-1, -1, -1], [-1, 0, -1], [0, -1, -7]])
def test_padding_slots_beside_row_zero(rows):
    """A padding slot never turns into row 0, be that live or not, and its NaN tokens do not get out."""
    q, k, v, decay = tokens(0, 1, 30, 1, 1)
    v = v.clone()
    for n, row in enumerate(rows):
        if row < 0:
            v[:, 10 * n : 10 * n + 10] = torch.nan
    pool = states(0, 3, 1)
    before = pool.clone()
    cu_seqlens = torch.tensor([0, 10, 20, 30])
    out = torch.full_like(v, torch.nan)
    o, _ = lightning_attn_fwd_varlen(
        q,
        k,
        v,
        decay,
        cu_seqlens,
        state_pool=pool,
        initial_state_indices=torch.tensor(rows, dtype=torch.int32),
        out=out,
    )
    assert o is out
    assert torch.equal(pool[1:], before[1:])
    if 0 not in rows:
        assert torch.equal(pool, before)
    for n, row in enumerate(rows):
        part = slice(10 * n, 10 * n + 10)
        if row < 0:
            assert torch.equal(o[:, part], torch.zeros_like(o[:, part]))
        else:
            expected, final = recurrent_simple_gla(
                q[:, part],
                k[:, part],
                v[:, part],
                g_gamma=-decay,
                initial_state=before[:1],
                output_final_state=True,
            )
            torch.testing.assert_close(o[:, part], expected, **TOL)
            torch.testing.assert_close(pool[:1], final, **TOL)


def test_pool_without_indices_and_no_pool_at_all():
    q, k, v, decay = tokens(2, 1, 100, 1, 2)
    cu_seqlens = torch.tensor([0, 70, 70, 100])
    pool = torch.zeros(5, 2, K, V, dtype=torch.float64)
    o, _ = lightning_attn_fwd_varlen(q, k, v, decay, cu_seqlens, state_pool=pool)
    fresh, final = lightning_attn_fwd_varlen(q, k, v, decay, cu_seqlens)
    assert torch.equal(o, fresh) and torch.equal(pool[:3], final)
    assert torch.equal(pool[3:], torch.zeros_like(pool[3:])) and torch.equal(
        final[1], torch.zeros_like(final[1])
    )
    assert (
        lightning_attn_fwd_varlen(q, k, v, decay, cu_seqlens, output_final_state=False)[1] is None
    )


def test_pool_of_low_precision_and_gradients_around_it():
    q, k, v, decay = (x.bfloat16() if x.dim() == 4 else x.float() for x in tokens(3, 1, 40, 1, 1))
    pool = states(3, 2, 1).bfloat16()
    before = pool.clone()
    q.requires_grad_()
    o, _ = lightning_attn_fwd_varlen(q, k, v, decay, torch.tensor([0, 40]), state_pool=pool)
    assert o.requires_grad and not pool.requires_grad and pool.dtype == torch.bfloat16
    _, final = recurrent_simple_gla(
        *(x.detach().double() for x in (q, k, v)),
        g_gamma=-decay.double(),
        initial_state=before[:1].double(),
        output_final_state=True,
    )
    assert ((pool[:1].double() - final).abs() <= 2**-8 * final.abs() * 1.01 + 1e-6).all()
    assert torch.equal(pool[1], before[1])


def test_pool_with_no_sequence():
    q, k, v, decay = tokens(4, 1, 0, 1, 1)
    pool = states(4, 2, 1)
    before = pool.clone()
    o, _ = lightning_attn_fwd_varlen(q, k, v, decay, torch.tensor([0]), state_pool=pool)
    assert o.shape == v.shape and torch.equal(pool, before)
