"""A training step of skip-list attention: forward pass and gradients through autograd; bf16."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops.lite import backward, training
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite.problem import setting
from benchmarks.ops.lite.training import PROVIDERS, check

# Batch, tokens, heads.
SHAPES = ((1, 4096, 16), (1, 8192, 16), (2, 4096, 32))
# Shares of the tiles that have gradients: a backward pass that skips 25, 75, 87.5 and 95 %.
DENSITIES = (3 / 4, 1 / 4, 1 / 8, 0.05)


def problems(shape: tuple[int, int, int]) -> list[Setting]:
    """Of one shape: no list, a list of all tiles, and lists of four densities."""
    batch, tokens, heads = shape
    size = {"batch": batch, "heads": heads}
    lists = [setting("list", tokens, density=d, **size) for d in DENSITIES]
    return [setting("dense", tokens, **size), setting("full", tokens, **size), *lists]


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [p for p in problems(SHAPES[0]) if p.params["density"] in (1, 1 / 8)]
    return [problem for shape in SHAPES for problem in problems(shape)]


NOTES = (
    f"A forward and a backward pass through autograd: gradients of q, k and v. Tiles of {lite.BLOCK_M} queries and "
    f"{lite.BLOCK_N} keys, random data. full: every tile is listed. list: equally many random key tiles for every "
    "query tile.",
    "lite: the forward pass is over all tiles, the gradients are over those of the list (grad_mask). lite_listed: both "
    "are over the list. lite_backward: what follows the forward pass of lite, as one call of the operator, without "
    "autograd.",
    "lite_dense is lite without a list on the same inputs; ratio_lite_dense is the speedup of a step.",
    "torch_flash and torch_cudnn are scaled_dot_product_attention with that backend on [B, H, S, D] views, and its "
    "gradients through autograd.",
    "tflops: 4 B H S^2 D of the forward pass and 10 B H S^2 D times the density, over the provider's time; it says "
    "little of lite_listed and lite_backward, which do less.",
    f"Gradients pass their check with a relative L2 error up to {backward.GRADIENT_LIMIT:g} per head, those of torch "
    f"up to {training.PEER_LIMIT:g}. Those of lite_listed are the exact ones of attention over the list; lite leaves "
    "out the terms of tiles that are not listed.",
    "bytes: q, k, v, out, dout, lse, the list and the gradients, each once.",
    "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
)

OP = Op(
    name="lite_training",
    title="Training step of skip-list attention, bf16",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=backward.make_inputs,
    set_bytes=training.read,
    check=check,
    flops=training.flops,
    notes=NOTES,
)
