"""Calls in the signatures of flash-attn: against softmax attention, and every argument in its place."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_helpers import stand_out
from torch import Tensor

import liteattention_sm89
from liteattention_sm89 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    functional,
    masks,
    reference,
)

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
LENGTHS = [70, 0, 130, 1]
STARTS = torch.tensor([0, 70, 70, 200, 201], dtype=torch.int32)


def softmax_attention(q, k, v, scale=None, causal=False) -> tuple[Tensor, Tensor]:
    """(out, lse) of one formula over all keys, in the dtype of the inputs."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (
        x.transpose(1, 2).repeat_interleave(n, 1) for x, n in zip((q, k, v), (1, group, group))
    )
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def by_sequence(q, k, v, **more) -> tuple[Tensor, Tensor]:
    """The same of LENGTHS tokens each, `[T, H, D]`, one sequence at a time: out `[T, H, D]` and lse `[H, T]`."""
    parts = [
        softmax_attention(*(x[None] for x in sequence), **more)
        for sequence in zip(*(x.split(LENGTHS) for x in (q, k, v)))
    ]
    return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def qkv(rows=150, keys=330, heads=4, heads_k=2, dim=32, batch=2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (rows, heads), (keys, heads_k), (keys, heads_k)
    return tuple(torch.randn(batch, *shape, dim, dtype=torch.float64) for shape in shapes)


def alike(tokens=201) -> Tensor:
    """[B, S, 3, H, D]."""
    return torch.randn(2, tokens, 3, 4, 32, dtype=torch.float64)


class Form:
    """A function of the module, the inputs in its form, and what it must give for a scale and a causal."""

    def __init__(self, function, make: Callable[[], tuple], unpacked: Callable[..., tuple]) -> None:
        self.function, self.make, self.unpacked = function, make, unpacked
        self.varlen = "varlen" in function.__name__

    def expected(self, given: tuple, **more) -> tuple[Tensor, Tensor]:
        return (by_sequence if self.varlen else softmax_attention)(*self.unpacked(given), **more)


def varlen() -> tuple:
    q, k, v = (x[0] for x in qkv(201, 201, batch=1))
    return q, k, v, STARTS, STARTS, 130, 130


FORMS = {
    form.function.__name__.removesuffix("_func"): form
    for form in (
        Form(flash_attn_func, qkv, lambda x: x),
        Form(flash_attn_qkvpacked_func, lambda: (alike(),), lambda x: x[0].unbind(2)),
        Form(
            flash_attn_kvpacked_func,
            lambda: (qkv()[0], torch.stack(qkv()[1:], 2)),
            lambda x: (x[0], *x[1].unbind(2)),
        ),
        Form(flash_attn_varlen_func, varlen, lambda x: x[:3]),
        Form(
            flash_attn_varlen_qkvpacked_func,
            lambda: (alike()[0], STARTS, 130),
            lambda x: x[0].unbind(1),
        ),
    )
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@each_form
@pytest.mark.parametrize("more", [{}, {"scale": 0.3}, {"causal": True}, {"scale": -0.7, "causal": True}])  # fmt: skip
def test_dense_attention(form, more):
    given = form.make()
    out, lse = form.expected(given, **more)
    calls = [
        ((more.get("scale"), more.get("causal", False)), {}),
        ((), {n.replace("scale", "softmax_scale"): x for n, x in more.items()}),
    ]
    for places, names in calls:
        actual = form.function(*given, *places, **names)
        assert isinstance(actual, Tensor)
        torch.testing.assert_close(actual, out, **TOLERANCE)
    actual = form.function(*given, *calls[0][0], return_softmax_lse=True)
    assert isinstance(actual, tuple) and len(actual) == 2
    torch.testing.assert_close(actual[0], out, **TOLERANCE)
    torch.testing.assert_close(actual[1].double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    q, k, v = (x.to(dtype) for x in qkv())
    out = flash_attn_func(q, k, v, 0.2)
    expected = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), scale=0.2, enable_gqa=True
    )
    assert out.dtype == dtype
    assert (out.double() - expected.transpose(1, 2)).abs().max() < 0.02


def test_sequences_of_other_lengths_for_queries_and_keys():
    lengths_q, lengths_k = [40, 0, 129], [64, 30, 200]
    q, (k, v) = qkv(169)[0][0], (x[0] for x in qkv(1, 294)[1:])
    starts = [torch.tensor([0, *x]).cumsum(0) for x in (lengths_q, lengths_k)]
    out, lse = flash_attn_varlen_func(
        q, k, v, *starts, 129, 200, 0.3, True, return_softmax_lse=True
    )
    assert out.shape == (169, 4, 32) and lse.shape == (4, 169)
    used = {"seqused_q": torch.tensor(lengths_q), "seqused_k": torch.tensor(lengths_k).int()}
    same = flash_attn_varlen_func(q, k, v, *starts, 129, 200, 0.3, True, **used)
    assert torch.equal(same, out)
    pieces = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    expected = [softmax_attention(*(x[None] for x in piece), 0.3, True)[0][0] for piece in pieces]
    torch.testing.assert_close(out, torch.cat(expected), **TOLERANCE)


# --- lists -----------------------------------------------------------------------------------------------------------


LEVELS = torch.tensor([-14.0, 0.0, -12.0, -4.0])


def listed_case(form: Form, given: tuple) -> tuple[dict, dict, tuple]:
    """Arguments of a call with a list, those of the reference, and its inputs; changes the inputs of a form.

    Tiles of 32 keys have scores near LEVELS by turns, in log2 units.
    """
    q, k, v = form.unpacked(given)
    place = torch.cat([torch.arange(n) for n in (LENGTHS if form.varlen else [k.shape[1]])])
    q[...] *= 0.1
    q[..., 0], k[..., 0] = 1, LEVELS[place // 32 % 4, None]
    packing: dict[str, Any] = {}
    sequences, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    if form.varlen:
        q, k, v = q[None], k[None], v[None]
        packing = {f"cu_seqlens_{x}": STARTS for x in "qk"} | {f"max_seqlen_{x}": 130 for x in "qk"}
        sequences, rows, keys = 4, 130, 130
    bits = torch.ones(sequences, 4, -(-rows // 128), -(-keys // 32), dtype=torch.bool)
    bits[:, 0, :, 1] = False
    more = {"read_mask": masks.pack(bits), "must_do": torch.tensor([1], dtype=torch.int32)}
    more |= {"direction": -1, "block_n": 32, "causal": True}
    skipping = more | {"threshold": -2.0, "threshold_mode": "length", "softmax_scale": math.log(2)}
    known = more | packing | {"threshold": -2 - math.log2(keys), "scale": math.log(2)}
    return skipping, known, (q, k, v)


OTHERWISE = {
    "read_mask": None, "must_do": None, "direction": 1, "causal": False, "threshold": 5.0,
    "threshold_mode": "max", "softmax_scale": 0.5, "use_int8": True,
}  # fmt: skip


@each_form
def test_lists(form):
    given = form.make()
    skipping, known, x = listed_case(form, given)
    out, lse, mask = reference.lite_attention(*x, **known)
    out = out[0] if form.varlen else out
    asked = {"return_softmax_lse": True, "return_mask": True}
    actual = form.function(*given, **skipping, **asked)
    assert len(actual) == 3 and all(map(torch.equal, actual, (out, lse, mask)))
    alone = form.function(*given, **skipping, return_mask=True)
    assert len(alone) == 2 and all(map(torch.equal, alone, (out, mask)))
    # None of the arguments is lost on the way.
    for name, other in OTHERWISE.items():
        changed = form.function(*given, **skipping | {name: other}, **asked)
        assert not all(map(torch.equal, changed, actual)), name
    wider = form.function(*given, **skipping | {"read_mask": None, "block_n": 64}, return_mask=True)
    assert not torch.equal(wider[1], mask)


@each_form
def test_8_bit_scores(form):
    given = form.make()
    skipping, known, x = listed_case(form, given)
    out, lse, mask = reference.lite_attention(*x, **known, use_int8=True)
    actual = form.function(
        *given, **skipping, use_int8=True, return_softmax_lse=True, return_mask=True
    )
    out = out[0] if form.varlen else out
    assert all(map(torch.equal, actual, (out, lse, mask)))


def test_the_list_goes_from_call_to_call():
    q, k, v = qkv(260, 700)
    stand_out(q, k)
    mask = None
    for direction in (1, -1):
        known = reference.lite_attention(q, k, v, mask, threshold=-4.0, direction=direction)
        actual = flash_attn_func(
            q, k, v, read_mask=mask, threshold=-4.0, direction=direction, return_softmax_lse=True, return_mask=True
        )  # fmt: skip
        assert all(map(torch.equal, actual, known))
        mask = actual[2]
    assert masks.density(mask, 11) < 0.7


# --- tensors ---------------------------------------------------------------------------------------------------------


@each_form
def test_out_is_written_and_returned(form):
    given = form.make()
    expected = form.expected(given)[0]
    out = torch.full_like(expected, math.nan)
    assert form.function(*given, out=out) is out
    torch.testing.assert_close(out, expected, **TOLERANCE)
    out.fill_(math.nan)
    actual = form.function(*given, out=out, return_softmax_lse=True)
    assert actual[0] is out and not out.isnan().any()


@each_form
def test_packed_tensors_are_read_where_they_are(form, monkeypatch):
    given, seen = form.make(), []
    real = functional.lite_attention
    monkeypatch.setattr(
        functional, "lite_attention", lambda *x, **y: seen.append(x) or real(*x, **y)
    )
    form.function(*given)
    for tensor, view in zip(seen[0], form.unpacked(given), strict=True):
        assert tensor.data_ptr() == view.data_ptr()
        assert tensor.stride()[-view.dim() :] == view.stride()


@each_form
def test_gradients_of_a_cpu_call(form):
    given = form.make()
    leaves = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    weight = torch.randn_like(form.expected(given)[0])
    found = torch.autograd.grad((form.function(*given, 0.3, True) * weight).sum(), leaves)
    expected = form.expected(given, scale=0.3, causal=True)[0]
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_torch_compile_sees_one_graph(fresh_compiler):
    for form in (FORMS["flash_attn"], FORMS["flash_attn_qkvpacked"]):
        given = form.make()
        compiled = torch.compile(form.function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given), form.function(*given), **TOLERANCE)


# --- refusals --------------------------------------------------------------------------------------------------------

WRONG = [
    ({"dropout_p": 0.1}, ValueError, r"dropout_p: expected 0.0, there is no dropout, got 0.1"),
    ({"dropout_p": None}, TypeError, "dropout_p: expected a number, got NoneType"),
    ({"dropout_p": False}, TypeError, "dropout_p: expected a number, got bool"),
    ({"softcap": 30.0}, ValueError, "softcap: expected 0.0, there is no soft cap, got 30.0"),
    ({"softcap": "0"}, TypeError, "softcap: expected a number, got str"),
    ({"window_size": (128, 0)}, ValueError, r"window_size: expected \(-1, -1\), .*, got \(128, 0\)"),
    ({"window_size": [-1]}, ValueError, r"window_size: expected \(-1, -1\), .*, got \[-1\]"),
    ({"window_size": -1}, TypeError, "window_size: expected two ints, got int"),
    ({"window_size": None}, TypeError, "window_size: expected two ints, got NoneType"),
    ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes: expected None, there is no bias, got Tensor"),
    ({"return_attn_probs": True}, ValueError, "return_attn_probs: expected False: return_softmax_lse=True gives"),
    *(
        ({name: 1}, TypeError, f"{name}: expected a bool, got int")
        for name in ("return_attn_probs", "return_softmax_lse", "return_mask", "deterministic", "use_int8")
    ),
    ({"return_mask": True}, ValueError, "return_mask: expected False where threshold is None"),
    ({"read_mask": torch.ones(1, dtype=torch.int32)}, ValueError, "read_mask: expected None where threshold is None"),
    ({"must_do": torch.ones(1, dtype=torch.int32)}, ValueError, "must_do: expected None where threshold is None"),
    ({"softmax_scale": 0.0}, ValueError, r"softmax_scale: expected a finite number, not 0 \(dropout_p is a keyword\)"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale: expected a finite number, not 0"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale: expected a finite number.*, got nan"),
    ({"softmax_scale": math.inf}, ValueError, "softmax_scale: expected a finite number.*, got inf"),
    ({"softmax_scale": True}, TypeError, "softmax_scale: expected a number, got bool"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale: expected a number, got str"),
    ({"causal": 0.2}, TypeError, "causal: expected a bool, got float"),
    ({"threshold": 1.0}, ValueError, "threshold: expected log2 units, at most 0"),
    ({"threshold_mode": "sum"}, ValueError, "threshold_mode: expected 'max' or 'length', got 'sum'"),
    ({"direction": 0}, ValueError, "direction: expected 1 or -1, got 0"),
    ({"block_n": 0}, ValueError, "block_n: expected at least 1, got 0"),
    ({"use_int9": True}, TypeError, "use_int9"),
]  # fmt: skip


@each_form
def test_what_is_refused(form):
    given = form.make()
    before = [x.clone() if isinstance(x, Tensor) else x for x in given]
    out = torch.full_like(form.expected(given)[0], 9.0)
    for more, error, message in WRONG:
        with pytest.raises(error, match=message):
            form.function(*given, out=out, **more)
    assert (out == 9).all()
    for one, other in zip(given, before):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@each_form
def test_neutral_values_are_taken(form):
    given = form.make()
    expected = form.function(*given)
    for more in (
        {"dropout_p": 0, "softcap": 0, "window_size": [-1, -1], "deterministic": True},
        {"dropout_p": 0.0, "softcap": 0.0, "window_size": (-1, -1), "deterministic": False,
         "alibi_slopes": None, "return_attn_probs": False},
    ):  # fmt: skip
        assert torch.equal(form.function(*given, **more), expected)


def first(x: Any) -> Any:
    return x[0]


SHAPES = [
    ("flash_attn", 0, first, "q: expected 4 dimensions"),
    ("flash_attn", 1, lambda x: x[:, :, :, :9], "k: expected"),
    ("flash_attn_qkvpacked", 0, first, r"qkv: expected \[B, S, 3, H, D\], got \[201, 3, 4, 32\]"),
    ("flash_attn_qkvpacked", 0, lambda x: x[:, :, :2], r"qkv: expected \[B, S, 3, H, D\], got"),
    ("flash_attn_qkvpacked", 0, lambda x: x.transpose(1, 2), r"qkv: expected \[B, S, 3, H, D\]"),
    ("flash_attn_kvpacked", 1, lambda x: x[:, :, :1], r"kv: expected \[B, Sk, 2, Hkv, D\], got"),
    ("flash_attn_kvpacked", 1, first, r"kv: expected \[B, Sk, 2, Hkv, D\], got \[330, 2, 2, 32\]"),
    ("flash_attn_kvpacked", 0, first, "q: expected 4 dimensions"),
    ("flash_attn_varlen", 0, lambda x: x[None], r"q: expected \[Tq, Hq, D\], got \[1, 201, 4, 32\]"),
    ("flash_attn_varlen", 1, first, r"k: expected \[Tk, Hkv, D\], got \[2, 32\]"),
    ("flash_attn_varlen", 2, lambda x: x[None], r"v: expected \[Tk, Hkv, D\], got \[1, 201, 2, 32\]"),
    ("flash_attn_varlen", 3, lambda x: x[:3], "cu_seqlens_q: expected rising numbers from 0 to 201"),
    ("flash_attn_varlen", 5, lambda x: 129, "max_seqlen_q: expected at least the length"),
    ("flash_attn_varlen", 6, lambda x: 129, "max_seqlen_k: expected at least the length"),
    ("flash_attn_varlen_qkvpacked", 0, lambda x: x[None], r"qkv: expected \[T, 3, H, D\], got \[1, 201"),
    ("flash_attn_varlen_qkvpacked", 0, lambda x: x[:, :2], r"qkv: expected \[T, 3, H, D\], got \[201, 2,"),
    ("flash_attn_varlen_qkvpacked", 1, lambda x: x[:2], "cu_seqlens_q: expected rising numbers"),
    ("flash_attn_varlen_qkvpacked", 2, lambda x: 9, "max_seqlen_q: expected at least the length"),
]  # fmt: skip


@pytest.mark.parametrize("name, place, change, message", SHAPES)
def test_wrong_shapes(name, place, change, message):
    form = FORMS[name]
    given = list(form.make())
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=f"^{message}"):
        form.function(*given)


@each_form
def test_wrong_types(form):
    given = form.make()
    names = [p.name for p in inspect.signature(form.function).parameters.values()][: len(given)]
    for place, (name, x) in enumerate(zip(names, given)):
        if isinstance(x, Tensor):
            for wrong in (None, [1.0]):
                with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got"):
                    form.function(*given[:place], wrong, *given[place + 1 :])
    with pytest.raises(TypeError, match="^out: expected a torch.Tensor, got list"):
        form.function(*given, out=[])
    if form.varlen:
        with pytest.raises(ValueError, match=r"^out: expected \[Tq, Hq, D\]"):
            form.function(*given, out=torch.empty(1, 201, 4, 32, dtype=torch.float64))
    # In the order of flash-attn 2, dropout_p would come here.
    with pytest.raises(ValueError, match=r"softmax_scale: expected .* \(dropout_p is a keyword\)"):
        form.function(*given, 0.0)
    with pytest.raises(TypeError, match="causal: expected a bool, got float"):
        form.function(*given, 0.1, 0.3)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_tokens_that_do_not_count(name):
    given, out = varlen(), torch.full((201, 4, 32), 7.0, dtype=torch.float64)
    with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got list"):
        flash_attn_varlen_func(*given, out=out, **{name: LENGTHS})
    for used in (torch.tensor([n // 2 for n in LENGTHS]), torch.tensor(LENGTHS)[:1]):
        with pytest.raises(ValueError, match=f"^{name}: expected None or the lengths of .*, got "):
            flash_attn_varlen_func(*given, out=out, **{name: used})
    with pytest.raises(ValueError, match=f"^{name}: .* got tensors on meta and cpu$"):
        flash_attn_varlen_func(*given, out=out, **{name: torch.tensor(LENGTHS, device="meta")})
    assert (out == 7).all()


def test_the_signatures():
    leading = {
        "flash_attn_func": ["q", "k", "v"],
        "flash_attn_kvpacked_func": ["q", "kv"],
        "flash_attn_qkvpacked_func": ["qkv"],
        "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
    }  # fmt: skip
    assert sorted(leading) == functional.__all__
    keywords = []
    for name, places in leading.items():
        function = getattr(liteattention_sm89, name)
        assert name in liteattention_sm89.__all__ and function is getattr(functional, name)
        parameters = inspect.signature(function).parameters
        given = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert given == [*places, "softmax_scale", "causal"]
        keywords.append(
            {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
        )
    # Both that spell them out have the same, but for what packed sequences alone have.
    packed = {"seqused_q": None, "seqused_k": None}
    assert packed | keywords[0] == keywords[3] and keywords[1] == keywords[2] == keywords[4] == {}
