"""Gradients through the public function: of small heads on a CPU, and of the kernels on a GPU."""

import pytest
import torch

import cula_cp_sm90
from cula_core.reference.kda_backward import Gradients
from cula_cp_sm90.arch import TARGET
from cula_testing import kda
from cula_testing.comparing import same
from cula_testing.kda.gradient_cases import CLASSES, check, gradient_case

SUBJECT = kda.Subject(cula_cp_sm90, TARGET)


class TestOnCpu(kda.GradientsThroughAutograd):
    subject = SUBJECT
    tokens, lengths, heads, dim = 200, (70, 1, 0, 64, 30), (1, 1), 32


class TestOnGpu(kda.GradientsOnGpu):
    subject = SUBJECT


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"segment_tokens": 1024}], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", CLASSES)
def test_in_two_steps_on_a_gpu(cuda, kind, options):
    """What stands in front of slices, by other gradients behind them than those that all gradients follow by."""
    case = gradient_case(kind, (3100, 0, 70), (1, 2), device=cuda, initial=True, dht=True)
    early = case.with_gradients(case.do, case.dht * 1e-3)
    flags = {name: x for name, x in case.flags.items() if name != "state_v_first"}
    begun = cula_cp_sm90.begin_chunk_kda_backward(**case.given, do=case.do, **flags, **options)
    front = begun.front(early.dht)
    found = begun.finish(case.dht)
    check(Gradients(*found), case)
    whole = Gradients(*cula_cp_sm90.begin_chunk_kda_backward(
        **case.given, do=case.do, **flags, **options
    ).finish(early.dht))  # fmt: skip
    check(whole, early)
    assert front.dtype == torch.float32 and same(front, whole.dh0)
