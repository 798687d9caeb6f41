"""What every backward of KDA is tested for, whatever runs it: a class derives from this one and says how."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cula_core.reference.kda_backward import Gradients

from ..comparing import same
from .gradient_cases import CLASSES, UNBOUNDED, GradientCase, check, gradient_case

OF_TOKENS = ("dq", "dk", "dv", "dg", "dbeta")
BOTH = {"initial": True, "dht": True}
# Everything that is compiled in, several at a time: kind, what the case has, rules.
OPTIONS = {
    "softplus": ("moderate", {"gate": "softplus", **BOTH}),
    "resets, softplus": (UNBOUNDED, {"gate": "softplus", "gate_dtype": torch.bfloat16}),
    "resets, log": (UNBOUNDED, {"gate": "log", **BOTH}),
    "mixed, log": ("mixed", {"gate": "log", "gate_dtype": torch.float16}),
    "mixed, any decay": ("mixed", {"gate": "softplus"}),
    "no parameters": ("strong", {"parameters": False}),
    "negative eigenvalues": ("moderate", {"neg_eigval": True, "beta_dtype": torch.bfloat16}),
    "strengths given": ("moderate", {"beta_sigmoid": False, **BOTH}),
    "no norm": ("moderate", {"l2norm": False, "operand": "bfloat16"}),
    "no norm, fp16 operands": ("moderate", {"l2norm": False, "dtype": torch.float16}),
    "V first": ("moderate", {"state_v_first": True, "heads": (1, 2), **BOTH}),
    "a scale": ("moderate", {"scale": -1.5}),
}


class GradientSuite:
    """Numbers against the chunked backward in fp64, and what must not change bit for bit.

    tokens: of a case. lengths: of packed sequences. heads: of q and k, and of v. dim: K and V.
    """

    tokens = 512
    lengths: tuple[int, ...] = (100, 1, 0, 64, 65, 200)
    heads = (2, 2)
    dim = 128

    def differentiate(self, case: GradientCase) -> Gradients:
        """Returns the gradients of a case's inputs, with 0 in place of those that autograd leaves out."""
        raise NotImplementedError

    @pytest.fixture
    def place(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")

    def case(self, kind: str, size: Sequence[int], place: torch.device, **more) -> GradientCase:
        return gradient_case(
            kind, size, **{"heads": self.heads, "dim": self.dim, "device": place} | more
        )

    @pytest.mark.parametrize("kind", CLASSES)
    def test_classes(self, place, kind):
        case = self.case(kind, (self.tokens,), place)
        check(self.differentiate(case), case)

    @pytest.mark.parametrize("kind", CLASSES)
    def test_packed_with_states(self, place, kind):
        heads = (self.heads[0], 2 * self.heads[0])
        case = self.case(kind, self.lengths, place, heads=heads, **BOTH)
        check(self.differentiate(case), case)

    def test_a_batch(self, place):
        case = self.case("moderate", (2, self.tokens // 2 - 3), place, packed=False, **BOTH)
        check(self.differentiate(case), case)

    @pytest.mark.parametrize("kind, more", OPTIONS.values(), ids=list(OPTIONS))
    def test_options(self, place, kind, more):
        case = self.case(kind, (self.tokens // 2 + 7,), place, **more)
        check(self.differentiate(case), case)

    def test_strengths_of_zero(self, place):
        """A token that writes nothing, alone and next to others."""
        case = self.case("moderate", (150,), place, beta_sigmoid=False)
        beta = case.given["beta"]
        assert beta is not None
        beta[:, 7] = 0.0
        beta[:, 70:75] = 0.0
        found = self.differentiate(case)
        check(found, case)
        assert found.dv[:, 7].abs().max() < 1e-6 * found.dv.abs().max()
        assert found.dbeta[:, 7].abs().min() > 0

    @pytest.mark.parametrize("size", [1e-6, 1e4])
    def test_gradients_of_any_size(self, place, size):
        case = self.case("moderate", (self.tokens // 2,), place)
        case = case.with_gradients((case.do.float() * size).to(case.do.dtype))
        check(self.differentiate(case), case)

    @pytest.mark.parametrize("kind", ["mixed", "near_zero"])
    def test_gradients_of_final_states_alone(self, place, kind):
        case = self.case(kind, self.lengths, place, **BOTH)
        case = case.with_gradients(torch.zeros_like(case.do), case.dht)
        found = self.differentiate(case)
        check(found, case)
        assert not found.dq.any()

    def test_a_sequence_without_gradients(self, place):
        """Its own are zero, and those of others the same bits."""
        case = self.case("moderate", self.lengths, place, initial=True)
        (_, silent), *_ = case.places()
        do = case.do.clone()
        do[:, silent] = 0
        before, found = self.differentiate(case), self.differentiate(case.with_gradients(do))
        check(found, case.with_gradients(do))
        for name in OF_TOKENS:
            one, other = getattr(found, name), getattr(before, name)
            assert not one[:, silent].any(), name
            assert same(one[:, silent.stop :], other[:, silent.stop :]), name
        assert found.dh0 is not None and not found.dh0[0].any()

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_neighbours_are_not_seen(self, place, bad):
        """Broken gradients of one sequence's outputs reach no other sequence."""
        case = self.case("moderate", (70, 100, 65), place, **BOTH)
        do = case.do.clone()
        _, (_, broken), _ = case.places()
        do[:, broken.start + 50] = bad
        found, sound = (
            self.differentiate(case.with_gradients(do, case.dht)),
            self.differentiate(case),
        )
        for name in OF_TOKENS:
            one, other = getattr(found, name), getattr(sound, name)
            for tokens in (slice(None, broken.start), slice(broken.stop, None)):
                assert same(one[:, tokens], other[:, tokens]), name
            assert not one[:, broken].isfinite().all(), name
        assert found.dh0 is not None and sound.dh0 is not None
        assert same(found.dh0[::2], sound.dh0[::2]) and not found.dh0[1].isfinite().all()

    @pytest.mark.parametrize(
        "size, packed", [((1,), True), ((1, 1, 0, 1), True), ((3, 1), False)], ids=str
    )
    def test_one_token(self, place, size, packed):
        case = self.case("moderate", size, place, packed=packed, **BOTH)
        check(self.differentiate(case), case)

    @pytest.mark.parametrize("lengths", [(0,), (0, 0, 0)], ids=str)
    def test_no_token(self, place, lengths):
        case = self.case("moderate", lengths, place, **BOTH)
        found = self.differentiate(case)
        assert found.dh0 is not None and case.dht is not None and torch.equal(found.dh0, case.dht)
        assert not found.dA_log.any() and not found.ddt_bias.any()  # type: ignore[union-attr]

    def test_the_same_bits_again(self, place):
        case = self.case("correlated_keys", self.lengths, place, **BOTH)
        first = self.differentiate(case)
        for _ in range(3):
            assert all(map(same, first, self.differentiate(case)))  # type: ignore[arg-type]

    def test_sequences_are_those_of_calls_of_their_own(self, place):
        """To the bit, wherever a sequence lies."""
        case = self.case("moderate", (70, 1, 130), place, **BOTH)
        found = self.differentiate(case)
        for n, (_, tokens) in enumerate(case.places()):
            given = dict(case.given)
            for name in ("q", "k", "v", "g", "beta"):
                given[name] = _part(given[name], tokens)
            given["initial_state"] = given["initial_state"][n : n + 1]  # type: ignore[index]
            given["cu_seqlens"] = torch.tensor(
                [0, tokens.stop - tokens.start], dtype=torch.int32, device=place
            )
            dht = None if case.dht is None else case.dht[n : n + 1]
            alone = self.differentiate(
                GradientCase(
                    case.kind, given, _part(case.do, tokens), dht, case.rules, case.operand
                )
            )
            for name in OF_TOKENS:
                assert same(getattr(found, name)[:, tokens], getattr(alone, name)), name
            assert (
                found.dh0 is not None
                and alone.dh0 is not None
                and same(found.dh0[n : n + 1], alone.dh0)
            )


def _part(x: Tensor | None, tokens: slice) -> Tensor:
    assert x is not None
    return x[:, tokens].contiguous()
