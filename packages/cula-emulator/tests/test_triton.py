"""PTX that Triton wrote (triton_ptx/make.py), under every schedule and with races detected."""

import re
from pathlib import Path

import pytest
import torch

import cula_emulator as emulator

PTX = Path(__file__).parent / "triton_ptx"


def launch(name, grid, arguments, schedule):
    text = (PTX / f"{name}.ptx").read_text()
    module = emulator.emulate(text)
    (kernel,) = module.kernels
    # Triton appends pointers to scratch memory, which these kernels do not use.
    unused = [None] * (len(module.parameters[kernel]) - len(arguments))
    shared = int(re.search(r"(\d+) bytes of dynamic shared memory", text)[1])
    place = {"shared_bytes": shared, "options": schedule}
    module.launch(kernel, grid, (128,), [*arguments, *unused], **place)


@pytest.mark.emulated(detect_races=True)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_softmax(arch, schedule):
    x = torch.randn(3, 200)
    out = torch.full_like(x, float("nan"))
    launch(f"softmax.{arch}", (3,), (x, out, 200), schedule)
    torch.testing.assert_close(out, x.softmax(1), rtol=1e-5, atol=1e-7)


@pytest.mark.emulated(detect_races=True)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_matmul(arch, schedule):
    """cp.async pipelines of three stages, ldmatrix, and mma.sync or wgmma."""
    a, b = torch.randn(64, 128).half(), torch.randn(128, 128).half()
    out = torch.full((64, 128), float("nan"))
    launch(f"matmul.{arch}", (1, 2), (a, b, out, 64, 128, 128), schedule)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-4, atol=1e-4)
