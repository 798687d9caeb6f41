"""Gradients of skip-list attention: dense, and with lists of a given density; bf16."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops.lite import backward
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite.backward import PROVIDERS, check
from benchmarks.ops.lite.lite_attention import LIST_SHAPE, group
from benchmarks.ops.lite.problem import setting

SHORT_LIST_SHAPE = (1, 8192, 16)
# Of the short lists, and of the long ones.
DENSITIES = (0.05, 1 / 8, 1 / 4, 1 / 2)
LONG_DENSITIES = (1 / 8,)


def lists(shape: tuple[int, int, int], densities: tuple[float, ...]) -> list[Setting]:
    batch, tokens, heads = shape
    return [setting("list", tokens, batch=batch, heads=heads, density=d) for d in densities]


def settings(quick: bool) -> list[Setting]:
    """The dense problems of the forward pass, then lists of two lengths."""
    short = lists(SHORT_LIST_SHAPE, DENSITIES)
    if quick:
        return [group("dense")[0], short[1]]
    return group("dense") + short + lists(LIST_SHAPE, LONG_DENSITIES)


NOTES = (
    f"Tiles of {lite.BLOCK_M} queries and {lite.BLOCK_N} keys, random data. list: equally many random key tiles for "
    "every query tile.",
    "out and lse of a forward pass over the same tiles are there before. A call is all that follows: the row sums, the "
    "list per key tile, the gradients, and what brings dq into its form.",
    "tflops: 10 B H S^2 D times the density, half of it for causal problems, over the provider's time; for lite_dense "
    "in a list problem this is the rate at which it does the work that lite has to do.",
    "lite adds up dq in global memory, in any order. lite_deterministic gives the same bits every time: dq comes from "
    "a kernel of its own, so seven products in place of five, but tflops counts five.",
    "lite, lite_deterministic and lite_dense have the kernels that users get: on Hopper those of liteattention-sm90 "
    "for head dimensions up to 128. lite_sm89 is lite with those of liteattention-sm89, forward pass included, where "
    "these are not chosen anyway. Every call of lite_sm89 takes the long way through the host, so its times outside "
    "graphs are longer than a user has.",
    "lite_dense is lite without a list on the same inputs; ratio_lite_dense is the speedup.",
    "torch_flash is the backward operator of scaled_dot_product_attention's flash backend on [B, H, S, D] views.",
    f"Gradients pass their check with a relative L2 error up to {backward.GRADIENT_LIMIT:g} per head.",
    "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
)

OP = Op(
    name="lite_backward",
    title="Gradients of skip-list attention, bf16",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=backward.make_inputs,
    set_bytes=backward.read,
    check=check,
    flops=backward.flops,
    notes=NOTES,
)
