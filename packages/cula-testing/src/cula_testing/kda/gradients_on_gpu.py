"""The gradients of a package's kernels on a GPU, through autograd of its public function."""

from __future__ import annotations

import math

import pytest
import torch

from cula_core.reference.kda_backward import Gradients

from ..comparing import same
from ..tensors import unsynchronised
from .gradient_cases import CLASSES, NAMES, GradientCase, check, gradient_case, through_autograd
from .gradients import BOTH, GradientSuite
from .subject import Subject


class GradientsThroughAutograd(GradientSuite):
    """The suite, by the public function of a package and `backward()`."""

    subject: Subject

    def differentiate(self, case: GradientCase, **options) -> Gradients:
        """Options are those of the function beside the flags of the case."""
        return through_autograd(self.subject.package.chunk_kda, case, **options)


class GradientsOnGpu(GradientsThroughAutograd):
    """The kernels on a GPU."""

    pytestmark = pytest.mark.gpu
    tokens = 1024

    @pytest.fixture
    def place(self, cuda: torch.device) -> torch.device:
        return cuda

    @pytest.mark.parametrize("heads", [(1, 1), (1, 8), (16, 16), (3, 6)], ids=str)
    def test_heads(self, place, heads):
        case = self.case("moderate", (300, 77), place, heads=heads, **BOTH)
        check(self.differentiate(case), case)

    @pytest.mark.parametrize(
        "lengths", [(1,) * 70, (64,) * 9, (0,) * 20 + (100,), (63, 65, 127, 129)], ids=len
    )
    def test_lengths(self, place, lengths):
        case = self.case("moderate", lengths, place, heads=(1, 2), **BOTH)
        check(self.differentiate(case), case)

    @pytest.mark.parametrize("cut", [False, True])
    @pytest.mark.parametrize("kind", CLASSES)
    def test_long_sequences(self, place, kind, cut):
        """Whole, and in segments."""
        case = self.case(kind, (4096,), place, heads=(1, 1), **BOTH)
        check(self.differentiate(case, use_intracard_cp=cut), case)

    def test_a_hundred_runs_have_the_same_bits(self, place):
        """Memory full of NaN between them, so that nothing that is not written is read."""
        case = self.case("mixed", self.lengths, place, heads=(2, 4), **BOTH)
        first = self.differentiate(case)
        for _ in range(100):
            torch.full((1 << 22,), math.nan, device=place)
            assert all(map(same, first, self.differentiate(case)))  # type: ignore[arg-type]

    def test_views_have_the_bits_of_dense_tensors(self, place):
        """Slices of one projection, and gradients without strides."""
        case = self.case("moderate", (2, 200), place, packed=False, heads=(2, 2))
        names = ("q", "k", "v")
        joined = torch.stack([case.given[name] for name in names], 2)  # type: ignore[arg-type]
        views = case.given | {name: joined[:, :, i] for i, name in enumerate(names)}
        one = torch.ones((), dtype=case.do.dtype, device=place)
        dense = self.differentiate(case.with_gradients(torch.ones_like(case.do)))
        twin = GradientCase(case.kind, views, one.expand_as(case.do), None, case.rules)
        assert all(a is None or same(a, b) for a, b in zip(dense, self.differentiate(twin)))

    @pytest.mark.parametrize("options", [{}, {"segment_tokens": 1024}], ids=["whole", "cut"])
    def test_what_the_forward_keeps(self, place, options):
        """Gradients have the same bits as without it."""
        case = self.case("moderate", (3100, 1, 0, 65), place, heads=(1, 2), **BOTH)
        kept, again = (
            self.differentiate(case, disable_recompute=keep, **options) for keep in (True, False)
        )
        check(kept, case)
        assert all(map(same, kept, again))

    def test_nothing_waits_for_the_gpu(self, place):
        case = self.case("moderate", self.lengths, place, **BOTH)
        self.differentiate(case)
        with unsynchronised():
            self.differentiate(case)

    @pytest.mark.parametrize(
        "sizes, options",
        [
            (((100, 0, 65), (1, 99, 65), (64, 64, 37)), {}),
            (((3100, 0, 65), (1, 3099, 65), (1024, 1100, 1041)), {"segment_tokens": 1024}),
        ],
        ids=["whole", "cut"],
    )
    def test_a_step_in_a_cuda_graph(self, place, sizes, options):
        """Replayed on other numbers and other lengths."""
        cases = [
            gradient_case("near_zero", lengths, self.heads, device=place, seed=seed, **BOTH)
            for seed, lengths in enumerate(sizes)
        ]
        static = cases[0]
        expected = [self.differentiate(case, **options) for case in cases]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.differentiate(static, **options)
        for case, wanted in zip(cases, expected):
            pairs = [(static.given[n], case.given[n]) for n in (*NAMES, "cu_seqlens")]
            for there, here in (*pairs, (static.do, case.do), (static.dht, case.dht)):
                if there is not None and there is not here:
                    there.copy_(here)  # type: ignore[arg-type]
            graph.replay()
            assert all(map(same, found, wanted))  # type: ignore[arg-type]
