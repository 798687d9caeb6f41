"""What the emulated tests share: calls, what the oracle makes of them, and what rounding to 16 bits may cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cula_lightning_sm90 import reference
from cula_testing.comparing import relative_rmse as relative_error
from cula_testing.packing import Slots
from cula_testing.tensors import normals

CHUNK = 64
# Log decays per token of successive heads.
RATES = {
    "gentle": (0.01, 0.15, 0.003, 0.06),
    "strong": (1e-4, 1.0, 0.0, 1e4, 8.0),
    "mixed": (0.0, 0.3, 2.0, 0.02),
}
MAX_OUTPUT_ERROR, MAX_STATE_ERROR, MAX_EXACT_STATE_ERROR = 5e-3, 3e-3, 2e-5
BASELINE_FACTOR = 1.5
# What fp32 loses where nothing is rounded to 16 bits, mostly in sums of log decays.
FP32_NOISE = 2e-5


@dataclass(frozen=True)
class Call(Slots):
    """The inputs of one call, whatever the layout in memory that it is given.

    q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV] or None, decay [HV] or None. lengths: of every sequence; packed
    ones follow each other in a batch of 1. initial [rows, HV, K, V] or None, slots: the row of each sequence, or None
    for row n; null_slot: a row that means padding. fresh: sequences that begin from zero, whose rows of `initial` are
    zero, and NaN in memory. final: None, "separate" or "in place". every: tokens between checkpoints, 0 for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    decay: Tensor | None
    lengths: tuple[int, ...]
    packed: bool = False
    initial: Tensor | None = None
    slots: tuple[int, ...] | None = None
    final: str | None = "separate"
    every: int = 0
    v_first: bool = False
    l2norm: bool = False
    exact_state: bool = False
    scale: float = 0.125
    null_slot: int | None = None
    fresh: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The pool's row of each sequence."""
        return tuple(-1 if row == self.null_slot else row for row in super().rows)

    def span(self, n: int) -> tuple[int, slice]:
        """Batch entry and tokens of a sequence."""
        if not self.packed:
            return n, slice(0, self.lengths[n])
        start = sum(self.lengths[:n])
        return 0, slice(start, start + self.lengths[n])

    def tokens(self, tensor: Tensor, n: int) -> Tensor:
        batch, span = self.span(n)
        return tensor[batch, span]

    def checkpoint_rows(self, n: int) -> tuple[int, slice]:
        """Where the checkpoints of a sequence go."""
        batch, span = self.span(n)
        first = span.start // self.every
        return batch, slice(first, first + self.lengths[n] // self.every)


@dataclass(frozen=True)
class Outcome:
    """out [B, T, HV, V], states [N, HV, K, V], checkpoints [B, T // every, HV, K, V], NaN in rows nobody owns."""

    out: Tensor
    states: Tensor
    checkpoints: Tensor | None = None


# ---- inputs ----------------------------------------------------------------------------------------------------------


def make_call(
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (1, 1),
    dims: tuple[int, int] = (64, 64),
    *,
    dtype: str = "bfloat16",
    packed: bool = False,
    gate: str | None = None,
    decay: bool = True,
    rates: str = "gentle",
    initial: bool = True,
    slots: tuple[int, ...] | None = None,
    seed: int = 0,
    **fields,
) -> Call:
    """A call with normal inputs; the pool has two rows more than there are sequences."""
    generator = torch.Generator().manual_seed(seed)
    (heads_k, heads_v), (dim_k, dim_v) = heads, dims
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    assert packed or set(lengths) == {tokens}

    normal = normals(generator)
    q, k = (normal(batch, tokens, heads_k, dim_k).to(getattr(torch, dtype)) for _ in range(2))
    v = normal(batch, tokens, heads_v, dim_v).to(getattr(torch, dtype))
    start = normal(len(lengths) + 2, heads_v, dim_k, dim_v).float()
    g, per_head = None, None
    if gate:
        uniform = torch.rand((batch, tokens, heads_v), generator=generator, dtype=torch.float64)
        if rates == "gentle":
            g = -0.1 * uniform
        else:
            g = torch.where(uniform < 0.04, -20.0, torch.where(uniform > 0.98, -1e4, 0.0))
        g = g.to(getattr(torch, gate))
    if decay:
        cycle = itertools.islice(itertools.cycle(RATES[rates]), heads_v)
        per_head = torch.tensor(list(cycle), dtype=torch.float32)
    call = Call(
        q, k, v, g, per_head, lengths, packed,
        initial=start if initial else None, slots=slots, scale=dim_k**-0.5, **fields,
    )  # fmt: skip
    for n in call.fresh:
        start[call.rows[n]] = 0.0
    return call


def poisoned(call: Call, *sequences: int) -> Call:
    """The same call with NaN and infinities in all that belongs to some sequences' tokens."""
    changed = {"q": call.q, "k": call.k, "v": call.v}
    if call.g is not None:
        changed["g"] = call.g
    changed = {name: tensor.clone() for name, tensor in changed.items()}
    for name, value in zip(changed, (math.nan, math.inf, -math.inf, math.nan)):
        for n in sequences:
            part = call.tokens(changed[name], n)
            part[:] = value
            part[1::2] = math.nan
    return replace(call, **changed)


def piece(call: Call, start: int, stop: int, initial: Tensor) -> Call:
    """Some tokens of every sequence of a dense batch."""
    cut = {name: getattr(call, name)[:, start:stop] for name in ("q", "k", "v")}
    cut["g"] = None if call.g is None else call.g[:, start:stop]
    return replace(call, **cut, lengths=(stop - start,) * len(call.lengths), initial=initial)


def alone(call: Call, n: int, packed: bool) -> Call:
    """One sequence of a call, alone, with the same state in the same row."""
    parts = {name: call.tokens(getattr(call, name), n)[None] for name in ("q", "k", "v")}
    parts["g"] = None if call.g is None else call.tokens(call.g, n)[None]
    return replace(
        call, **parts, lengths=call.lengths[n : n + 1], packed=packed, slots=(call.rows[n],)
    )


# ---- expectations ----------------------------------------------------------------------------------------------------


def _inverse_norms(call: Call, x: Tensor) -> Tensor:
    """1 / |x| of every token and head, or ones; [T, HV, 1] for x [T, HV, K]."""
    if not call.l2norm:
        return torch.ones_like(x[..., :1])
    return (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _rounding(call, q, k, v, log_decay, state):
    """One sequence in chunks, with the 16-bit roundings of operands and outputs that tensor cores impose; fp64 between.

    The state is known only at the ends of chunks, None elsewhere.
    """

    def narrow(x):
        return x.to(call.v.dtype).double()

    norm_q, norm_k = _inverse_norms(call, q), _inverse_norms(call, k)
    outputs, states = [], [state]
    for start in range(0, len(q), CHUNK):
        x = slice(start, start + CHUNK)
        sums = log_decay[x].cumsum(0)
        later = torch.ones(len(sums), len(sums), dtype=torch.bool).triu(1)
        differences = (sums[:, None] - sums[None]).masked_fill(later[:, :, None], -math.inf)
        product = torch.einsum("ihk,jhk->ijh", q[x], k[x]) * norm_q[x, None, :, 0]
        product = narrow(call.scale * product * norm_k[x][None, :, :, 0] * differences.exp())
        out = call.scale * norm_q[x] * sums.exp()[:, :, None]
        out = out * torch.einsum("ihk,hkv->ihv", q[x], narrow(state))
        outputs += narrow(out + torch.einsum("ijh,jhv->ihv", product, v[x])).unbind(0)
        weighted = (sums[-1] - sums).exp()[:, :, None] * norm_k[x] * v[x]
        term = narrow(weighted)
        if call.exact_state:
            term = term + narrow(weighted - term)
        state = sums[-1].exp()[:, None, None] * state + torch.einsum("jhk,jhv->hkv", k[x], term)
        states += [None] * (len(sums) - 1) + [state]
    return outputs, states


def exact(call: Call) -> Outcome:
    """In fp64, from the very numbers that the kernel gets."""
    starts = list(itertools.accumulate(call.lengths, initial=0)) if call.packed else None
    checkpoints = _checkpoints(call)
    outcome = reference.recurrent_prefill(
        call.q, call.k, call.v, call.g, call.decay, call.initial,
        None if call.slots is None else torch.tensor(call.rows), checkpoints,
        None if starts is None else torch.tensor(starts),
        scale=call.scale, l2norm=call.l2norm, checkpoint_every=call.every,
    )  # fmt: skip
    return Outcome(*outcome, checkpoints)


def rounded(call: Call) -> Outcome:
    """What a plain implementation in the activations' dtype would return."""
    heads_v, dim_v = call.v.shape[2:]
    dim_k, group = call.k.shape[3], heads_v // call.k.shape[2]
    out = torch.zeros(call.v.shape, dtype=torch.float64)
    finals = torch.zeros(len(call.lengths), heads_v, dim_k, dim_v, dtype=torch.float64)
    checkpoints = _checkpoints(call)
    for n, row in enumerate(call.rows):
        if row < 0:
            continue
        q, k = (call.tokens(x, n).double().repeat_interleave(group, 1) for x in (call.q, call.k))
        v = call.tokens(call.v, n).double()
        log_decay = torch.zeros(v.shape[:2], dtype=torch.float64)
        if call.g is not None:
            log_decay += call.tokens(call.g, n)
        if call.decay is not None:
            log_decay -= call.decay
        state = finals[n] if call.initial is None else call.initial[row].double()
        outputs, states = _rounding(call, q, k, v, log_decay, state)
        finals[n] = states[-1]
        if outputs:
            call.tokens(out, n)[:] = torch.stack(outputs)
        after = states[call.every :: call.every] if call.every else []
        if after:
            entry, rows = call.checkpoint_rows(n)
            checkpoints[entry, rows] = torch.stack(after)
    return Outcome(out, finals, checkpoints)


def _checkpoints(call: Call) -> Tensor | None:
    """Room for them, full of NaN."""
    if not call.every:
        return None
    batch, tokens, heads_v, dim_v = call.v.shape
    shape = (batch, tokens // call.every, heads_v, call.k.shape[3], dim_v)
    return torch.full(shape, math.nan, dtype=torch.float64)


# ---- comparisons -----------------------------------------------------------------------------------------------------


def assert_within(
    actual: Tensor, expected: Tensor, baseline: Tensor, limit: float, name: str
) -> None:
    """Within the limit, and within 1.5 times what the plain implementation loses."""
    loss = relative_error(baseline, expected)
    error = relative_error(actual, expected)
    assert error <= min(limit, BASELINE_FACTOR * loss + FP32_NOISE), (name, error, loss)


def assert_right(call: Call, actual: Outcome) -> None:
    """Outputs, states and checkpoints against the oracle; padding sequences have zeros, unowned rows NaN."""
    expected, baseline = exact(call), rounded(call)
    live = [n for n in range(len(call.lengths)) if n not in call.padding]
    for n in call.padding:
        assert not call.tokens(actual.out, n).any(), "outputs of a padding sequence"
    limit = MAX_EXACT_STATE_ERROR if call.exact_state else MAX_STATE_ERROR
    everything = (actual, expected, baseline)
    for head in range(call.v.shape[2]):
        outs = [torch.cat([call.tokens(x.out, n)[:, head] for n in live]) for x in everything]
        assert_within(*outs, MAX_OUTPUT_ERROR, f"outputs of head {head}")
        if call.final:
            states = [x.states[live, head] for x in everything]
            assert_within(*states, limit, f"final states of head {head}")
        if call.every:
            owned = ~expected.checkpoints[:, :, head].flatten(2).isnan().any(2)
            taken = [x.checkpoints[:, :, head] for x in everything]
            assert taken[0][~owned].isnan().all(), "a checkpoint that nobody owns"
            assert_within(*(x[owned] for x in taken), limit, f"checkpoints of head {head}")


# ---- memory ----------------------------------------------------------------------------------------------------------


def fused(call: Call) -> dict[str, Tensor]:
    """q, k and v as slices of one projection, g as one of a transposed tensor, with NaN around and between them."""
    batch, tokens = call.q.shape[:2]
    widths = {name: getattr(call, name)[0, 0].numel() for name in ("q", "k", "v")}
    pitch = sum(widths.values()) + 8 * 4
    whole = torch.full((2 * batch, tokens + 2, pitch), math.nan, dtype=call.q.dtype)
    views, first = {}, 8
    for name, width in widths.items():
        view = whole[1::2, 1 : 1 + tokens, first : first + width]
        views[name] = view.unflatten(2, getattr(call, name).shape[2:]).copy_(getattr(call, name))
        first += width + 8
    views["g"] = None
    if call.g is not None:
        heads_v = call.g.shape[2]
        gates = torch.full((batch, heads_v + 1, tokens + 3), math.nan, dtype=call.g.dtype)
        views["g"] = gates[:, 1:, 2 : 2 + tokens].transpose(1, 2).copy_(call.g)
    return views
