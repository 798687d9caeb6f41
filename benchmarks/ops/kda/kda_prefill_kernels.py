"""The kernels of KDA prefill one by one, and the chunk-parallel one with inputs that stay in the L2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.kda import internals, kda_prefill
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import Inputs, Result, setting
from benchmarks.ops.kda.providers import CULA, MANY_HEADS, bind_inside
from benchmarks.ops.kda.work import H200, STATE_BYTES, work
from benchmarks.ops.sequences import batch_of

CUT_KERNELS = ("scan", "merge")
REPEATED = "prepare_repeated"


def _only(kernels: Collection[str]) -> AbstractContextManager[Any]:
    return internals.launching_only(kernels)


def _alone(kernel: str, problem: Setting, x: Inputs) -> Callable[[], Result]:
    return bind_inside(functools.partial(_only, {kernel}), problem, x)


def repeated(problem: Setting, x: Inputs) -> tuple[Setting, Inputs]:
    """A problem of as many chunks, each a sequence of its own, whose inputs are all the memory of the first chunk."""
    size = internals.sizes(internals.package()).chunk
    chunks = batch_of(problem) * problem.params["T"] // size

    def chunk(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:1, :size].expand(chunks, *tensor[0, :size].shape)

    names = ("q", "k", "v", "gate", "beta")
    same = dataclasses.replace(x, **{name: chunk(getattr(x, name)) for name in names})
    return setting(size, chunks, problem.params["H"]), same


def _repeated(problem: Setting, x: Inputs) -> Callable[[], Result]:
    return _alone("prepare", *repeated(problem, x))


def moved(kernel: str, problem: Setting) -> int:
    """Bytes of a kernel as the model counts them; of REPEATED only those that it writes."""
    w = work(problem, H200)
    if kernel == REPEATED:
        return w.chunk_heads * internals.sizes(H200.package).block_bytes
    of_merge = STATE_BYTES * 3 * w.parts * problem.params["H"] * batch_of(problem)
    known = {"prepare": w.prepare_bytes, "scan": w.scan_bytes, "merge": of_merge}
    return known.get(kernel, w.walk_bytes)


def _supports(kernel: str, problem: Setting) -> str | None:
    if refused := CULA.supports(problem):
        return refused
    if kernel in CUT_KERNELS and problem.params["H"] >= MANY_HEADS:
        return "with many heads no sequence is cut"
    return None


def _variant(kernel: str) -> Provider:
    bind = _repeated if kernel == REPEATED else functools.partial(_alone, kernel)
    return Provider(
        kernel,
        "variant",
        bind,
        functools.partial(moved, kernel),
        supports=functools.partial(_supports, kernel),
    )


def _in_two(problem: Setting, x: Inputs) -> Result:
    """Runs a call that launches nothing but prepare, then a call that launches all the others."""
    call = CULA.bind(problem, x)
    kda_providers.workspace(problem, x.q.device).fill_(255)  # NaN in every format
    with _only({"prepare"}):
        call()
    with _only(set(internals.KERNELS) - {"prepare"}):
        return call()


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Checks that a call of prepare and then a call of the other kernels give the oracle's results."""
    if provider.role != "variant":
        return kda_providers.check(provider, problem, device)
    return kda.check_kda(_in_two, problem, device, kda.LIMIT)


def settings(quick: bool) -> list[Setting]:
    """Dense problems: many heads, where a call has two kernels, and few heads, where sequences are cut."""
    if quick:
        return [setting(1024), setting(8192, heads=4)]
    many = [setting(t, b) for b in (1, 2) for t in (512, 1024, 4096, 8192, 16384)]
    return many + [setting(t, heads=h) for t, h in ((8192, 4), (32768, 4), (32768, 8), (131072, 8))]


OP = dataclasses.replace(
    kda_prefill.OP,
    name="kda_prefill_kernels",
    title="KDA prefill kernel by kernel, K=V=128",
    settings=settings,
    providers=(CULA, *map(_variant, (*internals.KERNELS, REPEATED))),
    check=check,
    notes=(
        "prepare, scan, merge, recurrence: calls that launch this kernel alone, as it is where kernels run one after "
        "the other. With few heads sequences are cut, and scan and merge run as well. cula launches all kernels, and "
        "may have two beside each other.",
        "prepare_repeated: prepare of as many sequences of one chunk, whose inputs are all the same memory. It reads "
        "from the L2 and writes to memory what prepare writes.",
        "bytes: those of the kernel, workspace included; of cula inputs, final states and o once each.",
        *kda_prefill.NOTES[:1],
    ),
)
