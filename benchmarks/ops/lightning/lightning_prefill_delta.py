"""Lightning prefill beside kernels that solve a gated delta rule, on the 28 main settings; K=V=128."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops.lightning import delta
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning.delta import setting
from benchmarks.ops.lightning.delta_providers import LIMIT, PROVIDERS, UNFADING_LIMIT, check
from benchmarks.ops.sequences import main_sizes
from benchmarks.ops.tuning import TUNING_MS


def settings(quick: bool) -> list[Setting]:
    """Ten dense and eighteen packed problems of 64 heads."""
    if quick:
        return [
            setting(4096),
            setting(4096, batch=2),
            setting(8192, sequences=10, lengths="random"),
        ]
    return [setting(**size) for size in main_sizes()]


NOTES = (
    "cula is chunk_simple_gla with a gate per token and head, cula_decay is Lightning attention with a decay per head.",
    "flashinfer_* are FlashInfer's chunk_gated_delta_rule, fla_delta is that of flash-linear-attention. They solve a "
    "delta rule, which is strictly more arithmetic than Lightning attention and simple GLA: besides the products that "
    "these have, each chunk of 64 tokens needs the overlaps of its keys, the inverse of a triangular matrix and two "
    "products more. They have no switch that leaves this out, and the op gated_prefill has cula's gated delta rule.",
    "flashinfer_decay gets the decays of cula_decay, flashinfer_gate the gates of cula, both without beta, which is 1 "
    "then; flashinfer_delta and fla_delta get the gates and beta. FlashInfer takes the exponentials of log decays per "
    "token and head; these, and beta, are computed before the call.",
    "Keys are normalised before the call, for every provider.",
    "Every provider returns final states, FlashInfer's as [V, K]. bytes: q, k, v, o, gates, beta and states once each, "
    "what a provider takes of them.",
    "flashinfer: dense problems are given to it as B packed sequences. Outputs and states are written to memory of "
    "each buffer set, made before the call. use_cp='auto', its default, cuts sequences where sequences times heads are "
    "fewer than half of the multiprocessors, which on 132 of them are those of B=1 with 64 heads; `cut` in its errors "
    "is 1 where it did cut. Then it also fills a beta of ones in every call that is given none.",
    f"fla_delta is tuned anew for every setting: all its candidates, {TUNING_MS['rep']} ms each. It plans packed "
    "sequences once, outside the time.",
    f"Checked before it is timed: relative RMSE of the worst checked head against an fp64 oracle of what the provider "
    f"computes. cula within {lightning.OUTPUT_LIMIT:.0e} for the output and {lightning.STATE_LIMIT:.0e} for the state; "
    f"the others within {LIMIT:.0e} for both, flashinfer_decay {UNFADING_LIMIT:.1e}: they round the state, the inverse "
    "and what is added to the state to 16 bits one after the other, and one error enters the next, most of all in the "
    "head whose decay is 0.",
    "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
)

OP = Op(
    name="lightning_prefill_delta",
    title="Lightning prefill beside the gated delta rule, K=V=128",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=delta.make_inputs,
    set_bytes=delta.read,
    check=check,
    notes=NOTES,
)
