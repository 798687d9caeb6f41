"""Gradients on a Hopper GPU: against the oracle in fp64, bit for bit again, in a graph, without a synchronisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_oracle import Inputs, make
from torch import Tensor

from cula_lightning_sm90 import backward, chunk_simple_gla, lightning_attn_fwd_varlen, ops
from cula_testing.comparing import relative_rmse, same
from cula_testing.tensors import int32, unsynchronised

pytestmark = pytest.mark.gpu

RAGGED = [100, 1, 0, 63, 64, 65, 0, 128, 200, 1, 37]
LIMIT = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


@pytest.fixture
def hopper() -> torch.device:
    """The GPU; any other machine fails the test in one line."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.fail("needs a Hopper GPU; -m 'not gpu' leaves such tests out", pytrace=False)
    return torch.device("cuda", torch.cuda.current_device())


def incoming(x: Inputs, states: bool, size: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Gradients of the outputs and of the final states."""
    generator = torch.Generator(x.q.device).manual_seed(9)
    do = torch.randn(x.v.shape, generator=generator, device=x.q.device) * size
    dht = torch.randn(x.initial.shape, generator=generator, device=x.q.device) * size
    return do.to(x.v.dtype), dht if states else None


def found(
    x: Inputs, do: Tensor, dht: Tensor | None, v_first: bool = False, **options: Any
) -> list[Tensor]:
    """Gradients of q, k, v and, with states, of the initial ones [N, HV, K, V], by the kernels."""
    initial = None
    if dht is not None:
        initial = x.initial.mT.contiguous() if v_first else x.initial.clone()
        initial.requires_grad_()
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    o, final = chunk_simple_gla(
        *leaves, x.gate, None if x.decay is None else -x.decay, initial_state=initial, state_v_first=v_first,
        output_final_state=dht is not None, cu_seqlens=None if x.lengths is None else x.cu_seqlens(), **options,
    )  # fmt: skip
    results, given = [o], [do]
    if final is not None:
        results, given = [o, final.mT if v_first else final], [do, dht]
    grads = list(
        torch.autograd.grad(results, leaves + ([] if initial is None else [initial]), given)
    )
    if v_first and initial is not None:
        grads[3] = grads[3].mT
    return grads


def expected(
    x: Inputs, do: Tensor, dht: Tensor | None, l2norm: bool = False, of_decays: bool = False
) -> list[Tensor]:  # fmt: skip
    """The same in fp64: the plain torch form, which test_backward.py holds against the recurrence."""
    doubles = [t.double() for t in (x.q, x.k, x.v)]
    initial = None if dht is None else x.initial.double()
    return backward.gradients(
        ops.ON_CPU, do.double(), None if dht is None else dht.double(), *doubles,
        None if x.gate is None else x.gate.double(), x.decay, initial, None,
        None if x.lengths is None else x.cu_seqlens(), x.q.shape[3] ** -0.5, -1, False, l2norm, False, None, 0,
        of_decays,
    )  # fmt: skip


def assert_near(got: list[Tensor], want: list[Tensor], limit: float) -> None:
    """Every head of every gradient."""
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        heads = 1 if n == 3 else 2
        for head in range(a.shape[heads]):
            error = relative_rmse(a.select(heads, head), b.select(heads, head))
            assert error <= limit, ("q k v initial".split()[n], head, error)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("size", [(2, 129, 2, 4), (1, 1, 2, 2), (RAGGED, 0, 1, 3)], ids=str)
@pytest.mark.parametrize("states, v_first", [(False, False), (True, False), (True, True)])
def test_numbers(hopper, dtype, dims, size, states, v_first):
    for gate in (None, torch.float32):
        x = make(hopper, *size, dims, dtype=dtype, gate=gate)
        do, dht = incoming(x, states)
        assert_near(found(x, do, dht, v_first), expected(x, do, dht), LIMIT[dtype])


@pytest.mark.parametrize("gate", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size",
    [
        (1, 16384, 64, 64), (2, 4096, 16, 64), (1, 32768, 4, 8), (1, 2048, 1, 1), (1, 5000, 8, 8),
        ([5000, 1, 0, 999], 0, 4, 4),
    ],
    ids=str,
)  # fmt: skip
def test_large(hopper, gate, size):
    """The numbers of segments and tiles that the shapes ask for. The oracle takes some heads of many."""
    x = make(hopper, *size, gate=gate)
    do, dht = incoming(x, True)
    grads = found(x, do, dht)
    group = x.v.shape[2] // x.q.shape[2]
    for head in {0, x.q.shape[2] // 2, x.q.shape[2] - 1}:
        own, values = slice(head, head + 1), slice(head * group, (head + 1) * group)
        part = Inputs(
            x.q[:, :, own], x.k[:, :, own], x.v[:, :, values], None if x.decay is None else x.decay[values],
            None if x.gate is None else x.gate[:, :, values], x.lengths, x.initial[:, values],
        )  # fmt: skip
        want = expected(part, do[:, :, values], dht[:, values])
        got = [
            grads[0][:, :, own],
            grads[1][:, :, own],
            grads[2][:, :, values],
            grads[3][:, values],
        ]
        assert_near(got, want, LIMIT[torch.bfloat16])


@pytest.mark.parametrize("gate", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size",
    [(2, 300, 2, 4), (1, 8192, 8, 8), (RAGGED, 0, 1, 3), ([5000, 1, 0, 999], 0, 4, 4)],
    ids=str,
)
@pytest.mark.parametrize("states", [True, False])
def test_gradients_of_decays(hopper, gate, size, states):
    x = make(hopper, *size, gate=gate)
    do, dht = incoming(x, states)
    want = expected(x, do, dht, of_decays=True)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v, x.decay)]
    own = None if gate is None else x.gate.clone().requires_grad_()
    o, final = chunk_simple_gla(
        *leaves[:3], own, -leaves[3], initial_state=x.initial if states else None, output_final_state=states,
        cu_seqlens=None if x.lengths is None else x.cu_seqlens(),
    )  # fmt: skip
    results, given = ([o, final], [do, dht]) if states else ([o], [do])
    *grads, of_decay = torch.autograd.grad(
        results, [*leaves[:3], *([] if own is None else [own]), leaves[3]], given
    )
    if states:
        want.pop(3)
    assert_near(grads[:3], want[:3], LIMIT[torch.bfloat16])
    if own is not None:
        assert_near([grads[3]], want[3:4], LIMIT[torch.bfloat16])
        terms = want[3].abs().sum((0, 1))
        assert ((of_decay - want[4]).abs() <= LIMIT[torch.bfloat16] * terms).all()
    else:
        assert relative_rmse(of_decay, want[3]) <= 2e-2


@pytest.mark.parametrize("kind", ["strong", "mixed"])
def test_gates_that_forget(hopper, kind):
    """Where terms are not small and what is left of them is."""
    x = make(hopper, 1, 4096, 4, 4, gate=torch.float32, decay=False)
    uniform = torch.rand(
        x.gate.shape, device=hopper, generator=torch.Generator(hopper).manual_seed(3)
    )
    mixed = torch.where(uniform < 0.05, -20.0, torch.where(uniform > 0.97, -1e4, -1e-4))
    x.gate = mixed if kind == "mixed" else -2 - 3 * uniform
    do, _ = incoming(x, False)
    leaf = x.gate.clone().requires_grad_()
    o, _ = chunk_simple_gla(x.q, x.k, x.v, leaf)
    (grad,) = torch.autograd.grad(o, leaf, do)
    assert_near([grad], expected(x, do, None, of_decays=True)[3:], LIMIT[torch.bfloat16])


@pytest.mark.parametrize("dtype, largest", [(torch.bfloat16, 1e30), (torch.float16, 1e2)])
@pytest.mark.parametrize("small", [True, False])
def test_small_and_large_gradients(hopper, dtype, largest, small):
    x = make(hopper, 1, 300, 2, 2, dtype=dtype)
    size = 1e-6 if small else largest
    do, dht = incoming(x, True, size)
    got, want = found(x, do, dht), expected(x, do, dht)
    step = 2**-25 if dtype == torch.float16 else 0.0  # half of the smallest float16
    for a, b in zip(got, want, strict=True):
        error = (a.double() - b).norm()
        assert error <= LIMIT[dtype] * b.norm() + step * math.sqrt(b.numel())


def test_norms_inside(hopper):
    x = make(hopper, 2, 300, 2, 4)
    do, _ = incoming(x, False)
    got = found(x, do, None, use_qk_l2norm_in_kernel=True)
    assert_near(got, expected(x, do, None, l2norm=True), 6e-3)


def test_padding_and_a_pool_that_is_read(hopper):
    x = make(hopper, [100, 70, 130], 0, 2, 2)
    pool = torch.randn(6, *x.initial.shape[1:], device=hopper)
    do, _ = incoming(x, False)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v, pool)]
    o, _ = lightning_attn_fwd_varlen(
        *leaves[:3], x.decay, x.cu_seqlens(), state_pool=leaves[3], initial_state_indices=int32(4, -1, 0).to(hopper),
        update_state_pool=False,
    )  # fmt: skip
    *grads, of_pool = torch.autograd.grad(o, leaves, do)
    assert not any(grad[0, 100:170].any() for grad in grads) and not of_pool[[1, 2, 3, 5]].any()
    for first, end, row in ((0, 100, 4), (170, 300, 0)):
        part = Inputs(
            *(t[:, first:end] for t in (x.q, x.k, x.v)), x.decay, None, None, pool[row : row + 1]
        )
        own = do[:, first:end]
        want = expected(part, own, torch.zeros_like(part.initial))
        got = [*(grad[:, first:end] for grad in grads), of_pool[row : row + 1]]
        assert_near(got, want, LIMIT[torch.bfloat16])


@pytest.mark.parametrize(
    "size", [(1, 4096, 64, 64), (1, 8192, 8, 8), ([700, 1, 0, 1347], 0, 16, 16)], ids=str
)
def test_the_same_bits_again(hopper, size):
    x = make(hopper, *size)
    do, dht = incoming(x, True)
    first = found(x, do, dht)
    for _ in range(100):
        assert all(map(same, found(x, do, dht), first))


def test_views(hopper):
    """Slices of one projection, and a gradient that comes transposed or expanded, have the bits of dense tensors."""
    x = make(hopper, 2, 200, 4, 4)
    do, _ = incoming(x, False)
    want = found(x, do, None)
    whole = torch.full((2, 200, 4, 3 * 128), math.nan, dtype=x.q.dtype, device=hopper)
    views = [part.copy_(t) for part, t in zip(whole.split(128, -1), (x.q, x.k, x.v))]
    sliced = Inputs(*views, x.decay, None, None, x.initial)
    turned = do.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(map(same, found(sliced, turned, None), want))
    one = torch.ones((), dtype=do.dtype, device=hopper)
    assert all(map(same, found(x, one.expand_as(do), None), found(x, torch.ones_like(do), None)))


@pytest.mark.parametrize("splits", [1, 4])
def test_graph_replay_sees_new_contents(hopper, splits):
    """A step is captured after one call, and replayed with other lengths and inputs, without a synchronisation."""
    packings = [[1000, 0, 0], [100, 1, 899], [0, 437, 563]]
    x = make(hopper, packings[0], 0, 2, 2)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.decay)]
    cu, (do, _) = x.cu_seqlens(), incoming(x, False)

    def step() -> tuple[Tensor, ...]:
        o, _ = chunk_simple_gla(*leaves[:3], None, -leaves[3], cu_seqlens=cu, num_splits=splits)
        return torch.autograd.grad(o, leaves, do)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with unsynchronised():
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed, lengths in enumerate(packings):
        fresh = make(hopper, lengths, 0, 2, 2, seed=seed)
        with torch.no_grad():
            for leaf, t in zip(
                (*leaves, cu), (fresh.q, fresh.k, fresh.v, fresh.decay, fresh.cu_seqlens())
            ):
                leaf.copy_(t)
        want = step()
        graph.replay()
        assert all(map(same, results, want))
        assert_near(want[:3], expected(fresh, do, None), LIMIT[torch.bfloat16])
