"""Trains a small language model of KDA layers on the text of this repository, once by every implementation.

    python benchmarks/learning.py [--steps 200] [--providers cula fla ...] [--json [PATH]]
    python benchmarks/curves.py RESULT.json

The model, its weights at the begin and the batches are the same for all, so the loss curves are too, up to rounding.
Exit codes: 0 measured, 2 wrong arguments or no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import loss_rows, report, results
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.loss_rows import EXACT
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi

ROOT = Path(__file__).resolve().parents[1]
TITLE = "The loss of a small KDA language model over its first steps"
NOTES = (
    "A byte-level model of KDA layers and SwiGLU, AdamW, trained on the Python and markdown files of this repository. "
    "Weights at the begin and batches are the same for every provider.",
    "cula: the kernels' forward and their own backward. fla: flash-linear-attention's for both. torch: "
    "the reference by autograd. bfloat16 is autocast with weights in float32; torch fp32 rounds nothing to 16 bits.",
    "What torch in bfloat16 differs from fp32 by is what rounding the rest of the model does.",
)
LOWER_BOUND = -5.0
BYTES = 256
WARM_UP = 5  # steps that are not timed


@dataclass(frozen=True)
class Sizes:
    """Of the model, its batches and its optimizer."""

    layers: int = 4
    width: int = 512
    heads: int = 4
    dim: int = 128
    batch: int = 8
    tokens: int = 1024
    rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Provider:
    """impl: of `cula.kda.chunk_kda`. dtype: of activations."""

    name: str
    impl: str
    dtype: torch.dtype = torch.bfloat16


PROVIDERS = (
    Provider("cula", "cula-cp-sm90"),
    Provider("fla", "fla"),
    Provider("torch bf16", "reference"),
    Provider(EXACT, "reference", torch.float32),
)


class Attention(nn.Module):
    """KDA between projections: `[B, T, width]` to the same."""

    def __init__(self, sizes: Sizes, impl: str) -> None:
        super().__init__()
        self.impl, self.dim = impl, sizes.dim
        inner = sizes.heads * sizes.dim
        self.tokens = nn.Linear(sizes.width, 4 * inner, bias=False)
        self.gate = nn.Sequential(
            nn.Linear(sizes.width, sizes.dim, bias=False), nn.Linear(sizes.dim, inner, bias=False)
        )
        self.strength = nn.Linear(sizes.width, sizes.heads, bias=False)
        self.A_log = nn.Parameter(torch.linspace(-1.0, 1.0, sizes.heads))
        self.dt_bias = nn.Parameter(torch.linspace(-4.0, -1.0, inner))
        self.norm = nn.RMSNorm(sizes.dim, 1e-5)
        self.outside = nn.Linear(inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from cula.kda import chunk_kda

        q, k, v, open_ = (t.unflatten(-1, (-1, self.dim)) for t in self.tokens(x).chunk(4, -1))
        o, _ = chunk_kda(
            F.silu(q), F.silu(k), F.silu(v), self.gate(x).unflatten(-1, (-1, self.dim)), self.strength(x),
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
            lower_bound=LOWER_BOUND, A_log=self.A_log, dt_bias=self.dt_bias, impl=self.impl,
        )  # fmt: skip
        return self.outside((self.norm(o.float()) * open_.sigmoid()).flatten(2))


class Block(nn.Module):
    """KDA, then SwiGLU, each added to what comes in."""

    def __init__(self, sizes: Sizes, impl: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width, 1e-5) for _ in range(2))
        self.attention = Attention(sizes, impl)
        self.up = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.down = nn.Linear(2 * sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        one, other = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(one) * other)


class Model(nn.Module):
    """The logits of the next byte, `[B, T, 256]` of bytes `[B, T]`."""

    def __init__(self, sizes: Sizes, impl: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, impl) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, 1e-5)
        self.head = nn.Linear(sizes.width, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(root: Path = ROOT) -> Tensor:
    """The bytes of the repository's Python and markdown files, one after another."""
    folders = ("packages", "meta", "docs", "benchmarks", "tools")
    paths = sorted(p for f in folders for end in ("py", "md") for p in (root / f).rglob(f"*.{end}"))
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def batches(corpus: Tensor, sizes: Sizes, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes and those that follow them, `[B, T]` each, from places that the seed chooses."""
    generator = torch.Generator().manual_seed(sizes.seed)
    for _ in range(steps):
        starts = torch.randint(len(corpus) - sizes.tokens, (sizes.batch,), generator=generator)
        rows = corpus[starts[:, None] + torch.arange(sizes.tokens + 1)].long()
        yield rows[:, :-1], rows[:, 1:]


def train(
    provider: Provider, sizes: Sizes, corpus: Tensor, steps: int, device: torch.device
) -> dict[str, Any]:
    """The row of a provider."""
    torch.manual_seed(sizes.seed)
    model = Model(sizes, provider.impl).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), sizes.rate, betas=(0.9, 0.95))
    losses, times = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number, (ids, following) in enumerate(batches(corpus, sizes, steps)):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = sizes.rate * min(1.0, (number + 1) / 20)
        half = provider.dtype != torch.float32
        with torch.autocast(device.type, provider.dtype if half else None, enabled=half):
            logits = model(ids.to(device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), following.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 6))
        times.append((time.perf_counter() - start) * 1e3)
    cuda = device.type == "cuda"
    return {
        "provider": provider.name,
        "backward": backward_of(provider, device),
        "dtype": str(provider.dtype).removeprefix("torch."),
        "ms": round(statistics.median(times[WARM_UP:] or times), 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "losses": losses,
    }


def backward_of(provider: Provider, device: torch.device) -> str:
    """The name of the implementation that a provider's gradients come from."""
    import cula

    arch = None if device.type == "cuda" else "cpu"
    told = cula.explain(
        "chunk_kda", impl=provider.impl, arch=arch, dtype=provider.dtype, requires_grad=True
    )
    (row,) = [row for row in told.rows if row.chosen]
    return row.backward or row.name


def why_not(provider: Provider) -> str | None:
    """Why a provider cannot train here by what it stands for, or None."""
    import cula

    told = cula.explain("chunk_kda", impl=provider.impl, dtype=provider.dtype, requires_grad=True)
    if told.chosen is None:
        return next(str(row.reason) for row in told.rows if row.name == provider.impl)
    (row,) = [row for row in told.rows if row.chosen]
    return None if row.backward is None else f"its backward is that of {row.backward}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small language model of KDA layers.")
    names = [p.name for p in PROVIDERS]
    parser.add_argument("--providers", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=200)
    add_json(parser, loss_rows.OP)
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error("--steps: expected at least one")
    return args


def measure(
    wanted: Sequence[Provider], steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The rows, and the providers that cannot run."""
    rows, skipped, corpus = [], [], text()
    for provider in wanted:
        if reason := why_not(provider):
            skipped.append({"provider": provider.name, "reason": reason})
            continue
        rows.append(train(provider, Sizes(), corpus, steps, torch.device("cuda")))
        print(
            f"{provider.name}: {loss_rows.last(rows[-1]['losses']):.4f}",
            file=sys.stderr,
            flush=True,
        )
    return rows, skipped


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        return fail("benchmarks need a CUDA device, and torch sees none")
    origin = {**provenance(), "clocks_before": read_smi()}
    path = json_path(args.json, loss_rows.OP, gpu_slug(origin["gpu"]))
    rows, skipped = measure([p for p in PROVIDERS if p.name in args.providers], args.steps)
    content: dict[str, Any] = {
        "title": TITLE,
        "provenance": {**origin, "clocks_after": read_smi()},
        "model": asdict(Sizes()),
        "notes": list(NOTES),
        "skipped": skipped,
        "rows": rows,
    }
    for entry in skipped:
        print(f"not trained: {entry['provider']}: {entry['reason']}", file=sys.stderr)
    try:
        loss_rows.validate(content)
    except ValueError as error:
        return fail(error)
    print(report.as_text(loss_rows.table(content)))
    print(report.machine(content["provenance"]))
    if args.json is not None:
        results.write(content, path)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
