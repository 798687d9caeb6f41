"""Discovery, resolution and explanation, with kernel packages made up for the purpose."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import forks
import pytest
import torch

import cula
from cula import _discovery, _env, _implementations, _registry
from cula._discovery import FirstParty
from cula._facts import COMMON_FACTS, FACTS, OPS
from cula._registry import KERNELS_ONLY, explain, resolve
from cula.integrations import fla

CPU = torch.device("cpu")
GLA = (
    *(torch.float32, 16, 16, False, None),
    *(None, False, False, 1, False, False, False),
    *(False, False, False, False, None, None),
)
TRAINING = (*GLA[:3], True, *GLA[4:])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel package, no settings, nothing decided; and the same afterwards."""
    for name in ("CULA_IMPL", "CULA_DISABLE", "CULA_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_discovery, "FIRST_PARTY", ())
    monkeypatch.setattr(_discovery, "entry_points", lambda group: ())
    _forget()
    yield
    _forget()


def _forget() -> None:
    _env.env.cache_clear()
    _registry.refresh()


def make_spec(**changes: Any) -> types.ModuleType:
    """A spec module for simple GLA that claims to run on the CPU, so that it can be chosen here."""
    spec = types.ModuleType("made_up._spec")
    facts: dict[str, Any] = {
        "NAME": "made-up",
        "OP": "lightning.prefill",
        "ARCHS": ("cpu", "sm90"),
        "PRIORITY": 10,
        "supports": lambda **problem: None,
        "load": lambda function: lambda *args, **kwargs: f"{function} by made-up",
        **changes,
    }
    for name, value in facts.items():
        if value is not None:
            setattr(spec, name, value)
    return spec


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs spec modules behind entry points."""

    def install(*specs: types.ModuleType | str) -> None:
        points = []
        for i, spec in enumerate(specs):
            module = spec if isinstance(spec, str) else f"made_up_{i}._spec"
            if not isinstance(spec, str):
                monkeypatch.setitem(
                    sys.modules,
                    module.partition(".")[0],
                    types.ModuleType(module.partition(".")[0]),
                )
                monkeypatch.setitem(sys.modules, module, spec)
            points.append(EntryPoint(name=f"point{i}", value=module, group="cula.kernels"))
        monkeypatch.setattr(_discovery, "entry_points", lambda group: tuple(points))
        _forget()

    return install


def rows(op: str = "lightning.prefill", **problem: Any) -> dict[str, tuple[str, str | None]]:
    return {row.name: (row.verdict, row.reason) for row in explain(op, arch="cpu", **problem).rows}


def test_builtin_implementations_of_every_op() -> None:
    assert set(OPS) == {
        "lightning.decode", "lightning.prefill", "lightning.gated_delta_rule", "kda.prefill", "kda.decode",
        "lightning.gated_delta_decode", "delta.decode", "lite.attention",
    }  # fmt: skip
    for op in OPS:
        names = [i.name for i in _registry.implementations(op)]
        assert names == (["reference"] if op == "lite.attention" else ["fla", "reference"])
    assert {function for functions in OPS.values() for function in functions} == set(FACTS)


def test_entry_point_is_found_and_preferred(install: Callable[..., None]) -> None:
    install(make_spec())
    assert rows()["made-up"] == ("chosen", None)
    assert rows()["reference"] == ("available", None)
    assert resolve("chunk_simple_gla", "auto", CPU, *GLA)() == "chunk_simple_gla by made-up"
    assert resolve("chunk_simple_gla", "made-up", CPU, *GLA)() == "chunk_simple_gla by made-up"
    assert (
        inspect.unwrap(resolve("chunk_simple_gla", "reference", CPU, *GLA))
        is cula.reference.chunk_simple_gla
    )


def test_lower_priority_number_wins(install: Callable[..., None]) -> None:
    install(make_spec(NAME="slow", PRIORITY=20), make_spec(NAME="fast", PRIORITY=5))
    assert [row.name for row in explain("lightning.prefill", arch="cpu").rows][:2] == [
        "fast",
        "slow",
    ]
    assert explain("lightning.prefill", arch="cpu").chosen == "fast"


def test_one_spec_may_offer_several_ops(install: Callable[..., None]) -> None:
    install(make_spec(OP=("lightning.prefill", "lightning.gated_delta_rule")))
    assert explain("lightning.gated_delta_rule", arch="cpu").chosen == "made-up"
    assert "made-up" not in rows("kda.prefill")


def test_source_tree_is_found_without_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "made_up_tree"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_spec.py").write_text(
        "NAME, OP, ARCHS, PRIORITY = 'tree', 'kda.prefill', ('cpu',), 10\n"
        "def supports(**problem): return None\n"
        "def load(function): return lambda: function\n"
    )
    (tmp_path / "made_up_directory").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    names = ("made_up_tree", "made_up_absent", "made_up_directory")
    packages = tuple(FirstParty(name, ("kda.prefill",), ("sm90",)) for name in names)
    monkeypatch.setattr(_discovery, "FIRST_PARTY", packages)
    _forget()
    assert explain("chunk_kda", arch="cpu").chosen == "tree"
    assert _registry.broken() == ()
    # Found twice, by metadata and by probing, it still counts once.
    point = EntryPoint(name="tree", value="made_up_tree._spec", group="cula.kernels")
    monkeypatch.setattr(_discovery, "entry_points", lambda group: (point,))
    _forget()
    assert [i.name for i in _registry.implementations("kda.prefill")] == [
        "tree",
        "fla",
        "reference",
    ]
    assert _registry.broken() == ()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"load": None}, "AttributeError: made_up._spec lacks load"),
        ({"NAME": None, "ARCHS": None}, "AttributeError: made_up._spec lacks NAME, ARCHS"),
        ({"OP": "kda.backward"}, "ValueError: made_up._spec.OP: expected one of lightning.decode"),
        ({"NAME": "reference"}, "ValueError: made_up._spec.NAME: 'reference' is reserved"),
        (
            {"PRIORITY": 1000},
            "ValueError: made_up._spec.PRIORITY: expected an int in [0, 1000), got 1000",
        ),
    ],
)
def test_unusable_spec_is_reported_and_harmless(
    install, changes: dict[str, Any], error: str
) -> None:
    install(make_spec(**changes), make_spec(NAME="good"))
    verdict, reason = rows()["made_up_0"]
    assert verdict == "refused" and reason is not None and reason.startswith(error)
    assert explain("lightning.prefill", arch="cpu").chosen == "good"


def test_spec_that_cannot_be_imported_is_reported(install: Callable[..., None]) -> None:
    install("made_up_nowhere._spec")
    assert rows()["made_up_nowhere"] == (
        "refused",
        "ModuleNotFoundError: No module named 'made_up_nowhere'",
    )
    assert (
        inspect.unwrap(resolve("chunk_simple_gla", "auto", CPU, *GLA))
        is cula.reference.chunk_simple_gla
    )


def test_second_spec_of_a_name_is_reported(install: Callable[..., None]) -> None:
    install(make_spec(), make_spec(PRIORITY=1))
    assert rows()["made_up_1"] == ("refused", "the name 'made-up' is taken")
    assert rows()["made-up"] == ("chosen", None)


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"supports": lambda **p: "only on Sundays"}, "only on Sundays"),
        ({"supports": lambda **p: _raise(KeyError("dtype"))}, "KeyError: 'dtype'"),
        ({"load": lambda f: _raise(ImportError("no cutlass"))}, "ImportError: no cutlass"),
        ({"ARCHS": ("sm80", "sm90")}, "needs a CUDA device (sm80, sm90), the device here is cpu"),
    ],
)
def test_refusal_falls_back_under_auto_and_raises_when_asked_for(
    install, changes, reason: str
) -> None:
    install(make_spec(**changes))
    assert rows()["made-up"] == ("refused", reason)
    assert rows()["reference"] == ("chosen", None)
    assert (
        inspect.unwrap(resolve("chunk_simple_gla", "auto", CPU, *GLA))
        is cula.reference.chunk_simple_gla
    )
    with pytest.raises(RuntimeError) as caught:
        resolve("chunk_simple_gla", "made-up", CPU, *GLA)
    message = str(caught.value)
    assert (
        message
        == f"impl='made-up' cannot serve lightning.prefill.chunk_simple_gla on cpu: {reason}"
    )
    with pytest.raises(
        RuntimeError, match="no kernel serves lightning.prefill.chunk_simple_gla on cpu: made-up: "
    ):
        resolve("chunk_simple_gla", KERNELS_ONLY, CPU, *GLA)


def test_kernels_only_without_kernels() -> None:
    with pytest.raises(RuntimeError, match="on cpu: no kernel package for it is installed$"):
        resolve("chunk_simple_gla", KERNELS_ONLY, CPU, *GLA)


def test_kernels_only_with_gradients_says_who_has_them(install: Callable[..., None]) -> None:
    install(make_spec(supports=inference_only))
    with pytest.raises(
        RuntimeError,
        match="made-up: no backward; .*; an input requires gradients, which chunk_simple_gla gets from fla or the ref",
    ):
        resolve("chunk_simple_gla", KERNELS_ONLY, CPU, *TRAINING)


def test_architecture_that_a_kernel_does_not_list(install: Callable[..., None]) -> None:
    install(make_spec(ARCHS=("sm90",)))
    row = explain("lightning.prefill", arch="sm75").rows[0]
    assert row.reason == "needs one of sm90, the device here is sm75"


def test_unknown_impl_lists_the_known_ones(install: Callable[..., None]) -> None:
    install(make_spec())
    message = "impl: expected 'auto' or one of made-up, fla, reference for lightning.prefill, got 'made_up'"
    for call in (
        lambda: resolve("chunk_simple_gla", "made_up", CPU, *GLA),
        lambda: explain("lightning.prefill", impl="made_up"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for bad in (None, 3, ["reference"]):
        with pytest.raises(TypeError, match=f"impl: expected a str, got {type(bad).__name__}"):
            resolve("chunk_simple_gla", bad, CPU, *GLA)  # type: ignore[arg-type]


def test_supports_sees_the_problem_by_name(install: Callable[..., None]) -> None:
    seen: list[dict[str, Any]] = []

    def supports(**problem: Any) -> None:
        seen.append(problem)

    for op, functions in OPS.items():
        install(make_spec(OP=op, supports=supports))
        for function in functions:
            names = COMMON_FACTS + FACTS[function]
            resolve(function, "auto", CPU, *range(len(names)))
            expected = {name: i for i, name in enumerate(names)}
            assert seen.pop() == {"op": op, "function": function, "arch": "cpu", **expected}
    with pytest.raises(ValueError, match="zip"):
        resolve("chunk_simple_gla", "auto", CPU, torch.float32)


def test_fact_that_cannot_be_looked_up_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"^segment_tokens: expected a bool, an int or None, got list$"
    ):
        resolve("chunk_simple_gla", "auto", CPU, *GLA[:-1], [2])


class BackwardOfFLA:
    """Stands in for `cula.integrations.fla` and `cula.integrations.fla_backward`."""

    refusal: str | None = None

    def supports(self, **problem: Any) -> str:
        return "not today"

    def supports_backward(self, *, requires_grad: bool, **problem: Any) -> str | None:
        assert requires_grad
        return self.refusal

    def with_backward(self, function: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: (function, forward())


def inference_only(*, requires_grad: bool = False, **problem: Any) -> str | None:
    return "no backward" if requires_grad else None


def test_kernel_without_backward_takes_that_of_fla(
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fla = BackwardOfFLA()
    for module in ("_adapter", "_backward"):
        monkeypatch.setattr(_implementations, module, lambda: fla)
    install(make_spec(supports=inference_only))
    with caplog.at_level(logging.INFO, logger="cula"):
        for impl in ("auto", "made-up"):
            run = resolve("chunk_simple_gla", impl, CPU, *TRAINING)
            assert run() == ("chunk_simple_gla", "chunk_simple_gla by made-up")
            assert run not in _registry.self_checking
    assert [record.getMessage() for record in caplog.records] == [
        "lightning.prefill.chunk_simple_gla on cpu is served by made-up with the backward of fla"
    ]
    told = explain("chunk_simple_gla", arch="cpu", requires_grad=True)
    assert told.chosen == "made-up" and told.rows[0].backward == "fla"
    assert "  made-up    chosen     with the backward of fla\n" in str(told)
    # Without gradients the kernel itself is called, and checks its own arguments.
    run = resolve("chunk_simple_gla", "auto", CPU, *GLA)
    assert run() == "chunk_simple_gla by made-up" and run in _registry.self_checking


def test_kernel_with_a_backward_keeps_it(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_implementations, "_backward", BackwardOfFLA)
    install(make_spec())
    assert resolve("chunk_simple_gla", "auto", CPU, *TRAINING)() == "chunk_simple_gla by made-up"


def test_why_there_is_no_backward(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fla = BackwardOfFLA()
    for module in ("_adapter", "_backward"):
        monkeypatch.setattr(_implementations, module, lambda: fla)
    install(make_spec(supports=inference_only))
    fla.refusal = "not installed"
    assert rows(requires_grad=True)["made-up"] == ("refused", "no backward; fla: not installed")
    with pytest.raises(RuntimeError, match="impl='made-up' cannot .*: no backward; fla: not ins"):
        resolve("chunk_simple_gla", "made-up", CPU, *TRAINING)
    assert (
        inspect.unwrap(resolve("chunk_simple_gla", "auto", CPU, *TRAINING))
        is cula.reference.chunk_simple_gla
    )

    fla.refusal = None
    monkeypatch.setenv("CULA_DISABLE", "fla")
    _forget()
    reason = "no backward; fla: disabled by CULA_DISABLE"
    assert rows(requires_grad=True)["made-up"] == ("refused", reason)
    monkeypatch.delenv("CULA_DISABLE")

    # What it refuses without gradients too is the reason to give, and other functions have no such backward.
    install(make_spec(supports=lambda **problem: "only on Sundays"))
    assert rows(requires_grad=True)["made-up"] == ("refused", "only on Sundays")
    install(make_spec(OP="kda.decode", supports=inference_only))
    assert rows("kda.decode", requires_grad=True)["made-up"] == ("refused", "no backward")


def test_decision_is_made_once(install: Callable[..., None]) -> None:
    calls: list[str] = []
    install(
        make_spec(
            supports=lambda **p: calls.append("supports"),
            load=lambda f: calls.append("load") or len,
        )
    )
    for _ in range(3):
        assert resolve("chunk_simple_gla", "auto", CPU, *GLA) is len
    assert calls == ["supports", "load"]


def test_impl_from_the_environment(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_IMPL", "reference")
    install(make_spec())
    assert rows()["made-up"] == ("refused", "reference was asked for")
    assert (
        inspect.unwrap(resolve("chunk_simple_gla", "auto", CPU, *GLA))
        is cula.reference.chunk_simple_gla
    )
    assert resolve("chunk_simple_gla", "made-up", CPU, *GLA)() == "chunk_simple_gla by made-up"

    # It governs the ops that have an implementation of that name, and there it does not fall back.
    monkeypatch.setenv("CULA_IMPL", "made-up")
    install(make_spec(supports=lambda **p: "not today"))
    with pytest.raises(RuntimeError, match="impl='made-up' cannot serve .*: not today"):
        resolve("chunk_simple_gla", "auto", CPU, *GLA)
    assert explain("chunk_kda", arch="cpu").chosen == "reference"

    monkeypatch.setenv("CULA_IMPL", "refrence")
    _forget()
    with pytest.raises(ValueError, match="CULA_IMPL: expected 'auto' or one of .*, got 'refrence'"):
        explain("chunk_kda")


def test_disable_from_the_environment(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_DISABLE", "made-up, fla")
    install(make_spec())
    assert rows()["made-up"] == rows()["fla"] == ("refused", "disabled by CULA_DISABLE")
    assert rows()["reference"] == ("chosen", None)
    monkeypatch.setenv("CULA_DISABLE", "made-up,fla,reference")
    _forget()
    with pytest.raises(
        RuntimeError, match="nothing serves .* on cpu: made-up: disabled by CULA_DISABLE; fla: "
    ):
        resolve("chunk_simple_gla", "auto", CPU, *GLA)
    assert explain("lightning.prefill", arch="cpu").chosen is None


@pytest.mark.parametrize("name", ["made_up", "Reference", "cula-nothing"])
def test_an_unknown_name_in_the_environment_is_refused(
    name: str, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_DISABLE", f"fla, {name}")
    install(make_spec())
    message = f"^CULA_DISABLE: expected names of fla, made-up, reference, got '{name}'$"
    for call in (
        lambda: resolve("chunk_simple_gla", "auto", CPU, *GLA),
        lambda: explain("chunk_kda", arch="cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_environment_may_name_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = FirstParty("made_up_absent", ("lightning.prefill",), ("sm90",))
    monkeypatch.setattr(_discovery, "FIRST_PARTY", (absent,))
    monkeypatch.setenv("CULA_DISABLE", "made-up-absent")
    _forget()
    assert explain("chunk_simple_gla", arch="cpu").chosen == "reference"
    monkeypatch.setenv("CULA_IMPL", "made-up-absent")
    _forget()
    assert explain("chunk_kda", arch="cpu").chosen == "reference"
    with pytest.raises(
        RuntimeError, match="^impl='made-up-absent' cannot serve .*: not installed, a"
    ):
        resolve("chunk_simple_gla", "auto", CPU, *GLA)


def test_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _env.env() == _env.Env()
    monkeypatch.setenv("CULA_DISABLE", "reference")
    assert _env.env() == _env.Env()
    monkeypatch.setenv("CULA_LOG", "loud")
    _env.env.cache_clear()
    with pytest.raises(
        ValueError, match="CULA_LOG: expected one of debug, info, warning, error, critical"
    ):
        _env.env()


def test_decision_is_logged_once(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(make_spec(supports=lambda **p: "not today"))
    with caplog.at_level(logging.INFO, logger="cula"):
        for splits in (1, 2, 1):
            resolve("chunk_simple_gla", "auto", CPU, *GLA[:-1], splits)
    assert [record.getMessage() for record in caplog.records] == [
        "lightning.prefill.chunk_simple_gla on cpu is served by reference; made-up refused: not today; "
        "fla refused: needs a CUDA device, the device here is cpu"
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a CPU claim to be a GPU of an architecture, with two packages of this repository that are not there."""

    def claim(arch: str) -> None:
        monkeypatch.setattr(_registry, "_arch_of", lambda device: arch)
        monkeypatch.setattr(fla, "importable", lambda package: False)
        packages = (
            FirstParty("made_up_absent", ("lightning.prefill",), ("sm90",)),
            FirstParty("made_up_other", ("kda.prefill",), ("sm90",)),
        )
        monkeypatch.setattr(_discovery, "FIRST_PARTY", packages)
        _forget()

    return claim


HALF = (torch.bfloat16, *GLA[1:])
SLOW = "lightning.prefill.chunk_simple_gla on {} is served by reference, which is plain PyTorch and slow; "
FLA_MISSING = "fla refused: flash-linear-attention is not installed: pip install fla-core"
INSTALL = "pip install --find-links dist 'made-up-absent' (dist: bash .ci/run build in a clone)"


def test_falling_to_the_reference_on_a_gpu_is_a_warning_with_the_line_that_fixes_it(
    gpu: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    gpu("sm90")
    with caplog.at_level(logging.INFO, logger="cula"):
        for splits in (None, 1, None):
            resolve("chunk_simple_gla", "auto", CPU, *HALF[:-2], splits, None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    missing = f"made-up-absent missing: not installed: {INSTALL}"
    assert record.getMessage() == SLOW.format("sm90") + f"{FLA_MISSING}; {missing}"


@pytest.mark.parametrize(
    ("arch", "facts", "said"),
    [
        ("sm89", HALF, f"{FLA_MISSING}; made-up-absent missing: not installed, and needs one of sm90, the device here"),
        ("sm90", GLA, "fla refused: activations must be bfloat16 or float16, not torch.float32; "
         "made-up-absent missing: not installed, and activations must be bfloat16 or float16, not float32"),
    ],
)  # fmt: skip
def test_no_installation_is_advised_that_would_not_help(
    gpu: Callable[[str], None], caplog: pytest.LogCaptureFixture, arch: str, facts: Any, said: str
) -> None:
    gpu(arch)
    resolve("chunk_simple_gla", "auto", CPU, *facts)
    (record,) = caplog.records
    assert record.getMessage().startswith(SLOW.format(arch) + said)
    assert "find-links" not in record.getMessage()


def test_the_warning_names_a_broken_package(
    gpu: Callable[[str], None], install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install("made_up_nowhere._spec")
    gpu("sm90")
    resolve("chunk_simple_gla", "auto", CPU, *HALF)
    broken = "made_up_nowhere refused: ModuleNotFoundError: No module named 'made_up_nowhere'"
    assert caplog.records[0].getMessage().endswith(f"; {broken}")


@pytest.mark.parametrize("by", ["name", "variable", "cpu", "kernel"])
def test_who_asks_for_the_reference_or_gets_a_kernel_is_not_warned(
    by: str,
    gpu: Callable[[str], None],
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if by == "variable":
        monkeypatch.setenv("CULA_IMPL", "reference")
    if by == "kernel":
        install(make_spec())
    gpu("cpu" if by == "cpu" else "sm90")
    with caplog.at_level(logging.INFO, logger="cula"):
        resolve("chunk_simple_gla", "reference" if by == "name" else "auto", CPU, *HALF)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


WARNING = """
import torch
from cula import _registry
_registry._arch_of = lambda device: 'sm90'
name, cpu = 'chunk_gated_delta_rule', torch.device('cpu')
facts = [None] * len(_registry.FACTS[name])
call = (name, 'auto', cpu, torch.float64, 64, 64, False, None, *facts)
for _ in range(2): _registry.resolve(*call)
"""
LEVEL = """
import os
os.environ.update(CULA_LOG="info", CULA_DISABLE="fla")
import torch, cula
q = torch.ones(1, 2, 1, 4)
cula.lightning.lightning_attn_fwd(q, q, q, torch.ones(1))
"""


@pytest.fixture(scope="module")
def done() -> dict[str, forks.Done]:
    """What this code left, each in a process of its own, without settings of the environment around."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("CULA_")}
    codes = (WARNING, LEVEL)
    return dict(zip(codes, forks.run(*codes, environment=environment), strict=True))


def test_the_warning_is_seen_without_a_logging_setup(done) -> None:
    assert done[WARNING].status == 0
    (line,) = [line for line in done[WARNING].err.splitlines() if "gated_delta_rule" in line]
    assert line.startswith(
        "lightning.gated_delta_rule.chunk_gated_delta_rule on sm90 is served by reference, which is"
    )


def test_a_package_that_is_missing_has_a_row(gpu: Callable[[str], None]) -> None:
    gpu("sm90")
    told = explain("chunk_simple_gla", arch="sm90", dtype=torch.bfloat16)
    assert [(row.name, row.verdict) for row in told.rows] == [
        ("fla", "refused"), ("reference", "chosen"), ("made-up-absent", "missing"),
    ]  # fmt: skip
    assert told.rows[-1].reason == f"not installed: {INSTALL}"
    with pytest.raises(
        RuntimeError, match="^impl='made-up-absent' cannot .* sm90: not installed: pip"
    ):
        resolve("chunk_simple_gla", "made-up-absent", CPU, *HALF)
    with pytest.raises(
        RuntimeError, match="^no kernel .* on sm90: made-up-absent: not installed: p"
    ):
        resolve("chunk_simple_gla", KERNELS_ONLY, CPU, *HALF)
    with pytest.raises(
        ValueError, match="^impl: expected 'auto' or one of fla, reference for light"
    ):
        resolve("chunk_simple_gla", "made-up-other", CPU, *HALF)


def test_log_level_from_the_environment(done) -> None:
    assert done[LEVEL].status == 0
    (line,) = [line for line in done[LEVEL].err.splitlines() if line.startswith("cula")]
    # Between the two stands the kernel package, where it is installed.
    assert line.startswith(
        "cula INFO: lightning.prefill.lightning_attn_fwd on cpu is served by reference; "
    )
    assert line.endswith("fla refused: disabled by CULA_DISABLE")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("kda.prefill", ("kda.prefill", "chunk_kda")),
        ("chunk_kda", ("kda.prefill", "chunk_kda")),
        ("kda.chunk_kda", ("kda.prefill", "chunk_kda")),
        ("kda.decode", ("kda.decode", "fused_recurrent_kda")),
        ("lightning.prefill.chunk_simple_gla", ("lightning.prefill", "chunk_simple_gla")),
        ("linear_attention_commit", ("lightning.decode", "linear_attention_commit")),
        (
            "fused_recurrent_gated_delta_rule",
            ("lightning.gated_delta_decode", "fused_recurrent_gated_delta_rule"),
        ),
        ("delta.decode", ("delta.decode", "delta_rule_decode")),
        ("delta.delta_rule_flush", ("delta.decode", "delta_rule_flush")),
    ],
)
def test_explain_takes_ops_and_functions(op: str, expected: tuple[str, str]) -> None:
    found = explain(op)
    assert (found.op, found.function) == expected


@pytest.mark.parametrize("op", ["chunk_kdA", "kda", "", 3])
def test_explain_refuses_what_it_does_not_know(op: Any) -> None:
    with pytest.raises(
        ValueError, match=r"op: expected one of lightning.decode \(linear_attention_decode"
    ):
        explain(op)
    with pytest.raises(
        ValueError, match="function: expected one of chunk_kda for kda.prefill, got 'nope'"
    ):
        explain("kda.prefill", function="nope")


def test_explain_refuses_unknown_facts() -> None:
    with pytest.raises(
        TypeError,
        match="head_dim: expected one of dtype, head_dim_k, .* for chunk_kda, got an unknown",
    ):
        explain("chunk_kda", head_dim=128)
    assert (
        explain("chunk_kda", arch="cpu", tokens=3, varlen=True, safe_gate=True).chosen
        == "reference"
    )


@pytest.mark.parametrize(
    "op, facts, hint",
    [
        ("lightning_attn_fwd", ["state_pool"], "; state_pool: facts of lightning_attn_fwd_varlen, .*, chunk_kda"),
        ("chunk_simple_gla", ["state_pool", "safe_gate"], "; safe_gate, state_pool: facts of chunk_kda"),
        ("chunk_kda", ["persistent"], "; persistent: arguments of cula.compat.lightning.lightning_attn_fwd_varlen"),
        (
            "chunk_gated_delta_rule", ["output_state", "checkpoint_cu_starts"],
            "; checkpoint_cu_starts, output_state: arguments of cula.compat.flashinfer.chunk_gated_delta_rule",
        ),
        ("chunk_simple_gla", ["layer_idx"], "; layer_idx: arguments of cula.lightning.chunk_lightning_attn"),
        ("chunk_kda", ["cu_seqlens"], ""),
        ("lite_attention", ["state_v_first"], ""),
        ("chunk_kda", ["nonsense"], ""),
    ],
)  # fmt: skip
def test_unknown_facts_point_to_functions_that_have_them(
    op: str, facts: list[str], hint: str
) -> None:
    with pytest.raises(
        TypeError, match=f"^{facts[0]}: expected one of .*, got an unknown fact{hint}$"
    ):
        _registry.explain(op, **dict.fromkeys(facts, True))


def test_a_function_without_an_op_points_to_the_one_that_serves_it() -> None:
    with pytest.raises(
        ValueError, match="'chunk_lightning_attn'; .* is served as chunk_simple_gla$"
    ):
        _registry.explain("chunk_lightning_attn")


@pytest.mark.parametrize("arch", ["hopper", "sm9", "SM90", "", 90])
def test_explain_refuses_an_architecture_that_there_is_not(arch: Any) -> None:
    known = "arch: expected one of cpu, sm70, sm72, sm75, sm80, .*, sm90, sm100, .*, sm121, got "
    with pytest.raises(ValueError, match=known + re.escape(repr(arch))):
        explain("chunk_kda", arch=arch)


def test_explain_knows_the_architectures_of_kernels_and_of_this_machine(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(make_spec(ARCHS=("sm131",)))
    assert explain("chunk_simple_gla", arch="sm131").chosen == "made-up"
    monkeypatch.setattr(_registry, "_current_arch", lambda: "sm132")
    assert explain("chunk_simple_gla", arch="sm132").arch == explain("chunk_simple_gla").arch


def test_explanation_is_a_table(install: Callable[..., None]) -> None:
    install(make_spec(ARCHS=("sm90",)))
    assert str(explain("chunk_simple_gla", arch="cpu", dtype=torch.float32)) == (
        "lightning.prefill.chunk_simple_gla on cpu (dtype=torch.float32)\n"
        "  made-up    refused    needs a CUDA device (sm90), the device here is cpu\n"
        "  fla        refused    needs a CUDA device, the device here is cpu\n"
        "  reference  chosen"
    )
    assert repr(explain("chunk_kda")) == str(explain("chunk_kda"))


def test_reference_refuses_what_it_does_not_do() -> None:
    found = explain("chunk_kda", arch="cpu", use_intracard_cp=True)
    assert found.chosen is None
    assert found.rows[-1].reason == "does not split sequences (use_intracard_cp=True)"
    assert explain("chunk_kda", arch="cpu", use_intracard_cp=False).chosen == "reference"


def test_arch_of_a_device() -> None:
    assert _registry.arch_of(CPU) == "cpu"
    assert _registry.arch_of(torch.device("meta")) == "meta"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 9), "sm89"),
        ((9, 0), "sm90"),
        ((10, 0), "sm100"),
        ((10, 3), "sm103"),
        ((12, 0), "sm120"),
    ],
)
def test_arch_of_a_gpu(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # Past the cache, which must not keep a card that is not there.
    assert _registry._arch_of.__wrapped__(torch.device("cuda", 0)) == arch
