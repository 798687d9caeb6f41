"""The three passes of a backward on the CPU, under every schedule, with race detection."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from emulated_helpers import make_call
from gpu_oracle import in_rows
from gradient_oracle import gradients
from torch import Tensor

from cula_emulator.covering import covering_cases
from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90 import backward, launch
from cula_lightning_sm90.config import Config
from cula_testing.comparing import relative_rmse, same
from cula_testing.compiled import emulated_kernel
from cula_testing.tensors import int32

FACTORS = {
    "dims": ((64, 128), (128, 64), (128, 128)),
    "gate": (None, "bfloat16"),
    "gate_rows": (False, True),
    "sequences": ((False, (150, 150)), (True, (70, 0, 1, 64, 130)), (True, (0, 200))),
    "splits": (1, 3),
    "heads": ((1, 2), (2, 2)),
    # Of the initial state and of the final state's gradient.
    "states": ((False, False), (True, False), (True, True), (False, True)),
    "dtype": ("bfloat16", "float16"),
    "decay": (True, False),
    "rates": ("gentle", "strong"),
    "v_first": (False, True),
    "exact_state": (False, True),
    "of_decays": (False, True),
    # Few multiprocessors: one CTA has several items, and two tiles of V=128.
    "multiprocessors": (132, 2),
}
# Half of those in which all pairs meet: what the passes share with the forward is tested there.
CASES = covering_cases(
    FACTORS,
    lambda case: (
        (case["gate"] or not case["gate_rows"]) and (case["gate"] or case["rates"] == "gentle")
    ),
)[::2]


def label(case: dict) -> str:
    packed, lengths = case["sequences"]
    kind = f"{'packed' * packed or 'dense'}{len(lengths)}-split{case['splits']}"
    mode = f"{case['gate']}-gate" if case["gate"] else "decay" * case["decay"] or "plain"
    return "{}-{}x{}-{}-{}".format(case["dtype"], *case["dims"], mode, kind)


@pytest.fixture
def run(emulated) -> Callable[..., Any]:
    """run(lengths, ...) returns gradients of the kernels and of the oracle; run.configs are the kernels' configs."""

    def run(
        lengths: tuple[int, ...], packed: bool = False, states: tuple[bool, bool] = (True, True), *,
        gate_rows: bool = False, splits: int | None = None, v_first: bool = False, exact_state: bool = False,
        multiprocessors: int = 132, padding: int | None = None, of_decays: bool = False, **inputs: Any,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
        call = make_call(lengths, packed=packed, **inputs)
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
        initial = call.initial[: len(lengths)] if states[0] or padding is not None else None
        dht = (
            torch.randn(call.initial[: len(lengths)].shape, generator=generator)
            if states[1]
            else None
        )
        starts = list(accumulate(lengths, initial=0))
        run.configs = []

        def kernels(config):
            run.configs.append(config)
            return emulated_kernel(emulated, launch.unit(config))

        def launched(calls):
            for call in calls:
                launch.run(call, multiprocessors=multiprocessors, kernels=kernels)

        where = backward.Where(
            launched, lambda sums: launch.gradients_of_decays(sums, kernels=kernels)
        )

        def stored(x: Tensor | None) -> Tensor | None:
            return x.mT.contiguous() if x is not None and v_first else x

        indices = live = None
        if padding is not None:
            live = [n != padding for n in range(len(lengths))]
            indices = torch.where(torch.tensor(live), torch.arange(len(lengths)), -1).int()
        given = call.g if call.g is None or not gate_rows else in_rows(call.g)
        with poisoned_memory():
            found = backward.gradients(
                where,
                do, stored(dht), call.q, call.k, call.v, given, call.decay, stored(initial), indices,
                int32(*starts) if packed else None, call.scale, -1, v_first, False, exact_state, splits, 0, of_decays,
            )  # fmt: skip
        log_decay = torch.zeros(call.v.shape[:3], dtype=torch.float64)
        if call.g is not None:
            log_decay += call.g
        if call.decay is not None:
            log_decay -= call.decay
        spans = [
            (0, a, b) if packed else (n, 0, b - a)
            for n, (a, b) in enumerate(zip(starts, starts[1:]))
        ]
        *want, dg = gradients(
            {"q": call.q, "k": call.k, "v": call.v, "initial": initial, "log_decay": log_decay}, do, dht,
            bounds=spans, scale=call.scale, live=live,
        )  # fmt: skip
        names = ["dq", "dk", "dv", *(["dh0"] if initial is not None else [])]
        if of_decays and call.g is not None:
            names, want = [*names, "dg"], [*want, dg]
        if of_decays and call.decay is not None:
            sums = dg.abs().sum((0, 1))  # of terms that may cancel
            names, want = [*names, "ddecay"], [*want, -dg.sum((0, 1)) / sums]
            found[-1] = found[-1] / sums
        if v_first and initial is not None:
            found[3] = found[3].mT
        return dict(zip(names, found, strict=True)), dict(zip(names, want, strict=True))

    return run


def assert_right(found: dict[str, Tensor], want: dict[str, Tensor], limit: float = 6e-3) -> None:
    """Every head of every gradient, within what rounding to 16 bits costs."""
    for name, a in found.items():
        heads = {"dh0": 1, "ddecay": 0}.get(name, 2)
        for head in range(a.shape[heads]):
            x, y = a.select(heads, head), want[name].select(heads, head)
            relative = y.any() and name != "ddecay"
            error = relative_rmse(x, y) if relative else float((x - y).abs().max())
            assert error <= limit, (name, head, error)


def test_the_cases_hold_every_value():
    for name, values in FACTORS.items():
        assert {case[name] for case in CASES} == set(values)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(run, case):
    packed, lengths = case["sequences"]
    options = {name: case[name] for name in FACTORS if name != "sequences"}
    assert_right(*run(lengths, packed, **options))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 193])
def test_lengths(run, tokens):
    for splits in (1, 3):
        assert_right(
            *run((tokens,) * 2, heads=(1, 2), dims=(64, 64), splits=splits, multiprocessors=3)
        )


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("packed, lengths", [(False, (700,)), (True, (700, 150))])
def test_heads_that_forget(run, packed, lengths):
    """A prescan leaves out the last tokens of a segment where they have decayed to nothing at its first."""
    shape = {"heads": (1, 3), "dims": (64, 64), "rates": "mixed", "splits": 2}
    found, want = run(lengths, packed, (True, True), **shape)
    scans = [config for config in run.configs if getattr(config, "prescan", False)]
    assert any(config.problem.reverse for config in scans)
    assert_right(found, want)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize(
    "packed, lengths, states, options",
    [
        (False, (1100,), (True, True), {"dims": (64, 128), "v_first": True}),
        (False, (1024,), (False, False), {"dims": (128, 128)}),
        # Segments that end between states that are kept; a sequence that ends at one; padding, the last.
        (True, (70, 0, 1300, 512, 600), (True, True), {"dims": (64, 64), "splits": 4, "padding": 4}),
    ],
    ids=["dense", "stateless", "packed"],
)  # fmt: skip
def test_gradients_of_decays_from_states(run, packed, lengths, states, options):
    """Sequences of several intervals after which both passes leave states; little is forgotten."""
    found, want = run(
        lengths, packed, states, of_decays=True, gate="float32", decay=False, **options
    )
    problems = [c.problem for c in run.configs if isinstance(c, Config) and c.problem.dots]
    kept = {problem.reverse: problem.checkpoints for problem in problems}
    assert kept == {False: "every", True: "every"}
    assert_right(found, want, 5e-3)
    if packed:
        assert not found["dg"][0, 70 + 1300 + 512 :].any()


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dht", [True, False])
def test_padding_has_no_gradient(run, splits, dht):
    shape = {"heads": (1, 2), "dims": (64, 64), "splits": splits, "multiprocessors": 3}
    found, want = run((70, 130, 0, 64), True, (True, dht), padding=1, **shape)
    assert_right(found, want)
    for name, grad in found.items():
        assert not (grad[1] if name == "dh0" else grad[0, 70:200]).any()


@pytest.mark.emulated(seeds=1)
def test_neighbours_do_not_meet(run, monkeypatch):
    """What lies behind a sequence's partial chunk may be anything."""
    shape = {"heads": (1, 2), "dims": (64, 64), "gate": "float32", "multiprocessors": 3}
    calm, _ = run((65, 70, 130), True, (True, True), **shape)
    plain = make_call

    def poisoned(lengths, **options):
        call = plain(lengths, **options)
        for x, value in (
            (call.q, torch.inf),
            (call.k, -torch.inf),
            (call.v, torch.nan),
            (call.g, torch.nan),
        ):
            x[0, 65:135] = value
        return call

    monkeypatch.setitem(globals(), "make_call", poisoned)
    wild, _ = run((65, 70, 130), True, (True, True), **shape)
    for name, a in wild.items():
        b = calm[name]
        for own in (0, 2) if name == "dh0" else ((0, slice(0, 65)), (0, slice(135, None))):
            assert same(a[own], b[own]), name
