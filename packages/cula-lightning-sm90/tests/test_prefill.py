"""The kernels on a Hopper GPU. What is compiled in comes from few sets of options, so that most tests share kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from gpu_oracle import (
    CASES,
    MAX_OUTPUT_ERROR,
    Inputs,
    assert_output,
    assert_state,
    attend,
    check,
    chunked,
    make,
    stored,
)
from torch import Tensor

from cula_lightning_sm90 import (
    chunk_lightning_attn,
    chunk_simple_gla,
    launch,
    lightning_attn_fwd,
    lightning_attn_fwd_varlen,
    ops,
)
from cula_testing.comparing import bits, relative_rmse, same
from cula_testing.packing import spread
from cula_testing.tensors import unsynchronised

pytestmark = pytest.mark.gpu

RAGGED = [100, 1, 0, 63, 64, 65, 0, 128, 200, 1, 37]
# The two kernels that most tests below use, beside that of packed input with a pool.
DECAY, GATE = {"decay": True, "gate": None}, {"decay": False, "gate": torch.float32}
MODES = pytest.mark.parametrize("mode", [DECAY, GATE], ids=["decay", "gate"])


@pytest.fixture
def hopper() -> torch.device:
    """The GPU; any other machine fails the test in one line."""
    if not torch.cuda.is_available():
        pytest.fail("needs a Hopper GPU; -m 'not gpu' leaves such tests out", pytrace=False)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.fail(f"needs a Hopper GPU, not {torch.cuda.get_device_name()}", pytrace=False)
    return torch.device("cuda", torch.cuda.current_device())


def sizes(case) -> list[tuple]:
    """(batch or lengths, T, H, HV) on one side of the choice of V tiles and of segments, so that one kernel serves."""
    if case.packed:
        heads = (4, 8) if case.many else (1, 3)
        lengths = [RAGGED, spread(1, 20, 1500), [200] * 20]
        few = [[65], [300], [1, 0, 130, 0]] if case.splits > 1 else [[1], [64], [0, 300, 0], [2, 1]]
        lengths += [spread(2, 300, 3000), [64] * 40] if case.many else few
        return [(sequences, 0, *heads) for sequences in lengths]
    if case.many:
        return [(1, 1, 8, 72), (1, 200, 8, 72), (2, 129, 36, 72)]
    if case.splits > 1:
        return [(1, 65, 1, 3), (2, 500, 2, 2), (1, 1000, 1, 1)]
    return [(1, 1, 2, 2), (2, 63, 1, 3), (3, 64, 2, 2), (2, 129, 2, 4), (1, 1000, 1, 1)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(hopper, case):
    gate = None if case.gate is None else getattr(torch, case.gate)
    for i, size in enumerate(sizes(case)):
        tokens = size[1] or sum(size[0])
        if case.checkpoints and tokens < 64:
            continue  # none is written, so this is another kernel; see test_no_room_for_a_checkpoint
        x = make(
            hopper, *size, (case.dim_k, case.dim_v), dtype=getattr(torch, case.dtype), gate=gate,
            decay=case.decay, seed=i,
        )  # fmt: skip
        if gate and i % 2:
            x.gate = x.gate.contiguous()
        every = min((64, 128, 192)[i % 3], tokens // 64 * 64) if case.checkpoints else 0
        options = {"state": case.state, "v_first": case.v_first, "every": every}
        check(x, **options, exact=case.exact, l2norm=case.l2norm, splits=case.splits)


def test_no_room_for_a_checkpoint(hopper):
    check(make(hopper, 2, 63, 1, 2, **DECAY), every=64)


@MODES
@pytest.mark.parametrize(
    "size",
    [(1, 16384, 64, 64), (2, 4096, 16, 64), (1, 32768, 4, 8), (1, 2048, 1, 1), (1, 131, 2, 512)],
    ids=str,
)
def test_large(hopper, mode, size):
    """The numbers of segments and V tiles that the shapes ask for."""
    check(make(hopper, *size, **mode), splits=None)


@MODES
@pytest.mark.parametrize(
    "lengths",
    [
        [1], [64], [4000], [0], [0, 0, 0], [1] * 300, [64] * 20, [100] * 300, [0] * 299 + [100],
        [5000, 1, 0, 1], [1, 0, 1, 5000], spread(3, 20, 8192), spread(4, 300, 8192),
    ],
    ids=lambda x: f"{len(x)}-{sum(x)}",
)  # fmt: skip
def test_packed(hopper, mode, lengths):
    options = {"state": "pool", "splits": None} if mode is DECAY else {"state": "both"}
    check(make(hopper, lengths, 0, 1, 4, **mode), **options)


@pytest.mark.parametrize("splits", [None, 1, 2, 8, 16, 1000])
def test_splits(hopper, splits):
    """Few heads: lengths beside the ends of segments, and more segments than chunks."""
    for tokens in (64, 65, 1024, 1025, 4160, 5000):
        check(make(hopper, 1, tokens, 1, 2, **DECAY), splits=splits)
    check(make(hopper, 2, 2500, 1, 1, **GATE), splits=splits)
    for lengths in (RAGGED, [3000], [10, 2000, 1, 0, 1500], [1] * 20 + [4000]):
        check(make(hopper, lengths, 0, 1, 2, **DECAY), state="pool", splits=splits)


@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -1.5, 1e-3])
def test_scale(hopper, scale):
    check(make(hopper, 2, 200, 1, 2, **DECAY), scale=scale)


DECAYS = {
    "none": [0.0, 0.0, 0.0, 0.0],
    "weak": [1e-7, 1e-5, 1e-4, 1e-3],
    "strong": [1.0, 2.0, 8.0, 30.0],
    "nothing_stays": [100.0, 1e4, 1e10, 1e30],
    "mixed": [0.0, 1e-4, 10.0, 1e30],
}


@pytest.mark.parametrize("decays", DECAYS.values(), ids=list(DECAYS))
@pytest.mark.parametrize("splits", [1, 4])
def test_adversarial_decays(hopper, decays, splits):
    x = make(hopper, 1, 2077, 2, 4, **DECAY)
    x.decay.copy_(torch.tensor(decays))
    check(x, splits=splits)


GATES = {
    "zero": lambda shape: torch.zeros(shape),
    "minus_zero": lambda shape: -torch.zeros(shape),
    "weak": lambda shape: torch.full(shape, -1e-5),
    "strong": lambda shape: torch.full(shape, -20.0),
    "zero_or_strong": lambda shape: -20.0 * torch.randint(0, 2, shape),
    "rare_reset": lambda shape: -1e4 * (torch.rand(shape) < 0.02) - 0.01,
    "always_reset": lambda shape: torch.full(shape, -1e30),
    "one_chunk_forgets": lambda shape: torch.where(
        torch.arange(shape[1])[:, None] // 64 == 3, -50.0, -1e-3
    ).expand(shape),
}


@pytest.mark.parametrize("gates", GATES.values(), ids=list(GATES))
@pytest.mark.parametrize("splits", [1, 4])
def test_adversarial_gates(hopper, gates, splits):
    x = make(hopper, 1, 2077, 2, 4, **GATE)
    x.gate.copy_(gates(tuple(x.gate.shape)))
    check(x, splits=splits)


@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_values_of_any_size(hopper, size):
    x = make(hopper, 1, 500, 1, 2, **DECAY)
    x.v.mul_(size)
    x.initial.mul_(size)
    check(x)


@pytest.mark.parametrize("layer, layers", [(0, 24), (17, 24), (23, 24)])
def test_decay_of_a_layer(hopper, layer, layers):
    """chunk_lightning_attn has the decay 8 h / H (1 - layer / layers) of head h."""
    for x in (make(hopper, 1, 300, 8, 8), make(hopper, RAGGED[:8], 0, 8, 8)):
        x.decay = torch.arange(8, device=hopper) * (1 - layer / layers)
        cu_seqlens = None if x.lengths is None else x.cu_seqlens()
        out, state = chunk_lightning_attn(
            x.q, x.k, x.v, layer, layers, initial_state=x.initial, output_final_state=True,
            cu_seqlens=cu_seqlens, num_splits=1,
        )  # fmt: skip
        expected, baseline = chunked(x), chunked(x, rounded=torch.bfloat16, chunk=64)
        assert_output(out, expected.out, baseline.out)
        assert_state(state, expected.final, baseline.final)


def test_gammas_are_decays(hopper):
    x = make(hopper, 1, 300, 1, 2, **DECAY)
    twin = chunk_simple_gla(
        x.q, x.k, x.v, g_gamma=-x.decay, initial_state=x.initial, output_final_state=True
    )
    assert all(map(same, attend(x), twin))


def test_cu_seqlens_may_have_64_bits(hopper):
    x = make(hopper, RAGGED, 0, 1, 2, **GATE)
    assert all(map(same, attend(x), attend(x, cu_seqlens=x.cu_seqlens(torch.int64))))


def test_no_tokens(hopper):
    """Nothing is launched, and states pass through."""
    for x in (make(hopper, 2, 0), make(hopper, 0, 100), make(hopper, [0, 0])):
        out, final = attend(x)
        assert out.shape == x.v.shape and same(final, x.initial)
    assert not attend(make(hopper, 2, 0), state="final")[1].any()


def fused_views(x: Inputs, offset: int, gap: int) -> Inputs:
    """x with q, k, v as slices of one projection full of NaN elsewhere, `offset` elements into each row."""
    widths = [value[0, 0].numel() for value in (x.q, x.k, x.v)]
    batch, tokens = x.v.shape[:2]
    pitch = offset + sum(widths) + gap
    fused = torch.full((2 * batch + 1, tokens + 2, pitch), math.nan, device=x.q.device)
    fused = fused.to(x.q.dtype)
    views, first = [], offset
    for value, width in zip((x.q, x.k, x.v), widths):
        view = fused[1::2, 1 : 1 + tokens, first : first + width]
        views.append(view.unflatten(2, value.shape[2:]).copy_(value))
        first += width
    return Inputs(*views, x.decay, x.gate, x.lengths, x.initial)


@MODES
@pytest.mark.parametrize("offset, gap", [(0, 8), (8, 0), (3, 0), (1, 8)])
def test_activations_may_be_any_view(hopper, mode, offset, gap):
    """Aligned or not, the same bits as dense tensors; nothing is written beside the output."""
    x = make(hopper, 2, 200, 1, 2, **mode)
    expected = attend(x, num_splits=1)
    storage = torch.full((2, 2, 204, 128 + offset + gap), 7.0, dtype=x.v.dtype, device=hopper)
    out = storage[:, :, 2:202, offset : offset + 128].transpose(1, 2)
    twin = fused_views(x, offset, gap)
    if x.gate is not None:
        twin.gate = x.gate.transpose(1, 2).contiguous().transpose(1, 2)
    got = attend(twin, out=out, num_splits=1)
    assert got[0] is out and all(map(same, got, expected))
    out.fill_(7.0)
    assert (storage == 7.0).all()


@pytest.mark.parametrize("offset", [0, 3])
def test_packed_views(hopper, offset):
    x = make(hopper, RAGGED, 0, 1, 2, **GATE)
    assert all(map(same, attend(fused_views(x, offset, 0)), attend(x)))


def test_expanded_and_single_dimensions(hopper):
    """Strides of zero, and of dimensions that have one element."""
    x = make(hopper, 3, 130, 1, 2, **DECAY)
    one = Inputs(x.q[:1], x.k[:1], x.v[:1], x.decay, None, None, x.initial)
    spread_out = Inputs(*(value.expand(3, -1, -1, -1) for value in (one.q, one.k, one.v)),
                        x.decay, None, None, x.initial)  # fmt: skip
    dense = Inputs(*(value.contiguous() for value in (spread_out.q, spread_out.k, spread_out.v)),
                   x.decay, None, None, x.initial)  # fmt: skip
    assert all(map(same, attend(spread_out), attend(dense)))

    x = make(hopper, 1, 1, 1, 1, **DECAY)
    odd = [value.as_strided(value.shape, (7, 5, 3, 1)) for value in (x.q, x.k, x.v)]
    twin = Inputs(*odd, x.decay.repeat(3)[::3], None, None, x.initial)
    assert all(map(same, attend(twin), attend(x)))


def slots(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_pools_may_have_gaps_or_be_transposed(hopper):
    x = make(hopper, [100, 64, 1], 0, 1, 2, **DECAY)
    expected, states = attend(x, state="pool", indices=slots(hopper, 0, 1, 2))
    gaps = torch.full((9, 5, *states.shape[2:]), 7.0, device=hopper)
    indices, pool = slots(hopper, 3, 0, 1), gaps[1::2, 2:4]
    pool[indices] = x.initial
    out, final = attend(x, state="pool", initial=pool, indices=indices)
    assert final is pool and same(out, expected) and same(pool[indices], states)
    assert (gaps[::2] == 7).all() and (gaps[:, :2] == 7).all() and (gaps[:, 4:] == 7).all()

    turned = x.initial.mT.contiguous().mT
    out, final = attend(x, state="pool", initial=turned, indices=slots(hopper, 0, 1, 2))
    assert final is turned and same(out, expected) and same(turned, states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mode, state", [(DECAY, "pool"), (DECAY, "read"), (GATE, "both")])
def test_states_of_16_bits(hopper, mode, state, splits, v_first, dtype):
    """They are widened where a sequence begins and rounded where they are stored; nothing else changes."""
    x = make(hopper, [500, 1, 0, 64, 300], 0, 1, 2, **mode)
    options = {"state": state, "v_first": v_first, "num_splits": splits}
    if state != "both":
        options["indices"] = slots(hopper, 2, -1, 0, 4, 1)

    def run(initial: Tensor) -> tuple[Tensor, ...]:
        kept = initial.new_zeros(1, x.q.shape[1] // 64, *initial.shape[1:])
        saved = {"state_checkpoints": kept, "checkpoint_every_n_tokens": 64}
        return *attend(x, initial=initial.clone(), **options, **saved), kept

    given = stored(x.initial, v_first).to(dtype)
    (out, *states), (expected, *exact) = run(given), run(given.float())
    assert same(out, expected)
    assert all(same(own, other.to(dtype)) for own, other in zip(states, exact))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mode, splits", [(DECAY, 1), (DECAY, 3), (GATE, 1)])
def test_neighbours_are_not_seen(hopper, mode, splits, bad):
    """Every second sequence is broken in all it has; the others have the bits that they have between sound ones."""
    lengths = [100, 1, 37, 64, 63, 130, 5, 1, 300, 70]
    x = make(hopper, lengths, 0, 1, 2, **mode)
    options = {"state": "pool" if mode is DECAY else "both", "num_splits": splits}
    if mode is DECAY:
        options["indices"] = slots(hopper, *range(len(lengths)))
    sound = attend(x, **options)
    for n in range(1, len(lengths), 2):
        for value in (x.q, x.k, x.v) if x.gate is None else (x.q, x.k, x.v, x.gate):
            value[:, x.starts[n] : x.starts[n + 1]] = bad
    x.initial[1::2] = bad
    out, final = attend(x, **options)
    assert torch.isfinite(final[::2]).all() and same(final[::2], sound[1][::2])
    for n in range(0, len(lengths), 2):
        tokens = slice(x.starts[n], x.starts[n + 1])
        assert torch.isfinite(out[:, tokens]).all() and same(out[:, tokens], sound[0][:, tokens])


@MODES
def test_other_rows_heads_and_later_chunks_are_not_seen(hopper, mode):
    x = make(hopper, 3, 200, 2, 4, **mode)
    sound, states = attend(x, num_splits=1)
    x.q[1], x.k[1], x.v[1], x.initial[1] = (math.nan,) * 4
    x.v[:, :, 3] = math.nan
    x.v[2, 128:] = math.nan
    out, final = attend(x, num_splits=1)
    assert same(out[0, :, :3], sound[0, :, :3]) and same(final[0, :3], states[0, :3])
    assert same(out[2, :128, :3], sound[2, :128, :3])
    assert out[1].isnan().all() and out[:, :, 3].isnan().all()


@pytest.mark.parametrize("rows", [[2, -1, -3, 0, -1], [-1, -2, -3, -4, -5]], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_padding_slots(hopper, rows, splits):
    """Nothing of a padding slot is read or written, not even NaN."""
    x = make(hopper, [100, 64, 0, 130, 7], 0, 1, 2, **DECAY)
    used = [row for row in rows if row >= 0]
    unused = [row for row in range(4) if row not in used]
    pool = torch.full((4, *x.initial.shape[1:]), math.nan, device=hopper)
    pool[used] = 1.0
    before = pool.clone()
    padding = [slice(x.starts[n], x.starts[n + 1]) for n, row in enumerate(rows) if row < 0]
    for tokens in padding:
        x.q[:, tokens], x.k[:, tokens], x.v[:, tokens] = (math.nan,) * 3
    out = torch.full_like(x.v, math.nan)
    options = {"initial": pool, "indices": slots(hopper, *rows), "num_splits": splits}
    attend(x, state="pool", out=out, **options)
    assert torch.isfinite(out).all() and not any(out[:, tokens].any() for tokens in padding)
    assert same(pool[unused], before[unused]) and torch.isfinite(pool[used]).all()


def piece(x: Inputs, first: int, last: int, initial: Tensor) -> Inputs:
    """Some tokens of a dense x, from another state."""
    parts = [value[:, first:last] for value in (x.q, x.k, x.v)]
    gate = None if x.gate is None else x.gate[:, first:last]
    return Inputs(*parts, x.decay, gate, None, initial)


def in_pieces(x: Inputs, ends: list[int], **options) -> tuple[Tensor, Tensor]:
    outs, state, first = [], x.initial, 0
    for last in ends:
        out, state = attend(piece(x, first, last, state), **options)
        outs.append(out)
        first = last
    return torch.cat(outs, 1), state


@MODES
@pytest.mark.parametrize("heads, splits", [(2, 1), (64, None)])
def test_aligned_pieces_have_the_bits_of_one_go(hopper, mode, heads, splits):
    x = make(hopper, 1, 3000, heads, heads, **mode)
    whole = attend(x, num_splits=splits)
    for ends in ([64, 128, 1024, 2048, 3000], [1920, 3000], [*range(192, 3000, 192), 3000]):
        assert all(map(same, in_pieces(x, ends, num_splits=splits), whole))


def test_packed_pieces_have_the_bits_of_one_go(hopper):
    """A serving loop: every call takes some chunks of every sequence, and the pool carries the states."""
    lengths = [320, 64, 200, 130]
    x = make(hopper, lengths, 0, 1, 2, **DECAY)
    out, states = attend(x, num_splits=1)
    pool = x.initial.clone()
    for first in range(0, 320, 128):
        tokens = [
            torch.arange(min(first, n), min(first + 128, n)) + start
            for n, start in zip(lengths, x.starts)
        ]
        chosen = torch.cat(tokens).to(hopper)
        parts = [value[:, chosen] for value in (x.q, x.k, x.v)]
        part = Inputs(*parts, x.decay, None, [len(t) for t in tokens], x.initial)
        got, _ = attend(part, state="pool", initial=pool, num_splits=1)
        assert same(got, out[:, chosen])
    assert same(pool, states)


@pytest.mark.parametrize("splits", [1, None])
def test_exact_state_over_100_000_tokens_in_any_pieces(hopper, splits):
    x = make(hopper, 1, 100_000, 2, 4, **DECAY)
    x.decay.copy_(torch.tensor([0.0, 1e-4, 1e-2, 1.0]))
    options = {"exact_state": True, "num_splits": splits}
    out, whole = attend(x, **options)
    ends = [*sorted(random.Random(0).sample(range(1, 100_000), 25)), 100_000]
    parts, state = in_pieces(x, ends, **options)
    expected = chunked(x, chunk=64).final
    assert relative_rmse(state, whole) <= 1e-4
    # Without decay the state grows over 6,252 additions of tensor cores, which truncate: that alone is about 1e-4.
    for got in (whole, state):
        assert relative_rmse(got, expected) <= 3e-4
    assert relative_rmse(parts, out) <= MAX_OUTPUT_ERROR


def repeated(x: Inputs, **options) -> tuple[Callable[[], None], Tensor]:
    """A step that runs into NaN-filled buffers and counts the bits that differ from the first run, and the count."""
    pool = x.initial.clone()
    out = torch.full_like(x.v, math.nan)
    options |= {"initial": pool, "out": out}
    if x.lengths is not None:
        options["cu_seqlens"] = x.cu_seqlens()
    if options.get("state") == "pool":
        options["indices"] = slots(x.q.device, *range(len(pool)))
    expected, final = (bits(value).clone() for value in attend(x, **options))
    wrong = torch.zeros((), dtype=torch.int64, device=x.q.device)

    def step() -> None:
        pool.copy_(x.initial)
        out.fill_(math.nan)
        _, state = attend(x, **options)
        wrong.add_((bits(out) != expected).sum())
        wrong.add_((bits(state) != final).sum())

    return step, wrong


@pytest.mark.parametrize(
    "mode, size, options",
    [
        (DECAY, (1, 200, 8, 64), {"num_splits": 1}),
        (DECAY, (2, 130, 8, 96), {"num_splits": 1}),
        (GATE, (1, 700, 8, 64), {"num_splits": 1}),
        (GATE, (RAGGED, 0, 2, 16), {"num_splits": 1}),
        (DECAY, (RAGGED, 0, 2, 16), {"num_splits": 1, "state": "pool"}),
        (DECAY, (1, 1000, 2, 4), {"num_splits": 8}),
    ],
    ids=["one_tile", "two_tiles", "gate_pairs", "gate_packed", "pool", "split"],
)
def test_ten_thousand_runs_are_bit_identical(hopper, mode, size, options):
    x = make(hopper, *size, **mode)
    step, wrong = repeated(x, **options)
    step()
    assert wrong.item() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step()
    for _ in range(500):
        graph.replay()
    assert wrong.item() == 0
    # The count is able to see a difference.
    x.q.neg_()
    graph.replay()
    assert wrong.item() > 0


@pytest.mark.parametrize("mode, splits", [(DECAY, 1), (DECAY, 4), (GATE, 1)])
def test_graph_replay_sees_new_contents(hopper, mode, splits):
    """Captured after one call; replayed with other lengths, inputs and slots, on one stream and then on another."""
    packings = [[1000, 0, 0, 0, 0], [100, 1, 0, 563, 336], [0, 0, 0, 0, 1000], [200] * 5]
    x = make(hopper, packings[0], 0, 1, 2, **mode)
    options = {"num_splits": splits, "out": torch.empty_like(x.v), "cu_seqlens": x.cu_seqlens()}
    options["initial"] = torch.zeros(8 if mode is DECAY else 5, *x.initial.shape[1:], device=hopper)
    if mode is DECAY:
        options |= {"state": "pool", "indices": slots(hopper, *range(5))}
    attend(x, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, final = attend(x, **options)

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for seed, packing in enumerate(packings + packings[::-1]):
        fresh = make(hopper, packing, 0, 1, 2, seed=seed, **mode)
        for name in ("q", "k", "v", "decay", "gate"):
            if getattr(x, name) is not None:
                getattr(x, name).copy_(getattr(fresh, name))
        options["cu_seqlens"].copy_(fresh.cu_seqlens())
        options["initial"].normal_()
        if mode is DECAY:
            rows = torch.randperm(8)[:5].tolist()
            rows[seed % 5] = -1
            options["indices"].copy_(slots(hopper, *rows))
        names = ("initial", "indices", "cu_seqlens", "out")
        twin = {n: value.clone() if n in names else value for n, value in options.items()}
        expected = attend(fresh, **twin)
        options["out"].fill_(math.nan)
        torch.cuda.synchronize()
        stream = streams[seed % 2]
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        assert same(options["out"], expected[0]) and same(final, expected[1])


def test_two_streams_at_once(hopper):
    """Different problems side by side, each with a workspace of its own."""
    problems = [
        (make(hopper, 1, 3000, 1, 2, seed=1, **DECAY), {"num_splits": 8}),
        (make(hopper, spread(5, 20, 4000), 0, 1, 2, seed=2, **GATE), {"num_splits": 1}),
        (make(hopper, 1, 2500, 1, 3, seed=3, **DECAY), {"num_splits": 4}),
        (make(hopper, spread(6, 20, 3000), 0, 1, 2, seed=4, **GATE), {"num_splits": 1}),
    ]
    runs = [repeated(x, **options) for x, options in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(50):
        for stream, (step, _) in zip(streams, runs):
            with torch.cuda.stream(stream):
                step()
    torch.cuda.synchronize()
    assert [wrong.item() for _, wrong in runs] == [0] * len(runs)


@MODES
@pytest.mark.parametrize("splits", [1, 4])
def test_calls_run_on_the_current_stream_and_do_not_wait(hopper, mode, splits):
    """The input arrives on a side stream after a long wait: the call is back before, its kernels start after it."""
    x = make(hopper, 1, 500, 1, 2, **mode)
    expected = attend(x, num_splits=splits)
    late = Inputs(*(torch.zeros_like(value) for value in (x.q, x.k, x.v)),
                  x.decay, x.gate, None, x.initial)  # fmt: skip
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        for name in ("q", "k", "v"):
            getattr(late, name).copy_(getattr(x, name))
        got = attend(late, num_splits=splits)
        assert not side.query(), "the call has waited for the GPU"
    side.synchronize()
    assert all(map(same, got, expected))


@pytest.mark.parametrize(
    "mode, size, options",
    [
        (DECAY, (2, 300, 1, 2), {"num_splits": 1}),
        (GATE, (2, 300, 1, 2), {"num_splits": 1}),
        (DECAY, (1, 3000, 1, 2), {"num_splits": 8}),
        (DECAY, (RAGGED, 0, 1, 2), {"num_splits": 1, "state": "pool"}),
        (GATE, (RAGGED, 0, 1, 2), {"num_splits": 1}),
        (DECAY, (RAGGED, 0, 1, 2), {"num_splits": 4, "state": "pool"}),
    ],
    ids=["decay", "gate", "split", "pool", "gate_packed", "pool_split"],
)
def test_calls_neither_synchronise_nor_allocate(hopper, mode, size, options):
    """Nothing but the final state, a state per segment and head where sequences are cut, and a table of segments where
    they are packed."""
    x = make(hopper, *size, **mode)
    options |= {"out": torch.empty_like(x.v), "initial": x.initial.clone()}
    if x.lengths is not None:
        options["cu_seqlens"] = x.cu_seqlens()
    pool = options.get("state") == "pool"
    if pool:
        options["indices"] = slots(hopper, *range(len(x.initial)))
    attend(x, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with unsynchronised():
        kept = attend(x, **options)
    used = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert torch.isfinite(kept[0]).all()
    segments, splits = len(x.initial), options["num_splits"]
    allowed = 0 if pool else x.initial.nbytes
    if splits > 1:
        segments += splits
        allowed += segments * (x.initial[0].nbytes + 4 * x.v.shape[2])
    if x.lengths is not None:
        allowed += 24 * (1 + segments) + 8
    assert used <= allowed, (used, allowed)


def test_torch_compile_sees_one_graph(hopper, fresh_compiler):
    """All four functions in one graph, at two sizes."""

    def step(q, k, v, g, decay, state, pool, rows, cu_seqlens):
        first, state = lightning_attn_fwd(q, k, v, decay, None, state, True)
        second, pool = lightning_attn_fwd_varlen(q, k, first, decay, cu_seqlens, None, pool, rows)
        third, final = chunk_lightning_attn(q, k, second, 3, 24, None, pool[:3], True, cu_seqlens)
        fourth, last = chunk_simple_gla(
            q, k, third * 2, g, initial_state=state, output_final_state=True
        )
        return first, second, third, fourth, state, final, last, pool * 1

    compiled = torch.compile(step, fullgraph=True)
    for tokens in (200, 333):
        x = make(hopper, 1, tokens, 2, 2, gate=torch.float32, seed=tokens)
        pools = [torch.ones(5, 2, 128, 128, device=hopper) for _ in range(2)]
        rows, cu_seqlens = slots(hopper, 3, -1, 0), slots(hopper, 0, 70, 71, tokens)
        arguments = (x.q, x.k, x.v, x.gate, x.decay, x.initial)
        expected = step(*arguments, pools[0], rows, cu_seqlens)
        got = compiled(*arguments, pools[1], rows, cu_seqlens)
        assert all(map(same, got, expected)) and same(*pools)


@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "initial"])
def test_gradients_need_not_be_off_under_no_grad(hopper, name):
    x = make(hopper, 1, 100, 1, 2, **DECAY)
    expected = attend(x)
    getattr(x, name).requires_grad_()
    with pytest.raises(ValueError, match="backward"):
        attend(x)
    with torch.no_grad():
        assert all(map(same, attend(x), expected))


def test_one_compile_serves_all_sizes(hopper):
    attend(make(hopper, 1, 100, 1, 1, **DECAY), num_splits=1)
    compiled = launch.compile.cache_info().misses
    for i in range(40):
        heads = 1 + i % 3
        x = make(hopper, 1 + i % 5, 1 + 37 * i, heads, heads * (1 + i % 2), seed=i, **DECAY)
        attend(x, num_splits=1, scale=1 / (1 + i))
    assert launch.compile.cache_info().misses == compiled


def window(x: Inputs, row: int, first: int, last: int) -> Inputs:
    parts = [value[row : row + 1, first:last].contiguous() for value in (x.q, x.k, x.v)]
    return Inputs(*parts, x.decay, None, None, torch.zeros_like(x.initial[:1]))


def test_activations_beyond_two_billion_elements(hopper):
    """Decays of 1/4 and more forget all that lies 448 tokens back, so windows of 512 tokens tell their last 64."""
    tokens, heads = 140_000, 64
    shape = (2, tokens, heads, 128)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=hopper) for _ in range(3))
    assert q.numel() > 2**31
    decay = torch.linspace(0.25, 2.0, heads, device=hopper)
    x = Inputs(q, k, v, decay, None, None, torch.zeros(2, heads, 128, 128, device=hopper))
    out = torch.full_like(v, math.nan)
    _, final = attend(x, out=out)
    boundary = 2**31 // (heads * 128) - tokens
    for row, end in ((0, 512), (0, tokens), (1, 512), (1, boundary + 32), (1, tokens)):
        part = window(x, row, end - 512, end)
        expected, baseline = chunked(part), chunked(part, rounded=torch.bfloat16, chunk=64)
        last = slice(end - 64, end)
        assert_output(out[row : row + 1, last], expected.out[:, -64:], baseline.out[:, -64:])
        if end == tokens:
            assert_state(final[row : row + 1], expected.final, baseline.final)
    assert torch.isfinite(out.view(2, -1).sum(1, dtype=torch.float32)).all()


def test_pools_and_checkpoints_beyond_two_billion_elements(hopper):
    heads, rows = 64, 2**31 // (64 * 128 * 128)
    x = make(hopper, [300, 1, 65], 0, heads, heads, **DECAY)
    expected, states = attend(x, state="pool", indices=slots(hopper, 0, 1, 2))
    pool = torch.zeros(rows + 2, heads, 128, 128, device=hopper)
    indices = slots(hopper, rows + 1, 0, rows)
    pool[indices] = x.initial
    out, _ = attend(x, state="pool", initial=pool, indices=indices)
    assert same(out, expected) and same(pool[indices], states)
    pool[indices] = 0
    assert not pool.any()
    del pool

    x = make(hopper, 1, 64 * (rows + 1), heads, heads, **DECAY)
    written = torch.full((1, rows + 1, heads, 128, 128), math.nan, device=hopper)
    options = {"state_checkpoints": written, "checkpoint_every_n_tokens": 64}
    _, final = attend(x, **options)
    assert same(written[:, -1], final)
    _, middle = attend(piece(x, 0, 64 * (rows - 1), x.initial))
    assert same(written[:, rows - 2], middle)


@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "initial"])
def test_wrong_device(hopper, name):
    x = make(hopper, 1, 100, 1, 2, **DECAY)
    setattr(x, name, getattr(x, name).cpu())
    out = torch.full((1, 100, 2, 128), math.nan, dtype=torch.bfloat16, device=hopper)
    named = {"initial": "initial_state", "q": "q|k"}.get(name, name)
    with pytest.raises(ValueError, match=rf"^({named}): expected .*, got "):
        attend(x, out=out)
    assert out.isnan().all()


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_wrong_gpu(hopper, monkeypatch, capability):
    """One line that says what is missing; nothing is written."""
    x = make(hopper, 1, 100, 1, 2, **DECAY)
    out = torch.full_like(x.v, math.nan)
    ops.require_hopper.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    try:
        with pytest.raises(RuntimeError, match=r"needs compute capability 9\.0") as error:
            attend(x, out=out)
    finally:
        monkeypatch.undo()
        ops.require_hopper.cache_clear()
    assert "\n" not in str(error.value) and out.isnan().all()
    assert torch.isfinite(attend(x)[0]).all()
