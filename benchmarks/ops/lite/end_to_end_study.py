"""The study of whole denoising steps: the model, the replayed attention inputs, the turns, and their rows.

The model is diffusers' WanTransformer3DModel with the layer sizes of Wan 2.1, fewer blocks and random weights. All of
it runs, but random weights give no video-like attention, so each block's self-attention is handed the q, k and v of
`workloads.structured` in place of those that the block computed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from benchmarks.harness.registry import CheckFailed
from benchmarks.harness.timers import percentile
from benchmarks.ops.checks import SEED
from benchmarks.ops.lite.end_to_end_rows import PEERS
from benchmarks.ops.lite.internals import (
    apply_lite_attention,
    asked,
    density,
    kernel_of,
    threshold_for,
)
from benchmarks.ops.lite.quality_study import rounded
from benchmarks.ops.lite.workloads import HEAD_TYPES, Shape, Step, structured

TITLE = "Whole denoising steps of a video transformer"
NOTES = (
    "WanTransformer3DModel of diffusers in bfloat16 with the layer sizes of Wan 2.1 and random weights, a video of 81 "
    "frames, one prompt of 512 text tokens, no guidance. Only some blocks of the stack are there; embedding, "
    "conditioning and the output projection run once per step, as in the whole model. Nothing is compiled or captured.",
    "Random weights give no video-like attention. Projections, norms, rotary embedding, cross attention and "
    "feed-forward run and are timed, but the call of each self-attention gets other q, k and v: those of the workload "
    "`structured` of `workloads.py` with all its types of heads, new ones in every step, of its own for every block. "
    "They are made between the steps and not timed.",
    "Every block has lists of its own, which begin full. Thresholds: the one at which the worst step has a relative L1 "
    "error of the target, found by the package's calibration on other data of the same kind, one head of every type, "
    "all steps, with the first kernel of a run. l1_by_step is what the error then is, relative to dense attention by "
    "the same kernel.",
    "All implementations run every step in turns, in an order that moves on from step to step. Times are those of "
    "device events around a step. Cross attention runs with torch's cuDNN backend everywhere.",
    "Extrapolated columns take all layers of the published model to be as long as the blocks that ran. They leave out "
    "text encoder, autoencoder, and the second pass of guidance.",
)
# Relative L1 errors that thresholds are calibrated to.
TARGETS = (0.01, 0.05)
STEPS, BLOCKS, TRIED = 20, 2, 8
TEXT_TOKENS = 512
# Relative L1 distance of two dense kernels with 16-bit results.
DENSE_LIMIT = 1e-2
# Between seeds of data that is measured on and of data that thresholds are found on.
OTHER_DATA = 1000
AUTO = "auto"


@dataclass(frozen=True)
class Model:
    """Layer sizes. layers: of the published model."""

    name: str
    heads: int
    head_dim: int
    ffn: int
    layers: int
    channels: int = 16
    text_dim: int = 4096


MODELS = (
    Model("wan2.1-1.3B", heads=12, head_dim=128, ffn=8960, layers=30),
    Model("wan2.1-14B", heads=40, head_dim=128, ffn=13824, layers=40),
)
# Frames, rows and columns of tokens: 81 frames of 480 x 832 and 720 x 1280 pixels, a token for 4 x 16 x 16 of them.
GRIDS = {"480p": (21, 30, 52), "720p": (21, 45, 80)}
SMALL_MODELS = (Model("toy", heads=4, head_dim=32, ffn=64, layers=3, channels=4, text_dim=16),)
SMALL_GRIDS = {"tiny": (2, 8, 16)}
SMALL_STEPS, SMALL_TRIED, SMALL_TEXT = 4, 4, 24


@dataclass(frozen=True)
class Variant:
    """A way to compute the self-attentions. choice: the kernel to ask for, if any."""

    provider: str
    kernel: str
    choice: str | None = None
    target: float | None = None
    threshold: float | None = None


@dataclass
class Measured:
    """What a variant did in the steps so far."""

    step_ms: list[float] = field(default_factory=list)
    blocks_ms: list[float] = field(default_factory=list)
    attention_ms: list[float] = field(default_factory=list)
    density: list[float] = field(default_factory=list)
    l1: list[float] = field(default_factory=list)
    peak_gib: float | None = None


class Replayed:
    """An attention processor that runs another one, whose attention it gives other q, k and v.

    inputs: q, k and v `[B, S, H, D]` of the next call. marks: before and behind its attention. out: what that returned,
    `[B, H, S, D]`, if `keep` is set.
    """

    def __init__(self, processor: Any, mark: Callable[[], Any]) -> None:
        self.processor = processor
        self.mark = mark
        self.inputs: Step | None = None
        self.marks: tuple[Any, Any] | None = None
        self.keep = False
        self.out: Tensor | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        with _Substitution(self):
            return self.processor(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )

    def attend(self, func: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        """The attention that a processor asks for, of the replayed inputs."""
        assert self.inputs is not None
        query, key, value = (x.transpose(1, 2) for x in self.inputs)
        if given["query"].shape != query.shape:
            raise RuntimeError(
                f"replay: expected queries {list(query.shape)}, got {list(given['query'].shape)}"
            )
        before = self.mark()
        out = func(**{**given, "query": query, "key": key, "value": value})
        self.marks = before, self.mark()
        if self.keep:
            self.out = out
        return out


class _Substitution(TorchFunctionMode):
    """Hands every scaled_dot_product_attention to a `Replayed`, as long as it is entered."""

    def __init__(self, replayed: Replayed) -> None:
        super().__init__()
        self.replayed = replayed

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is not scaled_dot_product_attention:
            return func(*args, **given)
        return self.replayed.attend(func, {**dict(zip(("query", "key", "value"), args)), **given})


@dataclass
class Study:
    """What one invocation measures, and what it has found so far."""

    device: str
    blocks: int = BLOCKS
    steps: int = STEPS
    tried: int = TRIED
    text_tokens: int = TEXT_TOKENS
    targets: Sequence[float] = TARGETS
    providers: Sequence[str] = ("torch", "lite_dense", "lite")
    kernels: Sequence[str] = (AUTO,)
    say: Callable[[str], None] = print
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    found: dict[tuple[Any, ...], float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def peer(self) -> tuple[str, str]:
        """The provider of torch's dense attention, and its kernel."""
        return (PEERS[0], "cuDNN") if self.on_gpu else (PEERS[1], "torch")

    def method(self) -> dict[str, Any]:
        """How the rows came about, for the result file."""
        return {
            "steps": self.steps,
            "text_tokens": self.text_tokens,
            "seed": SEED,
            "thresholds_tried": self.tried,
            "calibration_heads": len(HEAD_TYPES),
        }

    def run(self, model: Model, resolution: str, grid: tuple[int, int, int]) -> None:
        """Appends a row per variant; CheckFailed, and no row, if a dense result is wrong."""
        shape = Shape(1, grid, model.heads, model.head_dim)
        name = f"{model.name} {resolution}"
        variants = self._variants(shape, name)
        stack = Stack.of(model, grid, self.blocks, self.text_tokens, self.device)
        data = [
            structured(shape, self.steps, self.device, SEED + block) for block in range(self.blocks)
        ]
        measured: dict[Variant, Measured] = {}
        for number in range(self.steps):
            inputs = [next(steps) for steps in data]
            if number == 0:
                measured = self._warm(stack, variants, inputs, (model.name, resolution))
            self._step(stack, measured, number, inputs)
            if number % 5 == 4 or number + 1 == self.steps:
                times = ", ".join(
                    f"{v.provider} {v.kernel} {m.step_ms[-1]:.1f}" for v, m in measured.items()
                )
                self.say(f"{name}: step {number + 1} of {self.steps}, ms: {times}")
        self.rows += [
            row(model, resolution, shape, self.blocks, variant, found)
            for variant, found in measured.items()
        ]

    def _variants(self, shape: Shape, name: str) -> list[Variant]:
        """What runs, the dense ones first; thresholds are found here."""
        found = [Variant(*self.peer)] if "torch" in self.providers else []
        probe = torch.empty(
            (1, shape.tokens, 1, shape.dim), dtype=torch.bfloat16, device=self.device
        )
        choices: dict[str, str | None] = {}
        for kernel in self.kernels:
            choice = None if kernel == AUTO else kernel
            with asked(choice):
                choices.setdefault(kernel_of(probe), choice)
        for kernel, choice in choices.items():
            if "lite_dense" in self.providers:
                found.append(Variant("lite_dense", kernel, choice))
        if "lite" not in self.providers:
            return found
        for target in self.targets:
            threshold = self._threshold(shape, target, next(iter(choices.values())))
            self.say(f"{name}: threshold {threshold:.2f} for {target:.0%}")
            found += [
                Variant("lite", kernel, choice, target, threshold)
                for kernel, choice in choices.items()
            ]
        return found

    def _threshold(self, shape: Shape, target: float, choice: str | None) -> float:
        """The threshold for a target, found on one head of every type."""
        key = (shape.grid, shape.dim, target)
        if key not in self.found:
            few = Shape(1, shape.grid, len(HEAD_TYPES), shape.dim)
            steps = list(structured(few, self.steps, self.device, SEED + OTHER_DATA))
            with asked(choice):
                self.found[key] = threshold_for(steps, target, max_steps=self.tried)
        return self.found[key]

    def _warm(
        self,
        stack: Stack,
        variants: Sequence[Variant],
        inputs: Sequence[Step],
        setting: tuple[str, str],
    ) -> dict[Variant, Measured]:
        """Runs every variant twice, the second time for its memory; notes those that do not run here as skipped."""
        found = {}
        for variant in variants:
            stack.add(variant)
            measured = Measured()
            try:
                for _ in range(2):
                    measured.peak_gib = stack.memory(variant, inputs)
            except RuntimeError as error:
                if variant.provider not in PEERS:
                    raise
                reason = str(error).partition("\n")[0]
                where = dict(zip(("model", "resolution"), setting))
                self.skipped.append({**where, "provider": variant.provider, "reason": reason})
                stack.backend = None
                continue
            stack.reset(variant)
            found[variant] = measured
        return found

    def _step(
        self, stack: Stack, measured: dict[Variant, Measured], number: int, inputs: Sequence[Step]
    ) -> None:
        """One denoising step by every variant."""
        order = list(measured)
        shift = number % max(len(order), 1)
        outs: dict[Variant, list[Tensor]] = {}
        for variant in order[shift:] + order[:shift]:
            found = measured[variant]
            times, outs[variant] = stack.step(variant, inputs, number / self.steps)
            for name, ms in times.items():
                getattr(found, name).append(ms)
            found.density.append(stack.density(variant, inputs))
        peer = next((v for v in order if v.provider in PEERS), None)
        for variant in order:
            if variant.provider in PEERS:
                continue
            against = peer
            if variant.provider == "lite":
                dense = (
                    v for v in order if (v.provider, v.kernel) == ("lite_dense", variant.kernel)
                )
                against = next(dense, None)
            if against is None:
                continue
            error = max(map(distance, outs[variant], outs[against]))
            if variant.provider == "lite":
                measured[variant].l1.append(error)
            elif not error <= DENSE_LIMIT:
                raise CheckFailed(
                    f"{variant.kernel}: dense attention has a relative L1 distance of {error:.2e} from that of "
                    f"{against.kernel}, the limit is {DENSE_LIMIT:.0e}"
                )


@dataclass
class Stack:
    """A model, its inputs, and the processors of every variant."""

    built: Any
    arguments: dict[str, Any]
    device: str
    replays: list[Replayed]
    backend: Any
    handles: dict[Variant, Any] = field(default_factory=dict)
    processors: dict[Variant, list[Any]] = field(default_factory=dict)
    marks: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Model, grid: tuple[int, int, int], blocks: int, text_tokens: int, device: str
    ) -> Stack:
        built = build(model, blocks, device)
        frames, height, width = grid
        generator = torch.Generator(device).manual_seed(SEED)

        def normal(*size: int) -> Tensor:
            made = torch.randn(size, generator=generator, device=device)
            return made.to(torch.bfloat16)

        arguments = {
            "hidden_states": normal(1, model.channels, frames, 2 * height, 2 * width),
            "encoder_hidden_states": normal(1, text_tokens, model.text_dim),
            "return_dict": False,
        }
        backend = None
        if device != "cpu":
            from torch.nn.attention import SDPBackend

            backend = SDPBackend.CUDNN_ATTENTION
        found = cls(built, arguments, device, [], backend)
        for block in built.blocks:
            replay = Replayed(block.attn1.processor, found.mark)
            block.attn1.processor = replay
            found.replays.append(replay)

        def note(name: str) -> Callable[..., None]:
            return lambda *_: found.marks.__setitem__(name, found.mark())

        built.blocks[0].register_forward_pre_hook(note("first"))
        built.blocks[-1].register_forward_hook(note("last"))
        return found

    def add(self, variant: Variant) -> None:
        """Makes the processors of a variant, with lists of their own."""
        attentions = [block.attn1 for block in self.built.blocks]
        if variant.provider in PEERS:
            self.processors[variant] = list(self.replays)
            return
        self._use(self.replays)
        handle = apply_lite_attention(self.built, variant.threshold, min_tokens=0)
        for lite in handle.layers.values():
            lite.enable_skip_optimization(variant.threshold is not None)
        self.processors[variant] = [attn.processor for attn in attentions]
        self.handles[variant] = handle
        handle.remove()

    def reset(self, variant: Variant) -> None:
        if variant in self.handles:
            self.handles[variant].reset()

    def step(
        self, variant: Variant, inputs: Sequence[Step], progress: float, keep: bool = True
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Times in ms of a denoising step, and the outputs of its self-attentions `[B, H, S, D]` if they are kept.

        progress: the share of the steps that lie behind.
        """
        self._use(self.processors[variant])
        for replay, step in zip(self.replays, inputs, strict=True):
            replay.inputs, replay.keep = step, keep
        latent = self.arguments["hidden_states"]
        when = torch.full((1,), round(1000 * (1 - progress)), device=latent.device)
        with self._backend(), asked(variant.choice):
            self._wait()
            start = self.mark()
            self.built(timestep=when, **self.arguments)
            end = self.mark()
            self._wait()
        attention = [self._between(*replay.marks) for replay in self.replays if replay.marks]
        times = {
            "step_ms": self._between(start, end),
            "blocks_ms": self._between(self.marks["first"], self.marks["last"]),
            "attention_ms": sum(attention),
        }
        outs = [replay.out for replay in self.replays if replay.out is not None]
        for replay in self.replays:
            replay.out = replay.marks = replay.inputs = None
        return times, outs

    def memory(self, variant: Variant, inputs: Sequence[Step]) -> float | None:
        """GiB of weights, of lists, and of what a step takes beside them; None on the CPU."""
        if self.device == "cpu":
            self.step(variant, inputs, 0.0, keep=False)
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step(variant, inputs, 0.0, keep=False)
        own = [*self.built.parameters(), *self.built.buffers(), *self._lists(variant)]
        size = sum(x.numel() * x.element_size() for x in own)
        return (torch.cuda.max_memory_allocated() - before + size) / 2**30

    def density(self, variant: Variant, inputs: Sequence[Step]) -> float:
        """Share of the tiles that the last step visited, the mean over blocks."""
        if variant.threshold is None:
            return 1.0
        shares = [
            density(lite.read_mask, q, k)
            for lite, (q, k, _) in zip(self.handles[variant].layers.values(), inputs, strict=True)
        ]
        return sum(shares) / len(shares)

    def mark(self) -> Any:
        """A point in time, of the device where there is one."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks that lie behind."""
        return (end - start) * 1e3 if self.device == "cpu" else start.elapsed_time(end)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _backend(self) -> contextlib.AbstractContextManager[Any]:
        """What serves torch's attention: that of torch_cudnn, and everybody's cross attention."""
        if self.backend is None:
            return contextlib.nullcontext()
        from torch.nn.attention import sdpa_kernel

        return sdpa_kernel(self.backend)

    def _lists(self, variant: Variant) -> Iterator[Tensor]:
        if variant.threshold is not None:
            for lite in self.handles[variant].layers.values():
                yield from (m for m in (lite.read_mask, lite.write_mask) if m is not None)

    def _use(self, processors: Sequence[Any]) -> None:
        for block, processor in zip(self.built.blocks, processors, strict=True):
            if isinstance(block.attn1.processor, torch.nn.Module):
                del block.attn1.processor  # a module gives way to no other value
            block.attn1.processor = processor


def build(model: Model, blocks: int, device: str) -> Any:
    """The transformer of diffusers with random weights, in the dtypes in which it is loaded for bfloat16."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(SEED)
    with torch.device(device):
        built = WanTransformer3DModel(
            num_attention_heads=model.heads,
            attention_head_dim=model.head_dim,
            in_channels=model.channels,
            out_channels=model.channels,
            text_dim=model.text_dim,
            ffn_dim=model.ffn,
            num_layers=blocks,
        )
    exact = set(built._keep_in_fp32_modules)
    for name, parameter in built.named_parameters():
        if not exact & set(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    return built.eval()


def distance(a: Tensor, b: Tensor) -> float:
    """sum |a - b| / sum |b|."""
    exact = b.float()
    gap = (a.float() - exact).abs().sum(dtype=torch.float64)
    return float(gap / exact.abs().sum(dtype=torch.float64))


def row(
    model: Model,
    resolution: str,
    shape: Shape,
    blocks: int,
    variant: Variant,
    measured: Measured,
) -> dict[str, Any]:
    """A row of the result file."""
    times = measured.step_ms
    low, high = (percentile(times, share) for share in (20, 80))
    return rounded({
        "model": model.name, "resolution": resolution, "tokens": shape.tokens, "heads": model.heads,
        "head_dim": model.head_dim, "ffn": model.ffn, "layers": model.layers, "blocks": blocks,
        "steps": len(times), "provider": variant.provider, "kernel": variant.kernel,
        "target": variant.target, "threshold": variant.threshold,
        "step_ms": statistics.median(times), "p20_ms": low, "p80_ms": high, "total_ms": sum(times),
        "blocks_ms": statistics.median(measured.blocks_ms),
        "attention_ms": statistics.median(measured.attention_ms),
        "ms_by_step": times, "density_by_step": measured.density,
        "l1_by_step": measured.l1 or None, "peak_gib": measured.peak_gib,
    })  # fmt: skip
