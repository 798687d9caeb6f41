"""Gradients through the public function: of small heads on a CPU, and of the kernels on a GPU."""

import cula_cp_sm90
from cula_cp_sm90.arch import TARGET
from cula_testing import kda

SUBJECT = kda.Subject(cula_cp_sm90, TARGET)


class TestOnCpu(kda.GradientsThroughAutograd):
    subject = SUBJECT
    tokens, lengths, heads, dim = 200, (70, 1, 0, 64, 30), (1, 1), 32


class TestOnGpu(kda.GradientsOnGpu):
    subject = SUBJECT
