"""Measures operators whose tokens lie on several GPUs, beside the same call on one.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/several_gpus.py [--providers cula fla] [--json [PATH]]

Exit codes: 0 measured, 2 wrong arguments or no GPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import rank_rows, report, results
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi

TITLE = "One sequence on several GPUs"
NOTES = (
    "One sequence in bfloat16 with random inputs and the final state; forward passes without gradients. The gates of "
    "KDA are computed inside, with lower bound -5 and decays per token from .999 to .9.",
    "Every sample begins behind a barrier, after 20 ms without work, so that clocks are those of bursts; the time is "
    "that of the slowest rank. Ranks are processes with NCCL, without NVLink multicast (NCCL_NVLS_ENABLE=0).",
    "Equal: as many tokens on every rank. Balanced: the bounds of `cula.distributed.balanced_bounds`.",
)
SIZES = ((131072, 64), (262144, 64), (131072, 16), (262144, 16), (32768, 64))
OF_FLA = ((131072, 64), (131072, 16))
DIM = 128
Call = Callable[..., Any]


def calls(op: str, provider: str) -> Call:
    """The function of an operator, as `f(q, k, v, g, beta, **options)`."""
    from cula.kda import chunk_kda
    from cula.lightning import chunk_gated_delta_rule, chunk_simple_gla

    if provider == "fla":
        from fla.ops.kda import chunk_kda as of_fla

        return of_fla
    if op == "simple_gla":
        return lambda q, k, v, g, beta, **options: chunk_simple_gla(q, k, v, g, **options)
    return {"kda": chunk_kda, "gated_delta_rule": chunk_gated_delta_rule}[op]


def inputs(op: str, tokens: int, heads: int, device: Any) -> tuple[list[Any], dict[str, Any]]:
    """q, k, v, g, beta, and options."""
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    shape = (1, tokens, heads, DIM)
    q, k, v = (normal(*shape) for _ in range(3))
    beta = torch.rand(shape[:3], generator=generator, device=device)
    if op == "kda":
        # -5 sigmoid(x): from -.001 to -.1 where x is about -6.
        rate, bias = (
            torch.zeros(heads, device=device),
            torch.full((heads * DIM,), -6.0, device=device),
        )
        options = {
            "A_log": rate, "dt_bias": bias, "use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0,
            "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip
        return [q, k, v, normal(*shape), beta], options
    g = -0.1 * torch.rand(shape[:3], generator=generator, device=device)
    return [q, k, v, g, beta], {} if op == "simple_gla" else {"use_qk_l2norm_in_kernel": True}


def captured(call: Call) -> Call:
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(call: Call, count: int) -> dict[str, float]:
    """ms of the slowest rank."""
    import torch
    import torch.distributed as dist

    for _ in range(3):
        call()
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        time.sleep(0.02)
        dist.barrier()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    low, middle, high = (statistics.quantiles(slowest.tolist(), n=10)[i] for i in (1, 4, 7))
    return {"ms": round(middle, 4), "p20_ms": round(low, 4), "p80_ms": round(high, 4)}


def contexts(
    provider: str, tokens: int, heads: int, device: Any
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """What is passed as `cp_context`, with the bounds of the ranks and what they are called."""
    import torch
    import torch.distributed as dist

    from cula.distributed import ContextParallel, balanced_bounds

    ranks = dist.get_world_size()
    whole = torch.tensor([0, tokens])
    equal = tuple(tokens * r // ranks for r in range(ranks + 1))
    if provider == "fla":
        from fla.ops.cp import build_cp_context

        offsets = whole.to(device, torch.int32)
        yield "equal", build_cp_context(offsets, dist.group.WORLD, cu_seqlens_cpu=whole), equal
        return
    for name, bounds in (("equal", equal), ("balanced", balanced_bounds(tokens, ranks, heads))):
        if name == "equal" or tuple(bounds) != equal:
            cp = ContextParallel(dist.group.WORLD, cu_seqlens=whole, bounds=bounds)
            cp.check()
            yield name, cp, tuple(bounds)


def measure(op: str, tokens: int, heads: int, provider: str, count: int) -> list[dict[str, Any]]:
    """The rows of a call."""
    import torch
    import torch.distributed as dist

    from cula.distributed.exchange import all_gather

    device = torch.device("cuda", torch.cuda.current_device())
    function, method = calls(op, provider), "eager" if provider == "fla" else "graph"
    prepare = captured if method == "graph" else lambda call: call
    given, options = inputs(op, tokens, heads, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = []
    with torch.no_grad():
        expected = function(*given, output_final_state=True, **options)[0]
        one = timed(prepare(lambda: function(*given, output_final_state=True, **options)), count)
        message = torch.zeros(1, heads, DIM, DIM * (1 if ranks == 2 else 2), device=device)
        alone = timed(captured(lambda: all_gather(message, dist.group.WORLD)), count)
        for name, cp, bounds in contexts(provider, tokens, heads, device):
            own = slice(*bounds[rank : rank + 2])
            local = [x[:, own].contiguous() for x in given]
            # FLA neither takes nor returns states beside a context.
            more = {} if provider == "fla" else {"output_final_state": True}

            def call(local: list[Any] = local, cp: Any = cp, more: dict[str, Any] = more) -> Any:
                return function(*local, **options, **more, cp_context=cp)

            exact, found = expected[:, own].float(), call()[0].float()
            error = (found - exact).norm() / exact.norm()
            del exact, found
            dist.all_reduce(error, dist.ReduceOp.MAX)
            together = timed(prepare(call), count)
            rows.append({
                "op": op, "tokens": tokens, "heads": heads, "ranks": ranks, "bounds": name, "provider": provider,
                "method": method, **together, **{f"one_{key}": ms for key, ms in one.items()}, "samples": count,
                "message_bytes": message.nbytes, "collective_ms": alone["ms"], "error": round(error.item(), 7),
            })  # fmt: skip
            if rank == 0:
                print(
                    report.as_text(rank_rows.table({"rows": rows[-1:]})),
                    file=sys.stderr,
                    flush=True,
                )
    return rows


def wanted(providers: Sequence[str]) -> Iterator[tuple[str, int, int, str]]:
    """Operator, tokens, heads and provider of every call."""
    if "cula" in providers:
        yield from (("kda", *size, "cula") for size in SIZES)
        yield from ((op, *SIZES[0], "cula") for op in ("gated_delta_rule", "simple_gla"))
    if "fla" in providers:
        yield from (("kda", *size, "fla") for size in OF_FLA)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures operators on several GPUs, under torchrun."
    )
    parser.add_argument("--providers", nargs="+", choices=("cula", "fla"), default=["cula"])
    parser.add_argument("--samples", type=int, default=20)
    add_json(parser, rank_rows.OP)
    args = parser.parse_args(argv)
    if args.samples < 2:
        parser.error("--samples: expected at least two")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    rank, ranks = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    if ranks < 2 or torch.cuda.device_count() < ranks:
        return fail("expected torchrun with at least two processes, and a GPU for each")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    origin = {**provenance(), "clocks_before": read_smi()}
    content: dict[str, Any] = {
        "title": TITLE, "provenance": origin, "notes": list(NOTES), "skipped": [], "rows": [],
    }  # fmt: skip
    path = json_path(args.json, rank_rows.OP, gpu_slug(origin["gpu"]))
    for op, tokens, heads, provider in wanted(args.providers):
        content["rows"] += measure(op, tokens, heads, provider, args.samples)
        gc.collect()
        torch.cuda.empty_cache()
        content["provenance"]["clocks_after"] = read_smi()
        rank_rows.validate(content)
        if args.json is not None and rank == 0:  # after every call, because all take minutes
            results.write(content, path)
    dist.destroy_process_group()
    if rank == 0:
        print(report.as_text(rank_rows.table(content)))
        print(report.machine(content["provenance"]))
        if args.json is not None:
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
