"""Convolution and norm around decode on a CPU, against `conv1d` and `rms_norm` over whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

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
from cula_testing.tensors import every_other, int32

HEADS, HEADS_V, DIM_K, DIM_V, POOL, TOKENS = 2, 4, 8, 6, 6, 3
CHANNELS = 2 * HEADS * DIM_K + HEADS_V * DIM_V
SLOTS, NULL = (4, -1, 0, 2), 2  # two live rows, and two kinds of padding
LIVE = {0: 4, 2: 0}
PREFILLED = {4: 0, 0: 5}  # tokens that a slot has seen before: one sequence begins
EPS = 1e-3
ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


@dataclass(frozen=True)
class Case:
    """mode: "dense", "packed" or "replay", of which tokens are rejected. activation: of the norm, None without one."""

    mode: str = "dense"
    channels: bool = False
    v_first: bool = True
    bias: bool = False
    activation: str | None = "silu"
    convolves: bool = True
    dtype: torch.dtype = torch.float64


class Model:
    """Parameters, and every slot's sequence: what it has been given, and its state in fp64."""

    def __init__(self, case: Case):
        self.case, self.generator = case, torch.Generator().manual_seed(3)
        wide = (DIM_K,) if case.channels else ()
        self.weight, bias = self.normal(CHANNELS, 4) / 2, self.normal(CHANNELS)
        self.bias = bias if case.bias else None
        self.scale = self.normal(DIM_V)
        self.gates = {"A_log": self.normal(HEADS_V), "dt_bias": self.normal(HEADS_V, *wide)}
        matrix = (DIM_V, DIM_K) if case.v_first else (DIM_K, DIM_V)
        wide_enough = torch.promote_types(case.dtype, torch.float32)
        self.state = self.normal(POOL, HEADS_V, *matrix).to(wide_enough)
        self.states = self.state.double().clone()
        self.given = {s: self.normal(p, CHANNELS).to(case.dtype) for s, p in PREFILLED.items()}

    def normal(self, *shape: int) -> Tensor:
        """Numbers that bfloat16 holds."""
        drawn = torch.randn(shape, generator=self.generator)
        return drawn.bfloat16().to(self.case.dtype)

    def tokens(self, lengths: list[int]) -> dict[str, Tensor]:
        """Tokens of a call; those of padding are NaN."""
        case, batch = self.case, len(lengths)
        shape = (1, sum(lengths) + 2) if case.mode == "packed" else (batch, TOKENS)
        wide = (DIM_K,) if case.channels else ()
        x = {
            "q": self.normal(*shape, HEADS, DIM_K),
            "k": self.normal(*shape, HEADS, DIM_K),
            "v": self.normal(*shape, HEADS_V, DIM_V),
            "g": self.normal(*shape, HEADS_V, *wide),
            "beta": self.normal(*shape, HEADS_V),
            "gate": self.normal(*shape, HEADS_V, DIM_V),
        }
        for n in set(range(batch)) - set(LIVE):
            for tensor in x.values():
                row(case, tensor, lengths, n).fill_(torch.nan)
        return x

    def convolved(self, slot: int, inputs: Tensor) -> dict[str, Tensor]:
        """q, k and v [1, T, H, D] behind the convolution of the whole sequence, rounded, in fp64."""
        line = torch.cat((self.given[slot], inputs)).double()
        if self.case.convolves:
            bias = None if self.bias is None else self.bias.double()
            padded = F.pad(line.T[None], (3, 0))
            line = F.silu(F.conv1d(padded, self.weight.double()[:, None], bias, groups=CHANNELS))
            line = line[0].T.contiguous().to(self.case.dtype).double()
        parts = line[len(line) - len(inputs) :].split([HEADS * DIM_K] * 2 + [HEADS_V * DIM_V], 1)
        heads = (HEADS, HEADS, HEADS_V)
        return {n: x.unflatten(1, (h, -1))[None] for n, x, h in zip("qkv", parts, heads)}

    def expected(self, slot: int, own: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Outputs [T, HV, V] of one row, and the arguments that commit its tokens. own: its tokens."""
        inputs = torch.cat([own[name].flatten(1) for name in "qkv"], 1)
        arguments = self.convolved(slot, inputs)
        arguments |= {name: own[name].double()[None] for name in ("g", "beta")}
        arguments |= {name: x.double() for name, x in self.gates.items()}
        arguments |= {"state": self.states[slot : slot + 1], "state_v_first": self.case.v_first}
        out = delta_rule_decode(**arguments, commit=False)[0]
        if self.case.activation is not None:
            out = F.rms_norm(out, (DIM_V,), self.scale.double(), EPS)
            out = out * ACTIVATIONS[self.case.activation](own["gate"].double())
        return out, {n: x for n, x in arguments.items() if n != "q"} | {"inputs": inputs}

    def accept(self, slot: int, arguments: dict[str, Any], count: int) -> None:
        """Appends the first tokens of a call to the sequence of a slot."""
        inputs = arguments.pop("inputs")
        delta_rule_commit(**arguments, num_accepted=int32(count))
        self.given[slot] = torch.cat((self.given[slot], inputs[:count]))

    def ring(self) -> Tensor:
        """Rings that hold NaN but for what a prefill has left."""
        ring = new_convolution_ring(
            self.state, HEADS, max_tokens=TOKENS, dtype=self.case.dtype, state_v_first=self.case.v_first
        )  # fmt: skip
        ring.fill_(torch.nan)
        for slot, given in self.given.items():
            last = given[-3:][None]
            if len(given):
                fill_convolution_ring(ring, last, int32(len(given)), int32(slot))
        return ring


def row(case: Case, x: Tensor, lengths: list[int], n: int) -> Tensor:
    """The tokens of one row."""
    if case.mode != "packed":
        return x[n]
    first = sum(lengths[:n])
    return x[0, first : first + lengths[n]]


def call(
    case: Case, model: Model, x: dict[str, Tensor], lengths: list[int], ring: Tensor, **options: Any
) -> Tensor:
    """The operator, on the model's own pool."""
    given = {name: tensor for name, tensor in x.items() if name != "gate"} | model.gates
    if case.convolves:
        positions = [len(model.given.get(slot, ())) for slot in SLOTS]
        options["convolution"] = ShortConvolution(ring, int32(*positions), model.weight, model.bias)
    if case.activation is not None:
        options["norm"] = GatedNorm(x["gate"], model.scale, EPS, case.activation)
    if case.mode == "packed":
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        options |= {"cu_seqlens": offsets, "max_tokens": TOKENS}
    return delta_rule_decode(
        **given, state=model.state, state_indices=int32(*SLOTS), null_slot=NULL, state_v_first=case.v_first, **options
    )  # fmt: skip


def assert_calls(case: Case, slack: float, relative_rmse) -> None:
    """Five calls in a row against the sequences: outputs, states, rings, and what must stay as it was."""
    model = Model(case)
    ring, before = model.ring(), model.state.clone()
    unused = [slot for slot in range(POOL) if slot not in PREFILLED]
    replay: Replay | None = None
    options: dict[str, Any] = {}
    if case.mode == "replay":
        replay = new_replay(
            model.state, HEADS, max_tokens=TOKENS, channels=case.channels, dtype=case.dtype, state_v_first=case.v_first
        )  # fmt: skip
        options["replay"] = replay
    for step in range(5):
        lengths = [TOKENS] * len(SLOTS)
        if case.mode == "packed":
            lengths = [(step + n) % (TOKENS + 1) for n in range(len(SLOTS))]
        x = model.tokens(lengths)
        out = call(case, model, x, lengths, ring, **options)
        accepted = list(lengths)
        if replay is not None:
            accepted = [(step + 2 * n) % (TOKENS + 1) for n in range(len(SLOTS))]
            options["num_accepted"] = int32(*accepted)
        for n in range(len(SLOTS)):
            found = row(case, out, lengths, n)
            if n not in LIVE:
                assert not found.any()
            if n not in LIVE or not lengths[n]:
                continue
            own = {name: row(case, tensor, lengths, n) for name, tensor in x.items()}
            expected, arguments = model.expected(LIVE[n], own)
            floor = relative_rmse(expected.to(found.dtype), expected)
            assert relative_rmse(found, expected) <= 1.05 * floor + slack
            model.accept(LIVE[n], arguments, accepted[n])
        if case.mode == "packed":
            assert not out[:, sum(lengths) :].any()
    if replay is not None:
        delta_rule_flush(
            model.state, replay, options["num_accepted"], state_indices=int32(*SLOTS), null_slot=NULL,
            state_v_first=case.v_first,
        )  # fmt: skip
    live = list(PREFILLED)
    assert relative_rmse(model.state[live], model.states[live]) <= slack
    assert same(model.state[unused], before[unused]) and ring[unused].isnan().all()
    if case.convolves:
        for slot, given in model.given.items():
            for position in range(len(given) - 3, len(given)):
                assert same(ring[slot, position % ring.shape[1]], given[position])


@pytest.mark.parametrize("mode", ["dense", "packed", "replay"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(channels=True, v_first=False, bias=True, activation="sigmoid"),
        Case(v_first=False, bias=True, activation=None),
        Case(channels=True, activation="sigmoid", convolves=False),
    ],
    ids=lambda case: f"{case.convolves}-{case.activation}-{'KDA' if case.channels else 'GDN'}",
)
def test_sequences(relative_rmse, case, mode):
    assert_calls(replace(case, mode=mode), 1e-12, relative_rmse)


@pytest.mark.parametrize("mode", ["dense", "replay"])
def test_what_is_convolved_is_rounded_to_the_dtype_of_q(relative_rmse, mode):
    """A value halfway between two numbers of bfloat16 may round either way. Without the rounding, or with one of the
    output before its norm, the error is several times the slack."""
    assert_calls(Case(mode=mode, bias=True, dtype=torch.bfloat16), 3e-4, relative_rmse)


def test_a_norm_goes_with_every_way_to_store_states(relative_rmse):
    case = Case(convolves=False)
    model = Model(case)
    x = model.tokens([TOKENS] * 4)
    gate = x.pop("gate")[[0, 2]]
    x = {name: tensor[[0, 2]] for name, tensor in x.items()} | model.gates
    table = int32(1, 2, 3, 4, 5, 0).view(2, 3)
    ways: tuple[dict[str, Any], ...] = (
        {"commit": False},
        {"state_indices": int32(5, -1), "output_state_indices": int32(1, 2)},
        {"state_indices": table, "num_accepted": int32(3, 1), "token_state_indices": table, "commit": False},
    )  # fmt: skip
    for options in ways:
        plain, normed, given = model.state.clone(), model.state.clone(), gate.clone()
        out = delta_rule_decode(**x, state=plain, **options)
        expected = F.rms_norm(out, (DIM_V,), model.scale, 0.5) * torch.sigmoid(gate)
        if "output_state_indices" in options:
            expected[1] = 0
            given[1] = torch.nan
        into = torch.full_like(out, torch.nan)
        norm = GatedNorm(given, model.scale, 0.5, "sigmoid")
        assert delta_rule_decode(**x, state=normed, **options, norm=norm, out=into) is into
        assert relative_rmse(into, expected) < 1e-12 and same(plain, normed)


# ---- rings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens, length", [(1, 4), (2, 8), (5, 8), (6, 16), (8, 16)])
def test_a_new_ring_is_the_smallest_that_calls_can_use(tokens, length, v_first):
    matrix = (DIM_V, DIM_K) if v_first else (DIM_K, DIM_V)
    state = torch.zeros(POOL, HEADS_V, *matrix)
    ring = new_convolution_ring(state, HEADS, max_tokens=tokens, state_v_first=v_first)
    assert ring.shape == (POOL, length, CHANNELS) and ring.dtype == torch.bfloat16
    assert ring.is_contiguous() and not ring.any()


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_ring_is_filled_by_position(count):
    """Of one sequence of two tokens only those, and nothing for padding."""
    ring, inputs = torch.full((5, 4, 2), -1.0), torch.randn(4, count, 2)
    expected = ring.clone()
    positions, slots = (7, 2, 9, 0), (3, 0, -1, 4)
    for n in (0, 1, 3):
        for i in range(count):
            at = positions[n] - count + i
            if at >= 0 and slots[n] != 4:
                expected[slots[n], at % 4] = inputs[n, i]
    fill_convolution_ring(ring, every_other(inputs), int32(*positions), int32(*slots), 4)
    assert same(ring, expected)
    assert (ring[[1, 2, 4]] == -1).all() and (ring[0] == -1).any() and not (ring[3] == -1).all()
