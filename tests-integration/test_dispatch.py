"""Kernel packages and `cula` side by side: one interface, and the same numbers on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cula
import noxfile
from cula import _discovery, _registry
from cula._discovery import FIRST_PARTY
from cula._facts import CALLERS_ALONE, COMMON_FACTS, FACTS, OPS
from cula_core import spec as core_spec
from cula_testing.gated.contract import good_arguments

SPECS = {name: import_module(f"{noxfile._import_name(name)}._spec") for name in noxfile.PACKAGES}
SERVED = {name: (spec.OP,) if isinstance(spec.OP, str) else spec.OP for name, spec in SPECS.items()}
PAIRS = [(name, op) for name, ops in SERVED.items() for op in ops]
FUNCTIONS = [(name, function) for name, op in PAIRS for function in OPS[op]]


def public(function: str) -> inspect.Signature:
    """The signature of the public function without what the caller alone has."""
    op = next(op for op, functions in OPS.items() if function in functions)
    signature = inspect.signature(getattr(import_module(f"cula.{op.partition('.')[0]}"), function))
    own = {"impl", *CALLERS_ALONE.get(function, ())}
    kept = [p for p in signature.parameters.values() if p.name not in own]
    return signature.replace(parameters=kept)


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_package_function_has_the_public_signature(name: str, function: str) -> None:
    """A package may take more behind it, by keyword and with a default."""
    theirs = [*inspect.signature(SPECS[name].load(function)).parameters.values()]
    ours = [*public(function).parameters.values()]
    more = theirs[len(ours) :]
    assert [(p.name, p.kind, p.default) for p in theirs[: len(ours)]] == [
        (p.name, p.kind, p.default) for p in ours
    ]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in more)


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_explain_says_why_a_kernel_does_not_serve_a_cpu(name: str, op: str) -> None:
    told = cula.explain(op, arch="cpu")
    assert told.chosen == "reference"
    (row,) = [row for row in told.rows if row.name == name]
    assert row.reason and "CUDA" in row.reason


@pytest.mark.parametrize("name", noxfile.PACKAGES)
def test_a_missing_package_and_a_missing_kernel_language_are_told_apart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[name]

    def row() -> _registry.Row:
        _registry.refresh()
        told = cula.explain(SERVED[name][0], arch=spec.ARCHS[0], dtype=torch.bfloat16)
        return next(row for row in told.rows if row.name == name)

    with monkeypatch.context() as patch:
        for module in (spec, core_spec):
            patch.setattr(module, "find_spec", lambda module: None, raising=False)
        assert (row().verdict, row().reason) == (
            "refused", f"its dependency cutlass is missing: pip install --find-links dist {name}",
        )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(_discovery, "entry_points", lambda group: ())
        for module in (_discovery, _registry):
            there = module.importable
            patch.setattr(
                module,
                "importable",
                lambda package, there=there: package != spec.__package__ and there(package),
            )
        assert row().verdict == "missing"
        assert str(row().reason).startswith(
            f"not installed: pip install --find-links dist '{name}'"
        )
    _registry.refresh()


@pytest.mark.parametrize("arch", noxfile.ARCHITECTURES)
def test_auto_picks_a_package_on_every_architecture_of_its_extra(arch: str) -> None:
    for name, op in PAIRS:
        if arch in noxfile.PACKAGES[name]:
            assert cula.explain(op, arch=arch).chosen == name


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode_of_the_package_and_of_cula_agree_to_the_bit_on_a_cpu(
    state_dtype: torch.dtype,
) -> None:
    from cula.lightning import linear_attention_decode
    from cula_lightning_decode import linear_attention_decode as of_the_package

    q = torch.randn(3, 2, 2, 64, dtype=torch.bfloat16)
    k = torch.randn(3, 2, 2, 64, dtype=torch.bfloat16)
    v = torch.randn(3, 2, 4, 64, dtype=torch.bfloat16)
    state = torch.randn(5, 4, 64, 64).to(state_dtype)
    decay = torch.linspace(0.0, 1.0, 4)
    rows = torch.tensor([4, -1, 0], dtype=torch.int32)
    states = state.clone(), state.clone()
    ours = linear_attention_decode(q, k, v, states[0], decay, state_indices=rows)
    theirs = of_the_package(q, k, v, states[1], decay, state_indices=rows)
    assert torch.equal(ours, theirs) and torch.equal(*states)
    assert not torch.equal(states[0], state) and not ours[1].any()


@pytest.mark.parametrize("dims", [(80, 80), (5, 7)])
def test_decode_of_any_head_dimension_is_the_same_on_a_cpu(dims: tuple[int, int]) -> None:
    """The kernel's head dimensions bind tensors on a GPU alone; there `cula` finds someone else."""
    from cula.lightning import linear_attention_decode
    from cula_lightning_decode import linear_attention_decode as of_the_package

    q, k = torch.randn(2, 3, 2, 2, dims[0]).bfloat16()
    v, decay = torch.randn(3, 2, 4, dims[1]).bfloat16(), torch.rand(4)
    states = [torch.ones(5, 4, *dims).bfloat16() for _ in range(2)]
    options = {"state_indices": torch.tensor([4, -1, 0], dtype=torch.int32), "rounding_seed": 3}
    ours = linear_attention_decode(q, k, v, states[0], decay, **options)
    theirs = of_the_package(q, k, v, states[1], decay, **options)
    assert torch.equal(ours, theirs) and torch.equal(*states)
    assert ours[0].any() and not (states[0][4] == 1).all()
    told = cula.explain("lightning.decode", arch="sm90", head_dim_k=dims[0], head_dim_v=dims[1])
    (row,) = [row for row in told.rows if row.name == "cula-lightning-decode"]
    assert row.reason == f"K must be one of (64, 128, 256), not {dims[0]}"
    assert told.chosen in ("fla", "reference")


@pytest.mark.parametrize(
    ("blamed", "changes"),
    [
        ("q", {"q": torch.zeros(2, 2, 64)}),
        ("q", {name: torch.zeros(2, 2, 64) for name in ("q", "k", "v")}),
        ("decay", {"decay": torch.tensor([0.5, -0.5])}),
        ("state_indices", {"state_indices": torch.tensor([1, 1], dtype=torch.int32)}),
        ("state_indices", {"state_indices": torch.tensor([1, 3], dtype=torch.int32)}),
    ],
)
def test_decode_of_the_package_refuses_what_cula_refuses(
    blamed: str, changes: dict[str, Any]
) -> None:
    good = {name: torch.zeros(2, 1, 2, 64) for name in ("q", "k", "v")}
    good |= {"state": torch.zeros(3, 2, 64, 64), "decay": torch.ones(2)}
    of_the_package = SPECS["cula-lightning-decode"].load("linear_attention_decode")
    for run in (cula.lightning.linear_attention_decode, of_the_package):
        run(**good)
        with pytest.raises(ValueError, match=f"^{blamed}: expected "):
            run(**good | changes)


DELTA = SPECS["cula-delta-decode"]
TABLE = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)


def delta_arguments(function: str) -> dict[str, Any]:
    """Everything that a function of `cula.delta` can be asked for at once; the same at every call."""
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    state = randn(6, 4, 64, 64)
    replay = cula.delta.new_replay(state, 2, max_tokens=2, dtype=torch.bfloat16)
    accepted = torch.tensor([2, 1], dtype=torch.int32)
    slots = torch.tensor([4, 0], dtype=torch.int32)
    if function == "delta_rule_flush":
        for ring in replay[:3]:
            ring.copy_(randn(*ring.shape))
        # From record 1 on one certain record, and two in question.
        replay.cursor.fill_(1 | 1 << 8 | 2 << 16)
        return {"state": state, "replay": replay, "num_accepted": accepted, "state_indices": slots}
    found = {
        "q": randn(2, 2, 2, 64).bfloat16(), "k": randn(2, 2, 2, 64).bfloat16(), "v": randn(2, 2, 4, 64).bfloat16(),
        "g": randn(2, 2, 4, 64), "beta": randn(2, 2, 4), "A_log": randn(4), "dt_bias": randn(4, 64), "scale": 0.5,
        "state": state, "state_indices": TABLE, "num_accepted": accepted, "token_state_indices": TABLE, "commit": False,
        "lower_bound": -5.0, "allow_neg_eigval": True, "null_slot": 3,
    }  # fmt: skip
    if function == "delta_rule_commit":
        for name in ("q", "scale", "token_state_indices", "commit"):
            del found[name]
        found["state_indices"] = slots
    return found


@pytest.mark.parametrize("function", OPS["delta.decode"])
def test_delta_rule_of_the_package_and_of_cula_agree_to_the_bit_on_a_cpu(function: str) -> None:
    ours, theirs, before = (delta_arguments(function) for _ in range(3))
    found = getattr(cula.delta, function)(**ours)
    expected = DELTA.load(function)(**theirs)
    assert (found is None and expected is None) or torch.equal(found, expected)
    assert torch.equal(ours["state"], theirs["state"])
    assert not torch.equal(ours["state"], before["state"])
    for x, y in zip(ours.get("replay", ()), theirs.get("replay", ()), strict=True):
        assert torch.equal(x, y)


def test_convolution_and_norm_of_the_package_and_of_cula_agree_to_the_bit_on_a_cpu() -> None:
    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        given = delta_arguments("delta_rule_decode")
        for name in ("num_accepted", "token_state_indices", "commit"):
            del given[name]
        given["state_indices"], state = TABLE[:, 0], given["state"]
        ring = cula.delta.new_convolution_ring(state, 2, max_tokens=2)
        ring.copy_(torch.arange(ring.numel()).view(ring.shape) % 7 - 3)
        channels = ring.shape[2]
        weight = torch.linspace(-1, 1, 4 * channels).view(channels, 4)
        convolution = cula.delta.ShortConvolution(
            ring, TABLE[:, 1] + 1, weight, weight[:, 0].clone()
        )
        norm = cula.delta.GatedNorm(given["v"], torch.linspace(0, 1, 64), 1e-3, "sigmoid")
        out = function(**given, convolution=convolution, norm=norm)
        assert not torch.equal(out, function(**given))
        return [out, state, ring]

    found, expected = run(cula.delta.delta_rule_decode), run(DELTA.load("delta_rule_decode"))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_rings_of_the_package_and_of_cula_are_the_same() -> None:
    from cula_delta_decode import new_replay

    state, options = torch.zeros(3, 4, 8, 16), {"max_tokens": 3, "channels": True}
    for v_first in (False, True):
        ours = cula.delta.new_replay(state, 2, state_v_first=v_first, **options)
        theirs = new_replay(state, 2, state_v_first=v_first, **options)
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y) and x.dtype == y.dtype


@pytest.mark.parametrize(
    ("function", "blamed", "changes"),
    [
        ("delta_rule_decode", "q", {"q": torch.zeros(2, 2, 64)}),
        ("delta_rule_decode", "q", {"q": torch.zeros(2, 1, 2, 64).bfloat16()}),
        ("delta_rule_decode", "v", {"v": torch.zeros(2, 2, 3, 64).bfloat16()}),
        ("delta_rule_decode", "g", {"g": torch.zeros(2, 2, 4, 63)}),
        ("delta_rule_decode", "g", {"g": torch.ones(2, 2, 4), "use_gate_in_kernel": False, "A_log": None,
                                    "dt_bias": None, "lower_bound": None}),
        ("delta_rule_decode", "beta", {"beta": torch.zeros(2, 2, 3)}),
        ("delta_rule_decode", "A_log", {"g": None, "dt_bias": None}),
        ("delta_rule_decode", "dt_bias", {"dt_bias": torch.zeros(4)}),
        ("delta_rule_decode", "lower_bound", {"lower_bound": 0.5}),
        ("delta_rule_decode", "softplus_beta", {"softplus_beta": 0.0}),
        ("delta_rule_decode", "allow_neg_eigval", {"beta": None}),
        ("delta_rule_decode", "commit", {"commit": 0}),
        ("delta_rule_decode", "scale", {"scale": float("nan")}),
        ("delta_rule_decode", "state", {"state": torch.zeros(6, 4, 64, 32)}),
        ("delta_rule_decode", "state_indices", {"state_indices": TABLE.long()}),
        ("delta_rule_decode", "state_indices", {"state_indices": TABLE + 5}),
        ("delta_rule_decode", "num_accepted", {"num_accepted": None}),
        ("delta_rule_decode", "token_state_indices", {"token_state_indices": TABLE[:, :1]}),
        ("delta_rule_decode", "token_state_indices", {"token_state_indices": TABLE * 0 + 5}),
        ("delta_rule_decode", "token_state_indices", {"token_state_indices": TABLE.flip(1).flip(0)}),
        ("delta_rule_decode", "output_state_indices", {"output_state_indices": TABLE[:, 0]}),
        ("delta_rule_decode", "max_tokens", {"max_tokens": 2}),
        ("delta_rule_decode", "null_slot", {"null_slot": 1 << 31}),
        ("delta_rule_decode", "convolution", {"convolution": (None,) * 4}),
        ("delta_rule_decode", "norm", {"norm": (None,) * 4}),
        ("delta_rule_decode", "out", {"out": torch.zeros(2, 2, 4, 64)}),
        ("delta_rule_commit", "k", {"k": torch.zeros(2, 9, 2, 64), "v": torch.zeros(2, 9, 4, 64)}),
        ("delta_rule_commit", "num_accepted", {"num_accepted": TABLE}),
        ("delta_rule_commit", "state_indices", {"state_indices": TABLE[:, 0] * 0 + 1}),
        ("delta_rule_commit", "cu_seqlens", {"cu_seqlens": TABLE[0]}),
        ("delta_rule_flush", "replay", {"replay": None}),
        ("delta_rule_flush", "state_v_first", {"state_v_first": 1}),
        ("delta_rule_flush", "state_indices", {"state_indices": TABLE[:, 0] + 3}),
        ("delta_rule_flush", "num_accepted", {"num_accepted": TABLE}),
    ],
)  # fmt: skip
def test_delta_rule_of_the_package_refuses_what_cula_refuses(
    function: str, blamed: str, changes: dict[str, Any]
) -> None:
    raised = []
    for run in (getattr(cula.delta, function), DELTA.load(function)):
        with pytest.raises(
            (TypeError, ValueError), match=rf"^{blamed}(\.\w+)?: expected "
        ) as caught:
            run(**delta_arguments(function) | changes)
        raised.append(caught.type)
    assert raised[0] is raised[1]


RECURRENT = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
PUBLIC_RECURRENT = {
    "fused_recurrent_kda": cula.kda.fused_recurrent_kda,
    "fused_recurrent_gated_delta_rule": cula.lightning.fused_recurrent_gated_delta_rule,
}


def recurrent_arguments(function: str, **changes: Any) -> dict[str, Any]:
    """Everything that a recurrence can be asked for at once, in fp64; the same at every call."""
    generator = torch.Generator().manual_seed(11)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kda = function == "fused_recurrent_kda"
    width = (16,) * kda
    found: dict[str, Any] = {
        "q": randn(1, 30, 2, 16), "k": randn(1, 30, 2, 16), "v": randn(1, 30, 4, 8), "g": randn(1, 30, 4, *width),
        "beta": randn(1, 30, 4), "scale": 0.5, "initial_state": randn(4, 4, 8, 16), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True, "state_v_first": True, "cu_seqlens": torch.tensor([0, 17, 17, 18, 30]),
        "A_log": randn(4).float(), "dt_bias": randn(4, *width).float(),
    }  # fmt: skip
    return found | ({"lower_bound": -5.0} if kda else {}) | changes


LOG = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}
PLAIN = LOG | {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}


RULE = "fused_recurrent_gated_delta_rule"
OF_KDA = {"g": -torch.rand(1, 30, 4, 16), "lower_bound": None}


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        *((function, {}) for function in RECURRENT),
        *((function, {"initial_state": None, "output_final_state": False}) for function in RECURRENT),
        (RULE, PLAIN | {"g": None, "gk": -torch.rand(1, 30, 4, 16), "beta": None, "scale": None}),
        (RULE, PLAIN | {"initial_state": torch.ones(4, 4, 8, 16), "g": -torch.rand(1, 30, 4)}),
        ("fused_recurrent_kda", PLAIN | OF_KDA | {"initial_state": torch.ones(4, 4, 8, 16), "scale": None}),
    ],
)  # fmt: skip
def test_recurrence_of_the_package_and_of_cula_agree_on_a_cpu(
    function: str, changes: dict[str, Any]
) -> None:
    arguments = recurrent_arguments(function, **changes)
    ours = PUBLIC_RECURRENT[function](**arguments, impl="reference")
    theirs = DELTA.load(function)(**arguments)
    for x, y in zip(ours, theirs, strict=True):
        assert (x is None and y is None) or x.dtype == y.dtype
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "blamed", "changes"),
    [
        *(
            (function, blamed, changes)
            for function in RECURRENT
            for blamed, changes in (
                ("q", {"q": torch.zeros(1, 30, 2, 16).int()}),
                ("k", {"k": torch.zeros(1, 30, 1, 16, dtype=torch.float64)}),
                ("v", {"v": torch.zeros(1, 30, 3, 8, dtype=torch.float64)}),
                ("g", {"g": torch.zeros(1, 30, 2)}),
                ("beta", {"beta": torch.zeros(1, 30, 2)}),
                ("scale", {"scale": float("nan")}),
                ("initial_state", {"initial_state": torch.zeros(3, 4, 8, 16)}),
                ("initial_state", {"initial_state": torch.zeros(4, 4, 8, 16).int()}),
                ("allow_neg_eigval", {"use_beta_sigmoid_in_kernel": False}),
                ("dt_bias", {"dt_bias": torch.zeros(5)}),
                ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 17, 29])}),
                ("state_v_first", {"state_v_first": 1}),
                ("out", {"out": torch.zeros(1, 30, 4, 8)}),
            )
        ),
        ("fused_recurrent_kda", "g", LOG | OF_KDA | {"g": torch.ones(1, 30, 4, 16)}),
        ("fused_recurrent_kda", "A_log", {"A_log": None, "lower_bound": None}),
        ("fused_recurrent_kda", "A_log", LOG | OF_KDA | {"A_log": torch.zeros(4)}),
        ("fused_recurrent_kda", "lower_bound", {"lower_bound": 1.0}),
        ("fused_recurrent_kda", "lower_bound", LOG | OF_KDA | {"lower_bound": -1.0}),
        ("fused_recurrent_kda", "beta", {"beta": None}),
        (RULE, "g", LOG | {"g": torch.ones(1, 30, 4)}),
        (RULE, "A_log", {"A_log": None}),
        (RULE, "A_log", LOG | {"A_log": torch.zeros(4), "g": -torch.ones(1, 30, 4)}),
        (RULE, "gk", {"gk": torch.ones(1, 30, 4, 16)}),
        (RULE, "gv", {"gv": torch.zeros(1, 30, 4, 16)}),
        (RULE, "use_gate_in_kernel", {"g": None}),
        (RULE, "use_beta_sigmoid_in_kernel", {"beta": None}),
    ],
)
def test_recurrence_of_the_package_refuses_what_cula_refuses(
    function: str, blamed: str, changes: dict[str, Any]
) -> None:
    raised = []
    for run in (PUBLIC_RECURRENT[function], DELTA.load(function)):
        with pytest.raises((TypeError, ValueError), match=f"^{blamed}: expected ") as caught:
            run(**recurrent_arguments(function, **changes))
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", RECURRENT)
def test_recurrences_on_a_gpu_are_those_of_the_kernel(
    require_arch: Callable[..., torch.device],
    assert_close: Callable[..., float],
    function: str,
    state_dtype: torch.dtype,
) -> None:
    device = require_arch("sm80+")

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    width = (64,) * (function == "fused_recurrent_kda")
    tensors = {
        "q": randn(1, 30, 2, 64), "k": randn(1, 30, 2, 64), "v": randn(1, 30, 4, 128), "g": randn(1, 30, 4, *width),
        "beta": randn(1, 30, 4), "initial_state": randn(4, 4, 64, 128, dtype=state_dtype),
        "A_log": randn(4, dtype=torch.float32), "dt_bias": randn(4, *width, dtype=torch.float32),
    }  # fmt: skip
    options: dict[str, Any] = {
        "output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "cu_seqlens": torch.tensor([0, 17, 17, 18, 30], device=device),
    }  # fmt: skip
    run = PUBLIC_RECURRENT[function]
    wide = {name: x.double() for name, x in tensors.items()}
    expected = run(**wide, **options, impl="reference")
    found = run(**tensors, **options)
    named = run(**tensors, **options, impl="cula-delta-decode")
    assert found[1].dtype == state_dtype
    for x, same, exact in zip(found, named, expected, strict=True):
        assert torch.equal(x, same)
        assert_close(x, exact)


def test_the_registry_knows_what_packages_of_this_repository_serve() -> None:
    """So that it can advise one that is not installed."""
    told = {first.name: (first.module, first.ops, first.archs) for first in FIRST_PARTY}
    assert told == {
        name: (spec.__name__.removesuffix("._spec"), SERVED[name], tuple(spec.ARCHS))
        for name, spec in SPECS.items()
    }
    assert all(spec.NAME == name for name, spec in SPECS.items())


GATED = "chunk_gated_delta_rule"
PREFILL = list(OPS["lightning.prefill"])


def prefill_arguments(function: str, **changes: Any) -> dict[str, Any]:
    """Everything that a Lightning prefill function can be asked for at once, in fp64; the same at every call."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    packed = function != "lightning_attn_fwd"
    q, k, v = randn(1, 200, 2, 16), randn(1, 200, 2, 16), randn(1, 200, 4, 8)
    decay = torch.linspace(0.0, 1.0, 4)
    states = randn(4, 4, 8, 16)
    found: dict[str, Any] = {
        "q": q, "k": k, "v": v, "scale": 0.5, "state_v_first": True, "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "exact_state": True, "num_splits": 2,
        "state_checkpoints": torch.full((1, 3, 4, 8, 16), 7.0, dtype=torch.float64), "checkpoint_every_n_tokens": 64,
    }  # fmt: skip
    if packed:
        found["cu_seqlens"] = torch.tensor([0, 66, 66, 198, 200])
    if function == "chunk_simple_gla":
        found |= {"g": -randn(1, 200, 4).abs(), "g_gamma": -decay, "initial_state": states}
    elif packed:
        rows = torch.tensor([3, -1, 0, 2], dtype=torch.int32)
        found |= {"decay": decay, "state_pool": states, "initial_state_indices": rows}
    else:
        found |= {"decay": decay, "initial_state": states[:1]}
    return found | changes


@pytest.mark.parametrize("function", PREFILL)
def test_prefill_of_the_package_and_of_cula_agree_on_a_cpu(function: str) -> None:
    of_the_package = SPECS["cula-lightning-sm90"].load(function)
    of_cula = getattr(cula.lightning, function)
    read_only = {"update_state_pool": False} if function == "lightning_attn_fwd_varlen" else {}
    kept: dict[str, Any] = {}
    if function == "lightning_attn_fwd_varlen":
        kept = {
            "state_checkpoints": None, "checkpoint_every_n_tokens": None,
            "checkpoint_rows": torch.tensor([1, 1, -1, 1]), "checkpoint_offsets": torch.tensor([64, 64, 64, 0]),
        }  # fmt: skip
    for changes in ({}, read_only, kept, {"use_qk_l2norm_in_kernel": False, "exact_state": False}):
        ours = prefill_arguments(function, **changes)
        theirs = prefill_arguments(function, **changes)
        for x, y in zip(of_cula(**ours), of_the_package(**theirs), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10)
        for name in ("state_checkpoints", "state_pool"):
            if ours.get(name) is not None:
                torch.testing.assert_close(theirs[name], ours[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("function", PREFILL)
@pytest.mark.parametrize(
    ("blamed", "changes"),
    [
        ("q", {"q": None}),
        ("q", {"q": torch.zeros(1, 200, 32)}),
        ("k", {"k": torch.zeros(1, 200, 2, 16)}),
        ("k", {"k": torch.zeros(1, 200, 1, 16, dtype=torch.float64)}),
        ("v", {"v": torch.zeros(1, 200, 3, 8, dtype=torch.float64)}),
        ("scale", {"scale": float("inf")}),
        ("state_v_first", {"state_v_first": 1}),
        ("output_final_state", {"output_final_state": None}),
        ("use_qk_l2norm_in_kernel", {"use_qk_l2norm_in_kernel": 1}),
        ("exact_state", {"exact_state": 1}),
        ("num_splits", {"num_splits": 0}),
        ("num_splits", {"num_splits": 1.0}),
        ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": None}),
        ("checkpoint_every_n_tokens", {"checkpoint_every_n_tokens": 32}),
        ("state_checkpoints", {"state_checkpoints": None}),
        ("state_checkpoints", {"state_checkpoints": torch.zeros(1, 3, 4, 8, 16).half()}),
        ("state_checkpoints", {"checkpoint_every_n_tokens": 128}),
        ("out", {"out": torch.zeros(1, 200, 4, 8)}),
        ("out", {"out": torch.zeros(1, 200, 4, 9, dtype=torch.float64)}),
    ],
)  # fmt: skip
def test_package_refuses_what_cula_refuses(
    function: str, blamed: str, changes: dict[str, Any]
) -> None:
    """`cula` leaves the arguments of a kernel call to the package, so both contracts must be one."""
    refused_alike(function, blamed, changes)


@pytest.mark.parametrize(
    ("function", "blamed", "changes"),
    [
        ("lightning_attn_fwd", "decay", {"decay": torch.tensor([0.0, 1.0, -0.5, -1.0])}),
        ("lightning_attn_fwd_varlen", "decay", {"decay": torch.full((4,), float("nan"))}),
        ("lightning_attn_fwd_varlen", "decay", {"decay": torch.zeros(2)}),
        ("chunk_simple_gla", "g_gamma", {"g_gamma": torch.tensor([0.0, -1.0, 0.5, 1.0])}),
        ("chunk_simple_gla", "g", {"g": torch.full((1, 200, 4), 0.25)}),
        ("chunk_simple_gla", "initial_state", {"initial_state": torch.zeros(3, 4, 8, 16)}),
        *(
            ("lightning_attn_fwd_varlen", "initial_state_indices", {"initial_state_indices": rows})
            for rows in (torch.tensor([3, -1, 0, 3]).int(), torch.tensor([3, -1, 0, 4]).int(),
                         torch.tensor([3, -1, 0, 2]), torch.tensor([3, -1, 0]).int())
        ),
        ("lightning_attn_fwd_varlen", "cu_seqlens", {"cu_seqlens": torch.tensor([0, 66, 60, 198, 200])}),
        ("lightning_attn_fwd_varlen", "state_pool", {"state_pool": torch.zeros(4, 4, 16, 8)}),
    ],
)  # fmt: skip
def test_package_refuses_values_and_states_that_cula_refuses(
    function: str, blamed: str, changes: dict[str, Any]
) -> None:
    refused_alike(function, blamed, changes)


def refused_alike(function: str, blamed: str, changes: dict[str, Any]) -> None:
    """Asserts that a Lightning prefill function of the package and that of `cula` raise the same."""
    raised = []
    for run in (getattr(cula.lightning, function), SPECS["cula-lightning-sm90"].load(function)):
        with pytest.raises((TypeError, ValueError), match=f"^{blamed}: expected ") as caught:
            run(**prefill_arguments(function, **changes))
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


KDA = [name for name, op in PAIRS if op == "kda.prefill"]


def facts_in_order(function: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """What `_registry.resolve` is told of a call, with None for what is not given."""
    names = (*COMMON_FACTS, *FACTS[function])
    return tuple(given.get(name, False if name == "requires_grad" else None) for name in names)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Tensor]]:
    """Makes torch claim a GPU of a compute capability; returns a tensor on it that has no memory."""
    with FakeTensorMode():
        tensor = torch.empty(1, 100, 2, 128, dtype=torch.bfloat16, device="cuda:0")

    def claim(*capability: int) -> Tensor:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        _registry._arch_of.cache_clear()
        _registry.refresh()
        return tensor

    yield claim
    _registry._arch_of.cache_clear()
    _registry.refresh()


@pytest.mark.parametrize(
    ("capability", "arch", "package"),
    [
        ((9, 0), "sm90", "cula-cp-sm90"),
        ((10, 0), "sm100", "cula-kda-sm100"),
        ((10, 3), "sm103", "cula-kda-sm100"),
    ],
)
def test_kda_goes_to_the_package_for_the_gpu(
    card: Callable[[int, int], Tensor], capability: tuple[int, int], arch: str, package: str
) -> None:
    device = card(*capability).device
    told = cula.explain("chunk_kda", dtype=torch.bfloat16, head_dim_k=128, head_dim_v=128)
    assert (told.arch, told.chosen) == (arch, package)
    (other,) = [row for row in told.rows if row.name in KDA and row.name != package]
    assert str(other.reason).endswith(f"the device here is {arch}")
    facts = (torch.bfloat16, 128, 128, False, None, *[None] * len(FACTS["chunk_kda"]))
    assert _registry.resolve("chunk_kda", "auto", device, *facts) is SPECS[package].load(
        "chunk_kda"
    )
    if arch != "sm90":
        assert SPECS[package].supports(requires_grad=True) == "no backward"


@pytest.mark.parametrize(
    ("function", "facts", "chosen", "reason"),
    [
        ("fused_recurrent_kda", {}, True, None),
        ("fused_recurrent_kda", {"state_dtype": torch.bfloat16, "varlen": True}, True, None),
        (RULE, {"gate_dtype": torch.float32}, True, None),
        (RULE, {"key_gate_dtype": torch.bfloat16}, True, None),
        ("fused_recurrent_kda", {"requires_grad": True}, False, "no backward"),
        (RULE, {"requires_grad": True}, False, "no backward"),
        (RULE, {"value_gate_dtype": torch.float32}, False, "takes no gates over V (gv)"),
        (
            RULE,
            {"gate_dtype": torch.float32, "key_gate_dtype": torch.float32},
            False,
            "takes g or gk, not both",
        ),
        (
            "fused_recurrent_kda",
            {"gate_dtype": torch.float64},
            False,
            "g must be float32, bfloat16, float16, not torch.float64",
        ),
        (
            RULE,
            {"beta_dtype": torch.float64},
            False,
            "beta must be float32, bfloat16, float16, not torch.float64",
        ),
        (
            "fused_recurrent_kda",
            {"dtype": torch.float32},
            False,
            "activations must be bfloat16 or float16, not torch.float32",
        ),
        (RULE, {"head_dim_k": 96}, False, "K must be one of (64, 128), not 96"),
        (
            RULE,
            {"state_dtype": torch.float64},
            False,
            "the state must be float32, bfloat16, float16, not torch.float64",
        ),
    ],
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_recurrences_go_to_the_package_that_can_serve_them(
    card: Callable[[int, int], Tensor],
    capability: tuple[int, int],
    function: str,
    facts: dict[str, Any],
    chosen: bool,
    reason: str | None,
) -> None:
    device = card(*capability).device
    given = {"dtype": torch.bfloat16, "head_dim_k": 128, "head_dim_v": 64} | facts
    told = cula.explain(function, **given)
    (row,) = [row for row in told.rows if row.name == "cula-delta-decode"]
    assert (row.chosen, row.reason) == (chosen, reason)
    key = facts_in_order(function, given)
    found = _registry.resolve(function, "auto", device, *key)
    assert (found is DELTA.load(function)) == chosen
    if not chosen:
        with pytest.raises(RuntimeError, match="^impl='cula-delta-decode' cannot serve ") as caught:
            _registry.resolve(function, "cula-delta-decode", device, *key)
        assert str(caught.value).endswith(str(reason))
    if given.get("requires_grad"):
        assert inspect.unwrap(found) is getattr(cula.reference, function)


FLOAT_GATES = "float32, bfloat16, float16, float64"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"gate_dtype": torch.float64, "beta_dtype": torch.float16}, None),
        ({"state_dtype": torch.float32, "state_pool": True, "varlen": True}, None),
        ({"grouped_queries": True, "softplus": True, "checkpoints": True}, None),
        ({"use_intracard_cp": False, "operand_dtype": torch.bfloat16}, None),
        ({"requires_grad": True}, None),
        ({"requires_grad": True, "state_pool": True}, "no backward with state_pool"),
        ({"requires_grad": True, "checkpoints": True}, "no backward with checkpoints"),
        ({"head_dim_k": 64}, "K must be 128, not 64"),
        ({"head_dim_v": 256}, "V must be 128, not 256"),
        ({"dtype": torch.float32}, "activations must be bfloat16 or float16, not torch.float32"),
        (
            {"state_dtype": torch.float64},
            "states must be float32, bfloat16, float16, not torch.float64",
        ),
        ({"gate_dtype": torch.int32}, f"g must be {FLOAT_GATES}, not torch.int32"),
        ({"beta_dtype": torch.int32}, f"beta must be {FLOAT_GATES}, not torch.int32"),
        ({"use_intracard_cp": True}, None),
        (
            {"dtype": torch.float16, "operand_dtype": torch.bfloat16},
            "float16 activations are multiplied in float16, not bfloat16",
        ),
    ],
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_gated_delta_rule_goes_to_the_package_that_can_serve_it(
    card: Callable[[int, int], Tensor],
    capability: tuple[int, int],
    facts: dict[str, Any],
    reason: str | None,
) -> None:
    device = card(*capability).device
    given = {"dtype": torch.bfloat16, "head_dim_k": 128, "head_dim_v": 128} | facts
    (row,) = [r for r in cula.explain(GATED, **given).rows if r.name == "cula-lightning-sm90"]
    hopper = capability == (9, 0)
    assert row.chosen == (hopper and reason is None)
    key = facts_in_order(GATED, given)
    kernel = SPECS["cula-lightning-sm90"].load(GATED)
    if hopper and reason is None:
        assert _registry.resolve(GATED, "auto", device, *key) is kernel
        return
    with pytest.raises(RuntimeError, match="^impl='cula-lightning-sm90' cannot serve ") as caught:
        _registry.resolve(GATED, "cula-lightning-sm90", device, *key)
    if hopper:
        assert row.reason == reason and str(caught.value).endswith(str(reason))


@pytest.mark.parametrize("function", PREFILL)
def test_lightning_prefill_trains_by_its_own_kernels(
    card: Callable[[int, int], Tensor], function: str
) -> None:
    device = card(9, 0).device
    given = {"dtype": torch.bfloat16, "head_dim_k": 128, "head_dim_v": 128, "requires_grad": True}
    told = cula.explain(function, **given)
    assert (told.chosen, told.rows[0].backward) == ("cula-lightning-sm90", None)
    key = facts_in_order(function, given)
    kernel = SPECS["cula-lightning-sm90"].load(function)
    assert _registry.resolve(function, "auto", device, *key) is kernel
    assert cula.explain(function, **given, decay_requires_grad=True).chosen == "cula-lightning-sm90"


def test_the_gated_delta_rule_of_the_package_and_of_cula_agree_on_a_cpu() -> None:
    for mode in ("dense", "packed"):
        ours = good_arguments(mode)
        theirs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in ours.items()}
        of_cula = cula.lightning.chunk_gated_delta_rule(**ours)
        of_the_package = SPECS["cula-lightning-sm90"].load(GATED)(**theirs)
        for x, y in zip(of_cula, of_the_package, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-2, atol=4e-3, equal_nan=True)


@pytest.mark.parametrize(("capability", "arch"), [((10, 0), "sm100"), ((10, 3), "sm103")])
def test_the_hopper_function_refuses_blackwell(
    card: Callable[[int, int], Tensor], capability: tuple[int, int], arch: str
) -> None:
    x = card(*capability)
    refusal = rf"^kda_prefill_hopper needs tensors on a Hopper GPU \(sm90\), got {arch}$"
    with pytest.raises(RuntimeError, match=refusal):
        cula.kda.kda_prefill_hopper(x, x, x, x, x)


def kda_arguments(**changes: Any) -> dict[str, Any]:
    """Everything that KDA prefill can be asked for at once, in fp64; the same at every call."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found: dict[str, Any] = {
        "q": randn(1, 150, 2, 16), "k": randn(1, 150, 2, 16), "v": randn(1, 150, 4, 8), "g": randn(1, 150, 4, 16),
        "beta": randn(1, 150, 4), "scale": 0.5, "initial_state": randn(4, 4, 8, 16), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True, "safe_gate": True, "lower_bound": -5.0, "state_v_first": True,
        "cu_seqlens": torch.tensor([0, 66, 66, 148, 150]), "cu_seqlens_cpu": torch.tensor([0, 66, 66, 148, 150]),
        "A_log": randn(4).float(), "dt_bias": randn(4, 16).float(),
    }  # fmt: skip
    return found | changes


NO_GATE = {
    "use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "lower_bound": None,
    "g": -torch.rand(1, 150, 4, 16, dtype=torch.float64),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"safe_gate": False, "lower_bound": None},
        NO_GATE | {"allow_neg_eigval": False},
        NO_GATE | {"g": -torch.rand(1, 150, 4, 16), "use_qk_l2norm_in_kernel": False, "scale": 0.1},
    ],
    ids=["safe", "softplus", "log", "log without the norm"],
)
@pytest.mark.parametrize("package", KDA)
def test_kda_of_the_package_and_of_cula_agree_on_a_cpu(
    package: str, changes: dict[str, Any]
) -> None:
    arguments = kda_arguments(**changes)
    if not arguments["use_qk_l2norm_in_kernel"]:
        arguments["k"] = arguments["k"] / arguments["k"].norm(dim=-1, keepdim=True)
    ours = cula.kda.chunk_kda(**arguments, impl="reference")
    theirs = SPECS[package].load("chunk_kda")(**arguments)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("blamed", "changes"),
    [
        ("q", {"q": None}),
        ("k", {"k": torch.zeros(1, 150, 1, 16, dtype=torch.float64)}),
        ("v", {"v": torch.zeros(1, 150, 3, 8, dtype=torch.float64)}),
        ("g", {"g": torch.zeros(1, 150, 2, 16)}),
        ("g", {"g": torch.zeros(1, 150, 4, 16, dtype=torch.int32)}),
        ("beta", {"beta": torch.zeros(1, 150, 2)}),
        ("beta", {"beta": 1.0}),
        ("scale", {"scale": float("nan")}),
        ("scale", {"scale": "1"}),
        ("initial_state", {"initial_state": torch.zeros(3, 4, 8, 16)}),
        ("initial_state", {"initial_state": torch.zeros(4, 4, 16, 8)}),
        ("initial_state", {"initial_state": torch.zeros(4, 4, 8, 16).int()}),
        ("output_final_state", {"output_final_state": 1}),
        ("safe_gate", {"safe_gate": None}),
        ("allow_neg_eigval", {"use_beta_sigmoid_in_kernel": False}),
        ("lower_bound", {"lower_bound": None}),
        ("lower_bound", {"lower_bound": -6.0}),
        ("lower_bound", {"lower_bound": 0.0, "safe_gate": False}),
        ("lower_bound", {"lower_bound": True}),
        ("lower_bound", NO_GATE | {"safe_gate": False, "lower_bound": -1.0}),
        ("A_log", {"A_log": None, "lower_bound": None, "safe_gate": False}),
        ("A_log", {"A_log": torch.zeros(2)}),
        ("A_log", NO_GATE | {"A_log": torch.zeros(4)}),
        ("dt_bias", {"dt_bias": torch.zeros(4)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 66, 66, 148, 151])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0.0, 66.0, 66.0, 148.0, 150.0])}),
        ("cu_seqlens_cpu", {"cu_seqlens_cpu": torch.tensor([0, 150])}),
        ("use_intracard_cp", {"use_intracard_cp": "on"}),
        ("out", {"out": torch.zeros(1, 150, 4, 8)}),
        ("g", NO_GATE | {"g": torch.full((1, 150, 4, 16), 0.25)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 66, 60, 148, 150])}),
        ("initial_state", {"initial_state": torch.zeros(4, 4, 8, 32)[..., ::2]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("package", KDA)
def test_the_kda_package_refuses_what_cula_refuses(
    package: str, blamed: str, changes: dict[str, Any]
) -> None:
    raised = []
    for run in (cula.kda.chunk_kda, SPECS[package].load("chunk_kda")):
        with pytest.raises((TypeError, ValueError), match=f"^{blamed}: expected ") as caught:
            run(**kda_arguments(**changes))
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


def test_skip_list_attention_of_the_package_and_of_cula_agree_on_a_cpu() -> None:
    from cula.lite import lite_attention

    of_the_package = SPECS["liteattention-sm89"].load("lite_attention")
    q, k, v = (torch.randn(2, 300, heads, 32, dtype=torch.float64) for heads in (4, 2, 2))
    read, must_do = torch.rand(2, 4, 3, 5) < 0.7, torch.rand(1, 4, 1, 1) < 0.5
    options = {"threshold": -3.0, "direction": -1, "must_do": must_do, "block_n": 64}
    ours = lite_attention(q, k, v, read, impl="reference", **options)
    for one, other in zip(of_the_package(q, k, v, read, **options), ours):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_modules_of_skip_list_attention_are_those_of_the_package() -> None:
    package = import_module("liteattention_sm89")
    for name in ("LiteAttention", "LiteAttentionRegistry"):
        assert getattr(cula.lite, name) is getattr(package, name)
    assert issubclass(cula.lite.SeqParallelLiteAttention, package.SeqParallelLiteAttention)
