# Vendored from packages/cula-cp-sm90/tests/test_emulated.py by "nox -s vendor": edit the master.
"""Whole calls of the compiled kernels on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from cutlass.cute.runtime import make_fake_stream
from kda_sm100_emulated import (
    KIND_BOUNDS,
    SPLIT_AND_WHOLE,
    Call,
    Outcome,
    alone,
    assert_right,
    assert_same,
    forced,
    make_call,
    poisoned,
    same,
    views,
)
from kda_sm100_facts import TARGETS, TILES, UNNOTICED
from kda_sm100_inputs import BOUNDED_KINDS, KINDS
from torch import Tensor

from cula_emulator import mutation
from cula_emulator.memory import loose_strides, poisoned_memory
from cula_kda_sm100 import launch, reference
from cula_kda_sm100.config import (
    ACTIVATION_DTYPES,
    BLOCK_BYTES,
    OPERAND_DTYPES,
    MergeConfig,
    PrepareConfig,
    RecurrenceConfig,
    chunk_slots,
    plan,
)

pytestmark = pytest.mark.emulated(detect_races=True)

FACTORS = {
    # (gate, kind of decays)
    "gate": (("safe", "typical"), ("log", "typical"), ("softplus", "resets")),
    # Dtypes of g and beta, and what beta is.
    "beta": (
        ("float16", "float16", "doubled"),
        ("bfloat16", "bfloat16", "sigmoid"),
        ("float32", "float32", "plain"),
    ),
    # (initial, final)
    "states": ((None, "separate"), ("dense", "in place"), ("indexed", "in place")),
    "packed": (False, True),
    "dtype": ACTIVATION_DTYPES,
    "operand": OPERAND_DTYPES,
    "l2norm": (True, False),
    "v_first": (False, True),
    "segment_chunks": (0, 1),
    "tiles": TILES,
    "multiprocessors": (132, 2),  # with few of them one CTA has several items
    "views": (False, True),
}
MORE = {
    "constants": (
        False,
        True,
    ),  # dt_bias, and an A_log where it may be missing; none with log decays
    "heads": ((1, 2), (2, 2)),
    "index_dtype": ("int32", "int64"),
}
# For every case which of their values it has. Every two values of two FACTORS meet.
ARRAY = (
    "000 111111011 001",
    "011 000001111 110",
    "022 100000000 100",
    "101 000100000 010",
    "112 111111110 001",
    "120 000010111 010",
    "202 010000111 100",
    "210 001000000 010",
    "221 111111101 101",
)
CASES = [
    {
        name: values[int(level) % len(values)]
        for (name, values), level in zip((FACTORS | MORE).items(), row)
    }
    for row in (row.replace(" ", "") for row in ARRAY)
]
DENSE_LENGTHS, LENGTHS = (130, 130), (70, 0, 1, 64, 130)


def label(case: dict) -> str:
    kind = f"{'packed' if case['packed'] else 'dense'}{'-split' * case['segment_chunks']}"
    gate = f"{case['beta'][0]}-{case['gate'][0]}"
    return f"{case['dtype']}-{gate}-{case['operand']}-{kind}-{case['tiles']}-{case['states'][0]}"


@pytest.fixture
def run(emulated, monkeypatch) -> Callable[..., Outcome]:
    """run(call, ...) launches a call as `launch.run` does on a GPU, with guards around and NaN in all it may write.

    as_views: inputs are views of larger tensors full of NaN, outputs and states have gaps. tiles, segment_chunks:
    in place of the planner's choice; its own with intracard_cp. intra: of `launch.run`. slots: chunks that the
    workspace holds, None for all. changes: of emulator Options; with `mutated`, a config, of that kernel alone.
    run.configs: those of the last call.
    """

    def compiled(config):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This static loop has")
            return emulated(
                *launch.kernel(config), make_fake_stream(use_tvm_ffi_env_stream=True), arch=TARGETS[0], key=config
            )  # fmt: skip

    def run(
        call: Call,
        *,
        as_views: bool = False,
        tiles: int | None = None,
        segment_chunks: int = 0,
        intracard_cp: bool | None = None,
        slots: int | None = None,
        multiprocessors: int = 132,
        index_dtype: str = "int32",
        intra: tuple[Tensor, ...] | None = None,
        mutated: object = None,
        **changes,
    ) -> Outcome:
        run.configs = []

        def kernel_for(config):
            run.configs.append(config)
            others = {"detect_races": False} if mutated else changes
            return partial(compiled(config), **(changes if config == mutated else others))

        def turned(tensor: Tensor | None) -> Tensor | None:
            return tensor.mT if call.v_first and tensor is not None else tensor

        batch, tokens, heads_v = call.given["v"].shape[:3]

        def states(count: int) -> Tensor:
            shape = (count, heads_v, 128, 128)
            stride = loose_strides(shape, 4 * as_views, dense=2)
            return emulated.empty(shape, torch.float32, stride=stride)

        given = views(call.given) if as_views else call.given
        stride = loose_strides(call.given["v"].shape, 8 * as_views)
        out = emulated.empty(call.given["v"].shape, call.given["v"].dtype, stride=stride)
        used = [row for row in call.rows if row >= 0]
        initial = final = before = None
        if call.initial is not None:
            initial = states(len(call.initial))
            turned(initial)[used] = call.initial[used]
            before = initial.clone()
        if call.final:
            final = initial if call.final == "in place" else states(len(call.lengths))
        count = len(call.lengths) if call.packed else None
        held = chunk_slots(batch, tokens, count) if slots is None else slots
        workspace = emulated.empty((held * heads_v * BLOCK_BYTES,), torch.uint8)
        planner = plan if intracard_cp is not None else forced(tiles, segment_chunks)
        monkeypatch.setattr(launch, "plan", planner)
        with poisoned_memory():
            launch.run(
                *(given[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), initial,
                None if call.slots is None else torch.tensor(call.slots, dtype=torch.int32), final,
                call.cu_seqlens(getattr(torch, index_dtype)) if call.packed else None, out, workspace,
                bounded=call.bounded, state_v_first=call.v_first, operand=call.operand,
                intra=intra, intracard_cp=bool(intracard_cp), longest=max(call.lengths),
                multiprocessors=multiprocessors, kernel_for=kernel_for, **call.options,
            )  # fmt: skip
        kept = torch.ones(0 if initial is None else len(initial), dtype=torch.bool)
        if call.final == "in place":
            kept[used] = False
            final = torch.stack([initial[max(row, 0)] for row in call.rows])
        elif final is not None and call.padding:
            assert not final[list(call.padding)].any(), "final state of a padding sequence"
        if initial is not None:
            assert same(initial[kept], before[kept]), "a state that is not the call's to change"
        return Outcome(out, turned(final))

    run.compiled = compiled
    return run


_settled: dict[tuple[str, Call], Outcome] = {}


@pytest.fixture
def right(request, assert_within) -> Callable[..., None]:
    """The result is right, and under all schedules that run this test the same, bit for bit."""

    def check(call: Call, outcome: Outcome, bound: float | None = None) -> None:
        assert_right(call, outcome, assert_within, bound)
        first = _settled.setdefault((request.node.originalname, call), outcome)
        assert_same(first, outcome)

    return check


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(run, right, case):
    (gate, kind), (gate_dtype, beta_dtype, strength) = case["gate"], case["beta"]
    (initial, final), lengths = case["states"], LENGTHS if case["packed"] else DENSE_LENGTHS
    slots = None
    if initial == "indexed":
        # Rows that are not the sequences' own numbers; one sequence is padding.
        padding = {2: 0, 5: 3}[len(lengths)]
        slots = tuple(-3 if n == padding else len(lengths) + 1 - n for n in range(len(lengths)))
    names = ("heads", "dtype", "l2norm", "operand", "v_first", "packed")
    call = make_call(
        lengths, kind=kind, gate=gate, gate_dtype=gate_dtype, beta_dtype=beta_dtype, strength=strength,
        rate=case["constants"] or gate == "softplus", bias=case["constants"], initial=bool(initial),
        final=final, slots=slots, **{name: case[name] for name in names},
    )  # fmt: skip
    outcome = run(
        poisoned(call, *call.padding),
        as_views=case["views"],
        **{
            name: case[name]
            for name in ("segment_chunks", "tiles", "multiprocessors", "index_dtype")
        },
    )
    right(call, outcome)


def test_the_cases_cover_every_pair():
    for (name, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        met = {(case[name], case[other]) for case in CASES}
        assert met == set(itertools.product(values, others)), (name, other)


# Calls that the following tests share, with the kernels of some case where possible.
DENSE = {
    "gate_dtype": "bfloat16", "beta_dtype": "bfloat16", "strength": "sigmoid", "final": "in place",
}  # fmt: skip
PACKED = {"packed": True, "final": "in place"}
ROWS = (3, 0, 6, 1, 4)


def dense(tokens: int, batch: int = 1, heads: tuple[int, int] = (1, 2), **more) -> Call:
    return make_call((tokens,) * batch, heads, **DENSE | more)


def packed(lengths: tuple[int, ...] = LENGTHS, heads: tuple[int, int] = (1, 2), **more) -> Call:
    fields = PACKED | {"slots": tuple(range(len(lengths)))[::-1]} | more
    return make_call(lengths, heads, **fields)


@pytest.mark.parametrize(
    "batch, tokens", [(1, 1), (2, 63), (2, 64), (1, 65), (1, 128), (1, 200), (1, 1000)]
)
def test_lengths(run, right, batch, tokens):
    call = dense(tokens, batch)
    right(call, run(call))


MANY = tuple({3: 2, 31: 1, 32: 65, 40: 1, 68: 3}.get(n, 0) for n in range(70))


@pytest.mark.parametrize(
    "lengths, heads",
    [((0, 7, 0), (1, 2)), ((64, 128), (2, 2)), (MANY, (1, 1))],
    ids=["empty", "full", "many"],
)
def test_packed_lengths(run, right, lengths, heads):
    """Sequences without a token pass their state on."""
    call = packed(lengths, heads)
    outcome = run(call, tiles=1, multiprocessors=2)
    right(call, outcome)
    for n, length in enumerate(lengths):
        if length == 0:
            assert same(outcome.states[n], call.initial[call.rows[n]])


@functools.cache
def from_zero(call: Call) -> Call:
    """With states of zeros, behind which errors cannot hide as they do behind large ones."""
    return replace(call, initial=torch.zeros_like(call.initial))


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("kind", BOUNDED_KINDS)
def test_kinds_of_decays_and_keys(run, right, kind):
    call = from_zero(dense(200, heads=(1, 1), kind=kind))
    right(call, run(call), KIND_BOUNDS.get(kind))


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_any_size(run, right, kind):
    """The kernel that needs no bound serves every kind."""
    call = from_zero(dense(200, heads=(1, 1), kind=kind, gate="log", bounded=False))
    right(call, run(call), KIND_BOUNDS.get(kind))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("final", [None, "separate"])
def test_a_pool_that_is_only_read(run, right, final):
    call = packed(slots=(3, -1, 6, 1, -7), final=final)
    right(call, run(poisoned(call, *call.padding), tiles=1))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("segment_chunks", [0, 1])
def test_other_sequences_change_nothing(run, segment_chunks):
    """Whatever the tokens of a packed sequence hold, the results of the others are the same bit for bit."""
    call = packed(heads=(1, 1), slots=ROWS)
    clean = run(call, tiles=TILES[-1], segment_chunks=segment_chunks)
    for bad in ({0, 3}, {2, 4}):
        outcome = run(poisoned(call, *bad), tiles=TILES[-1], segment_chunks=segment_chunks)
        for n in set(range(5)) - bad:
            assert_same_sequence(call, clean, n, call, outcome, n)


@pytest.mark.emulated(seeds=1)
def test_other_rows_of_a_batch_change_nothing(run):
    call = dense(100, 3)
    clean, outcome = run(call), run(poisoned(call, 1))
    for n in (0, 2):
        assert_same_sequence(call, clean, n, call, outcome, n)


@pytest.mark.emulated(seeds=1)
def test_a_packed_sequence_is_the_sequence_alone(run):
    """Bit for bit."""
    call = packed(heads=(1, 1), slots=ROWS)
    together = run(call, tiles=1)
    for n, length in enumerate(LENGTHS):
        if length:
            single = alone(call, n)
            assert_same_sequence(call, together, n, single, run(single, tiles=1), 0)


def assert_same_sequence(call, first, n, other_call, second, m) -> None:
    assert same(call.tokens(first.out, n), other_call.tokens(second.out, m))
    assert same(first.states[n], second.states[m])


@pytest.mark.emulated(seeds=1)
def test_ctas_and_tiles_in_any_number(run):
    """One CTA that does everything, several side by side, one per item of work: the same bits."""
    call = packed(slots=ROWS)
    first = run(call, tiles=1)
    spread = ((1, 1), (5, 3), (4, 2))
    for tiles, (multiprocessors, resident) in itertools.product(TILES, spread):
        options = {"multiprocessors": multiprocessors, "concurrent_ctas": resident}
        assert_same(first, run(call, tiles=tiles, **options))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("slots", [None, 4])
def test_intermediates(emulated, run, right, relative_rmse, slots):
    """What a backward pass takes comes with the outputs, whatever the pieces."""
    call = packed((70, 0, 1, 130))
    shape, dtype = call.given["v"].shape, call.given["v"].dtype
    dims = (64, 64, *(shape[3:] * 4))
    intra = tuple(emulated.empty((*shape[:3], dim), dtype) for dim in dims)
    right(call, run(call, slots=slots, tiles=1, intra=intra))
    x = {name: tensor.double() for name, tensor in call.given.items()}
    expected = reference.intermediates(**x, cu_seqlens=call.cu_seqlens(torch.int64), **call.options)
    for found, exact in zip(intra, expected):
        assert relative_rmse(found, exact) <= 3e-3


# ---- pieces and segments ---------------------------------------------------------------------------------------------

PIECES = {
    "dense": (dense(200, 2, (1, 1)), 3),
    "packed": (packed(heads=(1, 1), slots=(3, -1, 6, 1, 4)), 1),
}


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("call, slots", PIECES.values(), ids=PIECES)
def test_pieces_change_nothing(run, call, slots):
    """A workspace for few chunks: the same bits, wherever the final states go."""
    whole = run(call, tiles=1)
    for final in ("in place", "separate", None):
        pieces = run(replace(call, final=final), slots=slots, tiles=1)
        assert same(whole.out, pieces.out)
        live = [n for n in range(len(call.lengths)) if n not in call.padding]
        assert final is None or same(whole.states[live], pieces.states[live])


@pytest.mark.emulated(seeds=1)
def test_pieces_from_nothing(run, right):
    call = dense(200, 2, (1, 1), initial=False, final="separate")
    right(call, run(call, slots=3, tiles=1))


def test_segments(run, right):
    """Two segments of two chunks and the rest, on few CTAs."""
    call = dense(330)
    right(call, run(call, tiles=TILES[-1], segment_chunks=2, multiprocessors=3))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize(
    "lengths, slots",
    [((330, 0, 70), (4, 0, 1)), ((1, 200, 260), (0, -1, 2))],
    ids=str,
)
def test_packed_segments(run, right, lengths, slots):
    """Long sequences in segments, short ones whole, some skipped."""
    call = packed(lengths, (1, 1), slots=slots)
    right(
        call,
        run(poisoned(call, *call.padding), tiles=TILES[-1], segment_chunks=2, multiprocessors=3),
    )


@pytest.mark.emulated(schedules="immediate")
def test_segments_change_little(run, relative_rmse):
    call = dense(394, heads=(1, 1), kind="moderate")
    for one, other in zip(run(call, tiles=1), run(call, tiles=TILES[-1], segment_chunks=2)):
        assert relative_rmse(other, one) <= SPLIT_AND_WHOLE


@pytest.mark.emulated(schedules="immediate", detect_races=False)
def test_segments_of_the_planner(run, right):
    call = dense(2048, heads=(1, 1))
    outcome = run(call, intracard_cp=True)
    assert any(isinstance(config, MergeConfig) for config in run.configs)
    right(call, outcome)


# ---- which waits matter ----------------------------------------------------------------------------------------------

SCHEDULES = mutation.SCHEDULES[:3]


def opcodes(mutants) -> Counter:
    """Instructions without operands and conditions, but with the numbers of barriers and groups."""
    return Counter(re.match(r"(?:@\S+ )?(\S+(?: \d+)?)", m.text)[1] for m in mutants)


@pytest.fixture
def mutate(run) -> Callable[..., mutation.Report]:
    """mutate(wanted, (call, options), ...) skips every wait of the kernel whose config is `wanted`, in all calls."""

    def make(wanted: Callable[[object], bool], *calls: tuple[Call, dict]) -> mutation.Report:
        expected, configs = [], set()
        for call, options in calls:
            expected.append(run(call, **options))
            configs |= {config for config in run.configs if wanted(config)}
        (config,) = configs

        def check(changes) -> None:
            for (call, options), before in zip(calls, expected):
                outcome = run(call, mutated=config, **options, **vars(changes))
                assert torch.isfinite(outcome.out).all(), "not finite"
                assert_same(outcome, before)

        report = mutation.run(check, run.compiled(config), schedules=SCHEDULES)
        assert report.noticed and not report.not_reached, str(report)
        return report

    return make


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_of_the_chunks_matters(mutate):
    report = mutate(
        lambda config: isinstance(config, PrepareConfig), (dense(100, heads=(1, 1)), {})
    )
    assert not report.unnoticed, str(report)


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_of_the_chain_matters(mutate):
    """One CTA with more items and chunks than there are slots for; then with items of one chunk."""
    few = {"tiles": 1, "multiprocessors": 1}
    shapes = ((330, 1), (64, 4), (70, 3))
    calls = [(dense(tokens, batch, (1, 1)), few) for tokens, batch in shapes]
    report = mutate(lambda config: isinstance(config, RecurrenceConfig), *calls)
    assert opcodes(report.unnoticed) == UNNOTICED, str(report)


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_of_a_scan_matters(mutate):
    """As above, of whole segments and maps; strong decays would hide how a segment begins."""
    few = {"tiles": TILES[-1], "multiprocessors": 1}
    call = dense(330, heads=(1, 1), kind="moderate")
    calls = [(call, few | {"segment_chunks": chunks}) for chunks in (1, 2)]
    report = mutate(lambda config: getattr(config, "scan", False), *calls)
    assert not report.unnoticed, str(report)


@pytest.mark.emulated(schedules="immediate")
def test_every_barrier_of_the_merge_matters(mutate):
    """Four segments have two maps between them."""
    options = {"tiles": TILES[-1], "segment_chunks": 1}
    report = mutate(
        lambda config: isinstance(config, MergeConfig), (dense(200, heads=(1, 1)), options)
    )
    assert not report.unnoticed, str(report)
