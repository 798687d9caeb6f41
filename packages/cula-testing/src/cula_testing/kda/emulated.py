"""Whole calls of the compiled kernels on the CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.config import (
    ACTIVATION_DTYPES,
    OPERAND_DTYPES,
    Config,
    MergeConfig,
    PrepareConfig,
    RecurrenceConfig,
)
from cula_core.delta_rule.target import Target
from cula_core.reference import kda as reference
from cula_emulator import Options, mutation
from cula_emulator.memory import poisoned_memory

from ..comparing import relative_rmse, same
from .inputs import BOUNDED_KINDS, KINDS
from .problems import (
    KIND_BOUNDS,
    SPLIT_AND_WHOLE,
    Outcome,
    Problem,
    alone,
    assert_right,
    assert_same,
    make_problem,
    poisoned,
)
from .running import Run, compiler, configs_of
from .subject import Subject

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
    "tiles": (1, 2),  # the second one is all that a head has
    "multiprocessors": (132, 2),  # with few of them one CTA has several items
    "views": (False, True),
}
MORE = {
    # dt_bias, and an A_log where it may be missing; none with log decays
    "constants": (False, True),
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


def factors(tiles: tuple[int, ...]) -> dict[str, tuple]:
    """Returns the FACTORS of an architecture with these tiles of v per CTA."""
    return FACTORS | {"tiles": tiles}


def cases(tiles: tuple[int, ...]) -> list[dict]:
    """Returns the cases of an architecture, a value of every factor by name."""
    every = factors(tiles) | MORE
    rows = (row.replace(" ", "") for row in ARRAY)
    return [
        {
            name: values[int(level) % len(values)]
            for (name, values), level in zip(every.items(), row)
        }
        for row in rows
    ]


DENSE_LENGTHS, LENGTHS = (130, 130), (70, 0, 1, 64, 130)


def label(case: dict) -> str:
    kind = f"{'packed' if case['packed'] else 'dense'}{'-split' * case['segment_chunks']}"
    gate = f"{case['beta'][0]}-{case['gate'][0]}"
    return f"{case['dtype']}-{gate}-{case['operand']}-{kind}-{case['tiles']}-{case['states'][0]}"


def problem_of(case: dict) -> Problem:
    """Returns the problem of a case."""
    (gate, kind), (gate_dtype, beta_dtype, strength) = case["gate"], case["beta"]
    (initial, final), lengths = case["states"], LENGTHS if case["packed"] else DENSE_LENGTHS
    slots = None
    if initial == "indexed":
        # Rows that are not the sequences' own numbers; one sequence is padding.
        padding = {2: 0, 5: 3}[len(lengths)]
        slots = tuple(-3 if n == padding else len(lengths) + 1 - n for n in range(len(lengths)))
    names = ("heads", "dtype", "l2norm", "operand", "v_first", "packed")
    return make_problem(
        lengths, kind=kind, gate=gate, gate_dtype=gate_dtype, beta_dtype=beta_dtype, strength=strength,
        rate=case["constants"] or gate == "softplus", bias=case["constants"], initial=bool(initial),
        final=final, slots=slots, **{name: case[name] for name in names},
    )  # fmt: skip


def options_of(case: dict) -> dict:
    """Returns how the problem of a case is run."""
    names = ("segment_chunks", "tiles", "multiprocessors", "index_dtype")
    return {"as_views": case["views"], **{name: case[name] for name in names}}


_settled: dict[tuple[Subject, str, Problem], Outcome] = {}


# Calls that the following tests share, with the kernels of some case where possible.
DENSE = {
    "gate_dtype": "bfloat16", "beta_dtype": "bfloat16", "strength": "sigmoid", "final": "in place",
}  # fmt: skip
PACKED = {"packed": True, "final": "in place"}
ROWS = (3, 0, 6, 1, 4)


def dense(tokens: int, batch: int = 1, heads: tuple[int, int] = (1, 2), **more) -> Problem:
    return make_problem((tokens,) * batch, heads, **DENSE | more)


def packed(lengths: tuple[int, ...] = LENGTHS, heads: tuple[int, int] = (1, 2), **more) -> Problem:
    fields = PACKED | {"slots": tuple(range(len(lengths)))[::-1]} | more
    return make_problem(lengths, heads, **fields)


MANY = tuple({3: 2, 31: 1, 32: 65, 40: 1, 68: 3}.get(n, 0) for n in range(70))


@functools.cache
def from_zero(problem: Problem) -> Problem:
    """With states of zeros, behind which errors cannot hide as they do behind large ones."""
    return replace(problem, initial=torch.zeros_like(problem.initial))


def assert_same_sequence(problem, first, n, other_problem, second, m) -> None:
    assert same(problem.tokens(first.out, n), other_problem.tokens(second.out, m))
    assert same(first.states[n], second.states[m])


PIECES = {
    "dense": (dense(200, 2, (1, 1)), 3),
    "packed": (packed(heads=(1, 1), slots=(3, -1, 6, 1, 4)), 1),
}


INTRA_LENGTHS = (70, 0, 1, 130)


def intra_memory(problem: Problem, empty: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Returns memory for all that a backward pass takes."""
    shape, dtype = problem.given["v"].shape, problem.given["v"].dtype
    return tuple(empty((*shape[:3], dim), dtype=dtype) for dim in (64, 64, *(shape[3:] * 4)))


@functools.cache
def emulated_configs(target: Target) -> tuple[Config, ...]:
    """Returns the configs of an architecture that the suite runs, in a stable order; tests of machine code have them
    all."""
    every = tuple(sorted({1, target.v_tiles}))
    launches: list[tuple[Problem, dict]] = [(problem_of(c), options_of(c)) for c in cases(every)]
    small = (1, 1)
    some_slots = (3, -1, 6, 1, -7)
    for tiles in every:
        launches += [
            (dense(100), {"tiles": tiles}),
            (dense(200, heads=small, gate="log", bounded=False), {"tiles": tiles}),
            (dense(200, 2, small), {"tiles": tiles, "slots": 3}),
            *((packed(heads=small), {"tiles": tiles, "segment_chunks": n}) for n in (0, 1)),
            (dense(330), {"tiles": tiles, "segment_chunks": 2}),
        ]
    intra = packed(INTRA_LENGTHS)
    launches += [
        *((packed(slots=some_slots, final=final), {"tiles": 1}) for final in (None, "separate")),
        *(
            (replace(problem, final=final), {"tiles": 1, "slots": slots})
            for problem, slots in PIECES.values()
            for final in ("in place", "separate", None)
        ),
        (dense(200, 2, small, initial=False, final="separate"), {"tiles": 1, "slots": 3}),
        (intra, {"tiles": 1, "intra": intra_memory(intra, torch.empty)}),
    ]
    found = (
        config for problem, options in launches for config in configs_of(target, problem, **options)
    )
    return tuple(dict.fromkeys(found))


SCHEDULES = mutation.SCHEDULES[:3]


class Emulated:
    """Whole calls of the compiled kernels on the CPU, under every schedule, with race detection."""

    subject: Subject

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes with what depends on the subject."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", cases(self.subject.tiles), ids=label)

    @pytest.fixture
    def run(self, emulated) -> Callable[..., Outcome]:
        """run(problem, ...) launches a problem; options are those of `Run`.

        changes: of emulator Options; with `mutated`, a config, of that kernel alone. run.configs: those of the last
        call. run.compiled: what compiles a config.
        """
        target = self.subject.target
        compiled = compiler(emulated, target, self.subject.architectures[0])
        known = emulated_configs(target)

        def run(problem: Problem, *, mutated: object = None, **options) -> Outcome:
            run.configs = []
            names = {field.name for field in fields(Options)}
            changes = {name: options.pop(name) for name in names & set(options)}

            def kernels(config):
                assert config in known, f"{config} is not among the emulated_configs"
                run.configs.append(config)
                others = {"detect_races": False} if mutated else changes
                return partial(compiled(config), **(changes if config == mutated else others))

            work = Run(target, problem, emulated.empty, **options)
            with poisoned_memory():
                work.launch(kernels)
            return work.outcome()

        run.compiled = compiled
        return run

    @pytest.fixture
    def right(self, request) -> Callable[..., None]:
        """The result is right, and under all schedules that run this test the same, bit for bit."""

        def check(problem: Problem, outcome: Outcome, bound: float | None = None) -> None:
            assert_right(problem, outcome, bound)
            key = self.subject, request.node.originalname, problem
            first = _settled.setdefault(key, outcome)
            assert_same(first, outcome)

        return check

    def test_numbers(self, run, right, case):
        problem = problem_of(case)
        right(problem, run(poisoned(problem, *problem.padding), **options_of(case)))

    def test_the_cases_cover_every_pair(self):
        tiles = self.subject.tiles
        for (name, values), (other, others) in itertools.combinations(factors(tiles).items(), 2):
            met = {(case[name], case[other]) for case in cases(tiles)}
            assert met == set(itertools.product(values, others)), (name, other)

    @pytest.mark.parametrize(
        "batch, tokens", [(1, 1), (2, 63), (2, 64), (1, 65), (1, 128), (1, 200), (1, 1000)]
    )
    def test_lengths(self, run, right, batch, tokens):
        problem = dense(tokens, batch)
        right(problem, run(problem))

    @pytest.mark.parametrize(
        "lengths, heads",
        [((0, 7, 0), (1, 2)), ((64, 128), (2, 2)), (MANY, (1, 1))],
        ids=["empty", "full", "many"],
    )
    def test_packed_lengths(self, run, right, lengths, heads):
        """Sequences without a token pass their state on."""
        problem = packed(lengths, heads)
        outcome = run(problem, tiles=1, multiprocessors=2)
        right(problem, outcome)
        for n, length in enumerate(lengths):
            if length == 0:
                assert same(outcome.states[n], problem.initial[problem.rows[n]])

    @pytest.mark.emulated(schedules="immediate")
    @pytest.mark.parametrize("kind", BOUNDED_KINDS)
    def test_kinds_of_decays_and_keys(self, run, right, kind):
        problem = from_zero(dense(200, heads=(1, 1), kind=kind))
        right(problem, run(problem), KIND_BOUNDS.get(kind))

    @pytest.mark.emulated(schedules="immediate")
    @pytest.mark.parametrize("kind", KINDS)
    def test_decays_of_any_size(self, run, right, kind):
        """The kernel that needs no bound serves every kind."""
        problem = from_zero(dense(200, heads=(1, 1), kind=kind, gate="log", bounded=False))
        right(problem, run(problem), KIND_BOUNDS.get(kind))

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize("final", [None, "separate"])
    def test_a_pool_that_is_only_read(self, run, right, final):
        problem = packed(slots=(3, -1, 6, 1, -7), final=final)
        right(problem, run(poisoned(problem, *problem.padding), tiles=1))

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize("segment_chunks", [0, 1])
    def test_other_sequences_change_nothing(self, run, segment_chunks):
        """Whatever the tokens of a packed sequence hold, the results of the others are the same bit for bit."""
        problem = packed(heads=(1, 1), slots=ROWS)
        clean = run(problem, tiles=self.subject.tiles[-1], segment_chunks=segment_chunks)
        for bad in ({0, 3}, {2, 4}):
            outcome = run(
                poisoned(problem, *bad), tiles=self.subject.tiles[-1], segment_chunks=segment_chunks
            )
            for n in set(range(5)) - bad:
                assert_same_sequence(problem, clean, n, problem, outcome, n)

    @pytest.mark.emulated(seeds=1)
    def test_other_rows_of_a_batch_change_nothing(self, run):
        problem = dense(100, 3)
        clean, outcome = run(problem), run(poisoned(problem, 1))
        for n in (0, 2):
            assert_same_sequence(problem, clean, n, problem, outcome, n)

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize("chunks", [0, 1])
    def test_a_packed_sequence_is_the_sequence_alone(self, run, chunks):
        """Bit for bit, whole or cut after so many chunks, where a sequence that is shorter stays whole."""
        problem = packed(heads=(1, 1), slots=ROWS)
        together = run(problem, tiles=1, segment_chunks=chunks)
        for n, length in enumerate(LENGTHS):
            if length:
                single = alone(problem, n)
                own = chunks if length > chunks * 64 else 0
                apart = run(single, tiles=self.subject.tiles[-1], segment_chunks=own)
                assert_same_sequence(problem, together, n, single, apart, 0)

    @pytest.mark.emulated(seeds=1)
    def test_ctas_and_tiles_in_any_number(self, run):
        """One CTA that does everything, several side by side, one per item of work: the same bits."""
        problem = packed(slots=ROWS)
        first = run(problem, tiles=1)
        spread = ((1, 1), (5, 3), (4, 2))
        for tiles, (multiprocessors, resident) in itertools.product(self.subject.tiles, spread):
            options = {"multiprocessors": multiprocessors, "concurrent_ctas": resident}
            assert_same(first, run(problem, tiles=tiles, **options))

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize("slots", [None, 4])
    def test_intermediates(self, emulated, run, right, slots):
        """What a backward pass takes comes with the outputs, whatever the pieces."""
        problem = packed(INTRA_LENGTHS)
        intra = intra_memory(problem, emulated.empty)
        right(problem, run(problem, slots=slots, tiles=1, intra=intra))
        x = {name: tensor.double() for name, tensor in problem.given.items()}
        expected = reference.intermediates(
            **x, cu_seqlens=problem.cu_seqlens(torch.int64), **problem.options
        )
        for found, exact in zip(intra, expected):
            assert relative_rmse(found, exact) <= 3e-3

    # ---- pieces and segments -----------------------------------------------------------------------------------------

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize("problem, slots", PIECES.values(), ids=PIECES)
    def test_pieces_change_nothing(self, run, problem, slots):
        """A workspace for few chunks: the same bits, wherever the final states go."""
        whole = run(problem, tiles=1)
        for final in ("in place", "separate", None):
            pieces = run(replace(problem, final=final), slots=slots, tiles=1)
            assert same(whole.out, pieces.out)
            live = [n for n in range(len(problem.lengths)) if n not in problem.padding]
            assert final is None or same(whole.states[live], pieces.states[live])

    @pytest.mark.emulated(seeds=1)
    def test_pieces_from_nothing(self, run, right):
        problem = dense(200, 2, (1, 1), initial=False, final="separate")
        right(problem, run(problem, slots=3, tiles=1))

    def test_segments(self, run, right):
        """Two segments of two chunks and the rest, on few CTAs."""
        problem = dense(330)
        right(
            problem, run(problem, tiles=self.subject.tiles[-1], segment_chunks=2, multiprocessors=3)
        )

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize(
        "lengths, slots",
        [((330, 0, 70), (4, 0, 1)), ((1, 200, 260), (0, -1, 2))],
        ids=str,
    )
    def test_packed_segments(self, run, right, lengths, slots):
        """Long sequences in segments, short ones whole, some skipped."""
        problem = packed(lengths, (1, 1), slots=slots)
        right(
            problem,
            run(
                poisoned(problem, *problem.padding),
                tiles=self.subject.tiles[-1],
                segment_chunks=2,
                multiprocessors=3,
            ),
        )

    @pytest.mark.emulated(schedules="immediate")
    def test_segments_change_little(self, run):
        problem = dense(394, heads=(1, 1), kind="moderate")
        for one, other in zip(
            run(problem, tiles=1), run(problem, tiles=self.subject.tiles[-1], segment_chunks=2)
        ):
            assert relative_rmse(other, one) <= SPLIT_AND_WHOLE

    @pytest.mark.emulated(schedules="immediate", detect_races=False)
    def test_segments_of_the_planner(self, run, right):
        problem = dense(2048, heads=(1, 1))
        outcome = run(problem, intracard_cp="on")
        assert any(isinstance(config, MergeConfig) for config in run.configs)
        right(problem, outcome)

    # ---- which waits matter ------------------------------------------------------------------------------------------

    @pytest.fixture
    def mutate(self, run) -> Callable[..., mutation.Report]:
        """mutate(wanted, (problem, options), ...) skips waits of the kernel whose config is `wanted`, one by one."""

        def make(wanted: Callable[[object], bool], *calls: tuple[Problem, dict]) -> mutation.Report:
            expected, configs = [], set()
            for problem, options in calls:
                expected.append(run(problem, **options))
                configs |= {config for config in run.configs if wanted(config)}
            (config,) = configs

            def check(changes) -> None:
                for (problem, options), before in zip(calls, expected):
                    outcome = run(problem, mutated=config, **options, **vars(changes))
                    assert torch.isfinite(outcome.out).all(), "not finite"
                    assert_same(outcome, before)

            report = mutation.run(check, run.compiled(config), schedules=SCHEDULES)
            assert report.noticed and not report.not_reached, str(report)
            return report

        return make

    @pytest.mark.emulated(schedules="immediate")
    def test_every_wait_of_the_chunks_matters(self, mutate):
        report = mutate(
            lambda config: isinstance(config, PrepareConfig), (dense(100, heads=(1, 1)), {})
        )
        assert not report.unnoticed, str(report)

    @pytest.mark.emulated(schedules="immediate")
    def test_every_wait_of_the_chain_matters(self, mutate):
        """One CTA with more items and chunks than there are slots for; then with items of one chunk."""
        few = {"tiles": 1, "multiprocessors": 1}
        shapes = ((330, 1), (64, 4), (70, 3))
        calls = [(dense(tokens, batch, (1, 1)), few) for tokens, batch in shapes]
        report = mutate(lambda config: isinstance(config, RecurrenceConfig), *calls)
        assert mutation.opcodes(report.unnoticed) == self.subject.unnoticed, str(report)

    @pytest.mark.emulated(schedules="immediate")
    def test_every_wait_of_a_scan_matters(self, mutate):
        """As above, of whole segments and maps; strong decays would hide how a segment begins."""
        few = {"tiles": self.subject.tiles[-1], "multiprocessors": 1}
        problem = dense(330, heads=(1, 1), kind="moderate")
        calls = [(problem, few | {"segment_chunks": chunks}) for chunks in (1, 2)]
        report = mutate(lambda config: getattr(config, "scan", False), *calls)
        assert not report.unnoticed, str(report)

    @pytest.mark.emulated(schedules="immediate")
    def test_every_barrier_of_the_merge_matters(self, mutate):
        """Four segments have two maps between them."""
        options = {"tiles": self.subject.tiles[-1], "segment_chunks": 1}
        report = mutate(
            lambda config: isinstance(config, MergeConfig), (dense(200, heads=(1, 1)), options)
        )
        assert not report.unnoticed, str(report)
