"""cula as a plug-in of SGLang, with a stand-in for SGLang that has its recorded signatures; the reference serves."""

from __future__ import annotations

import logging
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_stand_in import LINEAR, SGLang, module

from cula import _registry
from cula.integrations.sglang import register

HV, K, V = 2, 16, 8
ROOT = Path(__file__).parents[2]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, undecided: None) -> SGLang:
    _registry.log_once.cache_clear()
    return SGLang(monkeypatch)


def start(sglang: SGLang, impl: str | None = "reference", **flags: str) -> None:
    """What SGLang does in each process, with flags of its command line."""
    for flag, name in flags.items():
        setattr(sglang.flags, flag, name)
    register(impl)
    sglang.HookRegistry.apply_hooks()


def decode_operands(kda: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of `packed_decode`, for two rows, the second of which is padding."""
    torch.manual_seed(0)
    width = HV * (K if kda else 1)
    named = {
        "A_log": torch.randn(HV), "dt_bias": torch.randn(width), "scale": K**-0.5,
        "ssm_states": torch.randn(4, HV, V, K), "cache_indices": torch.tensor([3, -1], dtype=torch.int32),
        "num_v_heads": HV, "head_v_dim": V,
    }  # fmt: skip
    return (torch.randn(2, HV * (2 * K + V)), torch.randn(2, width), torch.randn(2, HV)), named


def prefill_operands() -> dict[str, Any]:
    """Of `extend` of the gated delta rule, for sequences of 70 and 3 tokens, the first of which is tracked."""
    torch.manual_seed(0)
    return {
        "q": torch.randn(1, 73, HV, K), "k": torch.randn(1, 73, HV, K), "v": torch.randn(1, 73, HV, V),
        "g": -torch.rand(1, 73, HV), "beta": torch.rand(1, 73, HV), "ssm_states": torch.randn(4, HV, V, K),
        "cache_indices": torch.tensor([3, 1], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 70, 73], dtype=torch.int32),
        "track_state": torch.zeros(2, HV, V, K), "track_chunk_idx": torch.tensor([1, -1], dtype=torch.int32),
    }  # fmt: skip


def lightning_operands(lengths: list[int]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), HV, K)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    meta = SimpleNamespace(
        batch_size=len(lengths), q_offsets=torch.tensor([0, *ends], dtype=torch.int32), mask=None,
        s_offsets=torch.tensor([1, 2], dtype=torch.int32), s_scales=torch.ones(2, dtype=torch.bool),
    )  # fmt: skip
    return q, k, v, torch.randn(4, HV, K, K), torch.rand(HV, 1, 1), meta


# ---- who serves ------------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing(sglang: SGLang) -> None:
    start(sglang)
    start(sglang)
    assert sglang.choices == ["triton", "flashinfer", "cula"]
    assert [len(hooks) for hooks in sglang.HookRegistry.hooks.values()] == [1]


@pytest.mark.parametrize("impl", ["another", "", 3])
def test_an_unknown_implementation_is_refused_before_anything_changes(
    sglang: SGLang, impl: Any
) -> None:
    with pytest.raises(ValueError, match="impl: expected None or one of .*reference.*, got"):
        register(impl)
    assert sglang.choices == ["triton", "flashinfer"] and not sglang.HookRegistry.hooks


def test_nothing_is_replaced_unless_a_flag_says_so(sglang: SGLang) -> None:
    start(sglang)
    found = sglang.load("gdn")
    assert type(found.decode_kernel).__name__ == "TritonGDNKernel"
    assert list(sglang.HookRegistry.hooks) == [f"{LINEAR}.utils.resolve_linear_attn_backends"]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ({"linear_attn_backend": "cula"}, "decode extend"),
        ({"linear_attn_backend": "cula", "linear_attn_prefill_backend": "triton"}, "decode"),
        ({"linear_attn_decode_backend": "cula"}, "decode"),
        ({"linear_attn_prefill_backend": "cula"}, "extend"),
        ({"linear_attn_verify_backend": "cula"}, "verify"),
    ],
    ids=str,
)
def test_flags_choose_what_runs_on_cula(
    sglang: SGLang, kind: str, flags: dict[str, str], ours: str
) -> None:
    start(sglang, **flags)
    found = sglang.load(kind)
    base = getattr(module(f"kernels.{kind}_triton"), f"Triton{kind.upper()}Kernel")
    for phase in ("decode", "extend", "verify"):
        kernel = getattr(found, f"{phase}_kernel")
        # SGLang looks at the class: only a subclass has the safe gate and prefill in graphs.
        assert isinstance(kernel, base)
        assert (type(kernel) is not base) == (phase in ours.split()), phase
    if kind == "kda":
        assert found.supports_packed_decode_safe_gate == ("decode" in ours)
    assert found.supports_packed_decode
    tracked = found.extend_kernel.supports_track_state_snapshot
    assert tracked == (kind == "kda" or "extend" in ours)


def test_every_model_of_a_process_runs_on_cula(sglang: SGLang) -> None:
    start(sglang, linear_attn_backend="cula")
    for _ in range(2):  # a model and its draft
        assert type(sglang.load("kda").decode_kernel).__name__ == "CulaKDAKernel"
    assert all(len(hooks) == 1 for hooks in sglang.HookRegistry.hooks.values())


def test_the_backend_of_another_plug_in_is_not_ours(sglang: SGLang) -> None:
    start(sglang, linear_attn_decode_backend="cula", linear_attn_prefill_backend="other")
    with pytest.raises(ValueError, match="Unsupported extend backend"):
        sglang.load("gdn")


@pytest.mark.parametrize("kind", ["gdn", "kda", "lightning"])
def test_a_changed_signature_is_left_alone(
    sglang: SGLang, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "lightning":
        monkeypatch.setattr(sglang.lightning, "seg_la_fwd", lambda q, k, v, another: None)
        changed = f"{LINEAR}.lightning_backend.seg_la_fwd"
    else:
        title = f"Triton{kind.upper()}Kernel"
        kernel = getattr(module(f"kernels.{kind}_triton"), title)
        monkeypatch.setattr(kernel, "decode", lambda self, q, k, v, another: None)
        changed = f"{LINEAR}.kernels.{kind}_triton.{title}.decode"
    before = sglang.lightning.seg_la_fwd
    with caplog.at_level(logging.WARNING, "cula"):
        start(sglang, linear_attn_backend="cula")
        if kind == "lightning":
            sglang.load("gdn")
            assert sglang.lightning.seg_la_fwd is before
        else:
            with pytest.raises(ValueError, match="Unsupported decode backend"):
                sglang.load(kind)
            other = "kda" if kind == "gdn" else "gdn"
            assert type(sglang.load(other).decode_kernel).__name__.startswith("Cula")
    said = [record.message for record in caplog.records if record.name == "cula"]
    assert said == [
        f"{changed} has other parameters than in SGLang 0.5.23: its kernels stay SGLang's"
    ]


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_what_cula_serves_does_not_reach_sglang(sglang: SGLang) -> None:
    start(sglang, linear_attn_backend="cula")
    for kind in ("gdn", "kda"):
        args, named = decode_operands(kind == "kda")
        before = named["ssm_states"].clone()
        o = sglang.load(kind).decode_kernel.packed_decode(*args, **named)
        assert o.shape == (1, 2, HV, V) and o[0, 0].any() and not o[0, 1].any()
        changed = (named["ssm_states"] != before).flatten(1).any(1)
        assert changed.tolist() == [False, False, False, True]
    assert not sglang.seen


def test_what_cula_refuses_goes_to_sglang_unchanged_and_is_logged_once(
    sglang: SGLang, caplog: pytest.LogCaptureFixture
) -> None:
    start(sglang, linear_attn_backend="cula")
    kernel, (args, named) = sglang.load("gdn").decode_kernel, decode_operands()
    before = named["ssm_states"].clone()
    with caplog.at_level(logging.INFO, "cula"):
        for _ in range(2):
            found = kernel.packed_decode(*args, **named, replayssm_d=torch.zeros(1))
            assert found == "SGLang's packed_decode"
    assert sglang.seen == ["packed_decode"] * 2 and torch.equal(named["ssm_states"], before)
    said = [record.message for record in caplog.records]
    assert said == ["packed_decode is left to SGLang: replayssm_d is not served"]


def test_without_kernels_sglang_serves(sglang: SGLang, caplog: pytest.LogCaptureFixture) -> None:
    start(sglang, None, linear_attn_backend="cula")
    args, named = decode_operands()
    with caplog.at_level(logging.INFO, "cula"):
        found = sglang.load("gdn").decode_kernel.packed_decode(*args, **named)
    assert found == "SGLang's packed_decode"
    assert "no kernel serves delta.decode.delta_rule_decode on cpu" in caplog.text


def test_states_for_the_prefix_cache_are_there_whoever_serves(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(sglang, linear_attn_backend="cula")
    kernel, named = sglang.load("gdn").extend_kernel, prefill_operands()
    kernel.extend(**named)
    # Triton's kernel returns the states before each chunk: two of the first sequence, one of the second.
    h = torch.randn(1, 3, HV, V, K)
    sglang.answers["extend"] = ("o", None, h)
    assert not sglang.seen and named["track_state"][0].any()
    theirs = prefill_operands()
    assert kernel.extend(**theirs, another=None) == ("o", None, h)
    assert sglang.seen == ["extend"] and torch.equal(theirs["track_state"][0], h[0, 1])


@pytest.mark.parametrize(
    ("flags", "decode", "prefill"),
    [
        ({"linear_attn_backend": "cula"}, True, True),
        ({"linear_attn_decode_backend": "cula"}, True, False),
        ({"linear_attn_prefill_backend": "cula"}, False, True),
    ],
    ids=str,
)
def test_lightning_attention_follows_the_flags(
    sglang: SGLang, flags: dict[str, str], decode: bool, prefill: bool
) -> None:
    start(sglang, **flags)
    sglang.load("gdn")
    for lengths, ours in (([1, 1], decode), ([3, 2], prefill)):
        found = sglang.lightning.seg_la_fwd(*lightning_operands(lengths))
        assert isinstance(found, torch.Tensor) == ours
    found = sglang.lightning.seg_la_fwd(*lightning_operands([2, 2]), caches=torch.zeros(1))
    assert found == "SGLang's seg_la_fwd"


# ---- as an installed package -----------------------------------------------------------------------------------------


def test_the_entry_point_is_the_function(sglang: SGLang) -> None:
    text = (ROOT / "meta/pyproject.toml").read_text()
    _, _, group = text.partition('[project.entry-points."sglang.srt.plugins"]\n')
    name, _, target = group.splitlines()[0].partition(" = ")
    assert name == "cula" and pkgutil.resolve_name(target.strip('"')) is register


def test_the_import_is_light() -> None:
    program = (
        "import sys, cula.integrations.sglang; "
        "print([m for m in ('sglang', 'torch._dynamo', 'cutlass', 'triton') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
