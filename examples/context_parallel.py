"""A sequence over the ranks of a process group, compared with one process.

python examples/context_parallel.py                              two processes on the CPU
torchrun --nproc-per-node 4 examples/context_parallel.py         one process per GPU, where there are any
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cula.distributed import ContextParallel
from cula.kda import chunk_kda


def run(device: torch.device) -> None:
    """Forward and backward of KDA, on this rank's slice of one sequence."""
    torch.manual_seed(0)  # every rank makes the whole sequence, and keeps its slice
    on_gpu = device.type == "cuda"
    tokens, heads, dim = (4096, 4, 128) if on_gpu else (200, 2, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    q, k, v = (torch.randn(1, tokens, heads, dim, dtype=dtype, device=device) for _ in range(3))
    g = -torch.rand(1, tokens, heads, dim, device=device)
    beta = torch.rand(1, tokens, heads, device=device)
    expected, _ = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)

    cp = ContextParallel(
        dist.group.WORLD, cu_seqlens_cpu=torch.tensor([0, tokens]), layout="zigzag"
    )
    cp.check()
    local = [cp.shard(x).clone().requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = chunk_kda(*local, use_qk_l2norm_in_kernel=True, cp_context=cp)
    o.float().square().sum().backward()
    error = (o - cp.shard(expected)).abs().max().item()
    print(f"rank {cp.rank} of {cp.ranks}: {o.shape[1]} tokens, difference {error:.1e}")
    assert error < (2e-2 if on_gpu else 1e-4)


def on_cpu(rank: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    run(torch.device("cpu"))
    dist.destroy_process_group()


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_cpu, (2, str(Path(folder) / "store")), nprocs=2)
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
