"""Calls of simple GLA over slices of sequences: all of them give what whole sequences give, forwards and backwards."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cula_lightning_sm90
from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90 import chunk_simple_gla, launch, ops, plan
from cula_testing.comparing import relative_rmse, same
from cula_testing.compiled import emulated_kernel
from cula_testing.slices import BOUNDS, LENGTHS, over_ranks
from cula_testing.tensors import int32, normals

MAX_ERROR = 3e-3
TOKENS = sum(LENGTHS)
# What decays a call has; and its other options.
CALLS = {
    "gates": ({"g"}, {}),
    "decays": ({"g_gamma"}, {"exact_state": True}),
    "both, norms inside": ({"g", "g_gamma"}, {"use_qk_l2norm_in_kernel": True, "scale": -0.3}),
    "none, fp16": (set(), {}),
}


@functools.cache
def problem(name: str) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Tokens by name, options, and initial states: two heads of values share keys."""
    decays, options = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    normal, dtype = normals(generator), torch.float16 if "fp16" in name else torch.bfloat16
    shapes = {"q": (1, 64), "k": (1, 64), "v": (2, 128)}
    tokens = {x: normal(1, TOKENS, *shape).to(dtype) for x, shape in shapes.items()}
    if "g" in decays:
        tokens["g"] = -0.05 * torch.rand(1, TOKENS, 2, generator=generator)
    more = {"g_gamma": torch.tensor([-0.01, -3.0])} if "g_gamma" in decays else {}
    return tokens, options | more, normal(len(LENGTHS), 2, 64, 128).float()


@pytest.fixture
def kernels(emulated, monkeypatch):
    """States alone come from emulated kernels, of sequences in several segments, and all else from the CPU."""

    def run(call: Any, multiprocessors: object, ends: bool) -> None:
        launch.run(
            call, multiprocessors=16, ends=ends,
            kernels=lambda config: emulated_kernel(emulated, launch.unit(config)),
        )  # fmt: skip

    monkeypatch.setattr(plan, "_MIN_SEGMENT", 64)
    monkeypatch.setattr(ops, "require_hopper", lambda _: None)
    monkeypatch.setattr(ops, "_launch", lambda: SimpleNamespace(run=run))


def on(device: torch.device | str, *given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{n: x.to(device) if isinstance(x, Tensor) else x for n, x in d.items()} for d in given]


def cu_seqlens(device: torch.device | str) -> Tensor:
    return int32(0, *LENGTHS).cumsum(0).to(device, torch.int32)


def assert_slices_right(name: str, bounds: tuple[int, ...], device: torch.device | str) -> None:
    tokens, options = on(device, *problem(name)[:2])
    initial = problem(name)[2].to(device)

    def begin(slices: Any, **given: Any) -> Any:
        begun = cula_lightning_sm90.begin_chunk_simple_gla(slices=slices, **given, **options)
        going = [part for part in slices if part.goes_on]
        assert all(matrix is None for _, matrix in begun.maps)
        # Who exchanges the maps multiplies a state by the decay of all tokens.
        begun.maps = [
            (added, decay_of(part, **given) if part.comes_on else None)
            for part, (added, _) in zip(going, begun.maps, strict=True)
        ]
        return begun

    def decay_of(part: Any, g: Tensor | None = None, **_: Any) -> Tensor:
        total = torch.zeros(2, device=device)
        if g is not None:
            total = total + g[0, part.start : part.stop].sum(0)
        if "g_gamma" in options:
            total = total + options["g_gamma"] * (part.stop - part.start)
        return torch.eye(64, device=device) * total.exp()[:, None, None]

    found = over_ranks(begin, tokens, initial, bounds)
    want = chunk_simple_gla(
        **tokens, **options, initial_state=initial, output_final_state=True,
        cu_seqlens=cu_seqlens(device),
    )  # fmt: skip
    for x, y in zip(found, want, strict=True):
        assert relative_rmse(x, y.cpu()) <= MAX_ERROR


def assert_gradients_right(name: str, packed: bool, device: torch.device | str) -> None:
    """Those in front follow by other gradients behind than all the others, which have the bits of a whole backward."""
    tokens, options = on(device, *problem(name)[:2])
    initial, offsets = problem(name)[2].to(device), cu_seqlens(device)
    if not packed:
        initial, offsets = initial[:1], int32(0, TOKENS).to(device)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(1, TOKENS, 2, 128, generator=generator).to(device, tokens["v"].dtype)
    early, dht = (torch.randn(initial.shape, generator=generator).to(device) for _ in range(2))
    given = tokens | {n: x for n, x in options.items() if n == "g_gamma"}
    given |= {"initial_state": initial}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in given.items()}

    def gradients(leaves: dict[str, Tensor], behind: Tensor) -> dict[str, Tensor]:
        place = leaves["q"].device
        results = chunk_simple_gla(
            **options | leaves, output_final_state=True,
            cu_seqlens=offsets.to(place) if packed else None,
        )  # fmt: skip
        of_results = [d.to(x) for d, x in zip((do, behind), results, strict=True)]
        found = torch.autograd.grad(results, [*leaves.values()], of_results)
        return dict(zip(leaves, found, strict=True))

    with torch.no_grad():
        begun = cula_lightning_sm90.begin_chunk_simple_gla_backward(
            **options | leaves, cu_seqlens=offsets, do=do
        )
        begun.prepare()
        front = begun.front(early)
        found = dict(zip(begun.gives, begun.finish(dht), strict=True))
    wide = {
        n: x.detach().cpu().to(torch.float32 if n == "g_gamma" else torch.float64).requires_grad_()
        for n, x in leaves.items()
    }
    assert front.dtype == torch.float32
    assert relative_rmse(front.cpu(), gradients(wide, early)["initial_state"]) <= MAX_ERROR
    whole = gradients(leaves, dht)
    assert whole.keys() == {n for n, x in found.items() if x is not None}
    for n, x in whole.items():
        assert same(found[n], x), n


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("name", CALLS)
def test_slices_over_ranks(kernels, name, bounds):
    with poisoned_memory():
        assert_slices_right(name, bounds, "cpu")


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_in_two_steps(kernels, name, packed):
    with poisoned_memory():
        assert_gradients_right(name, packed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("name", CALLS)
def test_slices_over_ranks_on_a_gpu(cuda, monkeypatch, name, bounds):
    monkeypatch.setattr(plan, "_MIN_SEGMENT", 64)
    torch.full((1 << 26,), float("nan"), device=cuda)
    assert_slices_right(name, bounds, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_in_two_steps_on_a_gpu(cuda, monkeypatch, name, packed):
    monkeypatch.setattr(plan, "_MIN_SEGMENT", 64)
    torch.full((1 << 26,), float("nan"), device=cuda)
    assert_gradients_right(name, packed, cuda)


@pytest.mark.parametrize("multiprocessors", [78, 132])
@pytest.mark.parametrize("columns", [2, 32, 128, 200])
@pytest.mark.parametrize("reverse", [False, True])
def test_hardly_any_outputs_beside_states(columns, multiprocessors, reverse):
    """Of long sequences the segment that comes last, the only one with outputs, is a small part."""
    for tokens in (1, 63, 64, 65, 1024, 1025, 5000, 65536, 65600, 1 << 20):
        cut = plan.segment_for_states(columns, tokens, multiprocessors, reverse)
        assert cut % 64 == 0 and cut < tokens
        if not cut:
            assert tokens <= (2047 if reverse else 64)
            continue
        last = cut if reverse else tokens - (-(-tokens // cut) - 1) * cut
        most = -(-tokens // min(tokens // 1024, 16)) + 63 if reverse else 17 * 64
        assert 0 < last <= most
        # And what is scanned in front of it keeps the GPU busy.
        assert -(-tokens // cut) - 1 >= min(
            multiprocessors // columns, (tokens - 1) // 1024 - reverse, 15
        )
