"""Calls of the backward pass and what they must give, for the tests of its kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cula_testing.lite import Call, Inputs, make_inputs
from liteattention_sm89 import masks, reference

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


LISTS = Backward(150, 200, heads=1, dim=64, listed=0.6)
# What shares a kernel with it, and what needs kernels of its own.
EMULATED = [
    LISTS,
    *(replace(LISTS, tiles=tiles) for tiles in BITS if tiles != "some"),
    replace(LISTS, listed=0.25, batch=2, views=True),
    replace(LISTS, listed=0.95, heads=4, fewer=True),
    replace(LISTS, rows=4300, keys=70, listed=0.1),
    replace(LISTS, rows=129, keys=2200, listed=0.1),
    replace(LISTS, rows=1, keys=65, listed=1.0),
    Backward(200, 70, heads=1, dim=64, causal=True, dlse=True, how=("order",)),
    Backward(100, 200, heads=4, heads_k=2, dim=64, causal=True, dlse=True, how=("order",)),
    Backward(
        dim=72, dtype="float16", causal=True, listed=0.7, block_n=128, index_dtype="int64", how=("atomics",),
        lengths=((70, 200), (0, 30), (200, 130), (0, 0), (5, 0), (129, 129)), arch="sm_90a",
    ),
    Backward(dim=96, lengths=((70, 130), (0, 30), (5, 0), (130, 64)), how=("order",)),
    Backward(dim=128, listed=0.7, lengths=((70, 130), (0, 30), (5, 0), (130, 64)), how=("atomics",)),
    Backward(130, 140, dim=192, causal=True, dlse=True, listed=0.8, dtype="float16", block_n=128, how=("order",)),
    Backward(130, 70, dim=256, how=("atomics",), arch="sm_90a"),
    Backward(200, 130, dim=8, batch=2, listed=0.8, how=("atomics",), arch="sm_90a"),
]  # fmt: skip


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


def tile_shape(call: Call, x: Inputs) -> tuple[int, int]:
    return -(-x.most[0] // 128), -(-x.most[1] // call.block_n)


def with_tiles(call: Backward, x: Inputs) -> Inputs:
    if x.read is None:
        return x
    bits = masks.unpack(x.read, tile_shape(call, x)[1])
    return replace(x, read=masks.pack(BITS[call.tiles](bits).expand(bits.shape)))


@functools.cache
def problem(call: Backward, device: str = "cpu") -> Problem:
    """The gradients are those of autograd through the forward in fp64, or approximations with its out and lse."""
    x = with_tiles(call, make_inputs(call)).to(device)
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
        given = {"out": out.detach(), "lse": lse.detach(), "dlse": dlse}
        wanted = reference.masked_gradients(
            *(t.detach() for t in leaves), dout.double(), x.read, **given, **options
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
