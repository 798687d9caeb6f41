"""Every wrong argument, one at a time: the exception, what it says, and that nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kda_inputs import inputs, int32, spaced, turned
from torch import Tensor

from cula_cp_sm90 import chunk_kda, kda_workspace_bytes
from cula_cp_sm90.config import BLOCK_BYTES

Arguments = dict[str, Any]
TOKENS, HEADS, HEADS_V, DIM, POOL = 10, 1, 2, 128, 5
# A dense batch of 2 with initial states, and 3 packed sequences on a pool.
DENSE, PACKED = ("dense",), ("packed",)
BOTH = DENSE + PACKED
ANYWHERE, CUDA, CPU = ("cpu", "cuda"), ("cuda",), ("cpu",)
# A device that tensors may not be on when the others are on the one named.
ELSEWHERE = {"cpu": "meta", "cuda": "cpu"}
LAST = "a contiguous last dimension"
FLOATS = "float32 or bfloat16 or float16 or float64"


@dataclass(frozen=True)
class Wrong:
    """Arguments that replace good ones, and the refusal: `argument: expected ... `says`..., got ...`got`...`."""

    label: str
    change: Callable[[Arguments], Arguments]
    error: type[Exception]
    argument: str
    says: str
    got: str
    modes: tuple[str, ...] = BOTH
    devices: tuple[str, ...] = ANYWHERE


def change(label, name, how, error, says, got, modes=BOTH, **more) -> Wrong:
    """One tensor of the good ones replaced by a function of itself."""
    return Wrong(label, lambda a: {name: how(a[name])}, error, name, says, got, modes, **more)


def several(label, makers, error, argument, says, got, modes=BOTH, **more) -> Wrong:
    """Several arguments replaced together, so that only one rule is broken."""
    return Wrong(
        label, lambda a: {n: make(a) for n, make in makers.items()}, error, argument, says, got, modes, **more
    )  # fmt: skip


def values(argument, error, says, got, modes=BOTH, **given) -> Wrong:
    """Arguments replaced by these values."""
    label = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return Wrong(label, lambda a: given, error, argument, says, got, modes)


def value(name, given, error, says, got, modes=BOTH) -> Wrong:
    return values(name, error, says, got, modes, **{name: given})


def no_tensor(name: str, given: Any, modes=BOTH) -> Wrong:
    return value(name, given, TypeError, "a torch.Tensor", type(given).__name__, modes)


def away(name: str, modes=BOTH) -> Wrong:
    return Wrong(
        f"{name} on another device", lambda a: {name: a[name].to(ELSEWHERE[a["q"].device.type])},
        ValueError, name, "a tensor on ", "", modes,
    )  # fmt: skip


def every_other(tensor: Tensor) -> Tensor:
    """The same shape and values, two elements apart in the last dimension."""
    spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    spread[..., 0] = tensor
    return spread[..., 0]


def shifted(tensor: Tensor) -> Tensor:
    """The same shape and strides, one element behind an aligned address."""
    flat = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape)


def resized(name: str, *dims: tuple[int, int]) -> Callable[[Arguments], Tensor]:
    def make(a: Arguments) -> Tensor:
        shape = list(a[name].shape)
        for dim, size in dims:
            shape[dim] = size
        return a[name].new_zeros(shape)

    return make


def lengthened(tokens: int) -> dict[str, Callable[[Arguments], Tensor]]:
    """Every tensor of tokens that much longer, in no more memory."""

    def make(name: str) -> Callable[[Arguments], Tensor]:
        return lambda a: a[name][:, :1].expand(-1, tokens, *a[name].shape[2:])

    return {name: make(name) for name in ("q", "k", "v", "g", "beta", "out")}


def on_device(
    numbers: list[int], dtype: torch.dtype = torch.int64
) -> Callable[[Arguments], Tensor]:
    return lambda a: torch.tensor(numbers, dtype=dtype, device=a["q"].device)


def on_cpu(numbers: list[int]) -> Callable[[Arguments], Tensor]:
    return lambda a: torch.tensor(numbers)


def offsets(label: str, numbers: list[int], got: str) -> list[Wrong]:
    says = f"rise from 0 to T = {TOKENS}"
    return [
        several(f"cu_seqlens {label}", {"cu_seqlens": on_device(numbers), "cu_seqlens_cpu": lambda a: None}, ValueError,
                "cu_seqlens", says, got, PACKED, devices=CPU),
        several(f"cu_seqlens_cpu {label}", {"cu_seqlens": lambda a: resized("cu_seqlens", (0, len(numbers)))(a) if
                a["q"].is_cuda else on_cpu([0] * (len(numbers) - 1) + [TOKENS])(a), "cu_seqlens_cpu": on_cpu(numbers)},
                ValueError, "cu_seqlens_cpu", says, got, PACKED),
    ]  # fmt: skip


def of_states(name: str, shape: str, modes: tuple[str, ...]) -> list[Wrong]:
    """What may be wrong with a tensor of states. shape: the start of the expected shape, up to HV."""
    expected = f"{shape}, K, V] = [{shape.split(',')[0][1:]}, 2, 128, 128]"
    outer = 2 * DIM * DIM + 1
    return [
        no_tensor(name, 1.0, modes),
        change(f"{name} of 3 dimensions", name, lambda s: s[0], ValueError, expected, "[2, 128, 128]", modes),
        change(f"{name} of fewer heads", name, lambda s: s[:, :1], ValueError, expected, ", 1, 128, 128]", modes),
        several(f"{name} of another K", {name: resized(name, (2, 64))}, ValueError, name, expected, ", 64, 128]",
                modes),
        several(f"{name} [K, V] with state_v_first", {name: resized(name, (3, 64)), "state_v_first": lambda a: True},
                ValueError, name, f"{shape}, V, K] = ", ", 128, 64]", modes),
        change(f"{name} of bfloat16", name, Tensor.bfloat16, TypeError, "float32", "bfloat16", modes),
        change(f"{name} of float64", name, Tensor.double, TypeError, "float32", "float64", modes),
        change(f"{name} with gaps", name, spaced, ValueError, "dense matrices (last strides 128, 1, or 1, 128)",
               "136, 1)", modes),
        change(f"{name} every other", name, every_other, ValueError, "dense matrices", ", 2)", modes),
        change(f"{name} at an odd address", name, shifted, ValueError, "multiples of 16 bytes", "strides", modes,
               devices=CUDA),
        several(f"{name} with odd strides", {name: lambda a: torch.zeros(
            len(a[name]) * outer, device=a["q"].device).as_strided(a[name].shape, (outer, DIM * DIM, DIM, 1))},
                ValueError, name, "multiples of 16 bytes", f"strides ({outer}, 16384, 128, 1)", modes, devices=CUDA),
        away(name, modes),
    ]  # fmt: skip


FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
)
FLAGS += (
    "allow_neg_eigval",
    "safe_gate",
    "disable_recompute",
    "return_intermediate_states",
    "state_v_first",
)
FLAGS += ("update_state_pool",)  # fmt: skip
NO_GATE = {"use_gate_in_kernel": False, "safe_gate": False, "lower_bound": None}
NO_GATE |= {"A_log": None, "dt_bias": None}
WRONG = [
    *(no_tensor(name, wrong) for name in ("q", "k", "v", "g", "beta") for wrong in (None, [1.0])),
    *(no_tensor(name, 3) for name in ("out", "A_log", "dt_bias", "workspace")),
    no_tensor("cu_seqlens", [0, TOKENS], PACKED),
    no_tensor("cu_seqlens_cpu", [0, TOKENS], PACKED),
    no_tensor("initial_state_indices", [0, 1, 2], PACKED),
    change("q of int32", "q", Tensor.int, TypeError, "bfloat16 or float16", "int32"),
    change("q of float32 on a GPU", "q", Tensor.float, TypeError, "bfloat16 or float16", "float32", devices=CUDA),
    change("q of 3 dimensions", "q", lambda q: q[0], ValueError, "4 dimensions [B, T, H, K]", "[10, 1, 128]"),
    change("k of fewer tokens", "k", lambda k: k[:, :9], ValueError, "the shape of q", "9, 1, 128]"),
    change("k of float16", "k", Tensor.half, TypeError, "the dtype of q, bfloat16", "float16"),
    change("v of float16", "v", Tensor.half, TypeError, "the dtype of q, bfloat16", "float16"),
    change("v of 3 dimensions", "v", lambda v: v[0], ValueError, "[B, T, HV, V]", "[10, 2, 128]"),
    change("v of fewer tokens", "v", lambda v: v[:, :9], ValueError, ", 10 as in q", "9, 2, 128]"),
    several("HV = 3, H = 2", {"q": resized("q", (2, 2)), "k": resized("k", (2, 2)), "v": resized("v", (2, 3))},
            ValueError, "v", "a multiple of H = 2", "3"),
    several("no query heads", {"q": resized("q", (2, 0)), "k": resized("k", (2, 0))}, ValueError, "v",
            "a multiple of H = 0", "2"),
    several("no value heads", {"v": resized("v", (2, 0))}, ValueError, "v", "a multiple of H = 1", "0"),
    several("K = 0", {"q": resized("q", (3, 0)), "k": resized("k", (3, 0))}, ValueError, "q", "K of at least 1", "0",
            devices=CPU),
    several("V = 0", {"v": resized("v", (3, 0))}, ValueError, "v", "V of at least 1", "0", devices=CPU),
    several("K = 64", {"q": resized("q", (3, 64)), "k": resized("k", (3, 64))}, ValueError, "q", "K of 128", "64",
            devices=CUDA),
    several("V = 256", {"v": resized("v", (3, 256))}, ValueError, "v", "V of 128", "256", devices=CUDA),
    change("out of fewer tokens", "out", lambda o: o[:, :9], ValueError, "the shape of v", "9, 2, 128]"),
    change("out of float32", "out", Tensor.float, TypeError, "the dtype of q, bfloat16", "float32"),
    *(change(f"{name} every other element", name, every_other, ValueError, LAST, ", 2)")
      for name in ("q", "k", "v", "g", "out")),
    change("dt_bias every other element", "dt_bias", every_other, ValueError, LAST, "(2,)"),
    *(away(name) for name in ("k", "v", "g", "beta", "out", "A_log", "dt_bias", "workspace")),
    several("all on a device of no kind", {n: lambda a, n=n: a[n].to("meta") for n in ("q", "k", "v")},
            ValueError, "q", "a tensor on a CUDA device or the CPU", "meta"),
    *(change(f"{name} of int32", name, Tensor.int, TypeError, FLOATS, "int32")
      for name in ("g", "beta", "A_log", "dt_bias")),
    several("g per query head", {"g": resized("g", (2, 1))}, ValueError, "g", "[B, T, HV, K] = [", ", 10, 1, 128]"),
    change("g of 3 dimensions", "g", lambda g: g[..., 0], ValueError, ", 10, 2, 128]", ", 10, 2]"),
    several("beta per query head", {"beta": resized("beta", (2, 1))}, ValueError, "beta", "[B, T, HV] = [", ", 10, 1]"),
    change("beta of 4 dimensions", "beta", lambda b: b[..., None], ValueError, ", 10, 2]", ", 10, 2, 1]"),
    change("A_log per query head", "A_log", lambda x: x[:1], ValueError, "[HV] = [2]", "[1]"),
    change("A_log of 2 dimensions", "A_log", lambda x: x[None], ValueError, "[HV] = [2]", "[1, 2]"),
    change("A_log every other", "A_log", every_other, ValueError, "contiguous elements", "(2,)"),
    change("dt_bias per head", "dt_bias", lambda x: x[:2], ValueError, "[HV * K] = [256] or [HV, K] = [2, 128]", "[2]"),
    change("dt_bias [K, HV]", "dt_bias", lambda x: x.view(2, 128).mT, ValueError, "[2, 128]", "[128, 2]"),
    *(values(name, ValueError, "None unless use_gate_in_kernel is True", "Tensor", **NO_GATE | {name: torch.zeros(1)})
      for name in ("A_log", "dt_bias")),
    values("A_log", ValueError, "a tensor with use_gate_in_kernel and no lower_bound", "None", A_log=None,
           lower_bound=None, safe_gate=False),
    *(value("lower_bound", wrong, TypeError, "a float or None", type(wrong).__name__) for wrong in ("-5", True)),
    *(value("lower_bound", wrong, ValueError, "a finite number", str(wrong)) for wrong in (-math.inf, math.nan)),
    *(value("lower_bound", wrong, ValueError, "a number below 0", str(wrong)) for wrong in (0, 0.0, 1.5)),
    value("lower_bound", -5.5, ValueError, "a number in [-5, 0) with safe_gate", "-5.5"),
    value("lower_bound", None, ValueError, "a float with use_gate_in_kernel and safe_gate", "None"),
    values("lower_bound", ValueError, "None unless use_gate_in_kernel or safe_gate is True", "-5.0",
           **NO_GATE | {"lower_bound": -5.0}),
    *(value(name, wrong, TypeError, "a bool", type(wrong).__name__) for name in FLAGS for wrong in (1, None)),
    values("allow_neg_eigval", ValueError, "use_beta_sigmoid_in_kernel=True with it",
           "use_beta_sigmoid_in_kernel=False", use_beta_sigmoid_in_kernel=False),
    value("return_intermediate_states", True, NotImplementedError, "False", "True; this kernel keeps no states"),
    value("cp_context", 1, NotImplementedError, "None", "int; sequences are not split over several GPUs"),
    change("cu_seqlens of float32", "cu_seqlens", Tensor.float, TypeError, "int32 or int64", "float32", PACKED),
    change("cu_seqlens of 2 dimensions", "cu_seqlens", lambda c: c[None], ValueError, "[N + 1]", "[1, 4]", PACKED),
    change("cu_seqlens of nothing", "cu_seqlens", lambda c: c[:0], ValueError, "[N + 1]", "[0]", PACKED),
    change("cu_seqlens every other", "cu_seqlens", every_other, ValueError, "contiguous elements", "(2,)", PACKED),
    change("no sequence for 10 tokens", "cu_seqlens", lambda c: c[:1], ValueError, "N >= 1 for T = 10", "[1]", PACKED),
    away("cu_seqlens", PACKED),
    several("cu_seqlens of a dense batch",
            {n: lambda a, n=n: torch.cat((a[n], a[n])) for n in ("q", "k", "v", "g", "beta", "out")},
            ValueError, "cu_seqlens", "None unless B = 1", "B = 2", PACKED),
    *offsets("that fall", [0, 5, 3, 10], "[0, 5, 3, 10]"),
    *offsets("that start late", [1, 3, 3, 10], "[1, 3, 3, 10]"),
    *offsets("that end early", [0, 3, 3, 9], "[0, 3, 3, 9]"),
    *offsets("that end late", [0, 3, 3, 11], "[0, 3, 3, 11]"),
    *offsets("too many to show", [0] * 20, "0] ..."),
    Wrong("cu_seqlens_cpu alone", lambda a: {"cu_seqlens_cpu": torch.tensor([0, TOKENS])}, ValueError,
          "cu_seqlens_cpu", "None without cu_seqlens", "Tensor", DENSE),
    several("cu_seqlens_cpu too short", {"cu_seqlens_cpu": on_cpu([0, 10])}, ValueError, "cu_seqlens_cpu",
            "the shape of cu_seqlens, [4]", "[2]", PACKED),
    change("cu_seqlens_cpu of float32", "cu_seqlens_cpu", Tensor.float, TypeError, "int32 or int64", "float32", PACKED),
    change("cu_seqlens_cpu not on the CPU", "cu_seqlens_cpu", lambda c: c.to("meta"), ValueError, "a tensor on the CPU",
           "meta", PACKED),
    value("scale", "1", TypeError, "a float or None", "str"),
    value("scale", True, TypeError, "a float or None", "bool"),
    value("scale", math.inf, ValueError, "a finite number", "inf"),
    value("scale", math.nan, ValueError, "a finite number", "nan"),
    value("scale", torch.ones(()), TypeError, "a float or None", "Tensor"),
    *of_states("initial_state", "[N, HV", DENSE),
    *of_states("state_pool", "[pool, HV", PACKED),
    several("a state too few", {"initial_state": lambda a: a["initial_state"][:1]}, ValueError, "initial_state",
            "one state for each of 2 sequences", "1", DENSE),
    several("a state too many", {"initial_state": lambda a: a["initial_state"].repeat(2, 1, 1, 1)}, ValueError,
            "initial_state", "one state for each of 2 sequences", "4", DENSE),
    Wrong("a pool beside an initial state", lambda a: {"state_pool": a["initial_state"].clone()}, ValueError,
          "state_pool", "None beside an initial_state", "Tensor", DENSE),
    Wrong("a pool smaller than the batch", lambda a: {"state_pool": a["state_pool"][:2], "initial_state_indices": None},
          ValueError, "state_pool", "at least N = 3 states", "2", PACKED),
    Wrong("indices without a pool", lambda a: {"state_pool": None}, ValueError, "initial_state_indices",
          "None without a state_pool", "Tensor", PACKED),
    Wrong("indices of initial states", lambda a: {"initial_state_indices": int32(0, 1).to(a["q"].device)}, ValueError,
          "initial_state_indices", "None without a state_pool", "Tensor", DENSE),
    *(change(f"indices {label}", "initial_state_indices", how, error, says, got, PACKED)
      for label, how, error, says, got in (
        ("of int64", Tensor.long, TypeError, "int32", "int64"),
        ("of float32", Tensor.float, TypeError, "int32", "float32"),
        ("too short", lambda i: i[:1], ValueError, "[N] = [3]", "[1]"),
        ("of 2 dimensions", lambda i: i[None], ValueError, "[N] = [3]", "[1, 3]"),
        ("every other", every_other, ValueError, "contiguous elements", "(2,)"),
    )),
    several("indices beyond the pool", {"initial_state_indices": on_device([0, 5, 1], torch.int32)}, ValueError,
            "initial_state_indices", "below the 5 rows of state_pool", "5", PACKED, devices=CPU),
    away("initial_state_indices", PACKED),
    *(value("operand_dtype", wrong, TypeError, "torch.float16, torch.bfloat16 or None", repr(wrong))
      for wrong in (torch.float32, "float16", 16)),
    *(value("use_intracard_cp", wrong, ValueError, "'auto', True or False", repr(wrong))
      for wrong in ("on", None, 1)),
    values("use_intracard_cp", ValueError, "'auto' or False unless a sequence has at least 2048 tokens",
           "True with at most 10", DENSE, use_intracard_cp=True, workspace=None),
    values("use_intracard_cp", ValueError, "'auto' or False unless a sequence has at least 2048 tokens",
           "True with at most 7", PACKED, use_intracard_cp=True, workspace=None),
    several("2047 tokens to cut", lengthened(2047) | {"use_intracard_cp": lambda a: True}, ValueError,
            "use_intracard_cp", "at least 2048 tokens", "2047", DENSE),
    several("packed sequences of 2047 tokens", lengthened(2049) | {
        "cu_seqlens": on_device([0, 1, 2, 2049]), "cu_seqlens_cpu": on_cpu([0, 1, 2, 2049]),
        "use_intracard_cp": lambda a: True}, ValueError, "use_intracard_cp", "at least 2048 tokens", "2047", PACKED),
    change("workspace of int8", "workspace", lambda w: w.view(torch.int8), TypeError, "uint8", "int8"),
    change("workspace of 2 dimensions", "workspace", lambda w: w[None], ValueError, "1 dimension", "[1, "),
    change("workspace every other", "workspace", lambda w: torch.cat((w, w))[::2], ValueError, "contiguous elements",
           "(2,)"),
    change("workspace a byte too small", "workspace", lambda w: w[: 2 * BLOCK_BYTES - 1], ValueError,
           "at least 119808 bytes, one chunk of 64 tokens of every value head", "119807"),
    change("workspace at an odd address", "workspace", lambda w: torch.cat((w, w))[64:], ValueError,
           "a multiple of 128 bytes", "64 bytes past it", devices=CUDA),
    several("workspace too small to cut", lengthened(2048) | {
        "use_intracard_cp": lambda a: True, "workspace": lambda a: a["workspace"].new_empty(2 * 32 * 2 * 59904 - 1)},
            ValueError, "workspace", "at least 7667712 bytes with use_intracard_cp=True", "7667711", DENSE),
    several("workspace too small to cut packed sequences", lengthened(2048) | {
        "cu_seqlens": on_device([0, 0, 0, 2048]), "cu_seqlens_cpu": on_cpu([0, 0, 0, 2048]),
        "use_intracard_cp": lambda a: True, "workspace": lambda a: a["workspace"].new_empty((32 + 3) * 2 * 59904 - 1)},
            ValueError, "workspace", "at least 4193280 bytes with use_intracard_cp=True", "4193279", PACKED),
    *(change(f"{name} requires a gradient", name, lambda x: x.clone().requires_grad_(), ValueError,
             "no gradient (no backward; cula.kda.chunk_kda has one with flash-linear-attention)", "requires_grad=True",
             modes)
      for name, modes in (("q", BOTH), ("k", BOTH), ("v", BOTH), ("g", BOTH), ("beta", BOTH), ("A_log", BOTH),
                          ("dt_bias", BOTH), ("initial_state", DENSE), ("state_pool", PACKED), ("out", BOTH))),
    several("an empty batch and a wrong g",
            {n: lambda a, n=n: a[n][:0] for n in ("q", "k", "v", "beta", "out", "initial_state")}, ValueError, "g",
            "[B, T, HV, K] = [0, 10, 2, 128]", "[2, 10, 2, 128]", DENSE),
]  # fmt: skip


def cases(device: str) -> list:
    """The list for one device, once for each mode."""
    return [
        pytest.param(wrong, mode, id=f"{mode}-{wrong.label}")
        for wrong in WRONG
        for mode in wrong.modes
        if device in wrong.devices
    ]


def good_arguments(mode: str, device: torch.device | str) -> Arguments:
    packed = mode == "packed"
    given = inputs(
        1 if packed else 2, TOKENS, HEADS, HEADS_V, gate="safe", logits=True, initial=True,
        lengths=(3, 0, 7) if packed else None, states=POOL if packed else 2, device=device,
    )  # fmt: skip
    a: Arguments = {name: x for name, x in given.items() if x is not None}
    a |= {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
    a |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    a |= {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if packed:
        a["state_pool"] = a.pop("initial_state")
        a["initial_state_indices"] = int32(2, -1, 0).to(device)
        a["cu_seqlens_cpu"] = a["cu_seqlens"].cpu()
    workspace = torch.full((2 * BLOCK_BYTES,), 9, dtype=torch.uint8, device=device)
    return a | {"workspace": workspace, "out": torch.full_like(a["v"], 9.0)}


def contents(arguments: Arguments) -> dict[str, Tensor]:
    """A copy of every byte behind the tensors, those between the elements of a view included."""
    found = {}
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[name] = raw.set_(tensor.detach().untyped_storage()).clone()
    return found


def assert_refused(wrong: Wrong, good: Arguments) -> None:
    arguments = good | wrong.change(good)
    before = contents(arguments)
    with pytest.raises(wrong.error) as caught:
        chunk_kda(**arguments)
    message = str(caught.value)
    assert type(caught.value) is wrong.error
    head, found, tail = message.partition(", got ")
    assert found and head.startswith(f"{wrong.argument}: expected "), message
    assert wrong.says in head and wrong.got in tail, message
    for name, raw in contents(arguments).items():
        assert torch.equal(raw, before[name]), f"{name} has changed"


@pytest.mark.parametrize("wrong, mode", cases("cpu"))
def test_wrong_arguments_are_refused(wrong, mode):
    assert_refused(wrong, good_arguments(mode, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong, mode", cases("cuda"))
def test_wrong_cuda_arguments_are_refused(cuda, wrong, mode):
    assert_refused(wrong, good_arguments(mode, cuda))
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", BOTH)
def test_the_good_arguments_are_good(mode):
    """Otherwise the tests above would prove little."""
    arguments = good_arguments(mode, "cpu")
    before = contents(arguments)
    chunk_kda(**arguments)
    changed = {n for n, raw in contents(arguments).items() if not torch.equal(raw, before[n])}
    assert changed == {"out"} | ({"state_pool"} if mode == "packed" else set())


@pytest.mark.parametrize("mode", BOTH)
def test_arguments_that_may_be_left_out(mode):
    required = ("q", "k", "v", "g", "beta")
    good = good_arguments(mode, "cpu")
    a = {name: good[name] for name in required}
    a["g"] = -a["g"].abs()
    o, state = chunk_kda(*a.values())
    assert o.shape == a["v"].shape and state is None


def by_name(a: Arguments, how: Callable[[Tensor], Tensor], *names: str) -> Arguments:
    return {name: how(a[name]) for name in names if name in a}


def gapped(tensor: Tensor) -> Tensor:
    """The same shape inside a larger tensor, at odd distances."""
    shape = tensor.shape
    spread = torch.zeros(shape[0], 2 * shape[1] + 1, shape[2] + 3, shape[3] + 5, dtype=tensor.dtype)
    return spread[:, 1::2, 1 : 1 + shape[2], 3 : 3 + shape[3]]


TOKEN_TENSORS = ("q", "k", "v", "out")
ALLOWED: dict[str, tuple[tuple[str, ...], Callable[[Arguments], Arguments]]] = {
    "activations of float16": (BOTH, lambda a: by_name(a, Tensor.half, *TOKEN_TENSORS)),
    "activations of float32": (BOTH, lambda a: by_name(a, Tensor.float, *TOKEN_TENSORS)),
    "all of float64": (
        BOTH,
        lambda a: by_name(
            a, Tensor.double, *TOKEN_TENSORS, "g", "beta", "A_log", "dt_bias", "initial_state", "state_pool"
        ),
    ),
    "float32 states of float64": (BOTH, lambda a: by_name(a, Tensor.double, *TOKEN_TENSORS)),
    "activations with gaps": (BOTH, lambda a: by_name(a, gapped, *TOKEN_TENSORS, "g")),
    "dimensions that no kernel takes": (
        DENSE,
        lambda a: by_name(a, lambda x: x[..., :3], "q", "k", "g")
        | by_name(a, lambda x: x[..., :5], "v", "out")
        | by_name(a, lambda x: x[:6], "dt_bias")
        | by_name(a, lambda x: x[..., :3, :5].contiguous(), "initial_state"),
    ),
    "a strength of any strides": (BOTH, lambda a: by_name(a, lambda b: every_other(b.mT).mT.half(), "beta")),
    "a bias [HV, K]": (BOTH, lambda a: by_name(a, lambda b: spaced(b.view(HEADS_V, DIM)), "dt_bias")),
    "gate parameters of bfloat16": (BOTH, lambda a: by_name(a, Tensor.bfloat16, "A_log", "dt_bias")),
    "no rate and no bias": (BOTH, lambda a: {"A_log": None, "dt_bias": None}),
    "an integer bound": (BOTH, lambda a: {"lower_bound": -1}),
    "a bound that is not safe": (BOTH, lambda a: {"lower_bound": -50.0, "safe_gate": False}),
    "no bound": (BOTH, lambda a: {"lower_bound": None, "safe_gate": False}),
    "log decays": (BOTH, lambda a: NO_GATE | {"g": -a["g"].abs()}),
    "safe log decays": (BOTH, lambda a: NO_GATE | {"g": -a["g"].abs(), "safe_gate": True}),
    "a bound of log decays": (
        BOTH, lambda a: NO_GATE | {"g": -a["g"].abs(), "safe_gate": True, "lower_bound": -1.0}
    ),
    "cu_seqlens of int64": (PACKED, lambda a: by_name(a, Tensor.long, "cu_seqlens")),
    "no copy of cu_seqlens": (PACKED, lambda a: {"cu_seqlens_cpu": None}),
    "a pool of any size and pitch": (PACKED, lambda a: {"state_pool": torch.zeros(9, 6, DIM, DIM)[::2, 1:3]}),
    "transposed states": (BOTH, lambda a: by_name(a, turned, "initial_state", "state_pool")),
    "a pool of a dense batch": (
        DENSE,
        lambda a: {"state_pool": a["initial_state"], "initial_state": None, "initial_state_indices": int32(1, -7)},
    ),
    "a pool that is only read": (PACKED, lambda a: {"update_state_pool": False}),
    "no pool to update": (DENSE, lambda a: {"update_state_pool": False}),
    "only padding beside an empty pool": (
        PACKED, lambda a: {"state_pool": a["state_pool"][:0], "initial_state_indices": int32(-1, -9, -2)}
    ),
    "no indices": (PACKED, lambda a: {"initial_state_indices": None}),
    "states [V, K]": (
        BOTH,
        lambda a: {"state_v_first": True} | by_name(a, lambda s: s.mT.contiguous(), "initial_state", "state_pool"),
    ),
    "an integer scale": (BOTH, lambda a: {"scale": 2}),
    "a scale of zero": (BOTH, lambda a: {"scale": 0.0}),
    "no recomputing": (BOTH, lambda a: {"disable_recompute": True}),
    "never cut": (BOTH, lambda a: {"use_intracard_cp": False}),
    "operands of float16": (BOTH, lambda a: {"operand_dtype": torch.float16}),
    "operands of bfloat16": (BOTH, lambda a: {"operand_dtype": torch.bfloat16}),
    "a large workspace": (BOTH, lambda a: {"workspace": torch.zeros(1 << 20, dtype=torch.uint8)}),
    "the smallest workspace": (BOTH, lambda a: {"workspace": torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8)}),
}  # fmt: skip


@pytest.mark.parametrize(
    "label, mode", [(label, mode) for label, (modes, _) in ALLOWED.items() for mode in modes]
)
def test_unusual_arguments_are_accepted(label, mode):
    good = good_arguments(mode, "cpu")
    o, _ = chunk_kda(**good | ALLOWED[label][1](good))
    assert torch.isfinite(o).all()


@pytest.mark.parametrize("batch, lengths", [(1, (2048,)), (2, None), (1, (2048, 0, 1))])
def test_sequences_that_can_be_cut_are_accepted(batch, lengths):
    tokens = 2048 if lengths is None else sum(lengths)
    given = inputs(batch, tokens, 1, 1, dim_k=2, dim_v=2, gate="log", lengths=lengths)
    sequences = None if lengths is None else len(lengths)
    size = kda_workspace_bytes(batch, tokens, 1, sequences)
    workspace = torch.empty(size, dtype=torch.uint8)
    o, _ = chunk_kda(**given, use_intracard_cp=True, workspace=workspace)
    assert torch.equal(o, chunk_kda(**given, use_intracard_cp=False)[0])


@pytest.mark.parametrize("mode", BOTH)
def test_gradients_are_no_matter_under_no_grad(mode):
    good = good_arguments(mode, "cpu") | {"out": None}
    expected, _ = chunk_kda(**good)
    again = good_arguments(mode, "cpu") | {"out": None}
    again |= by_name(again, Tensor.requires_grad_, "q", "k", "v", "g", "beta", "A_log", "dt_bias")
    with torch.no_grad():
        o, state = chunk_kda(**again)
    assert torch.equal(o, expected) and not o.requires_grad and not state.requires_grad


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((1, 1, 1), 59_904),
        ((1, 64, 3), 3 * 59_904),
        ((2, 65, 1), 4 * 59_904),
        ((1, 64, 2, 5), 12 * 59_904),
        ((0, 5, 3), 3 * 59_904),
        ((1, 0, 3, 0), 3 * 59_904),
    ],
)
def test_the_size_of_a_workspace(sizes, expected):
    """59,904 bytes per chunk and value head, where packed sequences may fill T // 64 + N chunks; one at least."""
    assert kda_workspace_bytes(*sizes) == expected


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ((1.0, 1, 1), TypeError, "batch: expected an int, got float"),
        ((True, 1, 1), TypeError, "batch: expected an int, got bool"),
        ((1, None, 1), TypeError, "tokens: expected an int, got NoneType"),
        ((1, 1, "1"), TypeError, "value_heads: expected an int, got str"),
        ((1, 1, 1, 2.0), TypeError, "sequences: expected an int or None, got float"),
        ((-1, 1, 1), ValueError, "batch: expected at least 0, got -1"),
        ((1, -1, 1), ValueError, "tokens: expected at least 0, got -1"),
        ((1, 1, 0), ValueError, "value_heads: expected at least 1, got 0"),
        ((1, 1, 1, -1), ValueError, "sequences: expected at least 0, got -1"),
        ((2, 1, 1, 3), ValueError, "sequences: expected None unless batch = 1, got 3 with batch = 2"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused(sizes, error, message):
    with pytest.raises(error) as caught:
        kda_workspace_bytes(*sizes)
    assert str(caught.value) == message
