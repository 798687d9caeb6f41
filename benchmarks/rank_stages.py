"""Measures on one GPU what each of several GPUs computes of an operator, without what travels between them.

    python benchmarks/rank_stages.py [--json [PATH]] [--ops OP ...] [--passes forward step] [--ranks 2 4 8]
        [--tokens T ...] [--heads H ...] [--exchanges gather transpose]

Its process group has as many ranks as it is asked for, but one process, which is one of these ranks after the other. A
collective puts this rank's own message where those of others belong. A stage is what a rank does between two of them.
Results are those of no sequence; stages last as long as they would, but for how much power the numbers draw.

Exit codes: 0 measured, 2 wrong arguments or no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import several_gpus
from benchmarks.harness import rank_rows, report, results, stage_rows
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi

TITLE = "What each of several GPUs computes"
NOTES = (
    "One sequence in bfloat16 with random inputs, in equal slices. A forward returns the final state, and no gradients "
    "are wanted; a step is forward and backward with gradients of q, k, v, g and beta. The gates of KDA are computed "
    "inside, with lower bound -5 and decays per token from .999 to .9.",
    "One GPU is one rank after the other, in a process group whose collectives copy the rank's own message. CUDA "
    "graphs are replayed, each after 20 ms without work, so that clocks are those of bursts; events in them lie around "
    "each collective, whose time does not count.",
)
COLLECTIVES = ("all_gather", "all_to_all")


class HostEvent:
    """In place of an event of a GPU, where there is none."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: HostEvent) -> float:
        return (other._at - self._at) * 1e3


def event(device: Any) -> Any:
    """One whose record in a CUDA graph is a node of that graph."""
    import torch

    if device.type != "cuda":
        return HostEvent()
    return torch.cuda.Event(enable_timing=True, external=True)


@contextlib.contextmanager
def one_of(rank: int, ranks: int, device: Any) -> Iterator[Any]:
    """A mesh of so many ranks, of which this is the only one there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        yield DeviceMesh.from_group(group, device.type)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def watched(device: Any, seen: list[Any]) -> Iterator[None]:
    """Puts events around every collective into `seen`."""
    from cula.distributed import exchange

    def between(collective: Callable[..., Any], *arguments: Any) -> Any:
        first, last = event(device), event(device)
        first.record()
        found = collective(*arguments)
        last.record()
        seen.extend((first, last))
        return found

    real = {name: getattr(exchange, name) for name in COLLECTIVES}
    try:
        for name, collective in real.items():
            setattr(exchange, name, functools.partial(between, collective))
        yield
    finally:
        for name, collective in real.items():
            setattr(exchange, name, collective)


def stages(call: Callable[[], Any], device: Any, count: int) -> list[list[float]]:
    """ms of every stage of a call: medians, and the 20th and 80th percentiles."""
    import torch

    marks: list[Any] = []

    def marked() -> None:
        marks[:] = [event(device)]
        marks[0].record()
        with watched(device, marks):
            call()
        marks.append(event(device))
        marks[-1].record()

    replay = several_gpus.captured(call, marked) if device.type == "cuda" else marked
    times = []
    for sample in range(count + 2):
        time.sleep(0.02)
        replay()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if sample >= 2:
            pairs = zip(marks[::2], marks[1::2], strict=True)
            times.append([first.elapsed_time(last) for first, last in pairs])
    return [list(several_gpus.summary(of_stage).values()) for of_stage in zip(*times, strict=True)]


def prepared(
    op: str,
    which: str,
    tokens: int,
    heads: int,
    device: Any,
    own: tuple[int, int] | None,
    **more: Any,
) -> Callable[[], Any]:
    """A pass over the tokens own[0] to own[1], or all."""
    function = several_gpus.calls(op, "cula")
    if which == "forward":
        function = functools.partial(function, output_final_state=True)
    given, options = several_gpus.inputs(op, tokens, heads, device, own)
    return several_gpus.passed(which, functools.partial(function, **more), given, options)


def alone(
    op: str, which: str, tokens: int, heads: int, device: Any, count: int
) -> list[float] | None:
    """A call on one GPU that holds all tokens; None where none does."""
    import torch

    try:
        ((*times,),) = stages(prepared(op, which, tokens, heads, device, None), device, count)
    except torch.OutOfMemoryError:
        return None
    return times


def measure(
    op: str, which: str, tokens: int, heads: int, ranks: int, exchange: str, device: Any, count: int
) -> dict[str, Any]:
    """The row of a pass, without its time on one GPU."""
    import torch

    from benchmarks.ops.kda import rank_model
    from cula.distributed import ContextParallel

    of_ranks, bounds = {}, rank_model.bounds_of("equal", tokens, heads, ranks)
    for rank in sorted({0, 1, ranks - 1}):  # those between the first and the last do the same
        with one_of(rank, ranks, device) as mesh, torch.no_grad():
            cp = ContextParallel(mesh, cu_seqlens_cpu=torch.tensor([0, tokens]), exchange=exchange)
            low, high = bounds[rank : rank + 2]
            call = prepared(op, which, tokens, heads, device, (low, high), cp_context=cp)
            of_ranks[str(rank)] = stages(call, device, count)
            del call
        several_gpus.free_memory()
    return {
        "op": op, "tokens": tokens, "heads": heads, "ranks": ranks, "exchange": exchange, "pass": which,
        "samples": count, "stages": of_ranks,
    }  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what each of several GPUs computes.")
    for name, known, default in (
        ("ops", several_gpus.OPS, several_gpus.OPS),
        ("passes", rank_rows.PASSES, rank_rows.PASSES),
        ("exchanges", rank_rows.EXCHANGES, ("auto",)),
    ):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=list(default))
    for name, sizes in (
        ("ranks", rank_rows.RANKS), ("tokens", several_gpus.TOKENS), ("heads", several_gpus.HEADS),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", nargs="+", type=int, default=list(sizes))
    parser.add_argument("--samples", type=int, default=8)
    add_json(parser, stage_rows.OP)
    args = parser.parse_args(argv)
    if args.samples < 4:  # else percentiles are beyond them
        parser.error("--samples: expected at least four")
    if min(args.ranks) < 2:
        parser.error("--ranks: expected at least two")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    warnings.simplefilter("ignore")
    import torch

    if not torch.cuda.is_available():
        return fail("expected a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    origin = {**provenance(), "clocks_before": read_smi()}
    content: dict[str, Any] = {
        "title": TITLE, "provenance": origin, "notes": list(NOTES), "skipped": [], "rows": [],
    }  # fmt: skip
    path = json_path(args.json, stage_rows.OP, gpu_slug(origin["gpu"]))
    sizes = itertools.product(args.ops, args.passes, args.tokens, args.heads)
    for op, which, tokens, heads in sizes:
        one = alone(op, which, tokens, heads, device, args.samples)
        several_gpus.free_memory()
        for ranks, exchange in itertools.product(args.ranks, args.exchanges):
            size = op, which, tokens, heads, ranks, exchange
            try:
                row = measure(*size, device, args.samples)
            except torch.OutOfMemoryError:
                several_gpus.free_memory()
                call = stage_rows.label(dict(zip(stage_rows.KEY, size, strict=True)))
                content["skipped"].append(
                    {"call": call, "reason": "one GPU has too little memory for a slice"}
                )
                continue
            content["rows"].append(row | {"one": one})
            print(report.as_text(stage_rows.table({"rows": content["rows"][-1:]})), flush=True)
            content["provenance"]["clocks_after"] = read_smi()
            stage_rows.validate(content)
            if args.json is not None:  # after every call, because all take minutes
                results.write(content, path)
    print(report.as_text(stage_rows.table(content)))
    print(report.machine(content["provenance"]))
    if args.json is not None:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
