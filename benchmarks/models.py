"""Measures whole models of transformers, with random weights, without cula and with it.

    python benchmarks/models.py [--models PATTERN ...] [--work prefill decode train] [--json [PATH] [--join]]

A model has the sizes of the published one in 8 of its layers, and 16 experts (MiniMax: 4) in place of all. Needs
transformers 5.17, and fla-core 0.6 for the models that call it.
Exit codes: 0 measured, 2 wrong arguments or no GPU.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import model_rows, report, results
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.model_rows import OURS
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi

TITLE = "Whole models with random weights"
NOTES = (
    "Eager calls of the models of transformers in bfloat16, with random weights and tokens. The same model with and "
    "without cula, in turns: every round warms each of them up and times it.",
    "Prefill is the model without its head and without a cache. A decode step follows a prompt of 64 tokens. Training "
    "is a forward and backward pass of the loss with a checkpoint at every layer, without an optimizer.",
    "Layers: 8 of the published model, in its own order. Experts: 16, of MiniMax 4, by transformers' grouped_mm; the "
    "published models have more, of which a token meets as many.",
    "The error is the relative RMSE of the logits with cula to those without, over 512 tokens; experts that two "
    "roundings choose differently are part of it.",
    "Linear attention: kernels whose name says so. MiniMax without cula is plain torch, whose kernels do not.",
)
PROMPT = 64
LAYERS = 8
LINEAR = re.compile(
    r"cula|kda|delta|gla|l2norm|recompute_w_u|solve_tril|chunk_(local|global)|fused_recurrent|fwd_kernel_[oh]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Model:
    """A model type of transformers. theirs: what computes its linear attention without cula."""

    name: str
    theirs: str
    sizes: dict[str, Any] = field(default_factory=dict)
    # Why it is not trained, or None.
    untrained: str | None = None


MODELS = (
    Model("kimi_linear", "fla", {"num_experts": 16}),
    Model(
        "qwen3_next",
        "fla",
        {"num_experts": 16},
        "FLA 0.6 refuses the backward of its gated delta rule with Triton 3.4 to 3.7 on Hopper",
    ),
    Model(
        "minimax",
        "torch",
        {
            "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 2, "num_local_experts": 4,
            "layer_types": ["linear_attention"] * 7 + ["full_attention"],
        },
    ),
)  # fmt: skip
Call = Callable[[], Any]


def build(model: Model, device: Any) -> tuple[Any, Any]:
    """The model and its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = AutoConfig.for_model(model.name)
    sizes = {"num_hidden_layers": LAYERS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(whole, name, None):
            sizes[name] = getattr(whole, name)[:LAYERS]
    config = AutoConfig.for_model(model.name, **sizes | model.sizes)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with device:
        built = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return built.eval(), config


def works(model: Model, wanted: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """What is measured of a model: the work, its batch, its tokens."""
    for name, batch, tokens in (
        ("prefill", 1, 8192),
        ("prefill", 1, 32768),
        ("decode", 1, 1),
        ("decode", 32, 1),
        ("train", 1, 8192),
    ):
        if name in wanted and not (name == "train" and model.untrained):
            yield name, batch, tokens


def prepared(built: Any, config: Any, work: str, batch: int, tokens: int) -> Call:
    """A call that does the work once."""
    import torch

    def some(count: int) -> Any:
        return torch.randint(3, 1000, (batch, count), device="cuda")

    ids = some(tokens)
    if work == "train":

        def step() -> None:
            built(ids, labels=ids, use_cache=False).loss.backward()
            built.zero_grad(set_to_none=True)

        return step
    if work == "prefill":
        return torch.no_grad()(lambda: built.model(ids, use_cache=False))
    with torch.no_grad():
        cache = built(some(PROMPT), use_cache=True).past_key_values
    return torch.no_grad()(lambda: built(ids, past_key_values=cache, use_cache=True))


def timed(call: Call, count: int) -> list[float]:
    """Wall times in ms of calls that the device has finished."""
    import torch

    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def kernels(call: Call) -> tuple[float, float]:
    """How long kernels of a call run, in ms, and those of linear attention by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as told:
        call()
        torch.cuda.synchronize()
    times = [(event.key, event.self_device_time_total / 1e3) for event in told.key_averages()]
    return sum(t for _, t in times), sum(t for name, t in times if LINEAR.search(name))


def switch(provider: str) -> None:
    from cula.integrations import transformers

    (transformers.register if provider == OURS else transformers.unregister)()


def logits(built: Any) -> Any:
    import torch

    torch.manual_seed(1)
    ids = torch.randint(3, 1000, (1, 512), device="cuda")
    with torch.no_grad():
        return built(ids).logits.float()


def measure(model: Model, wanted: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """The rows of a model."""
    import torch

    providers = (model.theirs, OURS)
    built, config = build(model, torch.device("cuda"))
    parameters = sum(p.numel() for p in built.parameters())
    outputs = []
    for provider in providers:
        switch(provider)
        outputs.append(logits(built))
    error = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
    del outputs
    rows = []
    for work, batch, tokens in works(model, wanted):
        if work == "train":
            built.train()
            built.gradient_checkpointing_enable({"use_reentrant": False})
        samples: dict[str, list[float]] = {provider: [] for provider in providers}
        device: dict[str, tuple[float, float]] = {}
        peaks: dict[str, float] = {}
        for number in range(rounds):
            for provider in providers if number % 2 == 0 else providers[::-1]:
                switch(provider)
                call = prepared(built, config, work, batch, tokens)
                timed(call, 6 if work == "decode" else 2)
                torch.cuda.reset_peak_memory_stats()
                samples[provider] += timed(call, 20 if work == "decode" else 4)
                peaks[provider] = torch.cuda.max_memory_allocated() / 2**30
                if number == rounds - 1:
                    device[provider] = kernels(call)
                del call
                gc.collect()
        for provider, times in samples.items():
            low, middle, high = (statistics.quantiles(times, n=10)[i] for i in (1, 4, 7))
            whole, linear = device[provider]
            rows.append({
                "model": model.name, "parameters": parameters, "work": work, "batch": batch, "tokens": tokens,
                "provider": provider, "ms": round(middle, 3), "p20_ms": round(low, 3), "p80_ms": round(high, 3),
                "samples": len(times), "tokens_per_s": round(batch * tokens / middle * 1e3, 1),
                "device_ms": round(whole, 3), "linear_ms": None if provider == "torch" else round(linear, 4),
                "peak_gib": round(peaks[provider], 2), "error": round(error, 6) if provider == OURS else None,
            })  # fmt: skip
        print(report.as_text(model_rows.table({"rows": rows[-2:]})), file=sys.stderr, flush=True)
    switch(model.theirs)
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures whole models without cula and with it.")
    parser.add_argument("--models", nargs="+", metavar="PATTERN", default=["*"])
    parser.add_argument("--work", nargs="+", choices=model_rows.WORK, default=model_rows.WORK)
    parser.add_argument("--rounds", type=int, default=3)
    add_json(parser, model_rows.OP)
    parser.add_argument(
        "--join",
        action="store_true",
        help="keep what the file has of other models, measured at the same commit",
    )
    args = parser.parse_args(argv)
    if args.join and args.json is None:
        parser.error("--join: expected --json too")
    if args.rounds < 1:
        parser.error("--rounds: expected at least one")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    warnings.simplefilter("ignore")
    import torch

    if not torch.cuda.is_available():
        return fail("benchmarks need a CUDA device, and torch sees none")
    wanted = [m for m in MODELS if any(fnmatchcase(m.name, p) for p in args.models)]
    if not wanted:
        return fail(f"models: {' '.join(args.models)!r} matches none, such as kimi_linear")
    origin = {**provenance(), "clocks_before": read_smi()}
    path = json_path(args.json, model_rows.OP, gpu_slug(origin["gpu"]))
    earlier = model_rows.load(path) if args.join and path.exists() else None
    left = [m for m in wanted if m.untrained and "train" in args.work]
    content: dict[str, Any] = {
        "title": TITLE,
        "provenance": origin,
        "notes": list(NOTES),
        "skipped": [{"model": m.name, "work": "train", "reason": m.untrained} for m in left],
        "rows": [],
    }
    try:
        if earlier:
            results.refuse_another(earlier, content, model_rows.OF_BOTH)
        for model in wanted:
            content["rows"] += measure(model, args.work, args.rounds)
            content["provenance"]["clocks_after"] = read_smi()
            whole = model_rows.joined(earlier, content) if earlier else content
            model_rows.validate(whole)
            if args.json is not None:  # after every model, because all take a quarter of an hour
                results.write(whole, path)
            gc.collect()
            torch.cuda.empty_cache()
    except ValueError as error:
        return fail(error)
    print(report.as_text(model_rows.table(content)))
    print(report.machine(content["provenance"]))
    if args.json is not None:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
