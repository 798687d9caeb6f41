"""Everything that the owner of a card can prove and measure with it: `python tools/evidence.py CARD [--dry-run]`.

Runs the GPU tests of the packages for the card's architecture, measures every op that exists for it in bursts, the main
ones also under a sustained load, and the first call of every function, reads the hardware counters of decode where ncu
is installed, and writes the pages. Result files go to `benchmarks/results/<gpu>/`, a folder by the name of the GPU, so
no other card's figures are touched. A command that fails does not keep the next ones from running; the last lines name
those that failed. `bash .ci/run evidence -- CARD` installs what is needed first.

Exit codes: 0 all went well, 1 a command failed, 2 wrong arguments or another GPU.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.provenance import gpu_slug
from tools import gpu
from tools.layout import ROOT

GIB = 1 << 30
GRAPH = ("--methods", "graph")
# Ops with the options that their committed results were measured with.
SUSTAINED = ("--methods", "sustained")
DECODE = (
    ("lightning_decode",),
    ("lightning_decode", *SUSTAINED),
    ("lightning_decode_variants", *GRAPH),
)
DELTA = (
    ("delta_decode", *GRAPH),
    # What a host program waits for at one row.
    ("delta_decode", *GRAPH, "eager-host", "--settings", "*-B1-T1-*-vk", "--join"),
    ("delta_decode", *SUSTAINED),
    ("delta_decode_fused", *GRAPH),
    ("delta_decode_slots", *GRAPH),
    ("delta_decode_variants", *GRAPH),
)
DECODE_80SM = (
    ("lightning_decode_80sm", *GRAPH),
    ("lightning_decode_variants_80sm", *GRAPH),
    ("delta_decode_80sm", *GRAPH),
    ("delta_decode_variants_80sm", *GRAPH),
)
PREFILL = (
    ("lightning_prefill", *GRAPH),
    ("lightning_prefill", *SUSTAINED),
    ("lightning_prefill_delta", *GRAPH),
    ("lightning_training", *GRAPH),
)
GATED = (
    ("gated_prefill", *GRAPH),
    ("gated_prefill", *SUSTAINED),
    ("gated_training", *GRAPH),
)
KDA = tuple(
    (op, *GRAPH)
    for op in (
        "kda_prefill",
        "kda_prefill_flashkda",
        "kda_prefill_kernels",
        "kda_prefill_parts",
        "kda_training",
    )
) + (("kda_prefill_cut", "--methods", "eager-event"), ("kda_prefill", *SUSTAINED))
LITE = tuple(
    (f"lite_{op}", *GRAPH) for op in ("attention", "backward", "training", "stages", "sweeps")
) + tuple((f"lite_{op}", *SUSTAINED) for op in ("attention", "backward"))
# Ops that are of use only beside another implementation, with its module; without that they are left out, so that their
# results on a card stay what they were.
COMPARISONS = {
    "kda_prefill_flashkda": "flash_kda",
    "lightning_prefill_delta": "flashinfer",
}
COUNTERS = ("--sms", "0", "--batches", "1", "16", "64", "128", "256")
OWN_PAGE = "benchmarks/results/<gpu>/README.md"


@dataclass(frozen=True)
class Card:
    """A card, or all of an architecture: how to know it, what to run on it, and the page that shows the figures.

    `slug` is a pattern of the folder of its results. Where `multiprocessors` and `gib` are given a GPU of that name
    with others, such as a part of a card, is refused.
    """

    title: str
    capabilities: tuple[tuple[int, int], ...]
    packages: tuple[str, ...]
    ops: tuple[tuple[str, ...], ...]
    slug: str = r".+"
    multiprocessors: tuple[int, ...] = ()
    gib: tuple[int, int] | None = None
    counters: tuple[str, ...] = COUNTERS
    page: str = OWN_PAGE

    def expected(self) -> str:
        """The card in words, with what is checked."""
        facts = [f"compute capability {' or '.join(f'{a}.{b}' for a, b in self.capabilities)}"]
        if self.multiprocessors:
            facts.append(f"{' or '.join(map(str, self.multiprocessors))} multiprocessors")
        if self.gib:
            facts.append(f"{self.gib[0]} to {self.gib[1]} GiB of memory")
        return f"{self.title} ({', '.join(facts)})"


HOPPER_PACKAGES = (
    "cula-lightning-decode",
    "cula-delta-decode",
    "cula-lightning-sm90",
    "cula-cp-sm90",
    "liteattention-sm89",
    "liteattention-sm90",
)
HOPPER = ((9, 0),)
HOPPER_OPS = (
    *DECODE,
    *DELTA,
    *PREFILL,
    *GATED,
    *KDA,
    ("kda_prefill_schedule", *GRAPH),
    *LITE,
)
ANY_PACKAGES = ("cula-lightning-decode", "cula-delta-decode", "liteattention-sm89")
CARDS = {
    "h20": Card(
        "an H20",
        HOPPER,
        HOPPER_PACKAGES,
        HOPPER_OPS,
        r"h20",
        (78,),
        (90, 100),
        page=f"BENCHMARK_H20.md and {OWN_PAGE}",
    ),
    "h100": Card(
        "an H100", HOPPER, HOPPER_PACKAGES, HOPPER_OPS, r"h100(-.+)?", (114, 132), (60, 96)
    ),
    "h200": Card(
        "an H200",
        HOPPER,
        HOPPER_PACKAGES,
        (*HOPPER_OPS, *DECODE_80SM),
        r"h200(-nvl)?",
        (132,),
        (130, 145),
        counters=("--sms", "80", *COUNTERS[2:]),
        page="the READMEs of the packages",
    ),
    "sm89": Card("a GPU of sm89", ((8, 9),), ANY_PACKAGES, (*DECODE, *DELTA, *LITE)),
    "sm100": Card(
        "a GPU of sm100",
        ((10, 0), (10, 3)),
        ("cula-lightning-decode", "cula-delta-decode", "cula-kda-sm100", "liteattention-sm89"),
        (*DECODE, *DELTA, *KDA, *LITE),
    ),
    "sm120": Card("a GPU of sm120", ((12, 0), (12, 1)), ANY_PACKAGES, (*DECODE, *DELTA, *LITE)),
}


def refusal(card: Card, gpus: Sequence[gpu.Gpu]) -> str | None:
    """Why the first GPU, on which everything would run, is not the card; one line, or None if it is."""
    if not gpus:
        return f"needs {card.title}; this machine has no NVIDIA GPU"
    reason = _difference(card, gpus[0])
    others = [number for number, other in enumerate(gpus) if not _difference(card, other)]
    if reason and others:
        return f"{reason}; GPU {others[0]} is one, so set CUDA_VISIBLE_DEVICES={others[0]}"
    return reason


def _difference(card: Card, there: gpu.Gpu) -> str | None:
    if there.capability not in card.capabilities or not re.fullmatch(
        card.slug, gpu_slug(there.name)
    ):
        return f"this is a {there.name}, which is not {card.title}"
    if card.multiprocessors and there.multiprocessors not in card.multiprocessors:
        wanted = " or ".join(map(str, card.multiprocessors))
        return f"this {there.name} shows {there.multiprocessors} multiprocessors, where {card.title} has {wanted}"
    if card.gib and not card.gib[0] <= there.memory_bytes / GIB <= card.gib[1]:
        low, high = card.gib
        return (
            f"this {there.name} shows {there.memory_bytes / GIB:.0f} GiB of memory, where {card.title} has {low} to "
            f"{high}"
        )
    return None


def left_out(card: Card) -> dict[str, str]:
    """The ops of a card whose comparison lacks a module here, with that module."""
    wanted = {op: COMPARISONS[op] for op, *_ in card.ops if op in COMPARISONS}
    return {op: module for op, module in wanted.items() if find_spec(module) is None}


def commands(card: Card, ncu: bool) -> list[list[str]]:
    """What is run, in this order, from the root of the repository."""
    tests = [f"packages/{name}/tests" for name in card.packages]
    lines = [["-m", "pytest", "-m", "gpu", *tests]]
    without = left_out(card)
    lines += [
        ["benchmarks/run.py", op, *options, "--json"]
        for op, *options in card.ops
        if op not in without
    ]
    lines += [[f"benchmarks/ops/lite/{study}.py", "--json"] for study in ("quality", "trajectory")]
    lines.append(["benchmarks/first_call.py", "--json"])
    if ncu:
        lines.append(["benchmarks/ops/decode/ncu_decode.py", "profile", *card.counters])
    return [*lines, ["benchmarks/tables.py"]]


def plan(card: Card, gpus: Sequence[gpu.Gpu], ncu: bool) -> str:
    """What would happen, for a reader."""
    folder = f"benchmarks/results/{gpu_slug(gpus[0].name) if gpus else '<gpu>'}/"
    lines = [f"needs   {card.expected()}"]
    lines += [f"        on this machine: {refusal(card, gpus) or gpus[0].name}"]
    lines += [f"runs    python {' '.join(line)}" for line in commands(card, ncu)]
    for op, module in left_out(card).items():
        lines.append(f"        without {op}: {module} is not installed")
    if not ncu:
        lines.append("        without hardware counters: ncu is not on PATH")
    lines += [f"writes  {folder}*.json", f"        {card.page.replace('<gpu>', Path(folder).name)}"]
    return "\n".join(lines)


def run(lines: Sequence[Sequence[str]]) -> list[str]:
    """Runs every command, and returns those that failed."""
    failed = []
    for line in lines:
        said = f"python {' '.join(line)}"
        print(f"\n== {said}", flush=True)
        if subprocess.run([sys.executable, *line], cwd=ROOT, check=False).returncode:
            failed.append(said)
    return failed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tests and measures everything that a card can, and writes its page."
    )
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and stop")
    parser.add_argument("--check", action="store_true", help="only say whether the GPU is the card")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    card, gpus, ncu = CARDS[args.card], gpu.found(), shutil.which("ncu") is not None
    if args.dry_run:
        print(plan(card, gpus, ncu))
        return 0
    if reason := refusal(card, gpus):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if args.check:
        return 0
    print(plan(card, gpus, ncu))
    failed = run(commands(card, ncu))
    print("".join(f"\nfailed: {said}" for said in failed) or "\nall went well", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
