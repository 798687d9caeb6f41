# Vendored from packages/cula-cp-sm90/tests/test_stages.py by "nox -s vendor": edit the master.
"""The stages of a call one by one, on the CPU, against their definitions in fp64.

What the chunk-parallel kernel writes is unpacked and compared part by part: gate, norm, products inside a chunk,
inverse. The recurrence gets blocks that are packed from the definitions instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from cutlass.cute.runtime import make_fake_stream
from kda_sm100_emulated import make_call, one_thread
from kda_sm100_facts import TARGETS, TILES
from torch import Tensor

from cula_emulator import mutation
from cula_kda_sm100 import launch, reference
from cula_kda_sm100.common import AQK, BLOCK, DECAY, KG, KH, QG, T_PRIME, WIDE
from cula_kda_sm100.config import (
    CHUNK,
    HEAD_DIM,
    SUB,
    TRIANGLE,
    FactorsConfig,
    PrepareConfig,
    RecurrenceConfig,
    chunk_slots,
)

pytestmark = pytest.mark.emulated(detect_races=True)

LENGTHS = (70, 0, 1, 64)
LOG2_E = 1.4426950408889634
# Relative RMSE. A factor of 2^G has the error of its exponent, which is a sum of up to 64 rounded decays.
FACTOR_ERROR, PRODUCT_ERROR, INVERSE_ERROR, OUTPUT_ERROR = 4e-4, 1e-3, 1e-3, 3e-3
ROUNDED_ERROR = 3e-3  # to bfloat16


@dataclass
class Factors:
    """What a chunk and value head hands to the recurrence, in fp64; rows past the end are zero."""

    q: Tensor  # [64, 128], normalized
    k: Tensor
    decays: Tensor  # [64, 128], log2, of every token
    beta: Tensor  # [64]
    scale: float

    @cached_property
    def sums(self) -> Tensor:
        return self.decays.cumsum(0)

    @cached_property
    def apart(self) -> Tensor:
        """2^(G_i - G_j), j <= i, else 0: [64, 64, 128]."""
        rows = torch.arange(CHUNK)
        seen = (rows[:, None] >= rows)[..., None]
        return torch.where(seen, self.sums[:, None] - self.sums, -torch.inf).exp2()

    @property
    def qg(self) -> Tensor:
        return self.scale * self.q * self.sums.exp2()

    @property
    def kh(self) -> Tensor:
        return self.k * self.sums.exp2()

    @property
    def kg(self) -> Tensor:
        return self.k * (self.sums[-1] - self.sums).exp2()

    @property
    def decay(self) -> Tensor:
        return self.sums[-1].exp2()

    @property
    def aqk(self) -> Tensor:
        return self.scale * torch.einsum("ic,jc,ijc->ij", self.q, self.k, self.apart)

    @property
    def inverse(self) -> Tensor:
        akk = torch.einsum("i,ic,jc,ijc->ij", self.beta, self.k, self.k, self.apart).tril(-1)
        return torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + akk)

    @property
    def t_prime(self) -> Tensor:
        return self.inverse * self.beta


PARTS = {
    "decay": FACTOR_ERROR, "qg": FACTOR_ERROR, "kh": FACTOR_ERROR, "kg": FACTOR_ERROR, "aqk": PRODUCT_ERROR,
    "t_prime": INVERSE_ERROR,
}  # fmt: skip


def factors(call) -> dict[tuple[int, int], Factors]:
    """Of every (slot, value head) that has a token."""
    x = {name: call.given[name].double() for name in ("q", "k", "g", "beta")}
    constants = call.given["A_log"], call.given["dt_bias"]
    bound = call.options["lower_bound"]
    decays = reference._log_decay(x["g"], *constants, call.gate, bound) * LOG2_E
    if call.strength != "plain":
        x["beta"] = (2 if call.strength == "doubled" else 1) * x["beta"].sigmoid()
    q, k = (reference._normalized(x[name]) if call.l2norm else x[name] for name in ("q", "k"))
    group = decays.shape[2] // q.shape[2]
    found = {}
    for n, slot, rows in chunks(call):
        for head in range(decays.shape[2]):
            heads = (head // group, head // group, head, head)
            own = (
                filled(call.tokens(tensor, n)[rows, h])
                for tensor, h in zip((q, k, decays, x["beta"]), heads)
            )
            found[slot, head] = Factors(*own, call.scale)
    return found


def chunks(call) -> Iterator[tuple[int, int, slice]]:
    """(sequence, slot, tokens of the sequence) of every chunk."""
    start = 0
    for n, length in enumerate(call.lengths):
        for chunk in range(-(-length // CHUNK)):
            slot = start // CHUNK + n + chunk if call.packed else n * -(-length // CHUNK) + chunk
            yield n, slot, slice(chunk * CHUNK, min(length, (chunk + 1) * CHUNK))
        start += length


def filled(rows: Tensor) -> Tensor:
    """With zeros up to a whole chunk."""
    whole = torch.zeros(CHUNK, *rows.shape[1:], dtype=torch.float64)
    whole[: len(rows)] = rows
    return whole


# ---- blocks ----------------------------------------------------------------------------------------------------------


def wide_places() -> Tensor:
    """Where the elements of a [64, 128] matrix lie: panels of 64 columns, units of 8 permuted by the row."""
    row, column = torch.meshgrid(torch.arange(CHUNK), torch.arange(HEAD_DIM), indexing="ij")
    unit = column % 64 // 8 ^ row % 8
    return column // 64 * (CHUNK * 64) + row * 64 + unit * 8 + column % 8


def triangle_places() -> tuple[Tensor, Tensor]:
    """Where the elements of T' or Aqk lie, and which of them do: panels of 16 columns from the diagonal on."""
    row, column = torch.meshgrid(torch.arange(CHUNK), torch.arange(CHUNK), indexing="ij")
    panel = column // SUB
    before = torch.tensor([sum((CHUNK - SUB * p) * SUB for p in range(n)) for n in range(4)])
    unit = column % SUB // 8 ^ row // 4 % 2
    place = before[panel] + (row - SUB * panel) * SUB + unit * 8 + column % 8
    return place, row >= SUB * panel


def unpacked(block: Tensor) -> dict[str, Tensor]:
    """The parts of a block."""
    wide = {"qg": QG, "kh": KH, "kg": KG}
    parts = {name: block[at : at + WIDE][wide_places()] for name, at in wide.items()}
    place, there = triangle_places()
    for name, at in (("t_prime", T_PRIME), ("aqk", AQK)):
        own = block[at : at + TRIANGLE]
        parts[name] = torch.where(there, own[place.clamp(min=0)], torch.zeros((), dtype=own.dtype))
    return parts | {"decay": block[DECAY : DECAY + 2 * HEAD_DIM].view(torch.float32)}


def packed(parts: Factors, dtype: torch.dtype) -> Tensor:
    """A block of exact parts."""
    block = torch.full((BLOCK,), torch.nan, dtype=dtype)
    for at, x in ((QG, parts.qg), (KH, parts.kh), (KG, parts.kg)):
        block[at : at + WIDE][wide_places()] = x.to(dtype)
    place, there = triangle_places()
    for at, x in ((T_PRIME, parts.t_prime), (AQK, parts.aqk)):
        block[at : at + TRIANGLE][place[there]] = x[there].to(dtype)
    block[DECAY : DECAY + 2 * HEAD_DIM].view(torch.float32)[:] = parts.decay.float()
    return block


def test_places():
    """Every element of a block has one place, and parts come back as they were packed."""
    place, there = triangle_places()
    assert sorted(place[there].tolist()) == list(range(TRIANGLE))
    assert sorted(wide_places().flatten().tolist()) == list(range(WIDE))
    (parts,) = factors(make_call((64,))).values()
    found = unpacked(packed(parts, torch.float16))
    for part in PARTS:
        assert torch.equal(found[part], getattr(parts, part).to(found[part].dtype)), part


# ---- the kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(emulated) -> Callable[[object], Callable[..., None]]:
    def compiled(config):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This static loop has")
            return emulated(
                *launch.kernel(config), make_fake_stream(use_tvm_ffi_env_stream=True), arch=TARGETS[0], key=config
            )  # fmt: skip

    return compiled


def blocks_of(call, emulated) -> Tensor:
    heads_v = call.given["v"].shape[2]
    batch, tokens = call.given["q"].shape[:2]
    slots = chunk_slots(batch, tokens, len(call.lengths) if call.packed else None)
    return emulated.empty((slots, heads_v, BLOCK), getattr(torch, call.operand))


CALLS = {
    "dense": {"lengths": (130, 130), "gate_dtype": "bfloat16", "beta_dtype": "bfloat16"},
    "packed": {"lengths": LENGTHS, "kind": "moderate", "packed": True, "strength": "sigmoid"},
    "weak": {"lengths": (100,), "kind": "near_zero"},
    "any decay": {"lengths": (100,), "kind": "resets", "gate": "softplus"},
    "equal keys": {"lengths": (128,), "kind": "equal_keys", "strength": "doubled"},
    "raw": {"lengths": (65,), "gate": "log", "rate": False, "bias": False, "l2norm": False},
}


def prepare(compiled, call, blocks: Tensor, intra: tuple[Tensor, Tensor] | None = None) -> None:
    """The chunk-parallel kernel, alone."""
    x, options = call.given, call.options
    cu_seqlens = call.cu_seqlens(torch.int32) if call.packed else None
    dtypes = (str(x[name].dtype).removeprefix("torch.") for name in ("q", "g", "beta"))
    config = PrepareConfig(
        *dtypes, call.operand, call.gate, call.bounded, call.l2norm, options["beta_sigmoid"], options["neg_eigval"],
        x["A_log"] is not None, x["dt_bias"] is not None, "int32" if call.packed else None, intra is not None,
    )  # fmt: skip
    bias = None if x["dt_bias"] is None else x["dt_bias"].view(-1, HEAD_DIM)
    compiled(config)(
        x["q"], x["k"], x["g"], x["beta"], x["A_log"], bias, cu_seqlens, blocks, *(intra or (None, None)),
        call.scale, options["lower_bound"], 0, blocks.shape[0],
    )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_chunk_parallel_stages(compiled, emulated, relative_rmse, name):
    """Gate (decay), norm and gate (qg, kh, kg), products inside a chunk (Aqk), inverse (T')."""
    call = make_call(heads=(1, 2), **CALLS[name])
    blocks = blocks_of(call, emulated)
    prepare(compiled, call, blocks)
    with one_thread():
        expected = factors(call)
    assert expected
    for (slot, head), parts in expected.items():
        found = unpacked(blocks[slot, head])
        for part, bound in PARTS.items():
            exact = getattr(parts, part)
            if part == "decay":  # may be too small to be a normal number, and is zero then
                exact = exact.where(exact >= torch.finfo(torch.float32).smallest_normal, 0)
            error = relative_rmse(found[part], exact)
            assert error <= bound, f"{part} of slot {slot}, head {head}: {error:.1e}"


@pytest.mark.parametrize("name", ["dense", "packed", "any decay"])
def test_products_and_inverse_for_the_caller(compiled, emulated, relative_rmse, name):
    """Aqk and (I + Akk)^-1 by token, zero above the diagonal; the blocks are the same bits."""
    call = make_call(heads=(1, 2), **CALLS[name])
    batch, tokens, heads_v = call.given["v"].shape[:3]
    alone, blocks = blocks_of(call, emulated), blocks_of(call, emulated)
    prepare(compiled, call, alone)
    dtype = call.given["q"].dtype
    intra = tuple(emulated.empty((batch, tokens, heads_v, CHUNK), dtype) for _ in range(2))
    prepare(compiled, call, blocks, intra)
    assert torch.equal(blocks.view(torch.int16), alone.view(torch.int16))
    with one_thread():
        expected = factors(call)
    for n, slot, rows in chunks(call):
        for head in range(heads_v):
            parts = expected[slot, head]
            for found, exact in zip(intra, (parts.aqk, parts.inverse)):
                own = call.tokens(found, n)[rows, head]
                assert not own.triu(1).any()
                assert relative_rmse(own, exact[: len(own)]) <= ROUNDED_ERROR


@pytest.mark.parametrize("name", ["dense", "packed", "raw"])
def test_factors_for_the_caller(compiled, emulated, relative_rmse, name):
    """w, u, qg and kg by token, of both heads, from what the chunk-parallel kernel wrote."""
    call = make_call(heads=(1, 2), **CALLS[name])
    shape, dtype = call.given["v"].shape, call.given["v"].dtype
    blocks = blocks_of(call, emulated)
    prepare(compiled, call, blocks)
    found = [emulated.empty(shape, dtype) for _ in range(4)]
    cu_seqlens = call.cu_seqlens(torch.int32) if call.packed else None
    name = str(dtype).removeprefix("torch.")
    config = FactorsConfig(name, call.operand, "int32" if call.packed else None)
    compiled(config)(
        blocks, call.given["v"], *found, cu_seqlens, call.scale, 0, blocks.shape[0]
    )  # fmt: skip
    x = {name: tensor.double() for name, tensor in call.given.items() if tensor is not None}
    options = call.options
    offsets = call.cu_seqlens(torch.int64) if call.packed else None
    with one_thread():
        expected = reference.intermediates(
            *(x.get(name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), offsets, **options
        )  # fmt: skip
    for own, exact in zip(found, expected[2:]):
        assert relative_rmse(own, exact) <= ROUNDED_ERROR


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", ["dense", "weak"])
def test_the_recurrence(compiled, emulated, relative_rmse, name, tiles):
    """State and outputs, from exact blocks."""
    call = make_call(heads=(1, 2), **CALLS[name])
    v, heads_v = call.given["v"], call.given["v"].shape[2]
    blocks = blocks_of(call, emulated)
    with one_thread():
        for (slot, head), parts in factors(call).items():
            blocks[slot, head] = packed(parts, blocks.dtype)
    out = emulated.empty(v.shape, v.dtype)
    initial = call.initial[: len(call.lengths)].clone()
    final = emulated.empty(initial.shape, torch.float32)
    dtype = str(v.dtype).removeprefix("torch.")
    config = RecurrenceConfig(dtype, call.operand, tiles=tiles, initial_state=True)
    compiled(config)(
        blocks, v, out, initial, None, final, None, None, None, None, max(v.shape[1], CHUNK), 0,
        len(call.lengths) * heads_v,
    )  # fmt: skip
    assert relative_rmse(out, call.expected.out) <= OUTPUT_ERROR
    assert relative_rmse(final, call.expected.states) <= OUTPUT_ERROR


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_of_the_factors_matters(compiled, emulated):
    call = make_call((100,))
    blocks, v = blocks_of(call, emulated), call.given["v"]
    prepare(compiled, call, blocks)
    kernel = compiled(FactorsConfig("bfloat16", call.operand))

    def run(**changes) -> list[Tensor]:
        found = [emulated.empty(v.shape, v.dtype) for _ in range(4)]
        kernel(blocks, v, *found, None, call.scale, 0, blocks.shape[0], **changes)
        return found

    before = run()

    def check(changes) -> None:
        for one, other in zip(run(**vars(changes)), before):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))

    report = mutation.run(check, kernel, schedules=mutation.SCHEDULES[:3])
    assert report.noticed and not report.not_reached and not report.unnoticed, str(report)
