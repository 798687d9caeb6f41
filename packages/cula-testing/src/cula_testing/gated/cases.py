"""What prefill of the gated delta rule is tested with: heads, lengths and choices, and the arguments of their calls."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from ..tensors import normals

# Heads of q, k and v: alike, queries grouped (HQ > HV), and values grouped (HV > HQ).
HEADS = ((1, 1, 1), (6, 2, 2), (2, 2, 4), (16, 16, 32), (16, 16, 64))
# Tokens of packed sequences: whole chunks of 64, less than one, and tails.
LENGTHS = (
    (64,),
    (128,),
    (256,),
    (256, 256),
    (64, 128, 512),
    (31,),
    (61,),
    (91,),
    (121,),
    (251,),
    (511, 501),
    (31, 63, 93, 123, 150, 500),
)
# Whether there are decays, whether there are strengths, and the scale of outputs.
CHOICES = tuple(itertools.product((True, False), (True, False), (None, 1.0)))


class Case(NamedTuple):
    """One call. heads: of q, k and v. lengths: of packed sequences. scale: None for the default."""

    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    decays: bool
    strengths: bool
    scale: float | None

    def __str__(self) -> str:
        heads, lengths = ("-".join(map(str, x)) for x in (self.heads, self.lengths))
        given = [name for name in ("decays", "strengths") if getattr(self, name)]
        return "_".join((f"heads{heads}", f"tokens{lengths}", *given, f"scale{self.scale}"))


def cases() -> list[Case]:
    """Returns every pair of heads and lengths once, so that all choices meet each of the heads."""
    found = []
    for i, heads in enumerate(HEADS):
        for j, lengths in enumerate(LENGTHS):
            found.append(Case(heads, lengths, *CHOICES[(j + 3 * i) % len(CHOICES)]))
    return found


def arguments(
    case: Case,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Returns arguments of `chunk_gated_delta_rule`, with final states; K = V = dim, and keys are of norm 1.

    Decays and strengths are in fp32, or in fp64 beside fp64 activations.
    """
    normal = normals(torch.Generator().manual_seed(seed))
    tokens, per_head = sum(case.lengths), max(case.heads)
    q, k, v = (normal(1, tokens, heads, dim) for heads in case.heads)
    decay = -torch.nn.functional.softplus(normal(1, tokens, per_head) - 2)
    strength = normal(1, tokens, per_head).sigmoid()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    offsets = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
    return {
        "q": q.to(device, dtype),
        "k": normalize(k, dim=-1).to(device, dtype),
        "v": v.to(device, dtype),
        "g": decay.to(device, wide) if case.decays else None,
        "beta": strength.to(device, wide) if case.strengths else None,
        "scale": case.scale,
        "cu_seqlens": offsets.to(device),
        "output_final_state": True,
    }
