"""The table "If you asked for ..." of README.md: what users asked for, the answer in a sentence, and where it stands.

A region of `tables.py`: `<!-- bench:answers:h200 -->`. Every figure is read from a result file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.harness import rank_rows, report, results
from benchmarks.ops.decode import h20_page
from benchmarks.ops.lite import trajectory_rows

OP = "answers"
LONG, MAIN = "*-H[!6]*", "*-H64"
BLACKWELL = "B1-T8192-H64"
LISTED = "list3.1-B1-S16384-H24-D128"
TRAINED, SIMULATED = "B1-S4096-H16-D128", -1.0
ONE_TOKEN, STEP = "*-B[62]*-T1-fp32-vk", "gdn-B64-T4-fp32-vk-step"


def region(gpu: str, root: Path) -> str:
    """The table, of the results on one GPU."""
    rows = [
        _h20(root),
        _kda_blackwell(root),
        _cut(gpu, root),
        _lightning(gpu, root),
        _gated(gpu, root),
        _lite(gpu, root),
        *delta_decode(gpu, root),
        *training(gpu, root),
        *several_gpus(gpu, root),
    ]
    return f"\n{report.as_markdown((['asked for', 'answer', 'where'], rows)).replace('---:', '---')}\n\n"


def _h20(root: Path) -> list[str]:
    files = h20_page.read(root)
    found = {k: r for k, r in h20_page.big_batch_ratios(files).items() if k[0] == "fp32"}
    answer = "; ".join(
        f"{h20_page.LAYOUTS[where]} {min(ratios.measured):.2f} to {max(ratios.measured):.2f} x FLA"
        f"{_estimate(ratios)}"
        for where, ratios in found.items()
    )
    where = f"on {files.place}" + (", since no H20 was at hand" if files.stand_in else "")
    met = all(r.verdict() == "met" for r in found.values())
    return [
        f"Lightning decode on an H20: a baseline, and {h20_page.CRITERION} x FLA at B >= {h20_page.CRITERION_FROM}",
        f"{h20_page.CRITERION} is {'reached' if met else 'not reached everywhere'} {where}: {answer}",
        f"[{h20_page.PAGE}]({h20_page.PAGE})",
    ]


def _estimate(ratios: h20_page.Ratios) -> str:
    if ratios.estimated is None:
        return ""
    low, high = ratios.estimated
    return f", on an H20 estimated {low:.2f} to {high:.2f}"


def _kda_blackwell(root: Path) -> list[str]:
    predicted = _plain("kda_prefill_blackwell", "predicted", root)["rows"]
    published = _plain("kda_blackwell", "published", root)["rows"]
    ours, theirs = (
        next(r for r in rows if (r["card"], r["setting"]) == ("GB200", BLACKWELL))
        for rows in (predicted, published)
    )
    return [
        "KDA forward on Blackwell (SM100) in CuTe DSL",
        "all of it is CuTe DSL, emulated and compiled but not yet run on a Blackwell GPU; predicted "
        f"{ours['low_us'] / 1e3:.2f} to {ours['high_us'] / 1e3:.2f} ms for {BLACKWELL} on a GB200, where the C++ "
        f"kernels "
        f"were published with {theirs['cula_ms']:.2f} ms",
        "[what is proven, and how](docs/kda-sm100.md#what-is-proven-and-how)",
    ]


def _cut(gpu: str, root: Path) -> list[str]:
    result = results.load(results.result_path("kda_prefill", gpu, root))
    mean, count, least = _against(result, LONG)
    return [
        "KDA on Hopper with intra-card context parallelism",
        f"{mean:.2f} x FLA in the geometric mean of {count} settings with few heads, {least:.2f} x at the least (FLA "
        f"uncut; {_cut_by_fla(gpu, root)}); {_beside_flash_kda(gpu, root)}",
        "[beside FLA's own cutting](docs/kda-prefill.md#beside-flas-own-cutting)",
    ]


def _beside_flash_kda(gpu: str, root: Path) -> str:
    """Our ratio to FlashKDA with few heads and with many."""
    result = results.load(results.result_path("kda_prefill_flashkda", gpu, root))
    (few, _, least_few), (main, count, least) = (
        _against(result, pattern, "flash_kda") for pattern in (LONG, MAIN)
    )
    return (
        f"{few:.2f} x [FlashKDA](docs/kda-prefill.md#beside-flashkda) on the same settings, {least_few:.2f} x at the "
        f"least, and {main:.2f} x on {count} with 64 heads, {least:.2f} x at the least"
    )


def _cut_by_fla(gpu: str, root: Path) -> str:
    """What FLA's own cutting gains or loses where it cuts."""
    result = results.load(results.result_path("kda_prefill_cut", gpu, root))
    checks = (c for c in result["checks"] if c["provider"] == "fla_cp")
    cut = {c["setting"] for c in checks if c["errors"]["cut"]}
    times = {(r["setting"], r["provider"]): r["median_us"] for r in result["rows"]}
    ratios = [times[name, "fla_cp"] / times[name, "fla"] for name in cut]
    return f"with its own cutting FLA takes {min(ratios):.2f} to {max(ratios):.2f} times as long"


def _lightning(gpu: str, root: Path) -> list[str]:
    result = results.load(results.result_path("lightning_prefill", gpu, root))
    mean, count, least = _against(result, MAIN)
    return [
        "Lightning prefill on Hopper in CuTe DSL",
        f"{mean:.2f} x FLA in the geometric mean of the {count} settings asked for, {least:.2f} x at the least; "
        f"{_beside_flashinfer(gpu, root):.2f} x FlashInfer's kernel with the same decays, which is in CuTe DSL too by "
        "now and always solves a delta rule, more arithmetic than was asked for",
        "[beside FlashInfer](docs/lightning-prefill.md#beside-flashinfer)",
    ]


def _gated(gpu: str, root: Path) -> list[str]:
    result = results.load(results.result_path("gated_prefill", gpu, root))
    mean, count, least = _against(result, "*", "fla_delta")
    single, ones, slowest = _against(result, "B1-*", "flashinfer_delta")
    several, others, lowest = _against(result, "[BN][!1]*", "flashinfer_delta")
    return [
        "The gated delta rule, which FlashInfer's kernel solves, on Hopper in CuTe DSL",
        f"{mean:.2f} x FLA in the geometric mean of {count} settings, {least:.2f} x at the least; {single:.2f} x "
        f"FlashInfer on {ones} with one sequence, {slowest:.2f} x at the least, and {several:.2f} x on {others} with "
        f"several, {lowest:.2f} x at the least",
        "[its times](docs/gated-prefill.md#how-fast)",
    ]


def _beside_flashinfer(gpu: str, root: Path) -> float:
    """The geometric mean of our ratio with a decay per head to FlashInfer's kernel."""
    result = results.load(results.result_path("lightning_prefill_delta", gpu, root))
    method = results.device_method(result)
    rows = results.rows_of(result, method=method, provider="cula_decay")
    return statistics.geometric_mean(r["ratio_flashinfer_decay"] for r in rows)


def _lite(gpu: str, root: Path) -> list[str]:
    result = results.load(results.result_path("lite_attention", gpu, root))
    rows = results.rows_of(result, method=results.device_method(result), provider="lite")
    costs = [1 / r["ratio_lite_dense"] - 1 for r in rows if r["setting"].startswith("full-")]
    listed = next(r["ratio_lite_dense"] for r in rows if r["setting"] == LISTED)
    dense = [r for r in rows if r["setting"].startswith("dense-") and "-D128" in r["setting"]]
    beside = [r["ratio_torch_cudnn"] for r in dense]
    training = results.load(results.result_path("lite_training", gpu, root))
    method = results.device_method(training)
    steps = {
        r["setting"]: r["median_us"]
        for r in results.rows_of(training, method=method, provider="lite")
    }
    trained = steps[f"dense-{TRAINED}"] / steps[f"list12.5-{TRAINED}"]
    path = results.result_path(trajectory_rows.OP, gpu, root)
    simulated = next(r for r in trajectory_rows.load(path)["rows"] if r["threshold"] == SIMULATED)
    return [
        "LiteAttention on SM89: less overhead, a backward that skips, 8-bit scores",
        f"all three are there; deciding costs {min(costs):.1%} to {max(costs):.1%} where nothing is skipped; times as "
        f"fast as our dense kernels: {listed:.1f} with 3.1 % of the tiles, {trained:.2f} for a training step whose "
        f"backward skips 87.5 %, {simulated['speedup_lite_dense']:.1f} in the simulated trajectory once lists have "
        f"settled, in step {simulated['settled_step']}; dense attention with D=128 is {min(beside):.2f} to "
        f"{max(beside):.2f} x cuDNN; on an H200, with Hopper's own kernels: not timed on an Ada card",
        "[liteattention-sm89](packages/liteattention-sm89/README.md#measured)",
    ]


def delta_decode(gpu: str, root: Path) -> list[list[str]]:
    """Decode with the delta rule, where it has been measured."""
    path = results.result_path("delta_decode", gpu, root)
    if not path.exists():
        return []
    result = results.load(path)
    method = results.device_method(result)
    ours = {r["setting"]: r for r in results.rows_of(result, method=method, provider="cula")}
    shares = [r["ratio_ceiling"] for name, r in ours.items() if fnmatchcase(name, ONE_TOKEN)]
    parts = []
    for gate, pattern in (("GDN", "gdn-*-T1-fp32-vk"), ("KDA", "kda-*-T1-fp32-vk")):
        mean, count, least = _against(result, pattern)
        parts.append(
            f"{gate} {mean:.2f} x FLA in the geometric mean of {count} batches, {least:.2f} x at the least"
        )
    told = (
        f"with fp32 states `[V, K]` and one token {'; '.join(parts)}; {min(shares):.2f} to {max(shares):.2f} of an "
        "in-place multiplication at B >= 64"
    )
    if STEP in ours:
        others = {
            r["provider"]: r["median_us"] / ours[STEP]["median_us"]
            for r in results.rows_of(result, method=method, setting=STEP, role="variant")
        }
        told += (
            f"; a replay of drafts is {others['cula_commit']:.2f} times as fast as verifying and committing, and "
            f"{others['cula_slots']:.2f} times as fast as a state per token ({STEP})"
        )
    return [
        [
            "Decode of the gated delta rule and of KDA on a pool of states, with speculative decoding",
            told,
            "[how the kernels work](docs/delta-decode.md)",
        ]
    ]


def training(gpu: str, root: Path) -> list[list[str]]:
    """A training step by our own kernels, where it has been measured."""
    parts = []
    for kind, name, peer, of in (
        ("KDA", "kda_training", "fla", "FLA"),
        ("Lightning attention", "lightning_training", "fla", "FLA"),
        # FLA refuses this backward with the Triton of most results.
        ("the gated delta rule", "gated_training", "fla_lifted", "FLA with its refusal lifted"),
    ):
        path = results.result_path(name, gpu, root)
        if path.exists():
            result = results.load(path)
            rows = results.rows_of(result, role="ours", method=results.device_method(result))
            told = [r[f"ratio_{peer}"] for r in rows if r.get(f"ratio_{peer}")]
            if told:
                parts.append(f"{kind} {min(told):.2f} to {max(told):.2f} x {of}")
    if not parts:
        return []
    return [
        [
            "Training on Hopper: forward and backward",
            f"{'; '.join(parts)}; nothing but the inputs is kept, and the same call has the same bits",
            "[who computes gradients](docs/training.md)",
        ]
    ]


def several_gpus(gpu: str, root: Path) -> list[list[str]]:
    """A sequence on two GPUs, beside one and beside FLA on the same two, where that has been measured."""
    path = results.result_path(f"several_gpus_x2{rank_rows.OF_FLA}", gpu, root)
    if not path.exists():
        return []
    calls: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rank_rows.load(path)["rows"]:
        if row["bounds"] == "equal":
            key = row["pass"], row["op"], row["tokens"], row["heads"]
            calls.setdefault(key, {})[row["provider"]] = row
    beside: dict[str, list[float]] = {which: [] for which in rank_rows.PASSES}
    gains: dict[str, list[float]] = {"cula": [], "fla": []}
    for (which, *_), of in calls.items():
        if of.keys() == gains.keys():
            beside[which].append(of["fla"]["ms"] / of["cula"]["ms"])
            for provider, row in of.items():
                if row["one_ms"] is not None:
                    gains[provider].append(row["one_ms"] / row["ms"])
    (ours, theirs), (forward, step) = (
        [f"{min(values):.2f} to {max(values):.2f}" for values in of.values()]
        for of in (gains, beside)
    )
    return [
        [
            "Context parallelism: one sequence on several GPUs",
            f"on the same two GPUs a training step of KDA is {step} x FLA, the forwards of KDA and of the gated delta "
            f"rule {forward} x; in these calls two are {ours} times as fast as one (FLA: {theirs}); four and eight "
            "were not measured together",
            "[several GPUs](docs/several-gpus.md#how-fast)",
        ]
    ]


def _against(
    result: Mapping[str, Any], pattern: str, peer: str = "fla"
) -> tuple[float, int, float]:
    """The geometric mean of our ratio to a peer, the number of settings, and the lowest ratio."""
    method = results.device_method(result)
    mean, count = report.geometric_mean(result, method, pattern, peer)
    return mean, count, min(report.ratios(result, method, pattern, peer).values())


def _plain(name: str, folder: str, root: Path) -> Any:
    return json.loads(results.result_path(name, folder, root).read_text(encoding="utf-8"))
