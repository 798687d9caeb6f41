"""Models sharded over two processes (FSDP2) train as they do in one."""

from __future__ import annotations

from multiprocessing import set_forkserver_preload
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_model import batch, gradients, loss, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS, BATCH, TOKENS, STEPS = 2, 4, 70, 2


def step(run: torch.nn.Module, x: torch.Tensor, parts: int) -> torch.Tensor:
    """One step over a batch cut into parts whose gradients are added up."""
    total = x.new_zeros(())
    for part in x.chunk(parts):
        value = loss(run, part) / parts
        value.backward()
        total += value.detach()
    return total


def train(run: torch.nn.Module, x: torch.Tensor, parts: int = 1) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(run.parameters(), lr=1e-3)
    seen = {}
    for number in range(STEPS):
        optimizer.zero_grad()
        seen[f"loss {number}"] = step(run, x, parts)
        seen |= {f"{number} {name}": grad for name, grad in gradients(run).items()}
        optimizer.step()
    return seen


def sharded(mixed: bool = False) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(torch.bfloat16 if mixed else None, torch.float32)
    run = model()
    for layer in run:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(run, mesh=mesh, mp_policy=policy)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    own = batch(BATCH, TOKENS).chunk(RANKS)[rank]
    cases = {
        "plain": train(sharded(), own),
        "accumulated": train(sharded(), own, parts=2),
        "mixed": train(sharded(mixed=True), own),
    }
    for seen in cases.values():
        for name, value in seen.items():
            if hasattr(value, "full_tensor"):
                seen[name] = value.full_tensor()
            else:
                dist.all_reduce(value)
                seen[name] = value / RANKS
    if rank == 0:
        torch.save(cases, f"{folder}/cases")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    folder: Path = tmp_path_factory.mktemp("world")
    # Both processes come from one that has imported torch, which takes longer than what they do.
    set_forkserver_preload([fully_shard.__module__])
    mp.start_processes(work, (str(folder),), RANKS, start_method="forkserver")
    return torch.load(folder / "cases")


@pytest.mark.parametrize("case", ["plain", "accumulated"])
def test_sharded_as_in_one_process(cases: dict[str, dict[str, torch.Tensor]], case: str) -> None:
    expected = train(model(), batch(BATCH, TOKENS))
    assert len(expected) == STEPS * 13
    torch.testing.assert_close(cases[case], expected, rtol=1e-4, atol=1e-5)


def test_parameters_of_16_bits(cases: dict[str, dict[str, torch.Tensor]]) -> None:
    """Gathered parameters and tokens are bfloat16, gradients are added up in float32."""
    exact, found = train(model(), batch(BATCH, TOKENS)), cases["mixed"]
    for name, want in exact.items():
        assert found[name].dtype == torch.float32
        error = (found[name] - want).norm() / want.norm()
        assert 0 < error < 3e-2, (name, error)
