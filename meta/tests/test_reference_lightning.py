"""Lightning prefill: constant decay, in-place state pool, padding slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cula.reference import (
    chunk_simple_gla,
    lightning_attn_fwd,
    lightning_attn_fwd_varlen,
    recurrent_simple_gla,
)

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


def test_pool_without_rows_serves_padding_alone():
    q, k, v, decay = tokens(5, 1, 20, 1, 1)
    pool = states(5, 0, 1)
    rows = torch.tensor([-1, -1], dtype=torch.int32)
    o, _ = lightning_attn_fwd_varlen(
        q, k, v, decay, torch.tensor([0, 5, 20]), state_pool=pool, initial_state_indices=rows
    )
    assert not o.any() and len(pool) == 0


@given(seed=st.integers(0, 2**31), layout=slots, v_first=st.booleans())
@settings(max_examples=25, deadline=None)
def test_read_only_pool_returns_what_would_have_been_stored(seed, layout, v_first):
    packed, order, padding = layout
    q, k, v, decay = tokens(seed, 1, sum(packed), 1, 2)
    pool = states(seed, 6, 2)
    pool = pool.mT.contiguous() if v_first else pool
    before = pool.clone()
    rows = [-1 if dead else order[n] for n, dead in enumerate(padding)]
    options = {
        "cu_seqlens": torch.tensor([0, *packed]).cumsum(0),
        "state_pool": pool,
        "initial_state_indices": torch.tensor(rows, dtype=torch.int32),
        "state_v_first": v_first,
    }
    o, final = lightning_attn_fwd_varlen(q, k, v, decay, **options, update_state_pool=False)
    assert torch.equal(pool, before)
    same, none = lightning_attn_fwd_varlen(
        q, k, v, decay, **options, update_state_pool=False, output_final_state=False
    )
    assert none is None and torch.equal(same, o)
    expected, _ = lightning_attn_fwd_varlen(q, k, v, decay, **options)
    assert torch.equal(o, expected)
    for n, row in enumerate(rows):
        assert torch.equal(final[n], pool[row] if row >= 0 else torch.zeros_like(final[n]))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("every", [64, 128, 192])
@pytest.mark.parametrize("length", [0, 63, 64, 200, 384])
def test_checkpoints_of_a_dense_batch_are_states_on_the_way(length, every, v_first):
    q, k, v, decay = tokens(6, 2, length, 1, 2)
    state = states(6, 2, 2)
    state = state.mT.contiguous() if v_first else state
    kept = torch.full((2, length // every, 2, *state.shape[2:]), torch.nan, dtype=torch.float64)
    options = {"initial_state": state, "output_final_state": True, "state_v_first": v_first}
    o, _ = lightning_attn_fwd(
        q, k, v, decay, **options, state_checkpoints=kept, checkpoint_every_n_tokens=every
    )
    assert torch.equal(o, lightning_attn_fwd(q, k, v, decay, **options)[0])
    for i in range(length // every):
        part = slice(0, (i + 1) * every)
        _, expected = recurrent_simple_gla(
            q[:, part], k[:, part], v[:, part], g_gamma=-decay, **options
        )
        torch.testing.assert_close(kept[:, i], expected, **TOL)


@given(
    seed=st.integers(0, 2**31),
    packed=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    every=st.sampled_from([64, 128]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_checkpoints_of_packed_sequences_lie_where_arithmetic_says(seed, packed, every, data):
    """Row `a // n + i` for the i-th state of the sequence that starts at token a; other rows are left alone."""
    q, k, v, decay = tokens(seed, 1, sum(packed), 1, 1)
    live = data.draw(st.lists(st.booleans(), min_size=len(packed), max_size=len(packed)))
    rows = torch.tensor([n if alive else -1 for n, alive in enumerate(live)], dtype=torch.int32)
    pool = states(seed, len(packed), 1)
    cu_seqlens = torch.tensor([0, *packed]).cumsum(0)
    kept = torch.full((1, sum(packed) // every, 1, K, V), torch.nan, dtype=torch.float64)
    lightning_attn_fwd_varlen(
        q,
        k,
        v,
        decay,
        cu_seqlens,
        state_pool=pool,
        initial_state_indices=rows,
        update_state_pool=False,
        state_checkpoints=kept,
        checkpoint_every_n_tokens=every,
    )
    expected = torch.full_like(kept, torch.nan)
    for n, (start, length) in enumerate(zip(cu_seqlens.tolist(), packed)):
        for i in range(length // every if live[n] else 0):
            part = slice(start, start + (i + 1) * every)
            _, state = recurrent_simple_gla(
                q[:, part],
                k[:, part],
                v[:, part],
                g_gamma=-decay,
                initial_state=pool[n : n + 1],
                output_final_state=True,
            )
            row = start // every + i
            assert expected[0, row].isnan().all(), "two sequences share a row"
            expected[0, row] = state[0]
    torch.testing.assert_close(kept, expected, equal_nan=True, **TOL)


@pytest.mark.parametrize(("into_pool", "every"), [(False, None), (False, 64), (True, None)])
@pytest.mark.parametrize("v_first", [False, True])
def test_checkpoints_in_rows_that_the_caller_names(into_pool, every, v_first):
    """Once per sequence after so many tokens, or all of one behind each other; other rows keep their bits."""
    packed, rows, first = [150, 0, 64, 130, 70], [3, 1, 0, -1, 5], [8, 2, 4, 6, -1]
    offsets = [128, 64, 64, 64, 64]
    q, k, v, decay = tokens(9, 1, sum(packed), 1, 2)
    pool = states(9, 10, 2)
    pool = pool.mT.contiguous() if v_first else pool
    begin, cu_seqlens = pool.clone(), torch.tensor([0, *packed]).cumsum(0)
    kept = pool if into_pool else torch.full_like(pool, torch.nan)
    lightning_attn_fwd_varlen(
        q, k, v, decay, cu_seqlens, state_pool=pool, state_v_first=v_first,
        initial_state_indices=torch.tensor(rows, dtype=torch.int32), checkpoint_every_n_tokens=every,
        state_checkpoints=None if into_pool else kept, checkpoint_rows=torch.tensor(first),
        checkpoint_offsets=None if every else torch.tensor(offsets, dtype=torch.int32),
    )  # fmt: skip
    expected = begin.clone() if into_pool else torch.full_like(pool, torch.nan)

    def after(n, count):
        part = slice(int(cu_seqlens[n]), int(cu_seqlens[n]) + count)
        return recurrent_simple_gla(
            q[:, part], k[:, part], v[:, part], g_gamma=-decay, initial_state=begin[rows[n]][None],
            output_final_state=True, state_v_first=v_first,
        )[1][0]  # fmt: skip

    for n in (0, 2):  # of the others one is empty, one is padding, and one has no row
        counts = range(64, packed[n] + 1, 64) if every else [offsets[n]]
        for i, count in enumerate(counts):
            expected[first[n] + i] = after(n, count)
    if into_pool:
        for n in (0, 1, 2, 4):
            expected[rows[n]] = after(n, packed[n])
    torch.testing.assert_close(kept, expected, equal_nan=True, **TOL)


def test_norm_by_hand_and_of_nothing():
    """A key (3, 4, 0, 0) becomes (0.6, 0.8, 0, 0); zeros stay zeros, without a NaN in value or gradient."""
    q = torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.float64).expand(1, 2, 1, K)
    k = torch.zeros(1, 2, 1, K, dtype=torch.float64)
    k[0, 0, 0, :2] = torch.tensor([3.0, 4.0])
    v = torch.ones(1, 2, 1, V, dtype=torch.float64)
    k.requires_grad_()
    o, final = chunk_simple_gla(
        q, k, v, scale=1.0, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(o.detach(), torch.full_like(o, 0.6), rtol=1e-6, atol=0)
    by_hand = torch.tensor([0.6, 0.8, 0.0, 0.0], dtype=torch.float64)[:, None].expand(K, V)
    torch.testing.assert_close(final[0, 0].detach(), by_hand, rtol=1e-6, atol=0)
    o.sum().backward()
    assert k.grad.isfinite().all()


def test_constant_and_token_decay_add():
    q, k, v, decay = tokens(8, 2, 70, 1, 2)
    g = -torch.rand(2, 70, 2, dtype=torch.float64)
    found = chunk_simple_gla(q, k, v, g, -decay, output_final_state=True)
    expected = recurrent_simple_gla(q, k, v, g - decay, output_final_state=True)
    torch.testing.assert_close(found, expected, **TOL)
