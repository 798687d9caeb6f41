"""The gradients of the gated delta rule by the classes of inputs that those of KDA are judged by: of the operator on
the CPU with few channels, and of the kernels on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gated_gradients import NAMES, check, differentiate, gradient_case

from cula_lightning_sm90 import begin_chunk_gated_delta_rule_backward
from cula_lightning_sm90.gated.backward import launch
from cula_lightning_sm90.gated.backward.call import BackwardCall
from cula_lightning_sm90.gated.backward.ops import prepared
from cula_testing.comparing import same
from cula_testing.compiled import emulated_kernel
from cula_testing.kda.gradient_cases import CLASSES, UNBOUNDED, GradientCase
from cula_testing.tensors import unsynchronised

LENGTHS = (100, 1, 0, 64, 65, 200)
BOTH = {"initial": True, "dht": True}
# Everything that is compiled in, several at a time: kind, what the case has, rules.
OPTIONS = {
    "resets": (UNBOUNDED, BOTH),
    "decays of 16 bits": ("moderate", {"gate_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16}),
    "negative eigenvalues": ("moderate", {"neg_eigval": True, "heads": (1, 4), **BOTH}),
    "strengths given": ("strong", {"beta_sigmoid": False}),
    "no norm, bf16 operands": ("moderate", {"l2norm": False, "operand": "bfloat16"}),
    "no norm, fp16": ("moderate", {"l2norm": False, "dtype": torch.float16}),
    "V first": ("moderate", {"state_v_first": True, "heads": (1, 2), **BOTH}),
    "a scale": ("moderate", {"scale": -1.5}),
}


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("kind", ["mixed", "equal_keys", "weak_strengths", UNBOUNDED])
def test_kernels_in_the_emulator(emulated, kind):
    """Those that a GPU runs, with value heads that share keys."""
    case = gradient_case(kind, (100, 130), torch.device("cpu"), heads=(1, 2), **BOTH)
    names = ("q", "k", "v", "beta", "initial_state", "cu_seqlens")
    given, g = {name: case.given[name] for name in names}, case.given["g"]
    assert g is not None
    rules = {
        name: case.rules[name]
        for name in ("scale", "l2norm", "beta_sigmoid", "neg_eigval", "state_v_first")
    }
    call = prepared(
        BackwardCall(g=g[..., 0], do=case.do, dht=case.dht, operand=case.operand, **given, **rules)  # type: ignore[arg-type]
    )
    found = [emulated.empty(x.shape, x.dtype) for x in call[:6]]
    launch.run(
        call, launch.Gradients(*found), multiprocessors=3,
        kernels=lambda config: emulated_kernel(emulated, launch.unit(config)),
    )  # fmt: skip
    check(dict(zip(NAMES, found)), case)


class Gradients:
    """Numbers against the chunked backward in fp64, and what must not change bit for bit."""

    tokens, dim = 512, 128

    @pytest.fixture
    def place(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")

    def case(self, kind: str, size: tuple[int, ...], place: torch.device, **more) -> GradientCase:
        return gradient_case(kind, size, place, **{"heads": (2, 2), "dim": self.dim} | more)

    @pytest.mark.parametrize("kind", CLASSES)
    def test_classes(self, place, kind):
        case = self.case(kind, (self.tokens,), place)
        check(differentiate(case), case)

    @pytest.mark.parametrize("kind", CLASSES)
    def test_packed_with_states(self, place, kind):
        case = self.case(kind, LENGTHS, place, heads=(2, 4), **BOTH)
        check(differentiate(case), case)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_options(self, place, name):
        kind, more = OPTIONS[name]
        case = self.case(kind, (2, 130), place, packed=False, **more)
        check(differentiate(case), case)

    @pytest.mark.parametrize("size", [1e-6, 1e4])
    def test_sizes_of_gradients(self, place, size):
        case = self.case("moderate", LENGTHS, place, **BOTH)
        assert case.dht is not None
        case = case.with_gradients((size * case.do.float()).to(case.do.dtype), size * case.dht)
        check(differentiate(case), case)

    def test_a_sequence_without_gradients(self, place):
        """Gives zeros, and those of the others do not change."""
        case = self.case("moderate", LENGTHS, place, **BOTH)
        assert case.dht is not None
        do, dht = case.do.clone(), case.dht.clone()
        do[:, : LENGTHS[0]], dht[0] = 0, 0
        before, after = differentiate(case), differentiate(case.with_gradients(do, dht))
        for name in NAMES:
            first = (0,) if name == "initial_state" else (slice(None), slice(LENGTHS[0]))
            rest = (
                (slice(1, None),)
                if name == "initial_state"
                else (slice(None), slice(LENGTHS[0], None))
            )
            assert not after[name][first].any() and same(after[name][rest], before[name][rest]), (
                name
            )


class TestOnCpu(Gradients):
    """The operator's implementation in torch."""

    tokens, dim = 70, 16


@pytest.mark.gpu
class TestOnGpu(Gradients):
    """The kernels."""

    @pytest.fixture
    def place(self, cuda: torch.device) -> torch.device:
        return cuda

    @pytest.mark.parametrize("heads", [(1, 1), (1, 8), (16, 16), (3, 6)], ids=str)
    def test_heads(self, place, heads):
        case = self.case("moderate", (300, 77), place, heads=heads, **BOTH)
        check(differentiate(case), case)

    def test_groups_of_heads(self, place, monkeypatch):
        """Have the same bits as all heads together."""
        case = self.case("moderate", (1, 700), place, packed=False, heads=(4, 8), **BOTH)
        together = differentiate(case)
        monkeypatch.setenv("CULA_SCRATCH_LIMIT", "0")
        for _ in range(20):
            apart = differentiate(case)
            assert all(same(together[name], apart[name]) for name in NAMES)

    @pytest.mark.parametrize(
        "lengths", [(1,) * 70, (64,) * 9, (0,) * 20 + (100,), (63, 65, 127, 129)], ids=len
    )
    def test_lengths(self, place, lengths):
        case = self.case("moderate", lengths, place, heads=(1, 2), **BOTH)
        check(differentiate(case), case)

    @pytest.mark.parametrize("cut", [False, True])
    @pytest.mark.parametrize("kind", CLASSES)
    def test_long_sequences(self, place, kind, cut):
        """Whole, and in segments."""
        case = self.case(kind, (4096,), place, heads=(1, 2), **BOTH)
        check(differentiate(case, use_intracard_cp=cut), case)

    def test_a_hundred_runs_have_the_same_bits(self, place):
        """Memory full of NaN between them, so that nothing that is not written is read."""
        case = self.case("mixed", LENGTHS, place, heads=(2, 4), **BOTH)
        first = differentiate(case)
        for _ in range(100):
            torch.full((1 << 22,), math.nan, device=place)
            again = differentiate(case)
            assert all(same(first[name], again[name]) for name in first)

    def test_nothing_waits_for_the_gpu(self, place):
        case = self.case("moderate", LENGTHS, place, **BOTH)
        differentiate(case)
        with unsynchronised():
            differentiate(case)

    def test_a_step_in_a_cuda_graph(self, place):
        """Replayed on other numbers and other lengths."""
        sizes = ((100, 0, 65), (1, 99, 65), (64, 64, 37))
        cases = [
            self.case("moderate", lengths, place, heads=(1, 2), seed=seed, **BOTH)
            for seed, lengths in enumerate(sizes)
        ]
        static, expected = cases[0], [differentiate(case) for case in cases]
        static = replace(static, given=static.given | {"g": static.given["g"].contiguous()})  # type: ignore[union-attr]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = differentiate(static)
        for case, wanted in zip(cases, expected):
            pairs = [(static.given[name], case.given[name]) for name in (*NAMES, "cu_seqlens")]
            for there, here in (*pairs, (static.do, case.do), (static.dht, case.dht)):
                if there is not None and here is not None:
                    there.copy_(here)
            graph.replay()
            assert all(same(found[name], wanted[name]) for name in wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"segment_tokens": 1024}], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", CLASSES)
def test_in_two_steps_on_a_gpu(cuda, kind, options):
    """What stands in front of slices, by other gradients behind them than those that all gradients follow by."""
    case = gradient_case(kind, (3100, 0, 70), cuda, heads=(1, 2), **BOTH)
    assert case.dht is not None
    early = case.with_gradients(case.do, case.dht * 1e-3)
    given = {name: x for name, x in case.given.items() if name not in ("A_log", "dt_bias")}
    given["g"] = given["g"][..., 0]  # type: ignore[index]
    left = ("safe_gate", "lower_bound", "state_v_first")
    flags = {name: x for name, x in case.flags.items() if name not in left} | options

    def finished(begun, dht) -> dict[str, torch.Tensor]:
        q, k, v, g, beta, rate, bias, front = begun.finish(dht)
        assert rate is bias is None
        return dict(zip(NAMES, (q, k, v, g, beta, front)))

    begun, whole = (
        begin_chunk_gated_delta_rule_backward(**given, do=case.do, **flags) for _ in range(2)
    )
    front = begun.front(early.dht)
    check(finished(begun, case.dht), case)
    expected = finished(whole, early.dht)
    check(expected, early)
    assert front.dtype == torch.float32 and same(front, expected["initial_state"])
