"""The compiled kernels on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from emulated_helpers import (
    Call,
    Outcome,
    alone,
    assert_right,
    fused,
    make_call,
    piece,
    poisoned,
    relative_error,
)
from gpu_oracle import in_rows
from torch import Tensor

from cula_core.dtypes import dtype_name
from cula_emulator import mutation
from cula_emulator.covering import covering_cases
from cula_emulator.memory import loose_strides, poisoned_memory
from cula_lightning_sm90 import launch
from cula_lightning_sm90.call import Call as Arguments
from cula_lightning_sm90.config import Config, TableConfig
from cula_lightning_sm90.kernels.layout import PAIR_SLOTS
from cula_testing.comparing import same
from cula_testing.compiled import emulated_kernel
from cula_testing.tensors import column, int32

FACTORS = {
    "dim_k": (64, 128),
    "dim_v": (64, 128),
    "gate": (None, "bfloat16"),
    "gate_rows": (False, True),
    "sequences": ((False, (150, 150)), (True, (70, 0, 1, 64, 130)), (True, (0, 200))),
    "splits": (None, 6),
    "heads": ((1, 2), (2, 2), (1, 3)),
    "state": (("none", None), ("none", "separate"), ("dense", "in place"), ("indexed", "separate")),
    "every": (0, 64, 128),
    "dtype": ("bfloat16", "float16"),
    "decay": (True, False),
    "rates": ("gentle", "strong"),
    "v_first": (False, True),
    "l2norm": (False, True),
    "exact_state": (False, True),
    # Few multiprocessors: one CTA has several items, and two tiles of V=128.
    "multiprocessors": (132, 2),
    "views": (False, True),
    "index_dtype": (torch.int32, torch.int64),
}
CASES = covering_cases(FACTORS, lambda case: case["gate"] or not case["gate_rows"])


def label(case: dict) -> str:
    packed, lengths = case["sequences"]
    mode = f"{case['gate']}-gate" if case["gate"] else "decay" * case["decay"] or "plain"
    dims = f"{case['dim_k']}x{case['dim_v']}"
    kind = f"{'packed' * packed or 'dense'}{len(lengths)}-split{case['splits']}"
    return f"{case['dtype']}-{dims}-{mode}-{kind}-{case['state'][0]}-{case['state'][1]}"


@pytest.fixture
def run(emulated) -> Callable[..., Outcome]:
    """run(call, ...) launches a call as `launch.run` does on a GPU, with guards around and NaN in all it may write.

    views: inputs are views of larger tensors full of NaN, outputs and states have gaps. gate_rows: g is stored so that
    TMA can load it. kept_rows, offsets: arguments for checkpoints, which then go to a buffer of 12 rows, or in_pool.
    changes: of emulator Options; a line to ignore is one of the kernel of the config `mutated`.
    run.configs: those of the last call.
    """

    def compiled(config):
        return emulated_kernel(emulated, launch.unit(config))

    def run(
        call: Call,
        *,
        views: bool = False,
        gate_rows: bool = False,
        num_splits: int | None = None,
        segment_tokens: int = 0,
        multiprocessors: int = 132,
        index_dtype: torch.dtype = torch.int32,
        decay_sign: int = -1,
        state_dtype: torch.dtype = torch.float32,
        kept_rows: tuple[int, ...] | None = None,
        offsets: tuple[int, ...] | None = None,
        in_pool: bool = False,
        mutated: object = None,
        **changes,
    ) -> Outcome:
        run.configs = []

        def kernels(config):
            run.configs.append(config)
            line = {} if mutated in (None, config) else {"ignore_line": None}
            return partial(compiled(config), **(changes | line))

        def states(count: int, gap: int = 8 * views) -> Tensor:
            matrix = (call.k.shape[3], call.v.shape[3])
            shape = (count, call.v.shape[2], *(matrix[::-1] if call.v_first else matrix))
            return emulated.empty(shape, state_dtype, stride=loose_strides(shape, gap, dense=2))

        def turned(tensor: Tensor | None) -> Tensor | None:
            return tensor.mT if call.v_first and tensor is not None else tensor

        inputs = fused(call) if views else {n: getattr(call, n) for n in ("q", "k", "v", "g")}
        if gate_rows:
            inputs["g"] = in_rows(call.g)
        stride = loose_strides(call.v.shape, 8 * views)
        out = emulated.empty(call.v.shape, call.v.dtype, stride=stride)
        used = [row for row in call.rows if row >= 0]
        initial = final = before = checkpoints = None
        if call.initial is not None:
            initial = states(len(call.initial))
            read = [row for n, row in enumerate(call.rows) if row >= 0 and n not in call.fresh]
            turned(initial)[read] = call.initial[read].to(state_dtype)
            before = initial.clone()
        if call.final:
            final = initial if call.final == "in place" else states(len(call.lengths))
        if kept_rows or offsets:
            checkpoints = None if in_pool else states(12)
        elif call.every:
            batch, tokens = call.v.shape[:2]
            checkpoints = states(batch * (tokens // call.every), 0).unflatten(0, (batch, -1))
        cu_seqlens = slots = None
        if call.packed:
            cu_seqlens = torch.tensor([0, *call.lengths]).cumsum(0).to(index_dtype)
        if call.slots is not None:
            slots = column(int32(*call.slots))
        known = None
        if call.fresh:
            known = column(torch.tensor([n not in call.fresh for n in range(len(call.lengths))]))
        decay = None if call.decay is None else -decay_sign * call.decay
        with poisoned_memory():
            in_place = call.final == "in place"
            arguments = Arguments(
                inputs["q"], inputs["k"], inputs["v"], inputs["g"], decay,
                None if in_place else initial, initial if in_place else None, slots,
                None if in_place else final, checkpoints, cu_seqlens, out,
                scale=call.scale, decay_sign=decay_sign, state_v_first=call.v_first,
                l2norm=call.l2norm, exact_state=call.exact_state, checkpoint_every=0 if offsets else call.every,
                num_splits=num_splits, has_initial_state=known, null_slot=call.null_slot,
                segment_tokens=segment_tokens,
                checkpoint_rows=None if kept_rows is None else column(int32(*kept_rows)),
                checkpoint_offsets=None if offsets is None else column(int32(*offsets)),
            )  # fmt: skip
            launch.run(arguments, multiprocessors=multiprocessors, kernels=kernels)
        if in_pool:
            checkpoints = initial.clone()
        kept = torch.ones(0 if initial is None else len(initial), dtype=torch.bool)
        if call.final == "in place":
            kept[[*used, *(kept_rows if in_pool else ())]] = False
            final = torch.stack([initial[max(row, 0)] for row in call.rows])
        elif final is not None and call.padding:
            assert not final[list(call.padding)].any(), "final state of a padding sequence"
        if initial is not None:
            assert same(initial[kept], before[kept]), "a state that is not the call's to change"
        return Outcome(out, turned(final), turned(checkpoints))

    run.compiled = compiled
    return run


def assert_same(first: Outcome, second: Outcome) -> None:
    for name in ("out", "states", "checkpoints"):
        one, other = getattr(first, name), getattr(second, name)
        assert (one is None) == (other is None)
        assert one is None or same(one, other), name


_settled: dict[object, Outcome] = {}


@pytest.fixture
def assert_settled(request) -> Callable[[Outcome], None]:
    """The result is the same, bit for bit, as under the schedules that ran this test before."""

    def check(outcome: Outcome) -> None:
        parameters = request.node.callspec.params
        others = ((n, id(v)) for n, v in parameters.items() if n != "emulator_schedule")
        key = (request.node.originalname, frozenset(others))
        assert_same(_settled.setdefault(key, outcome), outcome)

    return check


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(run, assert_settled, case):
    (packed, lengths), (initial, final) = case["sequences"], case["state"]
    slots = None
    if initial == "indexed":
        # Rows that are not the sequences' own numbers; among several sequences one is padding.
        padding = {1: None, 2: 0, 5: 3}[len(lengths)]
        slots = tuple(-3 if n == padding else len(lengths) + 1 - n for n in range(len(lengths)))
    names = ("heads", "dtype", "gate", "decay", "rates", "every", "v_first", "l2norm")
    call = make_call(
        lengths, packed=packed, dims=(case["dim_k"], case["dim_v"]), initial=initial != "none", final=final,
        slots=slots, exact_state=case["exact_state"], **{name: case[name] for name in names},
    )  # fmt: skip
    call = poisoned(call, *call.padding)
    outcome = run(
        call,
        num_splits=case["splits"],
        **{name: case[name] for name in ("views", "gate_rows", "multiprocessors", "index_dtype")},
    )
    assert_right(call, outcome)
    assert_settled(outcome)


# Kernels that the following tests share: inputs that `make_call` takes.
DENSE = {"heads": (1, 2), "gate": "float32"}
PACKED = {
    "heads": (1, 2), "packed": True, "gate": "float16", "l2norm": True, "v_first": True,
    "final": "in place", "every": 64,
}  # fmt: skip
LENGTHS = (70, 0, 1, 64, 130)
ROWS = (3, 0, 6, 1, 4)


@pytest.mark.parametrize(
    "batch, tokens", [(1, 1), (2, 63), (3, 64), (2, 65), (1, 128), (3, 200), (1, 330)]
)
def test_lengths(run, batch, tokens):
    call = make_call((tokens,) * batch, **DENSE)
    assert_right(call, run(call))


@pytest.mark.parametrize(
    "lengths", [(5,), (0, 0, 5), (0, 7, 0), (330,), (64, 64, 128), (1, 1, 1, 63, 65, 1)], ids=str
)
def test_packed_lengths(run, lengths):
    """Sequences without a token pass their state on."""
    slots = tuple(range(len(lengths)))[::-1]
    call = make_call(lengths, slots=slots, **PACKED)
    outcome = run(call, multiprocessors=2)
    assert_right(call, outcome)
    for n, length in enumerate(lengths):
        if length == 0:
            assert same(outcome.states[n], call.initial[slots[n]])


@pytest.mark.parametrize("num_splits", [2, 3, 4])
@pytest.mark.parametrize("lengths, slots", [((60, 270), (1, 3)), (LENGTHS, ROWS)], ids=str)
def test_packed_splits(run, lengths, slots, num_splits):
    call = make_call(lengths, slots=slots, **PACKED)
    assert_right(call, run(call, num_splits=num_splits, multiprocessors=3))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("final", ["in place", "separate"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_padding_by_value_and_fresh_sequences(run, num_splits, final):
    call = make_call(
        (130, 70, 0, 64, 66), slots=(0, 3, 1, 4, 2), null_slot=4, fresh=(0, 2), **PACKED | {"final": final}
    )  # fmt: skip
    assert_right(call, run(poisoned(call, *call.padding), num_splits=num_splits, multiprocessors=3))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "kept_rows, offsets, in_pool",
    [
        ((8, -1, 2, 0, 4), None, False),
        (None, (64, 0, 64, 0, 128), False),
        ((8, 1, 2, -1, 4), (64, 0, 64, 64, 64), False),
        ((2, -1, -1, -1, 5), (64, 0, 64, 64, 128), True),
        ((2, -1, -1, -1, -1), None, True),
    ],
    ids=str,
)
def test_checkpoints_in_rows_of_the_caller(run, kept_rows, offsets, in_pool, num_splits):
    """The same states as in rows by arithmetic, and nothing in other rows."""
    call = make_call(LENGTHS, slots=ROWS, **PACKED)
    options = {"num_splits": num_splits, "multiprocessors": 3}
    plain = run(call, **options)
    assert_right(call, plain)
    found = run(call, kept_rows=kept_rows, offsets=offsets, in_pool=in_pool, **options)
    assert same(found.out, plain.out) and same(found.states, plain.states)
    free = set(range(len(found.checkpoints)))
    for n, row in enumerate(kept_rows or range(len(LENGTHS))):
        batch, span = call.checkpoint_rows(n)
        kept = plain.checkpoints[batch, span]
        if offsets is not None:
            kept = kept[offsets[n] // 64 - 1 :][:1] if offsets[n] else kept[:0]
        if row >= 0:
            assert same(found.checkpoints[row : row + len(kept)], kept), n
            free -= set(range(row, row + len(kept)))
    rest = found.checkpoints[sorted(free - (set(ROWS) if in_pool else set()))]
    assert rest.isnan().all()


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("final", ["in place", "separate"])
@pytest.mark.parametrize("num_splits, v_first", [(1, True), (3, False)])
def test_states_of_16_bits(run, num_splits, v_first, final, state_dtype):
    """They are widened where a sequence begins and rounded where they are stored; nothing else changes."""
    changes = {"final": final, "v_first": v_first}
    call = make_call(LENGTHS, slots=ROWS, null_slot=4, fresh=(0,), **PACKED | changes)
    call = replace(call, initial=call.initial.to(state_dtype).float())
    options = {"num_splits": num_splits, "multiprocessors": 3, "views": True}
    wide = run(call, **options)
    assert_right(call, wide)
    found = run(call, state_dtype=state_dtype, **options)
    assert same(found.out, wide.out)
    # Where rows are nobody's, one kind of NaN is as good as another.
    for name in ("states", "checkpoints"):
        own, other = getattr(found, name), getattr(wide, name)
        torch.testing.assert_close(own, other.to(state_dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4])
def test_splits(run, num_splits):
    """Last segments of one token, a full chunk, several chunks."""
    for tokens in (193, 256):
        call = make_call((tokens, tokens), **DENSE)
        assert_right(call, run(call, num_splits=num_splits, multiprocessors=3))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("final", ["in place", "separate"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_splits", [2, 3])
def test_heads_that_forget(run, num_splits, packed, final):
    """A prescan reads the last tokens of a segment alone where the others have decayed to nothing.

    Heads that never forget, that forget within two pieces of a segment, within a chunk, and within many segments.
    """
    shape = {"heads": (1, 4), "dims": (64, 128), "packed": packed, "slots": (2,), "final": final}
    call = make_call((1400,), rates="mixed", **shape)
    outcome = run(call, num_splits=num_splits)
    assert_right(call, outcome)

    poison = call.v.clone()
    poison[0, :64, 1:3] = math.nan
    other = run(replace(call, v=poison), num_splits=num_splits)
    behind = slice(704 if num_splits == 2 else 512, None)
    assert same(other.out[:, behind], outcome.out[:, behind])
    assert same(other.states, outcome.states)
    assert other.out[:, :64, 1:3].isnan().all()


@pytest.mark.emulated(seeds=1)
def test_segments_of_named_length_have_the_same_bits_packed_and_dense(run):
    call = make_call((1100,), (1, 4), (64, 128), rates="mixed", slots=(1,))
    dense = run(call, segment_tokens=512)
    assert [config.prescan for config in run.configs] == [True, False]
    assert_right(call, dense)
    assert_same(dense, run(replace(call, packed=True), segment_tokens=512))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_other_sequences_change_nothing(run, num_splits):
    """Whatever the tokens of a packed sequence hold, the results of the others are the same bit for bit."""
    call = make_call(LENGTHS, slots=ROWS, **PACKED)
    clean = run(call, num_splits=num_splits)
    for bad in (0, 2, 3, 4):
        outcome = run(poisoned(call, bad), num_splits=num_splits)
        for n in set(range(5)) - {bad}:
            assert_same_sequence(call, clean, n, call, outcome, n)


@pytest.mark.emulated(seeds=1)
def test_other_rows_of_a_batch_change_nothing(run):
    call = make_call((150, 150, 150), **DENSE)
    clean, outcome = run(call), run(poisoned(call, 1))
    for n in (0, 2):
        assert_same_sequence(call, clean, n, call, outcome, n)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("cut", [{"num_splits": 1}, {"segment_tokens": 64}], ids=str)
def test_a_packed_sequence_is_the_sequence_alone(run, cut):
    """Bit for bit, packed or in a batch of its own, whole or cut after so many tokens."""
    call = make_call(LENGTHS, slots=ROWS, **PACKED)
    together = run(call, **cut)
    for n, length in enumerate(LENGTHS):
        for packed in (True, False):
            if length:
                single = alone(call, n, packed)
                assert_same_sequence(call, together, n, single, run(single, **cut), 0)


def assert_same_sequence(call, first, n, other_call, second, m) -> None:
    assert same(call.tokens(first.out, n), other_call.tokens(second.out, m))
    assert same(first.states[n], second.states[m])
    if call.every:
        (batch, rows), (other_batch, other_rows) = (
            call.checkpoint_rows(n), other_call.checkpoint_rows(m),
        )  # fmt: skip
        assert same(first.checkpoints[batch, rows], second.checkpoints[other_batch, other_rows])


def in_pieces(run, call: Call, ends: tuple[int, ...]) -> Outcome:
    """The call in several, each starting from the state that the one before it left."""
    outs, state, start = [], call.initial, 0
    for end in ends:
        outcome = run(piece(call, start, end, state), num_splits=1)
        outs.append(outcome.out)
        state, start = outcome.states, end
    return Outcome(torch.cat(outs, 1), state)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("exact_state", [False, True])
def test_pieces_of_whole_chunks_change_nothing(run, exact_state):
    call = make_call((330, 330), exact_state=exact_state, **DENSE)
    assert_same(run(call, num_splits=1), in_pieces(run, call, (64, 192, 320, 330)))


@pytest.mark.emulated(seeds=1)
def test_pieces_of_any_length_with_exact_states(run):
    call = make_call((330, 330), exact_state=True, **DENSE)
    whole, pieces = run(call, num_splits=1), in_pieces(run, call, (37, 38, 101, 229, 330))
    assert relative_error(pieces.states, whole.states.double()) < 1e-4
    assert_right(call, pieces)


@pytest.mark.parametrize("gate", [None, "float32"])
def test_decays_of_any_strength(run, gate):
    """From none at all to those that forget at once, in either sign convention."""
    call = make_call((200,), (1, 5), gate=gate, rates="strong")
    outcome = run(call)
    assert_right(call, outcome)
    assert_same(outcome, run(call, decay_sign=1))


@pytest.mark.emulated(seeds=1)
def test_ctas_in_any_number(run):
    """One CTA that does everything, several side by side, one per item of work: the same bits."""
    call = make_call(LENGTHS, slots=ROWS, **PACKED)
    first = run(call)
    for multiprocessors, resident in ((1, 1), (2, 2), (5, 3)):
        assert_same(first, run(call, multiprocessors=multiprocessors, concurrent_ctas=resident))


@pytest.mark.emulated(seeds=1)
def test_one_or_two_tiles_per_cta(run):
    call = make_call(LENGTHS, (1, 2), (64, 128), packed=True, gate="float32", exact_state=True)
    one = run(call)
    assert [config.tiles for config in run.configs if isinstance(config, Config)] == [1]
    two = run(call, multiprocessors=3)
    assert [config.tiles for config in run.configs if isinstance(config, Config)] == [2]
    assert_right(call, two)
    assert_same(one, two)


@pytest.mark.parametrize(
    "size, heads, dims, options",
    [
        ((700,), (1, 2), (64, 128), {}),
        ((130, 130), (2, 4), (64, 64), {"multiprocessors": 5}),
        ((64 * 13, 64 * 13), (1, 2), (128, 64), {"multiprocessors": 3, "num_splits": 2}),
    ],
    ids=["one_head", "neighbours", "segments"],
)
@pytest.mark.parametrize("gate", ["float32", "float16"])
def test_ctas_that_load_gates_for_each_other(run, gate, size, heads, dims, options):
    """The same bits as from views, whose gates TMA cannot load; items one after the other, a sequence to skip."""
    slots = (1, -1)[: len(size)]
    call = make_call(size, heads, dims, gate=gate, slots=slots, rates="strong")
    alone = run(call, views=True, **options)
    assert not any(config.paired for config in run.configs)
    together = run(call, gate_rows=True, **options)
    assert all(config.paired for config in run.configs)
    assert_right(call, together)
    assert_same(together, alone)


@pytest.mark.parametrize("gate_rows", [False, True])
@pytest.mark.parametrize("gate", [None, "float32"])
def test_ctas_that_share_a_head(run, gate, gate_rows):
    """The same bits as where every CTA works for itself, as those of packed sequences do; items one after the other."""
    options = {"multiprocessors": 4, "num_splits": 2}
    call = make_call((300, 300), (1, 3), (128, 128), gate=gate, slots=(1, -1), l2norm=True)
    together = run(call, gate_rows=gate_rows and gate is not None, **options)
    assert all(config.shared for config in run.configs)
    assert_right(call, together)
    one = alone(call, 0, packed=True)
    by_itself = run(one, **options)
    assert not any(config.shared for config in run.configs if isinstance(config, Config))
    assert same(together.out[:1], by_itself.out)
    assert same(together.states[:1], by_itself.states)


def segments_of(lengths: tuple[int, ...], most: int) -> list[list[int]]:
    """Rows of the segment table: first token, length, sequence, slot, part, parts."""
    rows, start = [], 0
    for n, length in enumerate(lengths):
        parts = max(1, -(-length // most))
        for part in range(parts):
            size = min(most, length - part * most)
            rows.append([start + part * most, size, n, len(rows), part, parts])
        start += length
    return rows


@pytest.fixture
def check_table(emulated) -> Callable[..., None]:
    """Makes the table of 300 sequences, more than the kernel has threads, and checks it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 300, (300,), generator=generator)
    lengths[::7], lengths[40] = 0, 1500

    def check(index_dtype: torch.dtype = torch.int32, most: int = 128, **changes) -> None:
        rows = segments_of(tuple(lengths.tolist()), most)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(index_dtype)
        table = emulated.empty((len(rows) + 6, 6), torch.int32)
        unused = table[-1].clone()
        compiled(index_dtype)(cu_seqlens, table, most, most, **changes)
        assert table[0, :3].tolist() == [len(rows), 0, 0]
        made = table[1 : 1 + len(rows)]
        assert sorted(made.tolist()) == sorted(rows)
        chunks = (made[:, 1] + 63) // 64
        assert torch.equal(chunks, chunks.sort(descending=True).values), "not longest first"
        assert (table[1 + len(rows) :] == unused).all()

    def compiled(index_dtype: torch.dtype = torch.int32):
        return emulated_kernel(emulated, launch.unit(TableConfig(dtype_name(index_dtype))))

    check.compiled = compiled
    return check


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("most", [64, 192, 1536])
def test_segment_table(check_table, index_dtype, most):
    check_table(index_dtype, most)


# ---- which waits matter ----------------------------------------------------------------------------------------------

SCHEDULES = mutation.SCHEDULES[:3]
TRY_WAIT = "mbarrier.try_wait.parity.shared.b64"
# Of a prescan, and of the others. The tiles' wait for loads follows from that for weights, whose makers waited for the
# same loads; the emulator keeps memory longer than its CTA, so nobody need wait for the last store.
UNNOTICED = {
    True: Counter({TRY_WAIT: 1}),
    False: Counter({TRY_WAIT: 1, "cp.async.bulk.wait_group 0": 1}),
}


@pytest.mark.emulated(schedules="immediate")
def test_every_barrier_of_the_segment_table_matters(check_table):
    report = mutation.run(
        lambda options: check_table(**vars(options)), check_table.compiled(), schedules=SCHEDULES
    )
    assert len(report.noticed) == len(report.mutants) > 0, str(report)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("prescan", [False, True])
def test_every_wait_matters(run, prescan):
    """One CTA with more items, chunks and sums of gates than there are slots for.

    Some items are longer than the ring of gates; some are shorter than that of loads, since behind longer ones the
    slots of items are free anyway.
    """
    facts = PACKED | {"heads": (1, 1)}
    calls = [(make_call((800, 60, 0, 192, 30), slots=(6, -1, 3, 0, 2), **facts), 2)]
    if prescan:  # where every item of a call has the same length
        calls.append((make_call((330,), slots=(1,), **facts), 6))
        calls.append((make_call((1300,), slots=(1,), **facts), 2))
    expected = [run(call, num_splits=n, multiprocessors=1) for call, n in calls]
    passes = [config for config in run.configs if isinstance(config, Config)]
    config = next(config for config in passes if config.prescan == prescan)

    def check(options) -> None:
        for (call, n), before in zip(calls, expected):
            outcome = run(call, num_splits=n, multiprocessors=1, mutated=config, **vars(options))
            assert torch.isfinite(outcome.out).all(), "not finite"
            assert_same(outcome, before)

    report = mutation.run(check, run.compiled(config), schedules=SCHEDULES)
    assert mutation.opcodes(report.unnoticed) == UNNOTICED[prescan], str(report)
    assert not report.not_reached, str(report)


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_of_paired_ctas_matters(run):
    """Two CTAs with more chunks, then more items, than there are slots for."""
    facts = {"heads": (1, 2), "dims": (64, 64), "gate": "float32", "slots": None}
    calls = [make_call(lengths, **facts) for lengths in ((640,), (70,) * 4, (128,) * 4)]
    options = {"gate_rows": True, "multiprocessors": 2, "num_splits": 1}
    expected = [run(call, **options) for call in calls]
    (config,) = run.configs

    def check(changes) -> None:
        for call, before in zip(calls, expected):
            outcome = run(call, **options, **vars(changes))
            assert torch.isfinite(outcome.out).all(), "not finite"
            assert_same(outcome, before)

    report = mutation.run(check, run.compiled(config), schedules=SCHEDULES)
    # Before a CTA leaves it waits until every slot of gates is free; the one used last is free after all others.
    tail = Counter({TRY_WAIT: PAIR_SLOTS - 1})
    assert mutation.opcodes(report.unnoticed) == UNNOTICED[False] + tail, str(report)
    assert not report.not_reached, str(report)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("prescan", [False, True])
def test_every_wait_of_ctas_that_share_a_head_matters(run, prescan):
    """Two CTAs with more chunks and items than there are slots for."""
    calls = [
        make_call(lengths, (1, 1), (64, 128), slots=None, l2norm=True)
        for lengths in ((1300,), (140,) * 4)
    ]
    options = {"multiprocessors": 2, "num_splits": 2}
    expected = [run(call, **options) for call in calls]
    config = next(config for config in run.configs if config.prescan == prescan)
    assert config.shared

    def check(changes) -> None:
        for call, before in zip(calls, expected):
            outcome = run(call, **options, mutated=config, **vars(changes))
            assert torch.isfinite(outcome.out).all(), "not finite"
            assert_same(outcome, before)

    report = mutation.run(check, run.compiled(config), schedules=SCHEDULES)
    # The thread that sends half of P is the one that the emulator elects to arrive for its warp.
    sender = Counter({"bar.warp.sync": 1 - prescan})
    assert mutation.opcodes(report.unnoticed) == UNNOTICED[prescan] + sender, str(report)
    assert not report.not_reached, str(report)
