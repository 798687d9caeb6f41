"""cula behind FLA's own functions, with a stand-in for FLA's registries and functions; the reference serves."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fla_registries import PARAMETERS, SEEN, Fla, single_rank
from fla_stand_in import CU, HV, K, T, V, inputs
from vllm_cases import assert_near, delta_rule

from cula import _ranks, _registry, kda, lightning, reference
from cula.integrations import fla, fla_plugin

RELEASES = tuple(PARAMETERS)
PLACES = dict(zip(RELEASES, fla_plugin._PLACES.values(), strict=True))
CASES = [(release, name) for release in RELEASES for name in PARAMETERS[release]]


@pytest.fixture(autouse=True)
def release(request: pytest.FixtureRequest) -> str:
    """That of FLA: 0.6 unless a test has another."""
    return getattr(request, "param", "0.6")


@pytest.fixture(autouse=True)
def there(release: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fla_plugin, "importable", lambda package: True)
    monkeypatch.setattr(fla, "_version", lambda: tuple(map(int, release.split("."))))
    monkeypatch.delenv("CULA_FLA", raising=False)
    _registry.log_once.cache_clear()
    torch.manual_seed(0)
    yield Fla(release, monkeypatch)
    fla_plugin.unregister()


def of_every_release(function: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("release", RELEASES, indirect=True)(function)


def of_every_function(function: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("release, name", CASES, indirect=["release"])(function)


def arguments(name: str) -> dict[str, Any]:
    """A call of each function, packed and with initial states."""
    x = inputs()
    per_head = x["g"][..., 0]
    states = torch.randn(len(CU) - 1, HV, K, V)
    common = {"initial_state": states, "output_final_state": True, "cu_seqlens": CU.long()}
    raw = {"use_gate_in_kernel": True, "A_log": torch.randn(1, 1, HV, 1)}
    if name == "chunk_kda":
        return x | common | raw | {"dt_bias": torch.randn(HV * K), "use_qk_l2norm_in_kernel": True}
    if name == "fused_recurrent_kda_fwd":
        return x | common | {"inplace_final_state": False, "scale": 0.5}
    if name in ("chunk_gated_delta_rule", "ChunkGatedDeltaRuleFunction"):
        turned = {"state_v_first": True, "initial_state": states.mT.clone()}
        return x | common | turned | {"g": per_head}
    if name == "fused_recurrent_gated_delta_rule_fwd":
        return x | common | {"g": per_head, "A_log": torch.randn(HV), "scale": None}
    x |= {"q": torch.randn(1, T, HV, K).bfloat16(), "k": torch.randn(1, T, HV, K).bfloat16()}
    del x["beta"]
    return x | common | {"g": per_head, "scale": None}


def ours(name: str, given: dict[str, Any]) -> Any:
    """What cula's own function gives for the same."""
    given = dict(given, impl="reference")
    if name == "fused_recurrent_kda_fwd":
        del given["inplace_final_state"]
        return kda.fused_recurrent_kda(**given)
    if name == "fused_recurrent_gated_delta_rule_fwd":
        return lightning.fused_recurrent_gated_delta_rule(**given, use_gate_in_kernel=True)
    functions = {
        "chunk_kda": kda.chunk_kda,
        "chunk_gated_delta_rule": lightning.chunk_gated_delta_rule,
        "ChunkGatedDeltaRuleFunction": lightning.chunk_gated_delta_rule,
    }
    return functions.get(name, lightning.chunk_simple_gla)(**given)


@of_every_function
def test_functions_of_fla_give_what_ours_give(there: Fla, name: str) -> None:
    fla_plugin.register("reference")
    given = arguments(name)
    before = given["initial_state"].clone()
    expected = ours(name, given)
    torch.testing.assert_close(there.call(name, given), expected, rtol=0, atol=0)
    assert not SEEN and torch.equal(given["initial_state"], before)


@of_every_function
def test_calls_by_position_mean_the_same(there: Fla, name: str) -> None:
    fla_plugin.register("reference")
    known = set(there.parameters[name]) | {"state_v_first"}
    given = {n: x for n, x in arguments(name).items() if n in known}
    gate = {"use_gate_in_kernel": False} if name == "chunk_kda" else {}
    given |= gate
    expected = ours(name, given)
    torch.testing.assert_close(there.call(name, given, True), expected, rtol=0, atol=0)
    assert not SEEN


@of_every_function
def test_our_functions_have_the_parameters_of_fla(release: str, name: str) -> None:
    (place,) = (place for place in PLACES[release] if place.name == name)
    known = {*inspect.signature(place.ours).parameters, "transpose_state_layout", "kwargs"}
    assert set(PARAMETERS[release][name]) <= known


@of_every_function
def test_what_no_kernel_serves_is_left_to_fla(there: Fla, name: str, caplog) -> None:
    caplog.set_level(logging.INFO, "cula")
    fla_plugin.register()  # kernels alone, and there is none for a CPU
    for _ in range(2):
        assert there.call(name, arguments(name)) == f"FLA's {name}"
    assert SEEN == [name] * 2
    left = [line for line in caplog.messages if "is left to FLA: no kernel serves" in line]
    assert len(left) == 1 and left[0].startswith(name)


SLOTS = {"ssm_state_indices": torch.zeros(4, dtype=torch.int32)}


@of_every_function
def test_nothing_is_left_to_fla_in_a_context_of_ranks(there: Fla, name: str) -> None:
    """FLA would take a slice for whole sequences."""
    fla_plugin.register()
    SEEN.clear()
    _ranks.enter(object())
    try:
        with pytest.raises((TypeError, ValueError, NotImplementedError, _registry.Refused)):
            there.call(name, arguments(name))
    finally:
        _ranks.leave()
    assert not SEEN
    assert there.call(name, arguments(name)) == f"FLA's {name}"


@pytest.mark.parametrize(
    "name, asked",
    [
        ("chunk_kda", {"chunk_size": 16}),
        ("chunk_kda", {"head_first": True}),
        ("chunk_kda", {"lower_bound": 1.0}),
        ("chunk_kda", {"max_num_seqs": 2}),
        ("chunk_kda", {"use_graph": True, "return_intermediate_states": True}),
        ("chunk_kda", {"use_graph": True, "cp_context": single_rank(CU), "initial_state": None,
                       "output_final_state": False}),
        ("chunk_kda", {"cp_context": single_rank(CU)}),
        ("chunk_kda", {"cp_context": single_rank(CU), "initial_state": None}),
        ("chunk_kda", {"cp_context": object(), "initial_state": None, "output_final_state": False}),
        ("chunk_gated_delta_rule", {"cp_context": single_rank(CU)}),
        ("chunk_gated_delta_rule", {"chunk_size": 128}),
        ("chunk_gated_delta_rule", {"state_v_first": True, "transpose_state_layout": True}),
        ("fused_recurrent_kda_fwd", SLOTS),
        ("fused_recurrent_kda_fwd", {"num_accepted_tokens": torch.ones(4, dtype=torch.int32)}),
        ("fused_recurrent_kda_fwd", {"inplace_final_state": True}),  # of 9 tokens, any of which may be one row's
        ("fused_recurrent_kda_fwd", {"inplace_final_state": True, "initial_state": None}),
        ("fused_recurrent_kda_fwd", {"inplace_final_state": True, "cu_seqlens": None} | SLOTS),
        ("fused_recurrent_kda_fwd", {"inplace_final_state": True, "beta": torch.rand(1, T, HV, V)} | SLOTS),
        ("fused_recurrent_gated_delta_rule_fwd", {"gk": torch.zeros(1, T, HV, K)}),
        ("fused_recurrent_gated_delta_rule_fwd", {"gv": torch.zeros(1, T, HV, V)}),
        ("fused_recurrent_simple_gla", {"reverse": True}),
        ("fused_recurrent_simple_gla", {"g": None, "g_gamma": torch.zeros(HV).requires_grad_()}),
    ],
)  # fmt: skip
def test_what_cula_does_not_have_is_left_to_fla(
    there: Fla, name: str, asked: dict[str, Any]
) -> None:
    fla_plugin.register("reference")
    given = arguments(name) | asked
    before = {n: x.clone() for n, x in given.items() if isinstance(x, torch.Tensor)}
    assert there.call(name, given) == f"FLA's {name}"
    for n, x in before.items():
        assert torch.equal(given[n], x), n


@pytest.mark.parametrize("release", ["0.5"], indirect=True)
@pytest.mark.parametrize(
    "name, asked",
    [
        ("fused_recurrent_gated_delta_rule_fwd", {"use_exp2": True}),
        ("fused_recurrent", {"gk": torch.zeros(1, T, HV, K)}),
        ("fused_recurrent", {"gv": torch.zeros(1, T, HV, V)}),
    ],
)
def test_what_only_an_earlier_release_has_is_left_to_it(there: Fla, name, asked) -> None:
    fla_plugin.register("reference")
    assert there.call(name, arguments(name) | asked) == f"FLA's {name}"


def test_too_many_arguments_are_refused_by_fla(there: Fla) -> None:
    fla_plugin.register("reference")
    many = [None] * 40
    assert there.found("chunk_kda")(*many) == "FLA's chunk_kda"


def test_more_than_64_tokens_one_after_another_are_left_to_fla(there: Fla) -> None:
    fla_plugin.register("reference")
    x = {n: y for n, y in inputs(1, 65).items() if n in ("v",)}
    x |= {"q": torch.randn(1, 65, HV, K), "k": torch.randn(1, 65, HV, K)}
    name = "fused_recurrent_simple_gla"
    assert there.call(name, x) == f"FLA's {name}"
    x = {n: y[:, :64].bfloat16() for n, y in x.items()}
    o, final = there.call(name, x)
    assert o.shape == x["v"].shape and final is None


def test_earlier_names_of_a_layout_and_other_chunks(there: Fla) -> None:
    fla_plugin.register("reference")
    given = arguments("chunk_gated_delta_rule")
    expected = ours("chunk_gated_delta_rule", given)
    given |= {"state_v_first": False, "transpose_state_layout": True, "chunk_size": 32}
    given["chunk_indices"] = torch.tensor([[0, 0], [2, 0], [3, 0]])
    found = there.call("chunk_gated_delta_rule", given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_activations_and_states_of_any_strides(there: Fla) -> None:
    fla_plugin.register("reference")
    given = arguments("chunk_kda")
    expected = ours("chunk_kda", given)
    for name in ("q", "k", "v", "g", "initial_state"):
        given[name] = given[name].mT.contiguous().mT
    torch.testing.assert_close(there.call("chunk_kda", given), expected, rtol=0, atol=0)
    assert not SEEN


def test_final_states_are_float32(there: Fla) -> None:
    fla_plugin.register("reference")
    given = arguments("fused_recurrent_kda_fwd")
    given["initial_state"] = given["initial_state"].bfloat16()
    assert there.call("fused_recurrent_kda_fwd", given)[1].dtype == torch.float32


def test_gradients_go_through(there: Fla) -> None:
    fla_plugin.register("reference")
    x = {name: value.requires_grad_() for name, value in inputs().items()}
    o, _ = there.call("chunk_kda", x)
    twins = {name: value.detach().clone().requires_grad_() for name, value in x.items()}
    expected, _ = reference.chunk_kda(**twins)
    for one in (o, expected):
        one.float().square().sum().backward()
    for name, value in x.items():
        torch.testing.assert_close(value.grad, twins[name].grad, rtol=0, atol=0)


# ---- graphs, contexts, states on the way -----------------------------------------------------------------------------


def test_what_is_captured_reads_no_offsets_on_the_host(there: Fla, monkeypatch) -> None:
    fla_plugin.register("reference")
    asked = []
    run = kda.chunk_kda
    monkeypatch.setattr(kda, "chunk_kda", lambda *a, **o: asked.append(o) or run(*a, **o))
    given = arguments("chunk_kda")
    expected = ours("chunk_kda", given)
    given |= {"use_graph": True, "max_num_seqs": len(CU) - 1, "cu_seqlens_cpu": CU.long()}
    torch.testing.assert_close(there.call("chunk_kda", given), expected, rtol=0, atol=0)
    assert [o["cu_seqlens_cpu"] for o in asked[-1:]] == [None] and not SEEN
    given["q"].requires_grad_()
    assert there.call("chunk_kda", given) == "FLA's chunk_kda"


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@of_every_release
def test_a_context_of_fla_brings_its_offsets(release: str, there: Fla, group) -> None:
    fla_plugin.register("reference")
    gdn = "chunk_gated_delta_rule" if release == "0.6" else "ChunkGatedDeltaRuleFunction"
    for name in ("chunk_kda", gdn):
        given = arguments(name) | {"initial_state": None, "output_final_state": False}
        expected, _ = ours(name, given)
        given["cp_context"] = single_rank(CU.long())
        given["cu_seqlens"] = given["cp_context"].cu_seqlens
        o, final = there.call(name, given)
        torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)
        assert final is None and not SEEN


@of_every_release
@pytest.mark.parametrize("disable_recompute", [False, True])
def test_states_on_the_way_are_those_of_fla(
    release: str, there: Fla, disable_recompute: bool
) -> None:
    """In the dtype of activations, and one for each chunk of each sequence."""
    fla_plugin.register("reference")
    lengths = (70, 0, 3)
    x = inputs(1, sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    states = torch.randn(3, HV, V, K)
    o, final, h = there.call("chunk_kda", x | {
        "initial_state": states, "state_v_first": True, "output_final_state": True, "cu_seqlens": offsets,
        "return_intermediate_states": True, "disable_recompute": disable_recompute,
    })  # fmt: skip
    assert (
        h.dtype == torch.bfloat16 and h.shape == (1, 3, HV, V, K) and final.dtype == torch.float32
    )
    tokens = [x[n][0, :70] for n in ("q", "k", "v", "g", "beta")]
    _, after = delta_rule(*tokens, states[0], norm=False)
    assert_near(h[0, 0], states[0].double())
    assert_near(h[0, 1], after[63])
    assert_near(h[0, 2], states[2].double())
    assert_near(final[0].bfloat16(), after[69])


# ---- decode on pools -------------------------------------------------------------------------------------------------

ROWS, PAGES = 3, 8


def step(tokens: int, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    """Operands of ROWS rows with so many tokens each, and a pool in pages that hold something else too."""
    x = inputs(ROWS, tokens)
    pages = torch.randn(PAGES, HV * V * K + 24).to(dtype)
    pool = pages[:, : HV * V * K].unflatten(1, (HV, V, K))
    return x | {
        "initial_state": pool,
        "state_v_first": True,
        "use_qk_l2norm_in_kernel": True,
    }, pages


def check_step(
    x: dict[str, Any], pages: torch.Tensor, before: torch.Tensor, o: torch.Tensor, begins: list[int],
    ends: list[list[int]], lengths: list[int] | None = None,
) -> None:  # fmt: skip
    """Against the recurrence of every row; other bytes of the pages are as before."""
    batch = x["q"].flatten(0, 1)
    tokens = lengths or [x["q"].shape[1]] * len(begins)
    start = 0
    for begin, slots, count in zip(begins, ends, tokens):
        rows = slice(start, start + count)
        start += count
        if not count:
            continue
        was = before[begin, : HV * V * K].view(HV, V, K)
        tensors = [x[n].flatten(0, 1)[rows] for n in ("q", "k", "v", "g", "beta")]
        expected, states = delta_rule(*tensors, was, scale=K**-0.5)
        assert_near(o.flatten(0, 1)[rows], expected)
        for slot, state in zip(slots, states if len(slots) > 1 else states[-1:]):
            assert_near(pages[slot, : HV * V * K].view(HV, V, K), state)
    written = pages.clone()
    for slot in {s for slots, count in zip(ends, tokens) if count for s in slots[:count]}:
        written[slot, : HV * V * K] = before[slot, : HV * V * K]
    assert torch.equal(written, before) and start <= batch.shape[0]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@of_every_release
@DTYPES
@pytest.mark.parametrize("tokens, slots", [(3, None), (1, [5, 2, 7])])
def test_states_are_updated_in_place(release: str, there: Fla, dtype, tokens: int, slots) -> None:
    fla_plugin.register("reference")
    x, pages = step(tokens, dtype)
    before = pages.clone()
    # As an engine has them: a column of a table.
    table = (
        None if slots is None else torch.tensor([[s, 0] for s in slots], dtype=torch.int32)[:, 0]
    )
    o, final = there.call("fused_recurrent_kda_fwd", x | {"ssm_state_indices": table})
    assert final is x["initial_state"] and not SEEN
    rows = slots or [0, 1, 2]
    check_step(x, pages, before, o, rows, [[row] for row in rows])


@of_every_release
@DTYPES
@pytest.mark.parametrize("accepted", [None, [2, 1, 3]])
def test_every_token_has_a_slot(release: str, there: Fla, dtype, accepted) -> None:
    """The state after token t goes to slot t of its row, which begins where the last accepted token left it."""
    fla_plugin.register("reference")
    x, pages = step(2, dtype)
    before = pages.clone()
    slots = [[0, 1, 2], [3, 4, 0], [5, 6, 7]]
    given = x | {"ssm_state_indices": torch.tensor(slots, dtype=torch.int32)}
    if accepted is not None:
        given["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
    o, _ = there.call("fused_recurrent_kda_fwd", given)
    begins = [row[n - 1] for row, n in zip(slots, accepted or [1, 1, 1])]
    check_step(x, pages, before, o, begins, [row[:2] for row in slots])


@of_every_release
@pytest.mark.parametrize("out", [False, True])
def test_rows_of_different_length_on_a_pool(release: str, there: Fla, out: bool) -> None:
    fla_plugin.register("reference")
    x, pages = step(2, torch.float32)
    x |= {n: x[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
    before = pages.clone()
    # The table has a row more than there are sequences, as where a batch is padded for a graph.
    slots, lengths = [[0, 1, 2], [3, 4, 5], [6, 7, 7], [5, 5, 5]], [3, 0, 2]
    memory = torch.full_like(x["v"], 9.0) if out else None
    o, _ = there.call("fused_recurrent_kda_fwd", x | {
        "ssm_state_indices": torch.tensor(slots, dtype=torch.int32), "out": memory,
        "num_accepted_tokens": torch.tensor([1, 1, 2, 1], dtype=torch.int32), "cu_seqlens": torch.tensor([0, 3, 3, 5]),
    })  # fmt: skip
    assert (o.data_ptr() == memory.data_ptr()) if out else not o[0, 5].any()
    check_step(x, pages, before, o, [0, 3, 7], [[0, 1, 2], [3], [6, 7]], lengths)


# ---- registration ----------------------------------------------------------------------------------------------------


@of_every_release
def test_a_context_and_a_variable_switch_it_off(release: str, there: Fla, monkeypatch) -> None:
    fla_plugin.register("reference")
    for name in there.parameters:
        with fla_plugin.bypassed():
            assert there.call(name, arguments(name)) == f"FLA's {name}"
    monkeypatch.setenv("CULA_FLA", "0")
    assert there.call("chunk_kda", arguments("chunk_kda")) == "FLA's chunk_kda"


@of_every_release
def test_it_is_registered_once_and_taken_back(release: str, there: Fla) -> None:
    before = {name: there.found(name) for name in there.parameters}
    assert not fla_plugin.registered()
    for impl in (None, "reference"):
        fla_plugin.register(impl)
    assert fla_plugin.registered()
    there.call("chunk_kda", arguments("chunk_kda"))
    assert not SEEN
    fla_plugin.unregister()
    assert not fla_plugin.registered()
    for name, found in before.items():
        assert there.found(name) is found
        assert there.call(name, arguments(name)) == f"FLA's {name}"
    fla_plugin.unregister()


@pytest.mark.parametrize("release", ["0.5"], indirect=True)
def test_backends_of_fla_itself_are_there_first(there: Fla) -> None:
    """FLA 0.5 imports them at the first call, and would make another registry then."""
    fla_plugin.register("reference")
    assert there.initialized == ["kda"]


@pytest.mark.parametrize("name", PARAMETERS["0.6"])
def test_a_function_with_other_parameters_stays(name: str, monkeypatch, caplog) -> None:
    monkeypatch.setitem(PARAMETERS["0.6"], name, ["unheard_of", *PARAMETERS["0.6"][name]])
    there = Fla("0.6", monkeypatch)
    fla_plugin.register("reference")
    assert f"{name} has other parameters" in caplog.text
    for other in there.parameters:
        SEEN.clear()
        given = arguments(other) | ({"unheard_of": None} if other == name else {})
        there.call(other, given)
        assert SEEN == ([name] if other == name else [])


@of_every_release
def test_a_function_that_is_not_there_is_named(release: str, there: Fla, caplog) -> None:
    name = "ChunkSimpleGLAFunction"
    delattr(sys.modules["fla.ops.simple_gla.chunk"], name)
    fla_plugin.register("reference")
    assert f"FLA has no fla.ops.simple_gla.chunk.{name}" in caplog.text
    for other in there.parameters.keys() - {name}:
        there.call(other, arguments(other))
    assert not SEEN


def test_fla_as_an_implementation_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """impl="fla" measures FLA, whatever is registered behind it."""
    asked = []
    monkeypatch.setitem(fla._FUNCTIONS, "chunk_kda", lambda: asked.append(fla_plugin._here.off))
    run = fla.load("chunk_kda")
    run()
    fla_plugin.register("reference")
    run()
    assert asked == [False, True] and not fla_plugin._here.off


@pytest.mark.parametrize(
    "patch, error, text",
    [
        (lambda m: m.setattr(fla_plugin, "importable", lambda _: False), ImportError, "pip install fla-core"),
        (lambda m: m.setattr(fla, "_version", lambda: (0, 4)), RuntimeError, "needs fla-core 0.5 or newer"),
        (lambda m: m.setitem(sys.modules, "fla.backends", None), RuntimeError, "no registry of backends"),
        (lambda m: m.setattr(sys.modules["fla.backends"], "_DISPATCH_DISABLED", True), RuntimeError,
         "FLA_DISABLE_BACKEND_DISPATCH=1"),
    ],
)  # fmt: skip
def test_what_keeps_it_from_registering(monkeypatch, patch, error, text) -> None:
    patch(monkeypatch)
    with pytest.raises(error, match=text):
        fla_plugin.register()
    assert not fla_plugin.registered()


@pytest.mark.parametrize("value, code", [("1", 1), ("0", 0), ("", 0)])
def test_a_variable_asks_for_it_when_cula_is_imported(value: str, code: int) -> None:
    """Where FLA is not installed, that is an error that says so."""
    block = "import sys; sys.modules['fla'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{block}import cula"],
        env=os.environ | {"CULA_FLA": value}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("flash-linear-attention is not installed" in done.stderr) == bool(code)


def test_refusals_of_kernels_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for every layer of every step is judged once."""
    x = inputs()
    judged = []
    judge = _registry._judge
    monkeypatch.setattr(_registry, "_judge", lambda *a: judged.append(a) or judge(*a))
    _registry.refresh()
    for _ in range(3):
        with pytest.raises(_registry.Refused, match="no kernel serves kda.prefill.chunk_kda"):
            kda.chunk_kda(**x, impl=_registry.KERNELS_ONLY)
    assert len(judged) == 1
