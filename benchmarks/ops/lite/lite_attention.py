"""Skip-list attention: dense, with nothing skipped, and with lists of a given density; bf16."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite.problem import setting
from benchmarks.ops.lite.providers import PROVIDERS, check

# Batch, tokens, heads.
SHAPES = ((1, 4096, 16), (1, 8192, 16), (1, 16384, 24), (2, 4096, 32))
LIST_SHAPE = (1, 16384, 24)
DENSITIES = (1 / 32, 1 / 8, 1 / 4, 1 / 2)


def group(kind: str) -> list[Setting]:
    """The problems that are run both dense and with nothing skipped."""
    shapes = [setting(kind, s, batch=b, heads=h) for b, s, h in SHAPES]
    return [*shapes, setting(kind, 8192, dim=64), setting(kind, 8192, causal=True)]


def settings(quick: bool) -> list[Setting]:
    """Dense problems, the same with every tile listed, then lists of four densities."""
    batch, tokens, heads = LIST_SHAPE
    lists = [setting("list", tokens, batch=batch, heads=heads, density=d) for d in DENSITIES]
    if quick:
        return [group("dense")[0], group("full")[0], lists[0]]
    return group("dense") + group("full") + lists


NOTES = (
    f"Tiles of {lite.BLOCK_M} queries and {lite.BLOCK_N} keys, random data. full and list: the threshold is -inf, so "
    "that every tile listed is kept and written. list: equally many random key tiles for every query tile.",
    "tflops: 4 B H S^2 D times the density, half of it for causal problems, over the provider's time; for lite_dense "
    "in a list problem this is the rate at which it does the work that lite has to do.",
    f"lite_int8 is lite with scores from 8-bit integers; q and k are rounded in every call. It passes its check with a "
    f"relative L2 error up to {lite.INT8.output:g}, the others up to {lite.EXACT.output:g}.",
    "lite and lite_dense have the kernels that users get: on Hopper those of liteattention-sm90 for head dimensions up "
    "to 128. lite_sm89 is lite with those of liteattention-sm89, as LITEATTENTION_KERNEL=sm89 asks for them, where "
    "these are not chosen anyway; lite_int8 has no others. Every call of lite_sm89 takes the long way through the "
    "host, so its times outside graphs are longer than a user has.",
    "lite_dense is lite without a mask on the same inputs. ratio_lite_dense of full problems is 1 / (1 + overhead); of "
    "lists it is the speedup, which times the density is the rate per kept tile over the dense rate.",
    "torch_flash and torch_cudnn are scaled_dot_product_attention with that backend on [B, H, S, D] views; they return "
    "no log-sum-exp.",
    "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
)

OP = Op(
    name="lite_attention",
    title="Skip-list attention, bf16",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=lite.make_inputs,
    set_bytes=lite.read,
    check=check,
    flops=lite.flops,
    notes=NOTES,
)
