"""Every argument of the functions of `cula.delta`: wrong values are named, and nothing is changed by a refused call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cula import delta
from cula._facts import OPS
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution
from cula_core.reference.delta_decode import Replay

B, T, H, HV, K, V = 2, 3, 2, 4, 8, 6
META = torch.device("meta")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(delta, name) for name in OPS["delta.decode"]
}
DECODE, COMMIT, FLUSH = "delta_rule_decode", "delta_rule_commit", "delta_rule_flush"
BOTH = (DECODE, COMMIT)
ALL = (*BOTH, FLUSH)
SLOTS = torch.tensor([3, 0], dtype=torch.int32)
TABLE = torch.tensor([[3, 1, 2], [0, 4, -1]], dtype=torch.int32)
OFFSETS = torch.tensor([0, 1, 3], dtype=torch.int32)
Changes = dict[str, Any]
# Functions, the argument to blame, what to change (values, or functions of the good arguments), error, message.
Case = tuple[tuple[str, ...], str, Changes, type[Exception], str]


def good(function: str) -> dict[str, Any]:
    """Arguments that are accepted."""
    state = torch.randn(5, HV, V, K)
    if function == FLUSH:
        replay = delta.new_replay(state, H, dtype=torch.float32)
        return {"state": state, "replay": replay, "num_accepted": torch.ones(5, dtype=torch.int32)}
    found: dict[str, Any] = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, HV, V),
        "g": torch.randn(B, T, HV),
        "beta": torch.randn(B, T, HV),
        "state": state,
        "state_indices": SLOTS,
        "A_log": torch.randn(HV),
        "dt_bias": torch.randn(HV),
    }
    if function == COMMIT:
        del found["q"]
        found["num_accepted"] = torch.tensor([1, 2], dtype=torch.int32)
    return found


def ring(**changes: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], Replay]:
    """Rings for the pool of good arguments, some of which are changed."""

    def make(given: dict[str, Any]) -> Replay:
        replay = delta.new_replay(given["state"], H, max_tokens=T, dtype=torch.float32)
        return replay._replace(**{n: f(getattr(replay, n)) for n, f in changes.items()})

    return make


def convolving(
    **changes: Callable[[torch.Tensor], Any],
) -> Callable[[dict[str, Any]], ShortConvolution]:
    """A convolution for good arguments, some tensors of which are changed."""

    def make(given: dict[str, Any]) -> ShortConvolution:
        inputs = delta.new_convolution_ring(given["state"], H, max_tokens=T, dtype=torch.float32)
        channels = 2 * H * K + HV * V
        good = ShortConvolution(inputs, SLOTS + 4, torch.ones(channels, 4), torch.ones(channels))
        return good._replace(**{n: f(getattr(good, n)) for n, f in changes.items()})

    return make


def normalizing(**changes: Any) -> GatedNorm:
    """A norm for good arguments, some parts of which are changed."""
    return GatedNorm(torch.ones(B, T, HV, V), torch.ones(V))._replace(**changes)


def of(name: str, f: Callable[[torch.Tensor], Any]) -> Changes:
    return {name: lambda given: f(given[name])}


def gaps(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap between the elements of the last dimension."""
    return torch.stack((x, x), -1)[..., 0]


def packed(**more: Any) -> Changes:
    """The tokens of the first row, packed."""
    first = {n: lambda given, n=n: given[n][:1] for n in ("k", "v", "g", "beta")}
    return {**first, "cu_seqlens": OFFSETS, **more}


def elsewhere(name: str, value: Any = None) -> list[tuple[str, Changes, type[Exception], str]]:
    """What is wrong with any tensor: no tensor, another device."""
    value = value if value is not None else (lambda given: given[name])

    def change(f: Callable[[torch.Tensor], Any]) -> Changes:
        return {name: lambda given: f(value(given) if callable(value) else value)}

    return [
        (name, change(torch.Tensor.tolist), TypeError, "a torch.Tensor, got list"),
        (name, change(lambda x: x.to(META)), ValueError, "a tensor on cpu"),
    ]


def cases() -> list[Case]:
    found: list[Case] = []

    def add(functions: tuple[str, ...] | str, *rest: Any) -> None:
        found.append(((functions,) if isinstance(functions, str) else functions, *rest))

    for name in ("k", "v", "g", "beta", "state", "A_log", "dt_bias", "state_indices"):
        add(BOTH, name, of(name, torch.Tensor.tolist), TypeError, "a torch.Tensor, got list")
    for name in ("v", "g", "beta", "state", "A_log", "dt_bias", "state_indices"):
        add(BOTH, name, of(name, lambda x: x.to(META)), ValueError, "a tensor on cpu")
    add(DECODE, "q", of("q", torch.Tensor.tolist), TypeError, "a torch.Tensor, got list")
    add(DECODE, "q", of("q", lambda x: x[0]), ValueError, "4 dimensions [B, T, H, K]")
    add(DECODE, "q", of("q", lambda x: x[:, :1]), ValueError, "the shape of k, [2, 3, 2, 8]")
    add(DECODE, "q", of("q", lambda x: x.clone().requires_grad_()), ValueError, "no gradient")
    add(DECODE, "q", of("q", torch.Tensor.double), TypeError, "the dtype of k, float32")
    add(DECODE, "k", of("k", gaps), ValueError, "a contiguous last dimension")
    add(BOTH, "k", of("k", lambda x: x[:, :0]), ValueError, "1 to 8 tokens")
    add(BOTH, "v", of("v", lambda x: x[:1]), ValueError, "[B, T, HV, V] with B, T = 2, 3 as in k")
    add(BOTH, "v", of("v", lambda x: x[:, :, :3]), ValueError, "a number of heads HV that is a")
    add(BOTH, "g", of("g", lambda x: x[..., :3]), ValueError, "or [2, 3, 4, 8] or [2, 3, 32]")
    add(BOTH, "g", of("g", torch.Tensor.int), TypeError, "float32 or bfloat16")
    channels = {"g": gaps(torch.randn(B, T, HV, K)), "dt_bias": None}
    add(BOTH, "g", channels, ValueError, "a contiguous last dimension")
    final = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}
    add(BOTH, "g", final, ValueError, "values <= 0")
    add(BOTH, "beta", of("beta", lambda x: x[:1]), ValueError, "[B, T, HV] = [2, 3, 4]")
    add(BOTH, "A_log", of("A_log", lambda x: x[:3]), ValueError, "[HV] = [4]")
    add(BOTH, "dt_bias", of("dt_bias", lambda x: x[:3]), ValueError, "[HV] = [4]")
    for name in ("A_log", "dt_bias"):
        only = {n: None for n in ("A_log", "dt_bias") if n != name}
        add(BOTH, name, {"g": None, **only}, ValueError, "None unless there are g")
        add(BOTH, name, {"use_gate_in_kernel": False, "g": None, **only}, ValueError, "None unless")
    add(BOTH, "state", of("state", lambda x: x[:, :3]), ValueError, "[pool, HV, V, K] = [pool, 4")
    add(ALL, "state", of("state", lambda x: x[0]), ValueError, "[pool, HV, V, K], got [4, 6, 8]")
    add(ALL, "state", of("state", torch.Tensor.int), TypeError, "float32 or bfloat16 or float16")
    add(ALL, "state", of("state", gaps), ValueError, "dense matrices")
    few = {"state_indices": None, "state": torch.zeros(1, HV, V, K)}
    add(BOTH, "state", few, ValueError, "a pool of at least N = 2 states")
    add(FLUSH, "state", of("state", lambda x: x.requires_grad_()), ValueError, "no gradient")
    add(BOTH, "state_indices", {"state_indices": SLOTS.long()}, TypeError, "int32, got int64")
    add(BOTH, "state_indices", {"state_indices": SLOTS[:1]}, ValueError, "[N] = [2]")
    add(
        BOTH,
        "state_indices",
        {"state_indices": SLOTS + 2},
        ValueError,
        "below the 5 states of state",
    )
    add(
        BOTH,
        "state_indices",
        {"state_indices": SLOTS * 0},
        ValueError,
        "slots that differ because they are written",
    )
    add(COMMIT, "state_indices", {"state_indices": TABLE}, ValueError, "[N] = [2]")
    add(FLUSH, "state_indices", {"state_indices": TABLE}, ValueError, "[N] = [2], got [2, 3]")
    twice = {"state_indices": torch.zeros(5, dtype=torch.int32)}
    add(FLUSH, "state_indices", twice, ValueError, "slots that differ because they are written")
    add(FLUSH, "state_indices", {"state_indices": [0]}, TypeError, "a torch.Tensor, got list")
    replayed = {"state_indices": TABLE, "replay": ring()}
    add(DECODE, "state_indices", replayed, ValueError, "[N] with replay, got [2, 3]")

    name = "output_state_indices"
    for blamed, changes, error, message in elsewhere(name, SLOTS):
        add(DECODE, blamed, changes, error, message)
    add(DECODE, name, {name: SLOTS.long()}, TypeError, "int32, got int64")
    add(DECODE, name, {name: SLOTS[:1]}, ValueError, "[N] = [2], got [1]")
    add(DECODE, name, {name: SLOTS + 2}, ValueError, "below the 5 states of state")
    add(DECODE, name, {name: SLOTS * 0}, ValueError, "slots that differ because they are written")
    add(DECODE, name, {name: SLOTS, "commit": False}, ValueError, "None unless commit is True")
    add(DECODE, name, {name: SLOTS.flip(0)}, ValueError, "slots at which no other row begins")
    add(DECODE, name, {name: SLOTS, "replay": ring()}, ValueError, "None with replay")

    add(DECODE, "scale", {"scale": "half"}, TypeError, "a float or None, got str")
    add(DECODE, "scale", {"scale": float("nan")}, ValueError, "a finite number")
    add(BOTH, "lower_bound", {"lower_bound": 0.0}, ValueError, "a number below 0")
    add(BOTH, "lower_bound", {"lower_bound": "low"}, TypeError, "a float or None, got str")
    inside = {"lower_bound": -5.0, **final, "g": None}
    add(BOTH, "lower_bound", inside, ValueError, "None unless use_gate_in_kernel")
    for name in ("softplus_beta", "softplus_threshold"):
        add(BOTH, name, {name: None}, TypeError, "a float, got NoneType")
        add(BOTH, name, {name: float("inf")}, ValueError, "a finite number")
    add(BOTH, "softplus_beta", {"softplus_beta": 0.0}, ValueError, "a number above 0")
    for name in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
                 "use_qk_l2norm_in_kernel", "state_v_first"):  # fmt: skip
        add(BOTH, name, {name: 1}, TypeError, "a bool, got int")
    add(FLUSH, "state_v_first", {"state_v_first": 1}, TypeError, "a bool, got int")
    doubled = {"allow_neg_eigval": True}
    for other in ({"use_beta_sigmoid_in_kernel": False}, {"beta": None}):
        add(BOTH, "allow_neg_eigval", doubled | other, ValueError, "False unless there are beta")
    add(DECODE, "commit", {"commit": 1}, TypeError, "a bool, got int")
    add(DECODE, "commit", {"commit": False, "replay": ring()}, ValueError, "True with replay")

    for bad in ([], (1, 2, 3, 4)):
        add(
            (DECODE, FLUSH),
            "replay",
            {"replay": bad},
            TypeError,
            "a Replay, which new_replay returns, got",
        )
    add(
        FLUSH,
        "replay",
        {"replay": None},
        TypeError,
        "a Replay, which new_replay returns, got NoneType",
    )
    short = {"replay": ring(k=lambda x: x[:, :4])}
    records = "a power of two from 6 to 64 records, got 4"
    add(DECODE, "replay.k", short, ValueError, records)
    for name, changed, error, message in (
        ("k", lambda x: x.tolist(), TypeError, "a torch.Tensor"),
        ("k", lambda x: x[0], ValueError, "[pool, L, H, K]"),
        ("k", lambda x: x[1:], ValueError, "[pool, L, H, K] = [5, 8, 2, 8]"),
        ("u", lambda x: x[0], ValueError, "[pool, L, HV, V], got [8, 4, 6]"),
        ("u", torch.Tensor.half, TypeError, "float32, got float16"),
        ("decay", gaps, ValueError, "contiguous elements"),
        ("cursor", lambda x: x.to(META), ValueError, "a tensor on cpu"),
        ("cursor", torch.Tensor.long, TypeError, "int32, got int64"),
    ):
        both = (DECODE, FLUSH)
        add(both, f"replay.{name}", {"replay": ring(**{name: changed})}, error, message)
    wide = {"g": torch.zeros(B, T, HV, K), "dt_bias": None, "replay": ring()}
    add(DECODE, "replay.decay", wide, ValueError, "[pool, L, HV, K] = [5, 8, 4, 8]")

    name = "num_accepted"
    for blamed, changes, error, message in elsewhere(name):
        add((COMMIT, FLUSH), blamed, changes, error, message)
    add((COMMIT, FLUSH), name, of(name, torch.Tensor.long), TypeError, "int32, got int64")
    add((COMMIT, FLUSH), name, of(name, lambda x: x[:1]), ValueError, "got [1]")
    add(DECODE, name, {name: SLOTS}, ValueError, "None without replay or [N, slots]")
    add(
        DECODE, name, {"state_indices": TABLE}, ValueError, "a tensor with [N, slots] state_indices"
    )

    name = "token_states"
    table = {"token_state_indices": TABLE, "commit": False}
    add(DECODE, name, {name: torch.zeros(5, HV, V, K).half(), **table}, TypeError, "float32, got")
    add(DECODE, name, {name: torch.zeros(5, HV, K, V), **table}, ValueError, "= [")
    add(DECODE, name, {name: [1.0], **table}, TypeError, "a torch.Tensor, got list")
    beside = {name: torch.zeros(5, HV, V, K), "replay": ring()}
    add(DECODE, name, beside, ValueError, "None with replay")
    name = "token_state_indices"
    add(DECODE, name, {name: TABLE, "replay": ring()}, ValueError, "None with replay")
    add(
        DECODE,
        name,
        {"token_states": torch.zeros(5, HV, V, K)},
        ValueError,
        "a tensor with token_states",
    )
    add(DECODE, name, {name: TABLE[:, :2]}, ValueError, "[N, T] = [2, 3], got [2, 2]")
    add(DECODE, name, {name: TABLE.long()}, TypeError, "int32, got int64")
    add(
        DECODE,
        name,
        {name: TABLE.abs() * 0 + 1},
        ValueError,
        "slots that differ because they are written",
    )
    add(
        DECODE,
        name,
        {name: TABLE.flip(0), "commit": False},
        ValueError,
        "slots at which no other row begins",
    )
    small = {"token_states": torch.zeros(4, HV, V, K), name: TABLE}
    add(DECODE, name, small, ValueError, "below the 4 states of token_states, got 4")

    for name in ("convolution", "norm"):
        for bad in ((), 3):
            kind = "a ShortConvolution" if name == "convolution" else "a GatedNorm"
            add(DECODE, name, {name: bad}, TypeError, f"{kind}, got {type(bad).__name__}")
    for name, changed, error, message in (
        ("inputs", torch.Tensor.tolist, TypeError, "a torch.Tensor, got list"),
        ("inputs", torch.Tensor.double, TypeError, "float32, got float64"),
        ("inputs", lambda x: x[1:], ValueError, "[pool, L, 2 H K + HV V] = [5, L, 56]"),
        ("inputs", lambda x: x[:, :4].clone(), ValueError, "a power of two L of at least 8 for 3"),
        ("inputs", gaps, ValueError, "contiguous elements"),
        ("inputs", lambda x: x.to(META), ValueError, "a tensor on cpu"),
        ("positions", torch.Tensor.long, TypeError, "int32, got int64"),
        ("positions", lambda x: x[:1], ValueError, "[N] = [2], got [1]"),
        ("positions", lambda x: x - 5, ValueError, "values of at least 0, got -1"),
        ("weight", lambda x: x[:, :3].clone(), ValueError, "[2 H K + HV V, 4] = [56, 4]"),
        ("weight", torch.Tensor.int, TypeError, "float32 or bfloat16"),
        ("weight", lambda x: x.clone().requires_grad_(), ValueError, "no gradient"),
        ("bias", torch.Tensor.half, TypeError, "float32, got float16"),
        ("bias", lambda x: x[1:], ValueError, "[2 H K + HV V] = [56], got [55]"),
    ):
        changes = {"convolution": convolving(**{name: changed})}
        add(DECODE, f"convolution.{name}", changes, error, message)
    elsewhere_too: tuple[Changes, ...] = (
        {"commit": False},
        {"output_state_indices": SLOTS},
        {"token_state_indices": TABLE},
    )
    for changes in elsewhere_too:
        stays = "None unless every state stays in its slot"
        add(DECODE, "convolution", {**changes, "convolution": convolving()}, ValueError, stays)
    several = {"state_indices": TABLE, "num_accepted": SLOTS, "convolution": convolving()}
    add(DECODE, "convolution", several, ValueError, "None with [N, slots] state_indices")
    for name, bad, error, message in (
        ("gate", [1.0], TypeError, "a torch.Tensor, got list"),
        ("gate", torch.ones(B, T, HV, K), ValueError, "the shape of v, [2, 3, 4, 6]"),
        ("gate", torch.ones(B, T, HV, V).half(), TypeError, "the dtype of v, float32"),
        ("gate", torch.ones(B, T, HV, V, device=META), ValueError, "a tensor on cpu"),
        ("weight", torch.ones(K), ValueError, "[V] = [6], got [8]"),
        ("weight", torch.ones(V).int(), TypeError, "float32 or bfloat16"),
        ("weight", torch.ones(V, requires_grad=True), ValueError, "no gradient"),
        ("eps", None, TypeError, "a float, got NoneType"),
        ("eps", -1.0, ValueError, "a number of at least 0, got -1.0"),
        ("activation", "relu", ValueError, "'silu' or 'sigmoid', got 'relu'"),
        ("activation", None, ValueError, "'silu' or 'sigmoid', got None"),
    ):
        changes = {"norm": normalizing(**{name: bad})}
        add(DECODE, f"norm.{name}", changes, error, message)

    name = "cu_seqlens"
    for bad, error, message in (
        ([0, 3], TypeError, "a torch.Tensor, got list"),
        (OFFSETS.long(), TypeError, "int32, got int64"),
        (OFFSETS[None], ValueError, "[N + 1]"),
        (OFFSETS.to(META), ValueError, "a tensor on cpu"),
        (OFFSETS.flip(0), ValueError, "offsets that rise from 0 to at most T = 3"),
        (OFFSETS + 1, ValueError, "offsets that rise from 0 to at most T = 3"),
    ):
        changes = packed(**{name: bad})
        add(COMMIT, name, changes, error, message)
        add(DECODE, name, changes | of("q", lambda x: x[:1]), error, message)
    add(BOTH, name, {name: OFFSETS}, ValueError, "None unless B = 1")
    add(COMMIT, name, packed(max_tokens=1), ValueError, "rows of at most 1 tokens, got 2")
    add(BOTH, "max_tokens", {"max_tokens": 3}, ValueError, "None without cu_seqlens")
    add(BOTH, "max_tokens", {"max_tokens": "3", name: OFFSETS}, TypeError, "an int, got str")
    add(BOTH, "max_tokens", {"max_tokens": 9, name: OFFSETS}, ValueError, "1 to 8, got 9")
    add(ALL, "null_slot", {"null_slot": 0.0}, TypeError, "an int or None, got float")
    add(ALL, "null_slot", {"null_slot": 1 << 31}, ValueError, "a 32-bit integer")

    place = torch.zeros(B, T, HV, V)
    for bad, error, message in (
        ("no", TypeError, "a torch.Tensor, got str"),
        (place.double(), TypeError, "the dtype of k, float32"),
        (place.to(META), ValueError, "a tensor on cpu"),
        (place[:, 1:], ValueError, "the shape of v"),
        (gaps(place), ValueError, "a contiguous last dimension"),
        (place.clone().requires_grad_(), ValueError, "no gradient"),
    ):
        add(DECODE, "out", {"out": bad}, error, message)
    impl = "'auto' or one of"
    add(ALL, "impl", {"impl": "nobody"}, ValueError, impl)
    return found


CASES = [(function, *rest) for functions, *rest in cases() for function in functions]


def tensors(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor among arguments, those of rings included."""
    found = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    for name, several in given.items():
        if isinstance(several, (Replay, ShortConvolution, GatedNorm)):
            parts = several._asdict().items()
            found |= {f"{name}.{n}": x for n, x in parts if isinstance(x, torch.Tensor)}
    return found


@pytest.mark.parametrize("case", CASES, ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)])
def test_wrong_argument_is_named_and_nothing_changes(
    case: tuple[str, str, Changes, type[Exception], str],
) -> None:
    function, blamed, changes, error, expected = case
    base = good(function)
    arguments = dict(base)
    for name, value in changes.items():
        arguments[name] = value(base) if callable(value) else value
    before = {n: (x.detach().clone(), x._version) for n, x in tensors(arguments).items()}
    message = f"^{re.escape(blamed)}: expected .*{re.escape(expected)}"
    with pytest.raises(error, match=message) as caught:
        FUNCTIONS[function](**arguments)
    assert type(caught.value) is error
    for name, x in tensors(arguments).items():
        values, version = before[name]
        assert x._version == version, name
        if x.device.type == "cpu":
            assert torch.equal(x.detach(), values), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_has_a_case(function: str) -> None:
    covered = {blamed.partition(".")[0] for name, blamed, *_ in CASES if name == function}
    assert covered == set(inspect.signature(FUNCTIONS[function]).parameters)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checks_read_no_device(function: str) -> None:
    """On meta tensors, which have no contents, everything that looks at contents would raise."""
    given = good(function)
    arguments = {n: x.to(META) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    if "replay" in arguments:
        arguments["replay"] = Replay(*(x.to(META) for x in given["replay"]))
    if function == DECODE:
        convolution = convolving()(given)
        arguments["convolution"] = ShortConvolution(*(x.to(META) for x in convolution))
        arguments["norm"] = normalizing(gate=arguments["v"], weight=torch.ones(V, device=META))
    result = FUNCTIONS[function](**arguments)
    assert result is None or result.device == META


@pytest.mark.parametrize(
    ("blamed", "changes", "error", "expected"),
    [
        ("state", {"state": torch.zeros(2, 4, 8)}, ValueError, "[pool, HV, V, K]"),
        ("heads", {"heads": 3}, ValueError, "a number of heads H that divides HV = 4, got 3"),
        ("heads", {"heads": 2.0}, TypeError, "an int, got float"),
        ("max_tokens", {"max_tokens": 0}, ValueError, "1 to 8, got 0"),
        ("max_tokens", {"max_tokens": True}, TypeError, "an int, got bool"),
        ("channels", {"channels": 1}, TypeError, "a bool, got int"),
        ("dtype", {"dtype": torch.int32}, TypeError, "float32 or float64"),
        ("dtype", {"dtype": "float32"}, TypeError, "float32 or float64, got str"),
        ("records", {"records": 6}, ValueError, "a power of two from 2 to 64 records, got 6"),
        ("records", {"records": 128}, ValueError, "a power of two from 2 to 64 records, got 128"),
        ("records", {"records": 4, "max_tokens": 3}, ValueError, "a power of two from 6 to 64"),
        ("records", {"records": 4.0}, TypeError, "an int, got float"),
        ("state_v_first", {"state_v_first": None}, TypeError, "a bool, got NoneType"),
    ],
)
def test_rings_that_no_call_could_use_are_refused(
    blamed: str, changes: Changes, error: type[Exception], expected: str
) -> None:
    arguments = {"state": torch.zeros(2, 4, 8, 8), "heads": 2}
    with pytest.raises(error, match=f"^{blamed}: expected .*{re.escape(expected)}"):
        delta.new_replay(**arguments | changes)


RING = torch.zeros(3, 8, 5)


@pytest.mark.parametrize(
    ("blamed", "changes", "error", "expected"),
    [
        ("state", {"state": torch.zeros(2, 4, 8)}, ValueError, "[pool, HV, V, K]"),
        ("heads", {"heads": 3}, ValueError, "a number of heads H that divides HV = 4, got 3"),
        ("max_tokens", {"max_tokens": 9}, ValueError, "1 to 8, got 9"),
        ("dtype", {"dtype": torch.int32}, TypeError, "float32 or float64"),
        ("state_v_first", {"state_v_first": None}, TypeError, "a bool, got NoneType"),
    ],
)
def test_rings_of_a_convolution_that_cannot_be_are_refused(
    blamed: str, changes: Changes, error: type[Exception], expected: str
) -> None:
    arguments = {"state": torch.zeros(2, 4, 8, 8), "heads": 2}
    with pytest.raises(error, match=f"^{blamed}: expected .*{re.escape(expected)}"):
        delta.new_convolution_ring(**arguments | changes)


@pytest.mark.parametrize(
    ("blamed", "changes", "error", "expected"),
    [
        ("ring", {"ring": RING.int()}, TypeError, "float32 or float64, got int32"),
        ("ring", {"ring": RING[:, :6]}, ValueError, "a power of two L of at least 4, got 6"),
        ("inputs", {"inputs": torch.ones(2, 9, 5)}, ValueError, "1 to 8 inputs of a row"),
        ("inputs", {"inputs": torch.ones(2, 3, 4)}, ValueError, "[B, n, 2 H K + HV V] = [B, n, 5]"),
        ("positions", {"positions": SLOTS - 1}, ValueError, "values of at least 0, got -1"),
        ("state_indices", {"state_indices": SLOTS}, ValueError, "below the 3 states of ring, got 3"),
        ("ring", {"ring": RING[:1]}, ValueError, "a pool of at least N = 2 rings when there are no"),
        ("null_slot", {"null_slot": 0.0}, TypeError, "an int or None, got float"),
    ],
)  # fmt: skip
def test_inputs_that_a_ring_cannot_take_are_refused(
    blamed: str, changes: Changes, error: type[Exception], expected: str
) -> None:
    ring = RING.clone()
    arguments = {"ring": ring, "inputs": torch.ones(2, 3, 5), "positions": SLOTS + 7}
    with pytest.raises(error, match=f"^{blamed}: expected .*{re.escape(expected)}"):
        delta.fill_convolution_ring(**arguments | changes)
    assert torch.equal(ring, RING)
    delta.fill_convolution_ring(**arguments)
    assert not torch.equal(ring, RING)
