"""`cula.delta`: values against a plain recurrence in every mode, who serves, and torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cula
from cula import delta
from cula.integrations import fla

H, HV, K, V = 2, 4, 8, 6
TABLE = torch.tensor([[3, 1, 2], [0, 4, 5]], dtype=torch.int32)
Tokens = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh(undecided: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(batch: int, count: int, channels: bool = False) -> Tokens:
    """Arguments by name, in fp64: raw gates, logits, q and k that are not normalised."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return {
        "q": randn(batch, count, H, K),
        "k": randn(batch, count, H, K),
        "v": randn(batch, count, HV, V),
        "g": randn(batch, count, HV, *(K,) * channels),
        "beta": randn(batch, count, HV),
        "A_log": randn(HV),
        "dt_bias": randn(HV, *(K,) * channels),
    }


def pool(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, HV, V, K, dtype=torch.float64)


def recurrence(
    x: Tokens, n: int, states: torch.Tensor, lower_bound: float | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The outputs [T, HV, V] of row n, and its states [HV, V, K] after every token; written for one head at a time."""
    count = x["q"].shape[1]
    out, after = torch.zeros(count, HV, V, dtype=torch.float64), []
    states = states.clone()
    for t in range(count):
        for head in range(HV):
            q, k = x["q"][n, t, head // 2], x["k"][n, t, head // 2]
            q, k = (y / math.sqrt(float(y @ y) + 1e-6) for y in (q, k))
            raw, rate = x["g"][n, t, head] + x["dt_bias"][head], math.exp(float(x["A_log"][head]))
            decay = -rate * (1 + raw.exp()).log()
            if lower_bound is not None:
                decay = lower_bound / (1 + (-rate * raw).exp())
            strength = 1 / (1 + (-x["beta"][n, t, head]).exp())
            faded = states[head] * decay.exp()
            states[head] = faded + strength * torch.outer(x["v"][n, t, head] - faded @ k, k)
            out[t, head] = K**-0.5 * states[head] @ q
        after.append(states.clone())
    return out, after


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decode_is_the_recurrence(channels: bool, lower_bound: float | None) -> None:
    x, states = tokens(3, 2, channels), pool()
    before, out = states.clone(), torch.empty(3, 2, HV, V, dtype=torch.float64)
    found = delta.delta_rule_decode(
        **x, state=states, state_indices=int32(4, 1, 2), null_slot=1, lower_bound=lower_bound, out=out
    )  # fmt: skip
    assert found is out and not found[1].any()
    expected = before.clone()
    for n, slot in ((0, 4), (2, 2)):
        wanted, after = recurrence(x, n, before[slot], lower_bound)
        close(found[n], wanted)
        expected[slot] = after[-1]
    close(states, expected)


def test_final_gates_strengths_and_keys_are_taken_as_they_are() -> None:
    x = tokens(2, 3, channels=True)
    states = pool(2)
    raw = delta.delta_rule_decode(**x, state=states.clone())
    final = {
        name: x[name] / (x[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in "qk"
    }
    softplus = torch.nn.functional.softplus(x["g"] + x["dt_bias"])
    final |= {"v": x["v"], "g": (-x["A_log"].exp()[:, None] * softplus).flatten(2)}
    found = delta.delta_rule_decode(
        **final, beta=x["beta"].sigmoid(), state=states, use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False, use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    close(found, raw)


def test_both_layouts_and_a_transposed_view_of_either() -> None:
    x, states = tokens(2, 3), pool(2)
    other, view = states.mT.contiguous(), states.mT.contiguous()
    found = delta.delta_rule_decode(**x, state=states)
    close(delta.delta_rule_decode(**x, state=other, state_v_first=False), found)
    close(delta.delta_rule_decode(**x, state=view.mT), found)
    close(other, states.mT)
    close(view, states.mT)


def test_states_may_go_elsewhere_or_nowhere() -> None:
    x, states = tokens(2, 3), pool()
    before = states.clone()
    verified = delta.delta_rule_decode(**x, state=states, commit=False)
    assert torch.equal(states, before)
    moved = delta.delta_rule_decode(**x, state=states, output_state_indices=int32(5, -1))
    assert torch.equal(states[:5], before[:5])
    close(states[5], recurrence(x, 0, before[0])[1][-1])
    close(moved, verified)


def test_accepted_tokens_are_committed() -> None:
    x, states = tokens(4, 3), pool()
    before = states.clone()
    drafts = {name: value for name, value in x.items() if name != "q"}
    result = delta.delta_rule_commit(
        **drafts, state=states, num_accepted=int32(2, 9, -1, 3), state_indices=int32(3, 0, 1, -1)
    )
    assert result is None
    before[3] = recurrence(x, 0, before[3])[1][1]
    before[0] = recurrence(x, 1, before[0])[1][2]
    close(states, before)


@pytest.mark.parametrize("own_pool", [False, True])
def test_a_slot_per_token(own_pool: bool) -> None:
    """A row begins at the slot of its last accepted token, and every token leaves its state in a slot."""
    x, states = tokens(2, 3), pool()
    before = states.clone()
    kept = torch.zeros_like(states) if own_pool else states
    own = {"token_states": kept} if own_pool else {}
    found = delta.delta_rule_decode(
        **x, state=states, state_indices=TABLE, num_accepted=int32(2, 1), commit=False, token_state_indices=TABLE, **own
    )  # fmt: skip
    for n, begin in ((0, 1), (1, 0)):
        expected, after = recurrence(x, n, before[begin])
        close(found[n], expected)
        close(kept[TABLE[n].long()], torch.stack(after))


@pytest.mark.parametrize("records", [None, 16])
def test_replay_keeps_what_was_accepted(records: int | None) -> None:
    """Seven calls of three drafts, of which some are accepted, leave the states of the accepted tokens alone."""
    states = pool(3)
    exact = states.clone()
    replay = delta.new_replay(states, H, max_tokens=3, dtype=torch.float64, records=records)
    slots, accepted, stored = int32(2, 0), None, 0
    for step in range(7):
        x = tokens(2, 3)
        before = states.clone()
        found = delta.delta_rule_decode(
            **x, state=states, state_indices=slots, replay=replay, num_accepted=accepted
        )
        stored += not torch.equal(before, states)
        accepted = int32(step % 4, 3 - step % 4)
        for n, slot in enumerate(slots.tolist()):
            expected, after = recurrence(x, n, exact[slot])
            close(found[n], expected)
            if accepted[n]:
                exact[slot] = after[int(accepted[n]) - 1]
    # A ring of 16 records is stored by fewer calls than one of 8.
    assert (stored < 4) == (records == 16)
    delta.delta_rule_flush(states, replay, accepted, state_indices=slots)
    close(states, exact)


def test_packed_rows() -> None:
    x, states = tokens(1, 9), pool(4)
    before, offsets = states.clone(), int32(0, 3, 3, 7)
    slots = int32(2, 0, 1)
    table = torch.tensor([[3, 3, 3], [1, 1, 1]], dtype=torch.int32)
    found = delta.delta_rule_decode(**x, state=states, state_indices=slots, cu_seqlens=offsets)
    per_head = ("A_log", "dt_bias")
    for n, (start, end) in enumerate(zip(offsets[:-1], offsets[1:])):
        row = {name: y if name in per_head else y[:, start:end] for name, y in x.items()}
        expected, after = recurrence(row, 0, before[slots[n]])
        close(found[0, start:end], expected)
        close(states[slots[n]], after[-1] if after else before[slots[n]])
    assert not found[0, 7:].any()
    # Slots of tokens that a row lacks are not looked at.
    more = {"cu_seqlens": int32(0, 1, 2), "max_tokens": 3, "token_state_indices": table}
    delta.delta_rule_decode(**x, state=states, state_indices=int32(2, 0), commit=False, **more)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_convolution_and_norm_around_a_step(activation: str) -> None:
    """Two calls behind a prefill of two tokens, beside sums over the whole sequence."""
    x, states = tokens(1, 5), pool(3)
    before, out = states.clone(), []
    channels = 2 * H * K + HV * V
    weight, bias, gate, scale = (
        torch.randn(shape, dtype=torch.float64) for shape in ((channels, 4), (channels,), (1, 5, HV, V), (V,))
    )  # fmt: skip
    inputs = torch.cat([x[name].flatten(2) for name in "qkv"], 2)
    slots = int32(2)
    ring = delta.new_convolution_ring(states, H, max_tokens=2, dtype=torch.float64)
    delta.fill_convolution_ring(ring, inputs[:, :2], int32(2), slots)
    for first, last in ((2, 4), (4, 5)):
        part = {
            name: y if name in ("A_log", "dt_bias") else y[:, first:last] for name, y in x.items()
        }
        convolution = delta.ShortConvolution(ring, int32(first), weight, bias)
        norm = delta.GatedNorm(gate[:, first:last], scale, 1e-3, activation)
        out.append(delta.delta_rule_decode(
            **part, state=states, state_indices=slots, convolution=convolution, norm=norm
        ))  # fmt: skip
    for t in range(2, 5):
        total = bias.clone()
        for j in range(4):
            if t - 3 + j >= 0:
                total += weight[:, j] * inputs[0, t - 3 + j]
        total = total / (1 + (-total).exp())
        for name, y in zip("qkv", total.split([H * K, H * K, HV * V])):
            x[name][0, t] = y.view(x[name].shape[2:])
    tail = {name: y if name in ("A_log", "dt_bias") else y[:, 2:] for name, y in x.items()}
    expected, after = recurrence(tail, 0, before[2])
    expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    raw = gate[0, 2:]
    expected = expected / (1 + (-raw).exp()) * (raw if activation == "silu" else 1)
    close(torch.cat(out, 1)[0], expected)
    close(states[2], after[-1])


def test_nobody_but_kernels_and_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "importable", lambda package: True)
    for function in ("delta_rule_decode", "delta_rule_commit", "delta_rule_flush"):
        rows = cula.explain(function, arch="sm70").rows
        told = {row.name: (row.verdict, row.reason) for row in rows}
        assert told["fla"] == ("refused", f"has no {function}")
        assert told["reference"] == ("chosen", None)
    x = tokens(1, 1)
    with pytest.raises(RuntimeError, match="^impl='fla' cannot serve delta.decode.delta_rule_dec"):
        delta.delta_rule_decode(**x, state=pool(), impl="fla")


def around(
    x: Tokens, states: torch.Tensor, ring: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """A step with all that models have around it, behind the inputs of a prefill."""
    delta.fill_convolution_ring(ring, torch.ones_like(ring[:, :3]), int32(5, 1))
    return 1 + delta.delta_rule_decode(
        **x, state=states, convolution=delta.ShortConvolution(ring, int32(5, 1), weight),
        norm=delta.GatedNorm(gate, gate[0, 0, 0]),
    )  # fmt: skip


def test_a_compiled_step_with_convolution_and_norm_is_one_graph() -> None:
    def both(run: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x, states = tokens(2, 2), pool(2)
        ring = delta.new_convolution_ring(states, H, max_tokens=2, dtype=torch.float64)
        weight, gate = torch.randn(ring.shape[2], 4), torch.randn_like(x["v"])
        return [run(x, states, ring, weight, gate), states, ring]

    compiled = torch.compile(around, fullgraph=True, backend="aot_eager")
    for found, expected in zip(both(compiled), both(around), strict=True):
        close(found, expected)


def step(x: Tokens, states: torch.Tensor, replay: delta.Replay) -> tuple[torch.Tensor, ...]:
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    first = delta.delta_rule_decode(q, k, v, g, beta, states, commit=False)
    delta.delta_rule_commit(k, v, g, beta, states, int32(1, 2))
    return first, delta.delta_rule_decode(q, k, v, g, beta, states, replay=replay) + 1


def test_a_compiled_step_is_one_graph() -> None:
    def both(run: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x, states = tokens(2, 2), pool(2)
        replay = delta.new_replay(states, H, max_tokens=2, dtype=torch.float64)
        return [*run(x, states, replay), states, *replay]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, expected in zip(both(compiled), both(step), strict=True):
        close(found, expected)
