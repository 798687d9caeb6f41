"""The token-by-token oracles against sums written out by hand, without tensors."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cula.reference import recurrent_gated_delta_rule, recurrent_kda, recurrent_simple_gla


def tensor(values):
    """A list of T rows as `[1, T, 1, D]`, or a list of T numbers as `[1, T, 1]`."""
    x = torch.tensor(values, dtype=torch.float64)
    return x[None, :, None]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


Q = [[1.0, 2.0], [-1.0, 0.5], [0.25, 3.0]]
K = [[0.5, -1.0], [2.0, 1.0], [-0.5, 0.75]]
V = [[1.0, -2.0, 4.0], [0.5, 0.0, -1.0], [3.0, 1.0, 2.0]]
G = [-0.5, -1.5, -0.25]
H0 = [[1.0, 2.0, -1.0], [0.5, -0.5, 0.25]]


def test_simple_gla_is_the_decayed_sum_of_earlier_tokens():
    o, final = recurrent_simple_gla(
        tensor(Q),
        tensor(K),
        tensor(V),
        tensor(G),
        scale=0.5,
        initial_state=torch.tensor(H0, dtype=torch.float64)[None, None],
        output_final_state=True,
    )
    for t in range(3):
        for c in range(3):
            expected = math.exp(sum(G[: t + 1])) * dot(Q[t], [row[c] for row in H0])
            for j in range(t + 1):
                expected += math.exp(sum(G[j + 1 : t + 1])) * dot(Q[t], K[j]) * V[j][c]
            assert o[0, t, 0, c].item() == pytest.approx(0.5 * expected, rel=1e-13)
    for a in range(2):
        for c in range(3):
            expected = math.exp(sum(G)) * H0[a][c]
            expected += sum(math.exp(sum(G[j + 1 :])) * K[j][a] * V[j][c] for j in range(3))
            assert final[0, 0, a, c].item() == pytest.approx(expected, rel=1e-13)


def test_simple_gla_adds_the_two_kinds_of_decay():
    both, _ = recurrent_simple_gla(
        tensor(Q), tensor(K), tensor(V), tensor(G), torch.tensor([-0.25]).double()
    )
    one, _ = recurrent_simple_gla(tensor(Q), tensor(K), tensor(V), tensor([g - 0.25 for g in G]))
    none, _ = recurrent_simple_gla(tensor(Q), tensor(K), tensor(V))
    zero, _ = recurrent_simple_gla(tensor(Q), tensor(K), tensor(V), tensor([0.0] * 3))
    assert torch.equal(both, one)
    assert torch.equal(none, zero)


def test_delta_rule_with_scalar_state_in_exact_fractions():
    """K = V = 1: S = a S (1 - b k^2) + b k v, every factor a power of two, so that fp64 is exact."""
    k, v, q = (
        [Fraction(1, 2), Fraction(2), Fraction(1)],
        [Fraction(4), Fraction(-1), Fraction(8)],
        [Fraction(1)] * 3,
    )
    decay, beta, state = (
        [Fraction(1, 2), Fraction(1, 4), Fraction(1)],
        [Fraction(1), Fraction(1, 2), Fraction(1, 4)],
        Fraction(8),
    )
    expected = []
    for i in range(3):
        state = decay[i] * state * (1 - beta[i] * k[i] ** 2) + beta[i] * k[i] * v[i]
        expected.append(float(q[i] * state))

    def column(values):
        return tensor([[float(x)] for x in values])

    arguments = dict(
        q=column(q),
        k=column(k),
        v=column(v),
        beta=tensor([float(x) for x in beta]),
        scale=1.0,
        initial_state=torch.full((1, 1, 1, 1), 8.0, dtype=torch.float64),
        output_final_state=True,
    )
    log_decay = [math.log(x) for x in decay]
    for o, final in (
        recurrent_gated_delta_rule(g=tensor(log_decay), **arguments),
        recurrent_kda(g=tensor([[x] for x in log_decay]), **arguments),
    ):
        assert o.flatten().tolist() == pytest.approx(expected, rel=1e-15)
        assert final.item() == pytest.approx(expected[-1], rel=1e-15)


def test_kda_is_a_householder_like_transition_of_the_decayed_state():
    """S = (I - b k k^T) diag(a) S + b k v^T, the matrix form of the same update, in Python floats."""
    decay = [[-0.5, -2.0], [-0.1, -1.0], [0.0, -3.0]]
    beta = [0.5, 0.9, 1.5]
    state = [row[:] for row in H0]
    outputs = []
    for t in range(3):
        moved = [[math.exp(decay[t][a]) * state[a][c] for c in range(3)] for a in range(2)]
        state = [
            [
                sum(((a == b) - beta[t] * K[t][a] * K[t][b]) * moved[b][c] for b in range(2))
                + beta[t] * K[t][a] * V[t][c]
                for c in range(3)
            ]
            for a in range(2)
        ]
        outputs.append([2**-0.5 * dot(Q[t], [row[c] for row in state]) for c in range(3)])
    o, final = recurrent_kda(
        tensor(Q),
        tensor(K),
        tensor(V),
        tensor(decay),
        tensor(beta),
        initial_state=torch.tensor(H0, dtype=torch.float64)[None, None],
        output_final_state=True,
    )
    assert torch.allclose(
        o[0, :, 0], torch.tensor(outputs, dtype=torch.float64), rtol=1e-13, atol=1e-13
    )
    assert torch.allclose(
        final[0, 0], torch.tensor(state, dtype=torch.float64), rtol=1e-13, atol=1e-13
    )


@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_kda_recalls_the_last_value_of_an_orthonormal_key(seed, tokens):
    """Without decay and with beta = 1 the state is a memory: a key returns what was last written under it."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, 6, (tokens,), generator=generator)
    k = torch.eye(6, dtype=torch.float64)[keys][None, :, None]
    v = torch.randn(1, tokens, 1, 3, generator=generator, dtype=torch.float64)
    _, memory = recurrent_kda(
        k, k, v, torch.zeros_like(k), torch.ones(1, tokens, 1).double(), output_final_state=True
    )
    for key in keys.unique():
        last = int((keys == key).nonzero().max())
        assert torch.allclose(memory[0, 0, key], v[0, last, 0], rtol=0, atol=1e-12)
