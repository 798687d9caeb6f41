"""What the tests on a GPU compare with: linear attention in fp64 from its equations, on any device, and their cases.

Per sequence and value head, with a_t the log decay of token t,

    S_t = exp(a_t) S_{t-1} + k_t v_t^T,    o_t = scale S_t^T q_t.

Token by token this is too slow for long sequences, so `chunked` sums it chunk by chunk: for tokens i, j of a chunk,
A_i the running sum of a inside it and S the state before it,

    o_i = scale (exp(A_i) S^T q_i + sum over j <= i of exp(A_i - A_j) (q_i . k_j) v_j)
    S  <- exp(A_last) S + sum over j of exp(A_last - A_j) k_j v_j^T

`test_gpu_oracle.py` holds it against the recurrence itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90 import chunk_simple_gla, lightning_attn_fwd, lightning_attn_fwd_varlen
from cula_testing.comparing import relative_rmse, same
from cula_testing.tensors import column, int32

MAX_OUTPUT_ERROR, MAX_STATE_ERROR, MAX_EXACT_STATE_ERROR = 5e-3, 3e-3, 2e-5
# Of what the same algorithm loses in torch; on top of it, the noise of fp32 sums in another order.
BASELINE_FACTOR, OUTPUT_NOISE, STATE_NOISE = 1.5, 1e-6, 1e-5
# No single row of an output or a state may be this many times worse than all together are allowed to be.
ROW_FACTOR = 3


@dataclass(frozen=True)
class Case:
    """One kernel: what is compiled in (but for `many`: enough heads for two V tiles per CTA), and num_splits."""

    dtype: str
    dim_k: int
    dim_v: int
    gate: str | None
    decay: bool
    packed: bool
    v_first: bool
    state: str
    checkpoints: bool
    l2norm: bool
    exact: bool
    many: bool
    splits: int

    def __str__(self) -> str:
        words = [self.dtype[0] + self.dtype[-2:], f"{self.dim_k}x{self.dim_v}"]
        words += [f"gate_{self.gate}"] * (self.gate is not None) + ["decay"] * self.decay
        words += [name for name in ("packed", "v_first", "checkpoints") if getattr(self, name)]
        words += [name for name in ("l2norm", "exact", "many") if getattr(self, name)]
        return "-".join([*words, f"state_{self.state}", f"splits_{self.splits}"])


FACTORS = {
    "dtype": ("bfloat16", "float16"),
    "dim_k": (64, 128),
    "dim_v": (64, 128),
    "gate": (False, True),
    "decay": (False, True),
    "packed": (False, True),
    "v_first": (False, True),
    "state": ("none", "initial", "final", "both", "pool", "read"),
    "checkpoints": (False, True),
    "l2norm": (False, True),
    "exact": (False, True),
    "many": (False, True),
    "splits": (1, 3),
}


def possible(case: dict) -> bool:
    """Whether the public functions reach these values of some factors.

    Pools belong to packed input with nothing but a decay per head. Segments have one V tile whatever the number of
    heads, and so has V=64.
    """
    pool = case.get("state") in ("pool", "read")
    plain = case.get("packed", True) and case.get("decay", True) and not case.get("gate", False)
    whole = case.get("splits", 1) == 1 and case.get("dim_v", 128) == 128
    return (plain or not pool) and (whole or not case.get("many", False))


# Every possible pair of values of two factors is in one of these; the dtypes of gates take turns.
# fmt: off
CASES = [
    Case("bfloat16", 64, 128, "float32", True, False, True, "both", False, False, True, True, 1),
    Case("bfloat16", 128, 64, None, False, True, True, "none", False, True, False, False, 3),
    Case("float16", 64, 128, None, True, True, False, "pool", True, True, False, True, 1),
    Case("float16", 128, 128, "bfloat16", False, False, False, "final", True, True, True, False, 3),
    Case("float16", 128, 64, None, True, False, True, "initial", True, False, True, False, 1),
    Case("bfloat16", 64, 64, "float16", False, True, False, "initial", False, False, False, False, 3),
    Case("bfloat16", 64, 128, None, False, True, True, "final", True, False, False, True, 1),
    Case("float16", 128, 128, None, True, True, True, "read", False, True, True, True, 1),
    Case("bfloat16", 128, 64, None, True, True, True, "pool", False, False, True, False, 3),
    Case("bfloat16", 64, 64, None, True, True, False, "read", True, False, False, False, 3),
    Case("bfloat16", 64, 128, None, True, False, False, "none", True, False, False, True, 1),
    Case("bfloat16", 128, 64, None, False, True, False, "both", True, True, False, False, 3),
    Case("float16", 64, 64, "bfloat16", True, True, True, "final", False, False, False, False, 1),
    Case("float16", 64, 128, "float16", True, True, True, "none", True, False, True, True, 1),
    Case("float16", 64, 64, None, False, True, True, "both", False, True, False, False, 1),
    Case("float16", 128, 128, "float32", False, True, False, "initial", False, True, True, True, 1),
    # All that costs registers and shared memory at once.
    Case("bfloat16", 128, 128, "bfloat16", True, False, False, "both", True, True, True, True, 1),
]
# fmt: on


@dataclass
class Inputs:
    """q, k [B, T, H, K], v [B, T, HV, V], decay [HV], gate [B, T, HV], initial [N, HV, K, V]; lengths if packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    gate: Tensor | None
    lengths: list[int] | None
    initial: Tensor

    @property
    def starts(self) -> list[int]:
        """First token of every packed sequence, and the end."""
        return [0, *itertools.accumulate(self.lengths)]

    def cu_seqlens(self, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(self.starts, dtype=dtype, device=self.q.device)

    def to(self, device: torch.device | str) -> Inputs:
        moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in vars(self).items()}
        if self.gate is not None and not self.gate.is_contiguous():
            moved["gate"] = in_rows(moved["gate"])
        return Inputs(**moved)


def in_rows(gate: Tensor) -> Tensor:
    """The same gates where TMA can load those of neighbouring heads: rows at multiples of 16 bytes, NaN between."""
    heads, unit = gate.shape[2], 16 // gate.element_size()
    rows = gate.new_full((*gate.shape[:2], -(-heads // unit) * unit + unit), math.nan)
    return rows[..., :heads].copy_(gate)


def make(
    device: torch.device | str,
    size: int | list[int],
    tokens: int = 0,
    heads: int = 2,
    heads_v: int = 2,
    dims: tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype = torch.bfloat16,
    gate: torch.dtype | None = None,
    decay: bool = True,
    seed: int = 0,
) -> Inputs:
    """Inputs for a batch of `size` sequences of `tokens` tokens, or for packed sequences of the lengths `size`.

    Decays lie between 1e-4 and 1 per token, gates between 0 and about -1.5; these are stored as `in_rows` does.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lengths = size if isinstance(size, list) else None
    batch, sequences = (size, size) if lengths is None else (1, len(size))
    tokens = tokens if lengths is None else sum(lengths)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    q, k = (normal(batch, tokens, heads, dims[0]) for _ in range(2))
    v = normal(batch, tokens, heads_v, dims[1])
    initial = normal(sequences, heads_v, *dims, dtype=torch.float32)
    uniform = torch.rand(heads_v, generator=generator, device=device)
    gates = torch.nn.functional.logsigmoid(2 * normal(batch, tokens, heads_v, dtype=torch.float32))
    return Inputs(
        q, k, v, 10 ** (-4 * uniform) if decay else None,
        None if gate is None else in_rows((gates / 4).to(gate)), lengths, initial,
    )  # fmt: skip


@dataclass
class Result:
    """out as v; final [N, HV, K, V]; checkpoints [N, longest // every, HV, K, V], valid as far as a sequence goes."""

    out: Tensor
    final: Tensor
    checkpoints: Tensor | None


def chunked(
    x: Inputs,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    initial: bool = True,
    every: int = 0,
    rounded: torch.dtype | None = None,
    chunk: int = 32,
) -> Result:
    """The equations above in fp64.

    With `rounded`, in fp32 with every operand of a matrix product rounded to that dtype: what an implementation in
    torch with low-precision products does.
    """
    wide = torch.float64 if rounded is None else torch.float32
    tokens = x.q.shape[1] if x.lengths is None else max(x.lengths, default=0)
    sequences, heads_v, dim_k, dim_v = x.initial.shape
    group = heads_v // x.q.shape[2]
    scale = dim_k**-0.5 if scale is None else scale

    def operand(value: Tensor) -> Tensor:
        return value if rounded is None else value.to(rounded).to(wide)

    def unit(value: Tensor) -> Tensor:
        return operand(value * (value.square().sum(-1, keepdim=True) + 1e-6).rsqrt())

    # Rows of tokens that do not exist are zero and do not decay, so that they pass the state on as it is.
    positions = torch.arange(tokens, device=x.q.device)
    starts = lengths = None
    if x.lengths is not None:
        starts = torch.tensor(x.starts[:-1], device=x.q.device)[:, None]
        lengths = torch.tensor(x.lengths, device=x.q.device)[:, None]

    def rows(value: Tensor, first: int, last: int) -> Tensor:
        """[N, heads, tokens, ...] of tokens first..last of every sequence."""
        if starts is None:
            part = value[:, first:last]
        else:
            missing = positions[first:last] >= lengths
            part = value[0, (starts + positions[first:last]).masked_fill(missing, 0)]
            part = part.masked_fill(missing.view(*missing.shape, *[1] * (part.dim() - 2)), 0)
        return part.to(wide).transpose(1, 2)

    log_decay = torch.zeros(x.v.shape[:3], dtype=wide, device=x.q.device)
    if x.decay is not None:
        log_decay -= x.decay.to(wide)
    if x.gate is not None:
        log_decay += x.gate.to(wide)
    # The exponential of less is nothing, and larger numbers would spoil the sums.
    log_decay.clamp_(min=-500.0 if rounded is None else -104.0)

    state = torch.zeros_like(x.initial, dtype=wide)
    if initial:
        state += x.initial
    out = torch.zeros(sequences, tokens, heads_v, dim_v, dtype=wide, device=x.q.device)
    checkpoints = []
    for first in range(0, tokens, chunk):
        last = min(first + chunk, tokens)
        q, k, v = (rows(value, first, last) for value in (x.q, x.k, x.v))
        if l2norm:
            q, k = unit(q), unit(k)
        q, k = (value.repeat_interleave(group, 1) for value in (q, k))
        total = rows(log_decay, first, last).cumsum(2)
        above = torch.ones(last - first, last - first, device=q.device).triu(1).bool()
        between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -math.inf).exp()
        inside = operand(q @ k.mT * between) @ v
        before = total.exp()[..., None] * (q @ operand(state))
        out[:, first:last] = (scale * (inside + before)).transpose(1, 2)
        end = total[..., -1:]
        weighted = operand((end - total).exp()[..., None] * v)
        state = end.exp()[..., None] * state + k.mT @ weighted
        if every and last % every == 0:
            checkpoints.append(state)
    if lengths is not None:
        out = out[positions < lengths][None]
    written = torch.stack(checkpoints, 1) if checkpoints else None
    return Result(out if rounded is None else out.to(rounded), state, written)


def worst_row(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row (the last dimension), over the norm of that row plus that of an average one."""
    error = (actual.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    average = size.square().mean().sqrt()
    return 0.0 if average == 0 else (error / (size + average)).max().item()


def assert_output(actual: Tensor, expected: Tensor, baseline: Tensor) -> float:
    """Bounds of an output; returns its relative RMSE."""
    return _assert_close(actual, expected, baseline, MAX_OUTPUT_ERROR, OUTPUT_NOISE, "output")


def assert_state(actual: Tensor, expected: Tensor, baseline: Tensor, exact: bool = False) -> float:
    """Bounds of a state [.., K, V]; an exact one must not lose what 16-bit operands do."""
    if exact:
        return _assert_close(actual, expected, None, MAX_EXACT_STATE_ERROR, 0.0, "exact state")
    return _assert_close(actual, expected, baseline, MAX_STATE_ERROR, STATE_NOISE, "state")


def _assert_close(
    actual: Tensor, expected: Tensor, baseline: Tensor | None, limit: float, noise: float, name: str
) -> float:
    if not expected.numel():
        assert actual.shape == expected.shape, name
        return 0.0
    lost = None if baseline is None else relative_rmse(baseline, expected)
    allowed = limit if lost is None else min(limit, BASELINE_FACTOR * lost + noise)
    error, worst = relative_rmse(actual, expected), worst_row(actual, expected)
    assert error <= allowed, (
        f"{name}: relative RMSE {error:.3e}, limit {allowed:.3e}, torch loses {lost}"
    )
    assert worst <= ROW_FACTOR * limit, f"{name}: a row is off by {worst:.3e}"
    return error


def stored(state: Tensor, v_first: bool) -> Tensor:
    """[.., K, V] laid out as a call with this flag takes it; the same again turns it back."""
    return state.mT.contiguous() if v_first else state


def attend(
    x: Inputs,
    *,
    state: str = "both",
    v_first: bool = False,
    initial: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """Calls the public function that serves such inputs.

    state: "none", "initial" (taken only), "final" (returned only), "both"; "pool" (updated in place through indices)
    and "read" (a pool that is only read). initial: instead of x.initial, or of a copy for "pool"; as the call takes it.
    """
    if state in ("none", "final"):
        initial = None
    elif initial is None:
        initial = stored(x.initial, v_first)
    if state == "pool" and initial is x.initial:
        initial = initial.clone()
    final = state not in ("none", "initial")
    options["state_v_first"] = v_first
    if x.lengths is not None and cu_seqlens is None:
        cu_seqlens = x.cu_seqlens()
    if x.gate is not None or x.decay is None:
        return chunk_simple_gla(
            x.q, x.k, x.v, g=x.gate, g_gamma=None if x.decay is None else -x.decay,
            initial_state=initial, output_final_state=final, cu_seqlens=cu_seqlens, **options,
        )  # fmt: skip
    if cu_seqlens is None:
        return lightning_attn_fwd(
            x.q, x.k, x.v, x.decay, initial_state=initial, output_final_state=final, **options
        )
    return lightning_attn_fwd_varlen(
        x.q, x.k, x.v, x.decay, cu_seqlens, state_pool=initial, initial_state_indices=indices,
        output_final_state=final, update_state_pool=state == "pool", **options,
    )  # fmt: skip


def check(
    x: Inputs,
    *,
    state: str = "both",
    v_first: bool = False,
    every: int = 0,
    exact: bool = False,
    l2norm: bool = False,
    scale: float | None = None,
    splits: int | None = 1,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """One call on `device` (where x is, unless given) with buffers full of NaN, held against the oracle where x is:
    numbers, and what must not change bit for bit. Returns the relative errors."""
    given = {"scale": scale, "l2norm": l2norm, "initial": state not in ("none", "final")}
    expected = chunked(x, **given, every=every)
    baseline = chunked(x, **given, every=every, rounded=x.q.dtype, chunk=64)
    there = x if device is None else x.to(device)

    options = {"use_qk_l2norm_in_kernel": l2norm, "exact_state": exact, "num_splits": splits}
    out = torch.full_like(there.v, math.nan)
    sequences, heads_v, dim_k, dim_v = x.initial.shape
    written = None
    if every:
        matrix = (dim_v, dim_k) if v_first else (dim_k, dim_v)
        shape = (x.v.shape[0], x.v.shape[1] // every, heads_v, *matrix)
        written = torch.full(shape, math.nan, dtype=torch.float32, device=out.device)
        options |= {"state_checkpoints": written, "checkpoint_every_n_tokens": every}
    slots = list(range(sequences))
    initial = stored(there.initial, v_first).clone()
    if state in ("pool", "read"):
        # Backwards, one slot in three is padding, and two rows belong to nobody.
        slots = [sequences + 1 - n if n % 3 != 1 else -1 - n for n in range(sequences)]
        pool = torch.full((sequences + 2, *initial.shape[1:]), math.nan, device=out.device)
        for n, slot in enumerate(slots):
            if slot >= 0:
                pool[slot] = initial[n]
        initial = pool
        options["indices"] = column(int32(*slots).to(out.device))
    before = initial.clone()
    with poisoned_memory():
        got, final = attend(
            there, state=state, v_first=v_first, initial=initial, scale=scale, out=out, **options
        )
    assert got is out
    out = out.to(x.q.device)

    live = [n for n, slot in enumerate(slots) if slot >= 0]
    if len(live) < sequences:
        for n in set(range(sequences)) - set(live):
            padding = slice(x.starts[n], x.starts[n + 1])
            assert not out[:, padding].any(), "a padding slot has an output"
            for result in (expected, baseline):
                result.out[:, padding] = 0
    errors = {"out": assert_output(out, expected.out, baseline.out)}

    if state == "pool":
        assert final is initial
        others = [row for row in range(len(initial)) if row not in slots]
        assert same(initial[others], before[others]), "a row that nobody owns has changed"
        final = initial[[slots[n] for n in live]]
    else:
        assert same(initial, before), "the initial state has changed"
        if state == "read":
            assert not final[[n for n in range(sequences) if n not in live]].any()
            final = final[live]
    if state in ("none", "initial"):
        assert final is None
    else:
        final = stored(final, v_first).to(x.q.device)
        errors["state"] = assert_state(final, expected.final[live], baseline.final[live], exact)
    if every:
        written = stored(written, v_first).to(x.q.device)
        errors["checkpoints"] = _check_checkpoints(
            x, written, expected.checkpoints, baseline.checkpoints, every, live, exact
        )
    return errors


def _check_checkpoints(
    x: Inputs,
    written: Tensor,
    expected: Tensor | None,
    baseline: Tensor | None,
    every: int,
    live: list[int],
    exact: bool,
) -> float:
    """Every sequence has written its rows, and nobody any others."""
    if x.lengths is None:
        return assert_state(written, expected, baseline, exact) if expected is not None else 0.0
    owners = {x.starts[n] // every + i: (n, i) for n in live for i in range(x.lengths[n] // every)}
    free = [row for row in range(written.shape[1]) if row not in owners]
    assert written[0, free].isnan().all(), "a row that nobody owns has changed"
    if not owners:
        return 0.0
    sequences, places = zip(*owners.values())
    chosen = (list(sequences), list(places))
    return assert_state(written[0, list(owners)], expected[chosen], baseline[chosen], exact)
