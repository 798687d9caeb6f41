"""The oracle of the GPU tests, against the recurrence token by token; and whether their checks see what is wrong."""

from __future__ import annotations

import itertools
import math
import types

import gpu_oracle
import pytest
import torch
from gpu_oracle import CASES, FACTORS, Inputs, check, chunked, make, possible
from torch import Tensor

from cula_testing.comparing import relative_rmse

LENGTHS = [100, 0, 1, 64, 65, 0, 33]


def recurrence(
    x: Inputs, scale: float, l2norm: bool, initial: bool, every: int
) -> tuple[Tensor, Tensor, dict[tuple[int, int], Tensor]]:
    """Outputs, final states, and checkpoints by (sequence, number), in fp64."""
    if x.lengths is None:
        spans = [(n, 0, x.q.shape[1]) for n in range(len(x.initial))]
    else:
        spans = [(0, a, b) for a, b in itertools.pairwise(x.starts)]
    out, final = torch.zeros_like(x.v, dtype=torch.float64), x.initial.double()
    checkpoints = {}
    group = x.v.shape[2] // x.q.shape[2]
    for n, (row, first, last) in enumerate(spans):
        for head in range(x.v.shape[2]):
            state = final[n, head] * initial
            for t in range(first, last):
                q, k = (value[row, t, head // group].double() for value in (x.q, x.k))
                if l2norm:
                    q, k = (value / math.sqrt(value.square().sum() + 1e-6) for value in (q, k))
                decay = 0.0 if x.decay is None else -x.decay[head].item()
                decay += 0.0 if x.gate is None else x.gate[row, t, head].item()
                state = math.exp(decay) * state + torch.outer(k, x.v[row, t, head].double())
                out[row, t, head] = scale * (q @ state)
                if every and (t + 1 - first) % every == 0:
                    place = checkpoints.setdefault(
                        (n, (t + 1 - first) // every - 1), torch.zeros_like(final[n])
                    )
                    place[head] = state
            final[n, head] = state
    return out, final, checkpoints


@pytest.mark.parametrize("size", [(2, 130), (LENGTHS,)], ids=["dense", "packed"])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("gate", [None, torch.float32])
@pytest.mark.parametrize("l2norm, initial, chunk", [(False, True, 32), (True, False, 64)])
def test_chunks_are_the_recurrence(size, decay, gate, l2norm, initial, chunk):
    tokens = size[1] if len(size) > 1 else 0
    x = make("cpu", size[0], tokens, 1, 2, (8, 6), gate=gate, decay=decay)
    options = {"scale": 0.7, "l2norm": l2norm, "initial": initial, "every": 64}
    out, final, checkpoints = recurrence(x, **options)
    got = chunked(x, **options, chunk=chunk)
    assert relative_rmse(got.out, out) < 1e-12 and relative_rmse(got.final, final) < 1e-12
    assert checkpoints
    for (n, i), state in checkpoints.items():
        assert relative_rmse(got.checkpoints[n, i], state) < 1e-12


def test_resets_do_not_spoil_what_follows():
    """A log decay of -1e30 and small ones after it, in one chunk."""
    x = make("cpu", 1, 40, 1, 2, (8, 6), gate=torch.float32)
    x.gate[:, 7::9] = -1e30
    x.decay[1] = 1e30
    out, final, _ = recurrence(x, 1.0, False, True, 0)
    got = chunked(x, scale=1.0)
    assert relative_rmse(got.out, out) < 1e-12 and relative_rmse(got.final, final) < 1e-12


@pytest.mark.parametrize("dtype, least, most", [
    (torch.bfloat16, 1e-3, 4e-3), (torch.float16, 1e-4, 5e-4),
])  # fmt: skip
@pytest.mark.parametrize("gate", [None, torch.float32])
@pytest.mark.parametrize("l2norm", [False, True])
def test_what_rounded_products_lose(dtype, least, most, gate, l2norm):
    """The baseline stays well inside the bounds, so that 1.5 times as much is not always allowed."""
    x = make("cpu", 1, 500, 1, 4, (64, 64), dtype=dtype, gate=gate)
    exact, rounded = chunked(x, l2norm=l2norm), chunked(x, l2norm=l2norm, rounded=dtype, chunk=64)
    assert rounded.out.dtype == dtype
    assert least < relative_rmse(rounded.out, exact.out) < most
    assert relative_rmse(rounded.final, exact.final) < min(most, gpu_oracle.MAX_STATE_ERROR)
    gpu_oracle.assert_output(rounded.out, exact.out, rounded.out)
    gpu_oracle.assert_state(rounded.final, exact.final, rounded.final)


def test_neighbours_do_not_matter():
    x = make("cpu", LENGTHS, 0, 1, 2, (8, 6), gate=torch.float32)
    sound = chunked(x)
    middle = slice(x.starts[3], x.starts[4])
    for value in (x.q, x.k, x.v, x.gate):
        value[:, middle] = math.nan
    x.initial[3] = math.nan
    got = chunked(x)
    others = [n for n in range(len(LENGTHS)) if n != 3]
    assert torch.equal(got.final[others], sound.final[others]) and got.final[3].isnan().all()
    assert torch.equal(got.out[:, : middle.start], sound.out[:, : middle.start])
    assert torch.equal(got.out[:, middle.stop :], sound.out[:, middle.stop :])


def factors(case) -> dict:
    return vars(case) | {"gate": case.gate is not None}


def test_cases_cover_every_pair():
    for case in CASES:
        assert possible(factors(case)), case
    for (name, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for a, b in itertools.product(values, others):
            if possible({name: a, other: b}):
                assert any((factors(c)[name], factors(c)[other]) == (a, b) for c in CASES), (
                    f"no case has {name}={a} and {other}={b}"
                )
    assert {c.gate for c in CASES} == {None, "float32", "bfloat16", "float16"}


def small(case) -> Inputs:
    gate = None if case.gate is None else getattr(torch, case.gate)
    size = ([70, 0, 1, 130, 64], 0) if case.packed else (2, 130)
    return make(
        "cpu", *size, 1, 2, (case.dim_k, case.dim_v), dtype=getattr(torch, case.dtype), gate=gate,
        decay=case.decay,
    )  # fmt: skip


def options(case) -> dict:
    return {
        "state": case.state, "v_first": case.v_first, "every": 64 * case.checkpoints,
        "exact": case.exact, "l2norm": case.l2norm, "splits": case.splits,
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checks_accept_the_reference(case):
    """On CPU tensors the public functions run the reference; every case passes the checks of the GPU tests."""
    errors = check(small(case), **options(case))
    assert errors["out"] > 0 and ("state" in errors) == (case.state not in ("none", "initial"))
    assert ("checkpoints" in errors) == case.checkpoints


def spoil_one_output(out: Tensor, state: Tensor, checkpoints: Tensor) -> None:
    out[:, 1, 1] *= 1.2


def leave_output(out: Tensor, state: Tensor, checkpoints: Tensor) -> None:
    out[:, 3] = math.nan


def spoil_state(out: Tensor, state: Tensor, checkpoints: Tensor) -> None:
    state *= 1.004


def touch_free_row(out: Tensor, state: Tensor, checkpoints: Tensor) -> None:
    state[0, 0, 0, 0] = 1.0


def touch_padding(out: Tensor, state: Tensor, checkpoints: Tensor) -> None:
    out[:, 70:] += 1e-3


def swap_checkpoints(out: Tensor, state: Tensor, checkpoints: Tensor) -> None:
    checkpoints.copy_(checkpoints.flip(1))


@pytest.mark.parametrize(
    "wrong",
    [spoil_one_output, leave_output, spoil_state, touch_free_row, touch_padding, swap_checkpoints],
)
def test_checks_notice(monkeypatch, wrong):
    """The same call with one thing wrong in what it leaves behind."""
    case = types.SimpleNamespace(**vars(CASES[2]))
    assert case.state == "pool" and case.checkpoints
    right = gpu_oracle.attend

    def attend(x: Inputs, **arguments):
        out, state = right(x, **arguments)
        wrong(out, state, arguments["state_checkpoints"])
        return out, state

    x = small(case)
    check(x, **options(case))
    monkeypatch.setattr(gpu_oracle, "attend", attend)
    with pytest.raises(AssertionError):
        check(x, **options(case))
