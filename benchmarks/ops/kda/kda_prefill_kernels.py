"""The kernels of KDA prefill one by one, and the chunk-parallel one with inputs that stay in the L2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.kda import kda_prefill
from benchmarks.ops.kda import model as kda_model
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import Inputs, Result, setting
from benchmarks.ops.kda.providers import CULA, MANY_HEADS, within
from benchmarks.ops.sequences import batch_of

CHUNK = 64
KERNELS = ("prepare", "scan", "merge", "recurrence")
CUT_KERNELS = ("scan", "merge")
REPEATED = "prepare_repeated"


def kernel_of(config: Any) -> str:
    """Which of KERNELS a config is compiled to."""
    name = type(config).__name__.removesuffix("Config").lower()
    return "scan" if name == "recurrence" and config.scan else name


def _only(kernels: Collection[str]) -> AbstractContextManager[Any]:
    """Within it calls launch these kernels and leave the others out."""
    launch = import_module(f"{kda_providers.package()}.launch")
    compile_for = launch._compile_for

    def chosen(device: torch.device) -> Callable[[Any], Callable[..., None]]:
        compiled = compile_for(device)
        return lambda config: (
            compiled(config) if kernel_of(config) in kernels else lambda *arguments: None
        )

    return mock.patch.object(launch, "_compile_for", chosen)


def _alone(kernel: str, problem: Setting, x: Inputs) -> Callable[[], Result]:
    return within(functools.partial(_only, {kernel}), problem, x)


def repeated(problem: Setting, x: Inputs) -> tuple[Setting, Inputs]:
    """As many chunks, all of the first one's tokens: sequences of one chunk, whose rows lie in the same memory."""
    chunks = batch_of(problem) * problem.params["T"] // CHUNK

    def chunk(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:1, :CHUNK].expand(chunks, *tensor[0, :CHUNK].shape)

    names = ("q", "k", "v", "gate", "beta")
    same = dataclasses.replace(x, **{name: chunk(getattr(x, name)) for name in names})
    return setting(CHUNK, chunks, problem.params["H"]), same


def _repeated(problem: Setting, x: Inputs) -> Callable[[], Result]:
    return _alone("prepare", *repeated(problem, x))


def moved(kernel: str, problem: Setting) -> int:
    """Bytes, as the model counts them; of what is repeated the blocks that are written alone."""
    w = kda_model.work(problem, kda_model.H200)
    if kernel == REPEATED:
        return w.chunk_heads * import_module(f"{kda_model.H200.package}.config").BLOCK_BYTES
    of_merge = kda_model.STATE_BYTES * 3 * w.parts * problem.params["H"] * batch_of(problem)
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
    """A call that launches nothing but prepare, then one that launches all the others."""
    call = CULA.bind(problem, x)
    kda_providers.workspace(problem, x.q.device).fill_(255)  # NaN in every format
    with _only({"prepare"}):
        call()
    with _only(set(KERNELS) - {"prepare"}):
        return call()


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Of a kernel alone: that prepare and the others, in calls of their own, are the whole, against the fp64 oracle."""
    if provider.role != "variant":
        return kda_providers.check(provider, problem, device)
    return kda.check_kda(_in_two, problem, device, kda.LIMIT)


def settings(quick: bool) -> list[Setting]:
    """Dense ones: many heads, where two kernels make a call, and few, where sequences are cut."""
    if quick:
        return [setting(1024), setting(8192, heads=4)]
    many = [setting(t, b) for b in (1, 2) for t in (512, 1024, 4096, 8192, 16384)]
    return many + [setting(t, heads=h) for t, h in ((8192, 4), (32768, 4), (32768, 8), (131072, 8))]


OP = dataclasses.replace(
    kda_prefill.OP,
    name="kda_prefill_kernels",
    title="KDA prefill kernel by kernel, K=V=128",
    settings=settings,
    providers=(CULA, *map(_variant, (*KERNELS, REPEATED))),
    check=check,
    notes=(
        "prepare, scan, merge, recurrence: calls that launch this kernel alone; cula launches all of them. With few "
        "heads sequences are cut, and scan and merge run as well.",
        "prepare_repeated: prepare of as many sequences of one chunk, whose inputs are all the same memory. It reads "
        "from the L2 and writes to memory what prepare writes.",
        "bytes: those of the kernel, workspace included; of cula inputs, final states and o once each.",
        *kda_prefill.NOTES[:1],
    ),
)
