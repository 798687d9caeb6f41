"""Calls of vLLM and SGLang by kernels, eager and replayed from a CUDA graph with other sequences and more padding.

What they give is compared with the same call by the reference on the CPU in float64, whose own numbers other tests
compare with loops over tokens. The tests on the CPU run all of this but the kernels and the graph.
"""

from __future__ import annotations

import engine_calls_sglang
import engine_calls_vllm
import pytest
import torch
from engine_batches import Batch, Memory, Site
from torch import Tensor

from cula._registry import KERNELS_ONLY
from cula_testing.tensors import one_thread

BAR = 5e-3  # relative root mean square error
CASES = [
    pytest.param(site, dtype, id=f"{engine}-{name}-{str(dtype).removeprefix('torch.')}")
    for engine, sites in (("vllm", engine_calls_vllm.SITES), ("sglang", engine_calls_sglang.SITES))
    for name, site in sites.items()
    for dtype in site.pools
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def same(x: Tensor, y: Tensor) -> Tensor:
    """Where two tensors are equal to the bit, if they have one dtype."""
    return (x == y) | (x.isnan() & y.isnan())


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_near(found: Tensor, expected: Tensor, name: str) -> None:
    assert found.isfinite().all(), f"{name} has a number that is not finite"
    assert not found[expected == 0].any(), f"{name} is not zero in padding"
    if found.numel() == 0:
        return
    error = (found.double() - expected).norm() / expected.norm()
    assert error < BAR, f"{name}: relative RMSE {error:.2e}"


def assert_right(site: Site, batch: Batch, before: Memory, after: Memory, found: Memory) -> None:
    """Compares what a call returned, and left in memory that held `before`, with what the reference does.

    What the reference leaves as it is has to be the same to the bit.
    """
    exact = {
        name: x.double() if x.is_floating_point() and name != "decay" else x.clone()
        for name, x in before.items()
    }
    expected = site.call(exact, batch.live, "reference")
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        y = found[name].cpu()
        assert_near(y[: batch.live] if name == "o" else y, x, name)
    written = False
    for name, x in before.items():
        y, z = after[name].cpu(), exact[name]
        left = same(z, x.to(z.dtype))
        if name != "kept by rows":
            assert torch.equal(bits(y[left]), bits(x[left])), f"{name} changed where nobody writes"
            assert_near(y[~left], z[~left], name)
        written |= not bool(left.all())
    assert (written or expected.keys() > {"o"}) != site.reads, "states are to be written, or not"


@pytest.mark.parametrize(("site", "dtype"), CASES)
def test_the_same_calls_by_the_reference(site: Site, dtype: torch.dtype) -> None:
    with one_thread():
        for batch in site.batches:
            memory = site.operands(batch, 16, dtype)
            after = {name: x.clone() for name, x in memory.items()}
            found = site.call(after, batch.live, "reference")
            assert_right(site, batch, memory, after, found)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("site", "dtype"), CASES)
def test_kernels_serve_calls_of_engines(site: Site, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has a kernel for each of these calls")
    batches = [(batch, site.operands(batch, 128, dtype)) for batch in site.batches]
    (first, memory), rows = batches[0], site.batches[0].rows
    held = {name: x.cuda() for name, x in memory.items()}
    # No other than a kernel is asked: without one the call raises.
    found = site.call(held, rows, KERNELS_ONLY)
    assert_right(site, first, memory, held, found)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = site.call(held, rows, KERNELS_ONLY)
    for batch, memory in reversed(batches):
        for name, x in memory.items():
            held[name].copy_(x)
        for x in found.values():
            if not any(
                x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
                for y in held.values()
            ):
                x.fill_(float("nan"))
        graph.replay()
        assert_right(site, batch, memory, held, found)
