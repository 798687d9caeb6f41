"""The compiled prefill of the gated delta rule on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.config import MergeConfig, chunk_slots
from cula_core.reference.gated_delta_rule import Outcome, gated_delta_rule
from cula_emulator import mutation
from cula_emulator.memory import loose_strides, poisoned_memory
from cula_lightning_sm90.gated import launch
from cula_lightning_sm90.gated.config import (
    CHUNK,
    ENDS,
    HEAD_DIM,
    PLACES,
    UNCUT,
    Config,
    PrepareConfig,
    RecurrenceConfig,
)
from cula_lightning_sm90.gated.plan import Plan, Walk, workspace_words
from cula_testing.comparing import relative_rmse, same
from cula_testing.compiled import emulated_kernel
from cula_testing.tensors import column, int32, normals

MAX_ERROR = 3e-3
NULL_SLOT = 7  # of the tests with indices: a padding row beside the negative ones
PACKED = (70, 0, 1, 64, 130)


@dataclass(frozen=True)
class Case:
    """A call. heads: of q, k and v. state: None, "given", "indexed", "in place" or "redirected". segment: of how many
    chunks; a scan runs on `machines` too, which have `together` heads each. every, offsets: where states on the way are
    kept, kept_rows: in which of 12 rows; in_pool: of the pool."""

    lengths: tuple[int, ...]
    packed: bool = False
    heads: tuple[int, int, int] = (1, 1, 1)
    dtype: str = "bfloat16"
    operand: str = "float16"
    gate: str | None = "log"
    gate_dtype: str = "float32"
    strength: str | None = "given"
    l2norm: bool = True
    state: str | None = None
    v_first: bool = False
    fresh: bool = False
    every: int = 0
    offsets: tuple[int, ...] | None = None
    kept_rows: tuple[int, ...] | None = None
    in_pool: bool = False
    tiles: int = 2
    machines: int = 2
    prepare_ctas: int = 2
    segment: int = UNCUT
    together: int = 1
    state_dtype: str = "float32"

    @property
    def index_dtype(self) -> str | None:
        return "int32" if self.packed else None

    @property
    def prepare(self) -> PrepareConfig:
        return PrepareConfig(
            self.dtype, self.operand, self.l2norm, self.index_dtype, self.gate, self.gate_dtype,
            bias=self.gate == "softplus", strength=self.strength, strength_dtype=self.gate_dtype,
            cut=self.segment < UNCUT,
        )  # fmt: skip

    @property
    def recurrence(self) -> RecurrenceConfig:
        in_place = self.state in ("in place", "redirected")
        return RecurrenceConfig(
            self.dtype, self.operand, self.l2norm, self.index_dtype, self.tiles, state_v_first=self.v_first,
            initial_state=self.state is not None, indexed=self.state in ("indexed", "in place", "redirected"),
            redirected=self.state == "redirected", fresh=self.fresh, in_place=in_place,
            checkpoints="once" if self.offsets else "every" if self.every else None,
            placed=self.kept_rows is not None, cut=self.segment < UNCUT, state_dtype=self.state_dtype,
        )  # fmt: skip

    @property
    def scan(self) -> RecurrenceConfig:
        return replace(
            self.recurrence, tiles=2, final_state=False, redirected=False, in_place=False, checkpoints=None,
            placed=False, scan=True, cut=False,
        )  # fmt: skip


CASES = {
    "one head": Case((150,)),
    "full chunks": Case((128,), state="given", tiles=1),
    "nothing optional": Case((70,), gate=None, strength=None, l2norm=False),
    "packed, grouped values": Case(PACKED, True, (1, 1, 2), state="given"),
    "packed, grouped queries": Case(PACKED, True, (2, 1, 1), state="given", v_first=True),
    "one CTA": Case(PACKED, True, (1, 1, 2), state="indexed", machines=1, every=64),
    "one tile per CTA": Case(PACKED, True, (1, 1, 2), state="given", machines=3, tiles=1),
    "raw gates": Case(
        (150, 150), heads=(1, 1, 2), gate="softplus", gate_dtype="bfloat16", strength="logits"
    ),
    "in place": Case((70, 70, 70), strength="doubled logits", state="in place", machines=4),
    "redirected": Case(PACKED, True, state="redirected", fresh=True, every=64, v_first=True),
    "checkpoints in rows": Case(
        PACKED, True, (1, 1, 2), every=64, kept_rows=(3, 1, 0, -1, 10), state="given"
    ),
    "checkpoints in the pool": Case(
        PACKED,
        True,
        state="in place",
        offsets=(64, 0, 64, 64, 128),
        kept_rows=(1, 2, 4, 8, 6),
        in_pool=True,
    ),
    "a checkpoint of each, cut": Case(
        (320, 320), offsets=(64, 256), segment=2, machines=3, state="given"
    ),
    "float16": Case((150,), dtype="float16", state="given"),
    "float16, packed, keys of norm 1": Case(
        PACKED, True, dtype="float16", l2norm=False, machines=3
    ),
    "keys of norm 1": Case((150,), l2norm=False, state="given"),
    "machines of two heads": Case(
        PACKED, True, (2, 1, 4), state="in place", together=2, machines=3
    ),
    "machines of two heads with keys of their own, one tile per CTA": Case(
        (150, 150), heads=(2, 4, 4), state="given", together=2, machines=3, tiles=1
    ),
    "cut, machines of four heads": Case(
        (200, 0, 128, 1, 300), True, (1, 1, 4), segment=2, machines=3, state="given", together=4
    ),
    "cut": Case((320, 320), state="given", segment=2, machines=3),
    "cut, one tile per CTA": Case(
        (320,), heads=(1, 1, 2), dtype="float16", segment=1, machines=4, tiles=1
    ),
    "cut, packed, machines of two heads with keys of their own": Case(
        (200, 0, 128, 1, 300),
        True,
        (2, 2, 2),
        segment=2,
        machines=3,
        state="given",
        v_first=True,
        together=2,
    ),
    "cut, in place": Case(
        (300, 70, 256, 130), True, segment=1, machines=2, state="in place", fresh=True, every=64
    ),
}


@dataclass(frozen=True)
class Call:
    """A case's tensors. q, k, v and the gates are followed by tokens that hold NaN and infinities."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    rates: Tensor | None
    biases: Tensor | None
    states: Tensor | None
    indices: tuple[int, ...]
    targets: tuple[int, ...]
    begins: tuple[bool, ...]

    def expected(self) -> Outcome:
        """What the reference makes of it, in fp64; states and checkpoints as the kernel stores them."""
        case, states, options = self.case, self.states, {}
        checkpoints = None
        batch, tokens, heads = self.out_shape[:3]
        if (case.every or case.offsets) and not case.in_pool:
            rows = (batch, tokens // case.every) if case.every and case.kept_rows is None else (12,)
            checkpoints = torch.full((*rows, heads, HEAD_DIM, HEAD_DIM), math.nan)
        vectors = {"checkpoint_rows": case.kept_rows, "checkpoint_offsets": case.offsets}
        if case.state in ("indexed", "in place", "redirected"):
            options = {
                "state_pool": states,
                "state_indices": torch.tensor(self.indices),
                "update_state_pool": case.recurrence.in_place,
                "null_slot": NULL_SLOT,
            }
            if case.recurrence.redirected:
                options["output_state_indices"] = torch.tensor(self.targets)
            if case.fresh:
                options["has_initial_state"] = torch.tensor(self.begins)
            states = None
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0) if case.packed else None
        return gated_delta_rule(
            self.q, self.k, self.v, self.g, self.beta, initial_state=states, use_qk_l2norm_in_kernel=case.l2norm,
            use_beta_sigmoid_in_kernel=case.strength in ("logits", "doubled logits"),
            allow_neg_eigval=case.strength == "doubled logits", state_v_first=case.v_first, cu_seqlens=cu_seqlens,
            use_gate_in_kernel=case.gate == "softplus", A_log=self.rates, dt_bias=self.biases,
            state_checkpoints=checkpoints, checkpoint_every_n_tokens=case.every or None,
            **{name: None if x is None else torch.tensor(x) for name, x in vectors.items()}, **options,
        )  # fmt: skip

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:2], max(self.case.heads), HEAD_DIM)


def make_call(case: Case, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)
    normal = normals(generator)
    batch = 1 if case.packed else len(case.lengths)
    tokens = sum(case.lengths) if case.packed else case.lengths[0]
    heads, dtype = max(case.heads), getattr(torch, case.dtype)
    gate_dtype = getattr(torch, case.gate_dtype)
    q, k, v = (normal(batch, tokens, count, HEAD_DIM) for count in case.heads)
    if not case.l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))

    def loose(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The tensor as a view of a larger one: tokens behind it, and of a gate its neighbours, are not numbers."""
        if x is None:
            return None
        wide = torch.full((batch, tokens + 3, *x.shape[2:]), math.nan, dtype=dtype)
        wide[:, -2] = math.inf
        return wide[:, :tokens].copy_(x)

    g = beta = rates = biases = None
    if case.gate:
        g = normal(batch, tokens, heads)
        if case.gate == "log":
            g = torch.where(g > 2, -30.0, -0.05 * g.abs())
        else:
            rates, biases = normal(heads).float(), normal(heads).float() - 3
    if case.strength:
        beta = normal(batch, tokens, heads)
        beta = beta.sigmoid() if case.strength == "given" else beta
    sequences = len(case.lengths)
    states = 0.5 * normal(sequences + 4, heads, HEAD_DIM, HEAD_DIM).float()
    if case.state == "given":
        states = states[:sequences]
    indices = (3, -1, 5, 0, NULL_SLOT)[:sequences] if sequences > 1 else (3,)
    targets = (1, 4, -1, 2, 6)[:sequences]
    begins = tuple(n != 0 for n in range(sequences))
    return Call(
        case, *(loose(x, dtype) for x in (q, k, v)), loose(g, gate_dtype), loose(beta, gate_dtype), rates, biases,
        None if case.state is None else states, indices, targets, begins,
    )  # fmt: skip


@pytest.fixture
def run(emulated) -> Callable[..., Outcome]:
    """run(call) launches a call with guards around and NaN in all it may write; what it writes, as the reference."""

    def compiled(config: Config):
        return emulated_kernel(emulated, launch.unit(config))

    def run(call: Call, **options: dict) -> Outcome:
        case, recurrence = call.case, call.case.recurrence
        heads, sequences = max(case.heads), len(case.lengths)
        batch, tokens = call.out_shape[:2]

        def matrices(count: int, height: int = HEAD_DIM, dtype=torch.float32) -> Tensor:
            shape = (count, heads, height, HEAD_DIM)
            return emulated.empty(shape, dtype, stride=loose_strides(shape, 8, dense=2))

        states = partial(matrices, dtype=getattr(torch, case.state_dtype))

        out_stride = loose_strides(call.out_shape, 8)
        out = emulated.empty(call.out_shape, getattr(torch, case.dtype), stride=out_stride)
        initial = final = checkpoints = offsets = maps = marks = starts = None
        if call.states is not None:
            initial = states(len(call.states)).copy_(call.states)
        final = initial if recurrence.in_place else states(sequences)
        if case.in_pool:
            checkpoints = initial
        elif case.offsets or case.kept_rows:
            checkpoints = states(12)
        elif case.every:
            checkpoints = states(call.out_shape[0] * (call.out_shape[1] // case.every))
        with poisoned_memory():
            if case.packed:
                offsets = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
            slots = chunk_slots(batch, tokens, sequences if case.packed else None)
            steps = slots + ENDS * sequences if case.packed else slots
            share = -(-steps * heads // case.together // case.machines)
            walk = Walk(case.tiles, case.machines, share, together=case.together)
            plan = Plan(walk, case.prepare_ctas, 1 << 20, case.segment)
            if recurrence.cut:
                scan = Walk(2, case.machines, share, PLACES, case.together)
                plan = Plan(scan, case.prepare_ctas, 1 << 20, case.segment, walk)
                length = case.segment * CHUNK
                count = (
                    tokens // length + sequences if case.packed else batch * -(-tokens // length)
                )
                maps, starts = matrices(count, 2 * HEAD_DIM), matrices(count)
                marks = run.marks = torch.empty(count, heads, dtype=torch.int32)
            flags = sum(plan.flags)
            words = workspace_words(flags, slots * heads, plan.first)
            workspace = emulated.empty((words,), torch.int32)
            compiled(case.prepare)(
                call.q, call.k, call.g, call.beta, call.rates, call.biases, offsets, workspace, HEAD_DIM**-0.5,
                1.0, 20.0, flags, slots, heads, walk.seats, case.together, share, case.segment, plan.ahead,
                plan.prepare_ctas, **options.get("of_prepare", {}),
            )  # fmt: skip

            def walked(config, way, first_flag, own_flags, maps, marks, starts, options) -> None:
                compiled(config)(
                    call.q, call.k, call.v, out, initial,
                    column(int32(*call.indices)) if config.indexed else None,
                    column(int32(*call.targets)) if config.redirected else None,
                    column(torch.tensor(call.begins)).view(torch.uint8) if config.fresh else None,
                    final if config.final_state else None, checkpoints if config.checkpoints else None,
                    column(int32(*case.kept_rows)) if config.placed else None,
                    column(int32(*case.offsets)) if config.checkpoints == "once" else None, offsets,
                    workspace, maps, marks, starts, NULL_SLOT, max(case.every, 1), flags, first_flag, own_flags,
                    slots, way.seats, case.together, share, case.segment, way.ctas, **options,
                )  # fmt: skip

            of_first, of_second = plan.flags
            if recurrence.cut:
                options_of_scan = options.get("of_scan", {})
                walked(case.scan, plan.first, 0, of_first, maps, marks, None, options_of_scan)
                compiled(MergeConfig(index_dtype=case.index_dtype, fades=True))(
                    maps, marks, starts, None, None, None, offsets, -1, sequences, tokens, case.segment * CHUNK
                )  # fmt: skip
            own = (of_first, of_second) if recurrence.cut else (0, of_first)
            walked(recurrence, walk, *own, maps, marks, starts, options.get("of_recurrence", {}))
        if case.in_pool:
            checkpoints = None
        elif checkpoints is not None and case.every and case.kept_rows is None:
            checkpoints = checkpoints.unflatten(0, (call.out_shape[0], -1))
        if initial is not None and not recurrence.in_place:
            assert same(initial, call.states.to(initial.dtype)), "initial states are read only"
        return Outcome(out, final, initial if recurrence.in_place else None, checkpoints)

    run.compiled = compiled
    return run


def assert_right(call: Call, found: Outcome, limit: float = MAX_ERROR) -> None:
    expected = call.expected()
    errors = {"out": relative_rmse(found.out, expected.out)}
    if found.pool is None:
        errors["states"] = relative_rmse(found.states, expected.states)
    else:
        errors["pool"] = relative_rmse(found.pool, expected.pool)
        same_before = (expected.pool == call.states).flatten(1).all(1)
        assert same(found.pool[same_before], call.states[same_before])
    if expected.checkpoints is not None:
        owned = ~expected.checkpoints.isnan()
        assert found.checkpoints[~owned].isnan().all(), "a checkpoint that nobody owns"
        taken, wanted = found.checkpoints[owned], expected.checkpoints[owned]
        errors["checkpoints"] = relative_rmse(taken, wanted)
    assert all(error <= limit for error in errors.values()), errors


@pytest.mark.emulated
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prefill(run, case):
    call = make_call(case)
    assert_right(call, run(call))


STORED = {
    "redirected": CASES["redirected"],
    "in the pool": CASES["checkpoints in the pool"],
    "cut": replace(CASES["cut, in place"], v_first=True),
    "separate": replace(CASES["full chunks"], lengths=(150,), every=64),
}


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", STORED.values(), ids=STORED)
def test_states_of_16_bits(run, case, dtype):
    """They are widened where a sequence begins and rounded where they are stored; nothing else changes."""
    call = make_call(case)
    call = replace(call, states=call.states.to(getattr(torch, dtype)).float())
    wide = run(call)
    assert_right(call, wide)
    found = run(replace(call, case=replace(case, state_dtype=dtype)))
    assert same(found.out, wide.out)
    for name in ("states", "pool", "checkpoints"):
        own, other = getattr(found, name), getattr(wide, name)
        other = None if other is None else other.to(getattr(torch, dtype))
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.emulated
def test_bfloat16_operands(run):
    """Their rounding is eight times as coarse, their range fp32's: values of 1e6 would be infinite in fp16."""
    call = make_call(Case((150,), operand="bfloat16", state="given"))
    assert_right(call, run(call), limit=8e-3)
    call = replace(call, v=1e6 * call.v, states=1e6 * call.states)
    assert_right(call, run(call), limit=8e-3)


KEYS = {
    # What is written, once for every token of a class of keys, grows without bound where the inverse is wrong.
    "one key": lambda k: k[:, :1].expand_as(k),
    "eight keys": lambda k: k[:, torch.arange(k.shape[1]) % 8],
    "keys that resemble each other": lambda k: k[:, :1] + 0.3 * k,
}


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_that_repeat(run, keys, dtype):
    call = make_call(Case((150,), dtype=dtype, gate="log", strength="given", state="given"))
    g, beta = torch.full_like(call.g, -1e-4), torch.ones_like(call.beta)
    call = replace(call, k=keys(call.k).contiguous(), g=g, beta=beta)
    assert_right(call, run(call))


def initial(x: Tensor, u: Tensor) -> Tensor:
    """Log decays of a model before training: rates of 2, time steps of 0.001 to 0.1."""
    step = torch.exp(math.log(0.001) + u[:, :1] * math.log(100))
    return -2 * torch.nn.functional.softplus(x + step + torch.log(-torch.expm1(-step)))


def moderate(x: Tensor, u: Tensor) -> Tensor:
    return -5 * (x - 5).sigmoid()


def hardly_any(x: Tensor, u: Tensor) -> Tensor:
    return -1e-5 * u


def usual(x: Tensor, u: Tensor) -> Tensor:
    return x.sigmoid()


def nearly_one(x: Tensor, u: Tensor) -> Tensor:
    return 1 - 0.01 * u


def different(k: Tensor) -> Tensor:
    return k


def alike(k: Tensor) -> Tensor:
    return k[:, :1] + 0.1 * k


def eight_times(k: Tensor) -> Tensor:
    return k[:, ::8].repeat_interleave(8, 1)


# What is hard in different ways: log decays and strengths, of a normal and a uniform number each, and keys.
INPUTS = {
    "initial decays": (initial, usual, different),
    "moderate decays": (moderate, usual, different),
    "some strong decays": (
        lambda x, u: torch.where(u < 0.02, -10.0, -1e-4),
        usual,
        different,
    ),
    "hardly any decay": (hardly_any, usual, different),
    "hardly any decay, strengths up to 2": (hardly_any, lambda x, u: 2 * x.sigmoid(), different),
    "keys alike": (hardly_any, nearly_one, alike),
    "keys alike, moderate decays": (moderate, nearly_one, alike),
    "keys eight times": (lambda x, u: -1e-3 * u, nearly_one, eight_times),
    "keys eight times, strengths of 2": (
        lambda x, u: -1e-3 * u,
        lambda x, u: 2 - 0.02 * u,
        eight_times,
    ),
    "one key": (
        lambda x, u: torch.full_like(u, -1e-6),
        lambda x, u: torch.ones_like(u),
        KEYS["one key"],
    ),
}


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_are_hard(run, name):
    decays, strengths, keys = INPUTS[name]
    call = make_call(Case((1024,)))
    generator = torch.Generator().manual_seed(1)
    normal = normals(generator)

    def made(kind: Callable[..., Tensor]) -> Tensor:
        shape = call.g.shape
        return kind(normal(*shape), torch.rand(shape, generator=generator)).float()

    g, beta = made(decays), made(strengths)
    k = keys(call.k.double()).to(call.k.dtype)
    call = replace(call, g=g, beta=beta, k=k)
    assert_right(call, run(call), limit=4e-3 if name.endswith("strengths of 2") else MAX_ERROR)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("log2_size", [-20, -8, 24])
def test_keys_of_any_size(run, log2_size):
    """Keys that are normalised inside may lie outside fp16's range; of the smallest, the norm's epsilon is most."""
    call = make_call(Case((150,), state="given", strength=None))
    sizes = 2.0 ** (log2_size + torch.arange(150) % 5)
    call = replace(call, k=(call.k * sizes[:, None, None]).to(call.k.dtype))
    assert_right(call, run(call))


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("gate", [-1e4, -math.inf])
def test_gates_that_forget_everything(run, gate):
    """What a product of sums of log decays would lose: after such a gate the others still count."""
    call = make_call(Case((150,), state="given"))
    g = call.g.clone()
    g[:, [20, 64, 70, 127]] = gate
    call = replace(call, g=g)
    assert_right(call, run(call))


@pytest.mark.emulated
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("machines", [1, 3, 5])
def test_segments_that_forget(run, machines, packed):
    """A log2 decay of 18.5 per chunk forgets in three of a segment's chunks, unless writes make states larger."""
    case = Case(
        (1100,), packed, (3, 3, 3), l2norm=False, machines=machines, segment=5, state="given"
    )
    call = make_call(case)
    g, k, beta = torch.full_like(call.g, -0.2), call.k.clone(), torch.full_like(call.beta, 0.5)
    g[..., 0] = -1e-3
    # Every fourth key of this head has norm 2, and what a state has along it is multiplied by 1 - 4.
    k[:, ::4, 2] *= 2
    beta[:, ::4, 2] = 1.0
    call = replace(call, g=g, k=k, beta=beta)
    assert_right(call, run(call))
    assert run.marks[:3].tolist() == [[0, 1, 0]] * 3


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("l2norm", [True, False])
def test_sequences_do_not_see_each_other(run, dtype, l2norm):
    """Whatever some sequences hold, the bits of the others stay, and those of padding are zero."""
    case = Case(PACKED, True, (1, 1, 2), dtype, l2norm=l2norm, state="indexed")
    call = replace(make_call(case), indices=(3, 1, 5, 0, -1))
    clean = run(call)
    tensors = {name: getattr(call, name).clone() for name in ("q", "k", "v", "g", "beta")}
    starts = [sum(PACKED[:n]) for n in range(len(PACKED) + 1)]
    for n in (3, 4):
        for tensor, value in zip(
            tensors.values(), (math.inf, math.nan, -math.inf, math.nan, math.inf)
        ):
            tensor[:, starts[n] : starts[n + 1]] = value
            tensor[:, starts[n] + 1 : starts[n + 1] : 2] = math.nan
    found = run(replace(call, **tensors))
    assert same(found.out[:, : starts[3]], clean.out[:, : starts[3]])
    assert same(found.states[:3], clean.states[:3])
    assert not found.out[:, starts[4] :].any() and not found.states[4].any()
    assert found.out[:, starts[3] : starts[4]].isnan().all()


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("segment", [UNCUT, 2])
def test_a_packed_sequence_is_the_sequence_alone(run, segment):
    """Bit for bit, whole or cut after so many chunks, where sequences that are shorter may stay whole."""
    case = Case((200, 64, 128, 1, 300), True, (1, 1, 2), state="given", machines=3, segment=segment)
    call = make_call(case)
    together, first = run(call), 0
    for n, length in enumerate(case.lengths):
        tokens = slice(first, first + length)
        for segment_alone in {segment, segment if length > 2 * CHUNK else UNCUT}:
            alone = replace(case, lengths=(length,), segment=segment_alone, machines=2, tiles=1)
            parts = {name: getattr(call, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")}
            found = run(replace(call, case=alone, states=call.states[n : n + 1], **parts))
            assert same(found.out, together.out[:, tokens])
            assert same(found.states, together.states[n : n + 1])
        first += length


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("segment", [UNCUT, 2])
def test_tokens_behind_the_last_sequence_are_nobodys(run, segment):
    """Engines pad the rows of a batch, and its cu_seqlens end before: nothing is written there."""
    case = Case((200, 0, 130), True, (1, 1, 2), state="given", machines=3, segment=segment)
    call = make_call(case)
    wide = {
        name: torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 150), value=0.5)
        for name, x in vars(call).items()
        if name in ("q", "k", "v", "g", "beta")
    }
    exact, found = run(call), run(replace(call, **wide))
    assert same(found.out[:, :330], exact.out) and same(found.states, exact.states)
    assert found.out[:, 330:].isnan().all()


# What goes unnoticed, and why:
# - The emulator runs a kernel after the one before it. So nothing waits for flags, and what orders memory between both
#   has no effect: fences of all the GPU, the barrier of the warp that has seen flags, the barrier and the wait for
#   writes behind which the writers set flags. States that machines leave to each other are written before the other CTA
#   begins.
# - Products that one wait waits for may be one group: those of k with k and with q. At the beginning of a chunk nothing
#   runs, and the wait there is for the compiler.
# - It asks for no fence between reads of k and q and copies that overwrite these, and takes a later fence of another
#   thread for that of the writer of zeros of T' and Aqk, where keys are converted.
# - Behind its last reads of k and q, and of gates, a warp has met before it does so again to give them back.
# - The emulator keeps memory longer than its CTA: the wait for the last outputs.
# - Behind the barrier of the tile that clears keys, where these are not converted, comes that of all tiles; where there
#   is one it is needed.
UNNOTICED = {
    "of_prepare": Counter(
        {
            "bar.sync 4": 1,
            "bar.warp.sync": 2,
            "cp.async.bulk.wait_group 0": 1,
            "fence.acq_rel.gpu": 1,
            "fence.proxy.async.shared::cta": 1,
            "wgmma.commit_group.sync.aligned": 1,
        }
    ),
    "of_recurrence": Counter(
        {
            "bar.sync": 1,
            "bar.warp.sync": 1,
            "cp.async.bulk.wait_group 0": 1,
            "fence.acq_rel.gpu": 1,
            "fence.proxy.async.shared::cta": 1,
            "wgmma.wait_group.sync.aligned 0": 2,
        }
    ),
    "of_recurrence, float16": Counter(
        {
            "bar.sync": 1,
            "bar.sync 1": 1,
            "bar.warp.sync": 1,
            "cp.async.bulk.wait_group 0": 1,
            "fence.acq_rel.gpu": 1,
            "wgmma.wait_group.sync.aligned 0": 2,
        }
    ),
    "of_scan": Counter(
        {
            "bar.sync": 1,
            "fence.acq_rel.gpu": 1,
            "fence.proxy.async.shared::cta": 1,
            "wgmma.wait_group.sync.aligned 0": 1,
        }
    ),
}


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("mutated", UNNOTICED)
def test_every_wait_matters(run, mutated):
    """CTAs with more items, and more chunks, than there are slots for; one leaves a state to the other."""
    what, _, dtype = mutated.partition(", ")
    case = Case((70, 60, 192, 400, 30), True, (1, 1, 2), state="indexed", prepare_ctas=1)
    if what == "of_scan":
        case = Case((1100,), segment=4, prepare_ctas=1, gate=None)
    case = replace(case, dtype=dtype or "bfloat16")
    call = make_call(case)
    before = run(call)

    def check(options) -> None:
        found = run(call, **{what: vars(options)})
        assert same(found.out, before.out) and same(found.states, before.states)

    config = getattr(case, what.removeprefix("of_"))
    report = mutation.run(check, run.compiled(config), schedules=mutation.SCHEDULES[:3])
    assert mutation.opcodes(report.unnoticed) == UNNOTICED[mutated], str(report)
    assert not report.not_reached, str(report)
