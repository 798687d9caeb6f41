"""The public function on a CPU, what a GPU is handed, and what importing the package costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from as_cuda import AsCuda
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import liteattention_sm89
from cula_testing.interpreters import run
from cula_testing.specs import assert_answer, assert_says_what_to_install
from liteattention_sm89 import _spec, lite_attention, masks, ops, reference
from liteattention_sm89.check import is_aligned

OP = torch.ops.liteattention_sm89.forward.default
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
LAUNCHED = (
    "q",
    "k",
    "v",
    "out",
    "lse",
    "read_mask",
    "must_do",
    "write_mask",
    "cu_seqlens_q",
    "cu_seqlens_k",
)
PACKING = {
    "cu_seqlens_q": torch.tensor([0, 130, 130, 200], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 70, 200, 300], dtype=torch.int32),
    "max_seqlen_q": 140, "max_seqlen_k": 130,
}  # fmt: skip


def tensors(batch=2, rows=200, keys=300, heads=4, heads_k=2, dim=64, dtype=torch.bfloat16) -> tuple:
    return (
        torch.randn(batch, rows, heads, dim).to(dtype),
        *(torch.randn(batch, keys, heads_k, dim).to(dtype) for _ in range(2)),
    )


def options(packed: bool, **more) -> dict[str, Any]:
    """A random list and what else may be given."""
    sequences, tiles = (3, 3) if packed else (2, 5)
    must_do = masks.pack(torch.arange(tiles) % 2 == 1)
    listed = masks.pack(torch.rand(sequences, 4, 2, tiles) < 0.7)
    lists = {"read_mask": listed, "must_do": must_do, "direction": -1, "threshold": -1.0}
    return lists | {"scale": 0.3, "causal": True} | (PACKING if packed else {}) | more


CALLS: dict[str, Callable[[], dict]] = {
    "defaults": dict,
    "dense": lambda: {"threshold": None, "causal": True},
    "list": lambda: options(False),
    "packed": lambda: options(True),
    "packed dense": lambda: PACKING | {"threshold": None},
    "tiles of 128": lambda: {"block_n": 128, "threshold": 0, "direction": -1},
    "int8": lambda: options(False, use_int8=True),
    "int8 packed dense": lambda: PACKING | {"threshold": None, "use_int8": True},
}
each_call = pytest.mark.parametrize("call", CALLS)


def inputs(call: str) -> tuple[tuple, dict]:
    return tensors(1 if "packed" in call else 2), CALLS[call]()


def misplaced(tensor: Tensor) -> Tensor:
    """The same values, stored head by head and an element behind an aligned address."""
    by_head = tensor.transpose(1, 2)
    return torch.cat((by_head[..., :1], by_head), 3)[..., 1:].transpose(1, 2)


def expected_of(x: tuple, more: dict) -> tuple:
    known = {n: y for n, y in more.items() if n != "out" and y is not None}
    out, lse, write = reference.lite_attention(*x, **known)
    return out, lse, None if "threshold" in more and more["threshold"] is None else write


def assert_same(actual: tuple, expected: tuple) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


@each_call
def test_a_cpu_call_is_the_reference(call):
    x, more = inputs(call)
    expected = expected_of(x, more)
    assert_same(lite_attention(*x, **more), expected)
    step = torch.tensor([more.get("direction", 1)], dtype=torch.int32)
    out = misplaced(torch.full_like(x[0], math.nan))
    actual = lite_attention(*x, **more | {"direction": step, "out": out})
    assert actual[0] is out
    assert_same(actual, expected)
    # Views of the same values, which stay what they are.
    views = tuple(misplaced(y) for y in x)
    assert_same(lite_attention(*views, **more), expected)
    assert all(torch.equal(one, other) for one, other in zip(views, x))


def test_dense_attention_is_softmax_attention():
    q, k, v = tensors(dtype=torch.float64)
    expected = F.scaled_dot_product_attention(
        *(y.transpose(1, 2) for y in (q, k, v)), enable_gqa=True
    )
    out, lse, write = lite_attention(q, k, v, threshold=None)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-9, atol=1e-9)
    assert lse.shape == (2, 4, 200) and write is None


@pytest.mark.parametrize("packed", [False, True])
def test_autograd_on_a_cpu(packed):
    q, k, v = (y.requires_grad_() for y in tensors(1 if packed else 2, dtype=torch.float64))
    more = options(packed)
    out, lse, _ = lite_attention(q, k, v, **more)
    seen = lse.isfinite()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) * seen
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    known = {n: y for n, y in more.items() if n in ("scale", "causal", *PACKING)}
    wanted = reference.masked_gradients(q, k, v, dout, more["read_mask"], dlse=dlse, **known)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[dict]]:
    """The launcher's calls: it records and computes what a kernel would be given. Enter `AsCuda` to get there."""
    calls: list[dict] = []

    def run(*given, **more) -> None:
        a = dict(zip((*LAUNCHED, "max_seqlen_q"), given, strict=True)) | more
        calls.append(dict(a))
        a["use_int8"] = a.pop("int8")
        assert all(is_aligned(a[n]) for n in ("q", "k", "v", "out")) and a["scale"] > 0
        assert all(a[n] is None or a[n].stride(3) == 1 for n in LAUNCHED[5:8])
        out, lse, write = (a.pop(n) for n in ("out", "lse", "write_mask"))
        results = reference.lite_attention(**a)
        for target, result in zip((out, lse, write), results):
            if target is not None:
                target.copy_(result)

    monkeypatch.setattr(ops, "launcher", lambda *_: run)
    with torch.library._scoped_library("liteattention_sm89", "IMPL") as library:
        library.impl("forward", ops._forward_cuda, "CPU")
        yield calls


@each_call
def test_what_a_kernel_is_handed(launched, call):
    x, more = inputs(call)
    with AsCuda():
        actual = lite_attention(*x, **more)
    assert_same(actual, expected_of(x, more))
    (a,) = launched
    dense = "threshold" in more and more["threshold"] is None
    assert [a[n].data_ptr() for n in ("q", "k", "v", "out")] == [
        y.data_ptr() for y in (*x, actual[0])
    ]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert a[name] is more.get(name) or a[name].data_ptr() == more[name].data_ptr()
    assert (a["read_mask"] is None) == (a["write_mask"] is None) == dense
    assert a["must_do"] is None or a["must_do"].shape == a["read_mask"].shape
    assert (
        a["lse"].shape == (*x[0].shape[::2], x[0].shape[1])[:1] + (4, 200)
        and a["lse"].is_contiguous()
    )
    longest = (140, 130) if "packed" in call else (200, 300)
    assert (a["max_seqlen_q"], a["max_seqlen_k"]) == longest
    assert a["int8"] is more.get("use_int8", False)
    assert (a["direction"], a["block_n"]) == (more.get("direction", 1), more.get("block_n", 64))
    assert a["threshold"] == (0.0 if dense else more.get("threshold", -10.0))


@pytest.mark.parametrize("machine", [torch.no_grad, AsCuda])
@pytest.mark.parametrize("packed", [False, True])
def test_masks_may_be_bool(launched, packed, machine):
    """The result has the form of read_mask; the forms of the others do not matter to it."""
    x, more = tensors(1 if packed else 2), options(packed)
    tiles = 3 if packed else 5
    read = masks.unpack(more["read_mask"], tiles)
    shape = read.shape
    assert 0 < read.sum() < read.numel()
    held = torch.rand(shape) < 0.3
    for must_do in (None, held[0, 0, 0], held[0, 0, 0, 0], held[:, :1, :, :1], held):
        words = None if must_do is None else masks.pack(must_do.expand(shape))
        out, lse, write = lite_attention(*x, **more | {"must_do": words})
        for a, b in ((read, must_do), (read, words), (more["read_mask"], must_do)):
            with machine():
                found = lite_attention(*x, **more | {"read_mask": a, "must_do": b})
            expected = masks.unpack(write, tiles) if a.dtype == torch.bool else write
            assert_same(found, (out, lse, expected))


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_values_of_another_width(launched, packed, width):
    """A kernel gets heads of one width, and the caller those that were asked for."""
    q, k, v = tensors(1 if packed else 2)
    v = torch.randn(*v.shape[:3], width).to(v.dtype)
    more = options(packed)
    out = misplaced(torch.full((*q.shape[:3], width), math.nan, dtype=q.dtype))
    with AsCuda():
        actual = lite_attention(q, k, v, **more)
        into = lite_attention(q, k, v, **more | {"out": out})
    wide = max(width, 64)
    assert len(launched) == 2
    assert all(launched[0][n].shape[3] == wide for n in ("q", "k", "v", "out"))
    assert into[0] is out and actual[0].is_contiguous() and actual[0].shape == out.shape
    assert_same(actual, into)
    for one, other in zip(actual, expected_of((q, k, v), more), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_with_values_of_another_width():
    """A gradient mask takes a CPU's call where a GPU's goes."""
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float64))
    v = torch.randn(*v.shape[:3], 24, dtype=v.dtype).requires_grad_()
    weights = torch.randn(*q.shape[:3], 24, dtype=q.dtype)
    every = masks.full(2, 4, 2, 5)
    found, wanted = (
        torch.autograd.grad(
            (lite_attention(q, k, v, threshold=None, **more)[0] * weights).sum(), (q, k, v)
        )
        for more in ({"grad_mask": every}, {})
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_direction_on_the_device_is_not_read(launched):
    x, step = tensors(), torch.tensor([-1], dtype=torch.int32)
    with AsCuda():
        actual = lite_attention(*x, threshold=-1.0, direction=step)
    assert launched[0]["direction"].data_ptr() == step.data_ptr()
    assert_same(actual, expected_of(x, {"threshold": -1.0, "direction": -1}))


@pytest.mark.parametrize("machine", [torch.no_grad, AsCuda])
def test_must_do_may_be_one_word_for_all(launched, machine):
    x, word = tensors(1, 10, 2100), torch.tensor([6], dtype=torch.int32)
    with machine():
        actual = lite_attention(*x, must_do=word, threshold=math.inf)
    assert_same(actual, expected_of(x, {"must_do": word.expand(2), "threshold": math.inf}))


@pytest.mark.parametrize("use_int8", [False, True])
@pytest.mark.parametrize("scale", [-0.25, 0, -0.0, 1e-60, -1e-60])
def test_a_kernel_gets_a_positive_scale(launched, scale, use_int8):
    x, more = tensors(), {"scale": scale, "threshold": -1.0, "use_int8": use_int8}
    with AsCuda():
        actual = lite_attention(*x, **more)
    (a,) = launched
    assert a["scale"] == (0.25 if scale == -0.25 else 1.0)
    assert torch.equal(a["q"], -x[0] if scale == -0.25 else torch.zeros_like(x[0]))
    assert_same(actual, expected_of(x, more))


def test_what_a_kernel_cannot_read_is_copied(launched):
    x = tensors()
    query = misplaced(x[0])
    wide = torch.full((2, 200, 4, 67), math.nan, dtype=torch.bfloat16)
    read = masks.full(2, 4, 2, 33).mT.contiguous().mT
    keys = [misplaced(y.repeat(1, 7, 1, 1)) for y in x[1:]]
    with AsCuda():
        actual = lite_attention(query, *keys, read, out=wide[..., 3:])
    (a,) = launched
    assert actual[0].data_ptr() == wide[..., 3:].data_ptr() != a["out"].data_ptr()
    assert wide[..., :3].isnan().all() and torch.equal(wide[..., 3:], a["out"])
    assert a["read_mask"].is_contiguous() and actual[2].is_contiguous()
    assert_same(actual, lite_attention(query, *keys, read))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("batch, rows, keys", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_nothing_to_do(launched, batch, rows, keys, device):
    x = tensors(batch, rows, keys)
    for threshold in (None, -10.0):
        if device == "cuda":
            with AsCuda():
                out, lse, write = lite_attention(*x, threshold=threshold)
        else:
            out, lse, write = lite_attention(*x, threshold=threshold)
        assert out.shape == x[0].shape and not out.any()
        assert lse.shape == (batch, 4, rows) and (lse == -math.inf).all()
        shape = (batch, 4, -(-rows // 128), -(-keys // 64))
        assert (write is None) if threshold is None else write.shape == shape and not write.any()
    assert len(launched) == (2 if device == "cuda" and batch * rows else 0)


@pytest.mark.parametrize("machine", [torch.no_grad, AsCuda])
def test_empty_sequences_list_nothing(launched, machine):
    """Even where the longest lengths leave room for tiles."""
    x, starts = tensors(1, 0, 100), torch.tensor([0, 0, 0])
    with machine():
        out, lse, write = lite_attention(
            *x, cu_seqlens_q=starts, cu_seqlens_k=torch.tensor([0, 70, 100]), max_seqlen_q=130, max_seqlen_k=130
        )  # fmt: skip
    assert out.numel() == 0 and lse.shape == (4, 0)
    assert write.shape == (2, 4, 2, 1) and not write.any()


def test_an_error_of_the_launcher_is_passed_on(launched, monkeypatch):
    def run(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ops, "launcher", lambda *_: run)
    with AsCuda(), pytest.raises(RuntimeError, match="^out of memory$"):
        lite_attention(*tensors())


def test_opcheck(launched):
    """With every argument that there is; traces below go without."""
    x, more = inputs("packed")
    with AsCuda():
        lite_attention(*x, **more | {"use_int8": True})
    (a,) = launched
    given = [a[n] for n in (*LAUNCHED[:3], "read_mask", "must_do", *LAUNCHED[8:])]
    written = [torch.zeros_like(a[n]) for n in ("out", "lse", "write_mask")]
    scalars = (a["max_seqlen_q"], a["max_seqlen_k"], -1.0, "length", 1, 0.5, False, 64, True)
    step = torch.ones(1, dtype=torch.int32)
    torch.library.opcheck(OP, (*given, step, *written, *scalars), test_utils=CHECKS)
    names = [n.name for n in OP._schema.arguments if n.alias_info and n.alias_info.is_write]
    assert names == ["out", "lse", "write_mask"]


@pytest.mark.parametrize("call", ["dense", "list", "packed"])
def test_a_trace_holds_one_operator(launched, call):
    x, more = inputs(call)
    with AsCuda():
        graph = make_fx(
            lambda *y: lite_attention(*y, **more), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*x)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(OP) == 1 and not launched


@pytest.mark.parametrize("mode", ["max", "length"])
def test_a_trace_with_symbols_serves_other_lengths(launched, mode):
    def call(*x: Tensor) -> tuple:
        return lite_attention(*x, threshold=-2.0, threshold_mode=mode)

    with AsCuda():
        graph = make_fx(call, tracing_mode="symbolic")(*tensors())
    assert not launched
    for rows, keys in ((200, 300), (130, 2100), (77, 65)):
        x = tensors(3, rows, keys)
        limit = -2.0 if mode == "max" else -2.0 - math.log2(keys)
        assert_same(graph(*x), expected_of(x, {"threshold": limit}))
        assert (launched[-1]["threshold"], launched[-1]["max_seqlen_q"]) == (limit, rows)


def test_torch_compile_keeps_the_share_of_every_length(fresh_compiler):
    """The first compilation has a symbol for the length, the second one for the share too."""
    compiled = torch.compile(lite_attention, fullgraph=True, backend="aot_eager")
    written = []
    for keys, share in ((100, 3.0), (120, 3.5)):
        q, k, v = tensors(1, 20, keys)
        # Of the second tile, so that the length, the share or both of the first call would give another list.
        k[:, :64], k[:, 64:, 0], k[:, 64:, 1] = 0, -3.25, -3.5
        x = (torch.ones_like(q), k, v)
        for y in (k, v):
            torch._dynamo.maybe_mark_dynamic(y, 1)
        more = {"threshold": share, "scale": math.log(2) / 64}
        actual = compiled(*x, **more, threshold_mode="length")
        assert_same(actual, expected_of(x, more | {"threshold": share - math.log2(keys)}))
        written.append(masks.unpack(actual[2], 2)[0, ::2, 0, 1].tolist())
    assert written == [[True, True], [True, False]]


def test_torch_compile_sees_one_graph_on_a_cpu(fresh_compiler):
    x, read = tensors(2, 70, 100), masks.full(2, 4, 1, 2)
    compiled = torch.compile(lite_attention, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*x, read, causal=True), lite_attention(*x, read, causal=True))


def test_a_fresh_interpreter(tmp_path):
    """Imports and calls on a CPU need neither a kernel language nor diffusers; `replay` is a program."""
    code = """
import importlib.abc, runpy, sys
import torch
before, heavy = set(sys.modules), ("cutlass", "triton", "tvm_ffi", "cula", "fla", "diffusers")
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Block())
import liteattention_sm89
from liteattention_sm89 import _spec, diffusers
x = torch.zeros(1, 3, 1, 64)
liteattention_sm89.lite_attention(x, x, x)
_spec.load("lite_attention")(x, x, x)
sys.meta_path.pop(0)
_spec.supports()
new = set(sys.modules) - before
assert not {m.partition(".")[0] for m in new} & set(heavy), new
assert "liteattention_sm89.launch" not in new
sys.argv = ["replay", "x.pt"]
runpy.run_module("liteattention_sm89.replay", run_name="__main__")
"""
    result = run(code, liteattention_sm89, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "error: x.pt: no such file\n")


@pytest.mark.parametrize("problem, reason", [
    ({}, None),
    ({"function": "lite_attention", "must_do": True, "unheard_of": 3, "requires_grad": False}, None),
    ({"dtype": torch.bfloat16, "head_dim_k": 8, "head_dim_v": 8, "block_m": 128, "block_n": 64}, None),
    ({"dtype": "float16", "head_dim_k": 256, "block_n": 128}, None),
    ({"head_dim_v": 64}, None),
    ({"requires_grad": True}, None),
    ({"dtype": torch.float32}, "must be bfloat16 or float16, not float32"),
    ({"head_dim_k": 60}, "a multiple of 8 up to 256, not 60"),
    ({"head_dim_k": 264}, "a multiple of 8 up to 256, not 264"),
    ({"head_dim_k": 64, "head_dim_v": 128}, None),
    ({"head_dim_k": 64, "head_dim_v": 60}, "that of v must be a multiple of 8 up to 256, not 60"),
    ({"block_m": 64}, "block_m must be 128, not 64"),
    ({"block_n": 32}, "block_n must be 64 or 128, not 32"),
])  # fmt: skip
def test_the_spec_gives_reasons(problem, reason):
    assert_answer(_spec.supports, problem, reason)


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_the_spec_says_what_to_install(monkeypatch, missing):
    assert_says_what_to_install(monkeypatch, _spec.supports, missing, "liteattention-sm89")


def test_the_spec_loads_its_function():
    assert _spec.load("lite_attention") is lite_attention and _spec.OP == "lite.attention"
    with pytest.raises(AttributeError, match="has no attribute 'chunk_kda'"):
        _spec.load("chunk_kda")
