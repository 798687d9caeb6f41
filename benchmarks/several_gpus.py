"""Measures operators whose tokens lie on several GPUs, beside the same call on one.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 8 benchmarks/several_gpus.py [--providers cula fla] [--json [PATH]]
        [--ops OP ...] [--passes forward step] [--tokens T ...] [--heads H ...] [--exchanges gather transpose]
        [--steps eager graph]

Exit codes: 0 measured, 2 wrong arguments or no GPUs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
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
from benchmarks.harness.timers import percentile

TITLE = "One sequence on several GPUs"
NOTES = (
    "One sequence in bfloat16 with random inputs. A forward of cula returns the final state, and no gradients are "
    "wanted; a step is forward and backward with gradients of q, k, v, g and beta. The gates of KDA are computed "
    "inside, with lower bound -5 and decays per token from .999 to .9.",
    "Every sample begins behind a barrier, after 20 ms without work, so that clocks are those of bursts; the time is "
    "that of the slowest rank. Ranks are processes with NCCL, without NVLink multicast (NCCL_NVLS_ENABLE=0).",
    "Equal: as many tokens on every rank. Balanced: the bounds of `cula.distributed.balanced_bounds`.",
)
NOTE_OF_FLA = "Flash-linear-attention chooses among its candidates with 16,384 tokens a rank."
OPS = ("kda", "gated_delta_rule", "simple_gla")
OF_FLA = ("kda", "gated_delta_rule")  # which of them it has across ranks
TOKENS, HEADS = (131072, 262144, 1048576), (64, 16)
DIM = 128
SLAB = 8192  # tokens that are drawn from one seed
TUNED = 16384  # tokens of a rank with which FLA chooses among its candidates
Call = Callable[..., Any]


def calls(op: str, provider: str) -> Call:
    """The function of an operator, as `f(q, k, v, g, beta, **options)`."""
    from cula.kda import chunk_kda
    from cula.lightning import chunk_gated_delta_rule, chunk_simple_gla

    if provider == "fla":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as gdn_of_fla
        from fla.ops.kda import chunk_kda as kda_of_fla

        return {"kda": kda_of_fla, "gated_delta_rule": gdn_of_fla}[op]
    if op == "simple_gla":
        return lambda q, k, v, g, beta, **options: chunk_simple_gla(q, k, v, g, **options)
    return {"kda": chunk_kda, "gated_delta_rule": chunk_gated_delta_rule}[op]


def inputs(
    op: str, tokens: int, heads: int, device: Any, own: tuple[int, int] | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """q, k, v, g, beta of the tokens from own[0] to own[1] (of all), and options. Ranks draw their own alone."""
    import torch

    first, last = own or (0, tokens)
    wide, narrow = (heads, DIM), (heads,)
    shapes = [wide, wide, wide, wide if op == "kda" else narrow, narrow]
    dtypes = [torch.bfloat16 if shape is wide else torch.float32 for shape in shapes]
    given = [
        torch.empty(1, last - first, *shape, dtype=dtype, device=device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    for start in range(first // SLAB * SLAB, last, SLAB):
        generator = torch.Generator(device).manual_seed(start)
        begin, end = max(start, first), min(start + SLAB, last)
        for x in given:
            draw = torch.randn if x.ndim == 4 else torch.rand
            drawn = draw(SLAB, *x.shape[2:], generator=generator, device=device, dtype=x.dtype)
            x[0, begin - first : end - first] = drawn[begin - start : end - start]
    if op != "kda":
        given[3] *= -0.1
        return given, {} if op == "simple_gla" else {"use_qk_l2norm_in_kernel": True}
    # -5 sigmoid(x): from -.001 to -.1 where x is about -6.
    rate, bias = torch.zeros(heads, device=device), torch.full((heads * DIM,), -6.0, device=device)
    options = {
        "A_log": rate, "dt_bias": bias, "use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return given, options


def warmed(call: Call) -> Call:
    for _ in range(2):  # the second may find less free memory than the first
        call()
    return call


def captured(call: Call, marked: Call | None = None) -> Call:
    """Replays a call as a CUDA graph. marked: the same call with events in it, to be recorded in its place."""
    import torch

    warmed(call)
    torch.cuda.synchronize()
    free_memory()  # a graph has memory of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (marked or call)()
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
    return summary(slowest.tolist())


def summary(times: Sequence[float]) -> dict[str, float]:
    """The median, and the 20th and 80th percentile."""
    low, middle, high = (percentile(times, percent) for percent in (20, 50, 80))
    return {"ms": round(middle, 4), "p20_ms": round(low, 4), "p80_ms": round(high, 4)}


def free_memory() -> None:
    """Gives back what nobody refers to any more."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def contexts(
    provider: str, tokens: int, heads: int, exchange: str, device: Any
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """What is passed as `cp_context`, with the bounds of the ranks and what they are called."""
    import torch
    import torch.distributed as dist

    from benchmarks.ops.kda import rank_model
    from cula.distributed import ContextParallel

    ranks = dist.get_world_size()
    whole = torch.tensor([0, tokens])
    equal, balanced = (
        tuple(rank_model.bounds_of(which, tokens, heads, ranks)) for which in rank_rows.BOUNDS
    )
    if provider == "fla":
        from fla.ops.cp import build_cp_context

        offsets = whole.to(device, torch.int32)
        yield "equal", build_cp_context(offsets, dist.group.WORLD, cu_seqlens_cpu=whole), equal
        return
    for name, bounds in zip(rank_rows.BOUNDS, (equal, balanced), strict=True):
        if name == "equal" or bounds != equal:
            cp = ContextParallel(
                dist.group.WORLD, cu_seqlens=whole, bounds=bounds, exchange=exchange
            )
            cp.check()
            yield name, cp, bounds


def passed(which: str, function: Call, given: list[Any], options: dict[str, Any]) -> Call:
    """A pass as a function without arguments, which returns outputs, and in a step all gradients behind them."""
    import torch

    if which == "forward":
        return lambda: [function(*given, **options)[0]]
    leaves = [x.detach().requires_grad_() for x in given]
    # A gradient of the outputs that is at hand: it has their shape and dtype.
    from_above = given[2]

    def step() -> list[Any]:
        with torch.enable_grad():
            o = function(*leaves, **options)[0]
        gradients = torch.autograd.grad(o, leaves, from_above, allow_unused=True)
        return [o.detach(), *(x for x in gradients if x is not None)]  # simple GLA has no beta

    return step


def handed_on(function: Call, given: list[Any], options: dict[str, Any]) -> Any:
    """Outputs of this rank's tokens where the ranks call one after the other, each with the state behind the last."""
    import torch
    import torch.distributed as dist

    state = torch.zeros(1, given[0].shape[2], DIM, DIM, device=given[0].device)
    o = None
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            o, state = function(*given, initial_state=state, output_final_state=True, **options)
        dist.broadcast(state, rank)
    return o


def rmse(found: Any, exact: Any) -> float:
    """Relative RMSE, of the worst rank."""
    import torch
    import torch.distributed as dist

    # Summed in pieces: a copy in float32 need not fit.
    sums = torch.zeros(2, device=found.device, dtype=torch.float64)
    for a, b in zip(found.split(SLAB, 1), exact.split(SLAB, 1), strict=True):
        sums += torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
    error = (sums[0] / sums[1]).sqrt()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return round(error.item(), 7)


def tune(op: str, which: str, heads: int, device: Any) -> None:
    """FLA tunes itself in its first calls, for all lengths: on a rank by itself and across ranks. With long sequences
    that takes many minutes."""
    import torch.distributed as dist

    ((_, cp, _),) = contexts("fla", TUNED * dist.get_world_size(), heads, "auto", device)
    given, options = inputs(op, TUNED, heads, device)
    for context in (None, cp):
        function = functools.partial(calls(op, "fla"), cp_context=context)
        passed(which, function, given, options)()


def on_one(
    run: Callable[[], Call], prepare: Callable[[Call], Call], count: int
) -> tuple[dict[str, float], list[Any]] | None:
    """Times and results of a call on every rank by itself; None where one has too little memory."""
    import torch
    import torch.distributed as dist

    replay = None
    try:
        call = run()
        replay = prepare(call)
    except torch.OutOfMemoryError:
        pass
    fits = torch.tensor(int(replay is not None), device="cuda")
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    if not fits.item():
        return None
    times = timed(replay, count)
    del replay  # with the memory of a graph
    free_memory()
    return times, call()


def collective(heads: int, exchange: str) -> tuple[Any, Call]:
    """A message with the maps of a rank, and what sends it as an exchange does."""
    import torch
    import torch.distributed as dist

    from cula.distributed.exchange import all_gather, all_to_all, by_heads, shares

    rank, ranks = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(1, heads, DIM, DIM * (1 if ranks == 2 else 2), device="cuda")
    if not by_heads(exchange, ranks, message.nbytes * (ranks - 1)):
        return message, lambda: all_gather(message, dist.group.WORLD)
    of_ranks = shares(heads, ranks)
    rows = message.squeeze(0)
    return message, lambda: all_to_all(rows, [of_ranks[rank]] * ranks, of_ranks, dist.group.WORLD)


def measure(
    op: str,
    which: str,
    tokens: int,
    heads: int,
    provider: str,
    exchange: str,
    method: str,
    count: int,
) -> list[dict[str, Any]]:
    """The rows of a pass."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    whole = function = calls(op, provider)
    if provider == "cula" and which == "forward":
        # FLA neither takes nor returns states beside a context, and a step does not ask for them.
        whole = functools.partial(function, output_final_state=True)
    prepare = captured if method == "graph" else warmed
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ways = list(contexts(provider, tokens, heads, exchange, device))
    own = {bounds: (bounds[rank], bounds[rank + 1]) for _, _, bounds in ways}
    rows, one, exact = [], dict.fromkeys(("ms", "p20_ms", "p80_ms")), {}
    with torch.no_grad():
        if provider == "fla":
            tune(op, which, heads, device)
        found = on_one(
            lambda: passed(which, whole, *inputs(op, tokens, heads, device)), prepare, count
        )
        if found:
            one, expected = found
            exact = {b: [x[:, slice(*o)].clone() for x in expected] for b, o in own.items()}
            del expected
        del found
        free_memory()
        message, send = collective(heads, exchange)
        alone = timed(captured(send), count)
        for name, cp, bounds in ways:
            given, options = inputs(op, tokens, heads, device, own[bounds])
            right = exact.pop(bounds) if exact else [handed_on(function, given, options)]
            call = passed(which, functools.partial(whole, cp_context=cp), given, options)
            # Behind ranks that hand states on there are no gradients.
            errors = [rmse(x, y) for x, y in zip(call(), right, strict=False)]
            del right
            together = timed(prepare(call), count)
            rows.append({
                "op": op, "tokens": tokens, "heads": heads, "ranks": ranks, "bounds": name, "exchange": exchange,
                "provider": provider, "pass": which, "method": method, **together,
                **{f"one_{key}": ms for key, ms in one.items()}, "samples": count, "message_bytes": message.nbytes,
                "collective_ms": alone["ms"], "error": errors[0], "gradient_error": max(errors[1:], default=None),
            })  # fmt: skip
            del call
            if rank == 0:
                print(
                    report.as_text(rank_rows.table({"rows": rows[-1:]})),
                    file=sys.stderr,
                    flush=True,
                )
    return rows


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, str, int, int, str, str, str]]:
    """Operator, pass, tokens, heads, provider, exchange and method of every call."""
    sizes = itertools.product(args.passes, args.ops, args.tokens, args.heads, args.providers)
    for which, op, tokens, heads, provider in sizes:
        if provider == "cula":
            methods = args.steps if which == "step" else ["graph"]
            for exchange, method in itertools.product(args.exchanges, methods):
                yield op, which, tokens, heads, provider, exchange, method
        elif op in OF_FLA:
            yield op, which, tokens, heads, provider, "auto", "eager"


def refused(call: Sequence[Any], error: Exception) -> dict[str, str]:
    """What flash-linear-attention did not do, and why: what it refuses, or has too little memory for."""
    row = dict(zip(("op", "pass", "tokens", "heads", "provider"), call, strict=False))
    reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
    return {"call": f"{row['provider']}, {rank_rows.size(row)}", "reason": reason}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures operators on several GPUs, under torchrun."
    )
    for name, known, default in (
        ("providers", ("cula", "fla"), ("cula",)),
        ("ops", OPS, OPS),
        ("passes", rank_rows.PASSES, rank_rows.PASSES),
        ("exchanges", rank_rows.EXCHANGES, ("auto",)),
        ("steps", rank_rows.METHODS, ("eager",)),
    ):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=list(default))
    for name, sizes in (("tokens", TOKENS), ("heads", HEADS)):
        parser.add_argument(f"--{name}", nargs="+", type=int, default=list(sizes))
    parser.add_argument("--samples", type=int, default=20)
    add_json(parser, f"several_gpus_x<ranks>[{rank_rows.OF_FLA}]")
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
    op = f"several_gpus_x{ranks}" + (rank_rows.OF_FLA if "fla" in args.providers else "")
    if op not in rank_rows.OPS or torch.cuda.device_count() < ranks:
        return fail("expected torchrun with 2, 4 or 8 processes, and a GPU for each")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    origin = {**provenance(), "clocks_before": read_smi()}
    content: dict[str, Any] = {
        "title": TITLE, "provenance": origin, "notes": [*NOTES, *[NOTE_OF_FLA] * ("fla" in args.providers)],
        "skipped": [], "rows": [],
    }  # fmt: skip
    path = json_path(args.json, op, gpu_slug(origin["gpu"]))
    for call in wanted(args):
        try:
            content["rows"] += measure(*call, args.samples)
        except RuntimeError as error:
            if "cula" in call:
                raise
            content["skipped"].append(refused(call, error))
        free_memory()
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
