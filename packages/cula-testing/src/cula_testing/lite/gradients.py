"""Calls of the backward pass, and what they must give, for every package that has kernels of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .calls import Call, Inputs, make_inputs, packed_bits, unpacked_bits

MAX_GRADIENT_ERROR = 5e-3  # of all, by the root of the mean square
MAX_TOKEN_ERROR = 3e-2  # of one token, by its size and the usual one
BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "some": lambda bits: bits,
    "every": torch.ones_like,
    "but the first": lambda bits: torch.arange(bits.shape[-1]) > 0,
    "the last": lambda bits: torch.arange(bits.shape[-1]) == bits.shape[-1] - 1,
    "by turns": lambda bits: (
        (torch.arange(bits.shape[-1]) + torch.arange(bits.shape[-2])[:, None]) % 2 == 1
    ),
    "no first row": lambda bits: bits & (torch.arange(bits.shape[-2]) > 0)[:, None],
    "a cross": lambda bits: (
        bits & (torch.arange(bits.shape[-1]) != 1) & (torch.arange(bits.shape[-2]) != 1)[:, None]
    ),
    "no second column": lambda bits: bits & (torch.arange(bits.shape[-1]) != 1),
}


@dataclass(frozen=True)
class Backward(Call):
    """A call of the backward launcher. tiles: which tiles count, one of BITS; "some" are `listed` of them. dlse: lse
    has a gradient too. fewer: out and lse come from a forward over all tiles. how: "atomics", "order" (deterministic)
    or both. arch: that of the kernels in the emulator."""

    tiles: str = "some"
    dlse: bool = False
    fewer: bool = False
    how: tuple[str, ...] = ("atomics", "order")
    arch: str = "sm_89"

    def __str__(self) -> str:
        words = [self.arch, super().__str__()]
        if self.tiles != "some":
            words.append(self.tiles.replace(" ", "_"))
        words += [name for name in ("dlse", "fewer") if getattr(self, name)]
        return "-".join(words + ["-".join(self.how)] * (len(self.how) == 1))


@dataclass
class Problem:
    """inputs.read: the tiles that count; the rest is as from a forward pass, and wanted is in fp64."""

    inputs: Inputs
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    wanted: tuple[Tensor, Tensor, Tensor]
    blind: Tensor  # [B, Sq, Hq], the rows without any key that counts


def _with_tiles(call: Backward, x: Inputs) -> Inputs:
    if x.read is None:
        return x
    bits = unpacked_bits(x.read, -(-x.most[1] // call.block_n))
    return replace(x, read=packed_bits(BITS[call.tiles](bits).expand(bits.shape)))


def make_problem(call: Backward, reference: Any, device: str = "cpu") -> Problem:
    """The gradients are those of autograd through the forward in fp64, or approximations with its out and lse.

    reference: the module of the oracle, with `lite_attention` and `masked_gradients`.
    """
    x = _with_tiles(call, make_inputs(call)).to(device)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(x.q.shape, generator=generator)
    options = {
        "causal": call.causal, "block_n": call.block_n, "cu_seqlens_q": x.starts_q, "cu_seqlens_k": x.starts_k,
    } | ({} if x.starts_q is None else {"max_seqlen_q": x.most[0], "max_seqlen_k": x.most[1]})  # fmt: skip
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse, _ = reference.lite_attention(*leaves, x.read, threshold=-math.inf, **options)
    blind = (lse == -math.inf).view(x.q.shape[0], x.q.shape[2], x.q.shape[1]).mT
    dout = dout.to(x.q)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.device) if call.dlse else None
    if call.fewer:
        out, lse, _ = reference.lite_attention(*leaves, threshold=-math.inf, **options)
        found = {"out": out.detach(), "lse": lse.detach(), "dlse": dlse}
        wanted = reference.masked_gradients(
            *(t.detach() for t in leaves), dout.double(), x.read, **found, **options
        )
    else:
        results, given = [out], [dout.double()]
        if dlse is not None:
            results, given = [out, lse], [*given, dlse.double()]
        wanted = torch.autograd.grad(results, leaves, given)
    return Problem(x, out.detach().to(x.q), lse.detach().float(), dout, dlse, wanted, blind)


def assert_gradients(found: tuple[Tensor, ...], p: Problem) -> None:
    unused = ~p.wanted[2].any(-1)  # keys that no row sees
    for name, got, want, idle in zip(
        ("dq", "dk", "dv"), found, p.wanted, (p.blind, unused, unused), strict=True
    ):
        difference = got.double() - want
        assert got.shape == want.shape and difference.isfinite().all(), f"{name} is not finite"
        assert not got[idle].any(), f"{name} of what does not count"
        if idle.all():
            continue
        sizes, errors = want[~idle].norm(dim=-1), difference[~idle].norm(dim=-1)
        usual = sizes.square().mean().sqrt()
        of_all = errors.square().mean().sqrt() / usual
        of_one = (errors / (sizes + usual)).max()
        assert of_all < MAX_GRADIENT_ERROR, f"{name}: {of_all}"
        assert of_one < MAX_TOKEN_ERROR, f"{name}: {of_one} of a token"
