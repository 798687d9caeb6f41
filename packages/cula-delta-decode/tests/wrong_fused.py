"""Wrong parts of the two options of decode, short convolution and gated norm, and wrong arguments of `fill`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cula_testing.refusals import ANYWHERE, CPU, CUDA, ELSEWHERE, Table, resized
from cula_testing.tensors import every_other, shifted

FUSED, FILL = ("fused",), ("fill",)
CHANNELS = 768  # 2 H K + HV V of H, HV, K, V = 2, 4, 64, 128
LAST, FLOATS = "a contiguous last dimension", "float32 or bfloat16 or float16"
# The parts of the two options, by what they are called among good arguments.
CONVOLUTION_NAMES = {
    "inputs": "past",
    "positions": "past_positions",
    "weight": "taps",
    "bias": "tap_bias",
}
NORM_NAMES = {"gate": "gate", "weight": "norm_weight", "eps": "eps", "activation": "activation"}
_TABLE = Table(FUSED)
change, several, value = _TABLE.change, _TABLE.several, _TABLE.value
no_tensor, away, entry = _TABLE.no_tensor, _TABLE.away, _TABLE.entry


def part(
    label: str,
    name: str,
    how: Callable[[Tensor], Any],
    error,
    says: str,
    got: str,
    devices=ANYWHERE,
):
    """A wrong tensor of a convolution or a norm, which has this name in messages: "norm.gate"."""
    option, field = name.split(".")
    given = {"convolution": CONVOLUTION_NAMES, "norm": NORM_NAMES}[option][field]
    makers = {given: lambda a: how(a[given])}
    return several(f"{name} {label}", makers, error, name, says, got, FUSED, devices)


# What the two options are made of.
FUSED_WRONG = [
    *(
        part("is no tensor", name, lambda x: [1.0], TypeError, "a torch.Tensor", "list")
        for name in ("convolution.inputs", "convolution.positions", "convolution.weight", "convolution.bias",
                     "norm.gate", "norm.weight")
    ),
    *(
        part("elsewhere", name, lambda x: x.to(ELSEWHERE[x.device.type]), ValueError, "a tensor on ", "")
        for name in ("convolution.inputs", "convolution.positions", "convolution.weight", "convolution.bias",
                     "norm.gate", "norm.weight")
    ),
    *(
        part("with gaps", name, every_other, ValueError, "contiguous elements", "strides")
        for name in ("convolution.inputs", "convolution.weight", "convolution.bias", "norm.weight")
    ),
    part("with gaps", "norm.gate", every_other, ValueError, LAST, "strides"),
    *(
        part("of int32", name, Tensor.int, TypeError, FLOATS, "int32")
        for name in ("convolution.weight", "norm.weight")
    ),
    *(
        part("of float64", name, Tensor.double, TypeError, FLOATS, "float64", CUDA)
        for name in ("convolution.weight", "norm.weight")
    ),
    *(
        part("requires a gradient", name, lambda x: x.clone().requires_grad_(), ValueError, "no gradient",
             "requires_grad=True")
        for name in ("convolution.inputs", "convolution.weight", "convolution.bias", "norm.gate", "norm.weight")
    ),
    part("of float16", "convolution.inputs", Tensor.half, TypeError, "bfloat16", "float16"),
    part("of 2 dimensions", "convolution.inputs", lambda x: x[0], ValueError,
         f"[pool, L, 2 H K + HV V] = [5, L, {CHANNELS}]", f"[8, {CHANNELS}]"),
    part("of a smaller pool", "convolution.inputs", lambda x: x[:4], ValueError, "= [5, L, ", "[4, 8, "),
    part("of fewer channels", "convolution.inputs", lambda x: x[..., 1:].contiguous(), ValueError, "= [5, L, ",
         f"[5, 8, {CHANNELS - 1}]"),
    *(
        several(f"{length} inputs", {"past": resized("past", (1, length))}, ValueError, "convolution.inputs",
                "a power of two L of at least 8 for 3 tokens", str(length), FUSED)
        for length in (0, 4, 12)
    ),
    part("at an odd address", "convolution.inputs", shifted, ValueError, "a multiple of 16 bytes", "0x", CUDA),
    part("at an odd address", "convolution.weight", shifted, ValueError, "a multiple of 16 bytes", "0x", CUDA),
    part("of int64", "convolution.positions", Tensor.long, TypeError, "int32", "int64"),
    part("of float32", "convolution.positions", Tensor.float, TypeError, "int32", "float32"),
    part("too short", "convolution.positions", lambda x: x[:1], ValueError, "[N] = [2]", "[1]"),
    part("of 2 dimensions", "convolution.positions", lambda x: x[None], ValueError, "[N] = [2]", "[1, 2]"),
    part("below 0", "convolution.positions", lambda x: x - 1, ValueError, "values of at least 0", "-1", CPU),
    part("of 3 taps", "convolution.weight", lambda x: x[:, :3].contiguous(), ValueError,
         f"[2 H K + HV V, 4] = [{CHANNELS}, 4]", f"[{CHANNELS}, 3]"),
    part("of 3 dimensions", "convolution.weight", lambda x: x[:, None], ValueError, f"= [{CHANNELS}, 4]", "1, 4]"),
    part("of fewer channels", "convolution.weight", lambda x: x[:-1], ValueError, f"= [{CHANNELS}, 4]",
         f"[{CHANNELS - 1}, 4]"),
    part("of another dtype", "convolution.bias", Tensor.half, TypeError, "float32", "float16"),
    part("of fewer channels", "convolution.bias", lambda x: x[:-1], ValueError, f"[2 H K + HV V] = [{CHANNELS}]",
         f"[{CHANNELS - 1}]"),
    part("of 2 dimensions", "convolution.bias", lambda x: x[None], ValueError, f"= [{CHANNELS}]", f"[1, {CHANNELS}]"),
    part("of fewer tokens", "norm.gate", lambda x: x[:, :2], ValueError, "the shape of v, [2, 3, 4, 128]",
         "[2, 2, 4, 128]"),
    part("of 3 dimensions", "norm.gate", lambda x: x[0], ValueError, "the shape of v", "[3, 4, 128]"),
    part("of another dtype", "norm.gate", Tensor.half, TypeError, "the dtype of v, bfloat16", "float16"),
    part("of K", "norm.weight", lambda x: x[:64], ValueError, "[V] = [128]", "[64]"),
    part("per head", "norm.weight", lambda x: x.expand(4, -1), ValueError, "[V] = [128]", "[4, 128]"),
    *(
        several(f"norm.eps={eps!r}", {"eps": lambda a, eps=eps: eps}, error, "norm.eps", says, got, FUSED)
        for eps, error, says, got in (
            (None, TypeError, "a float", "NoneType"),
            ("1", TypeError, "a float", "str"),
            (True, TypeError, "a float", "bool"),
            (math.nan, ValueError, "a finite number", "nan"),
            (math.inf, ValueError, "a finite number", "inf"),
            (-1e-5, ValueError, "a number of at least 0", "-1e-05"),
        )
    ),
    *(
        several(f"norm.activation={name!r}", {"activation": lambda a, name=name: name}, ValueError, "norm.activation",
                "'silu' or 'sigmoid'", repr(name), FUSED)
        for name in ("swish", None, ["silu"])
    ),
    *(
        entry(f"a convolution {label}", change, ValueError, "convolution", "None unless every state stays in its slot",
              "a ShortConvolution", FUSED)
        for label, change in (
            ("that commits nothing", lambda a: {"commit": False}),
            ("whose states go elsewhere", lambda a: {"output_state_indices": a["state_indices"]}),
            ("whose tokens have slots", lambda a: {"token_state_indices": a["state_indices"][:, None].repeat(1, 3)}),
        )
    ),
    entry("a convolution of rows with several slots",
          lambda a: {"state_indices": a["state_indices"][:, None].repeat(1, 2), "num_accepted": a["state_indices"]},
          ValueError, "convolution", "None with [N, slots] state_indices", "a ShortConvolution", FUSED),
]  # fmt: skip
FILL_WRONG = [
    *(no_tensor(name, [1.0], FILL) for name in ("ring", "inputs", "positions")),
    *(away(name, FILL) for name in ("inputs", "positions", "state_indices")),
    change("a ring of int32", "ring", Tensor.int, TypeError, "bfloat16 or float16", "int32", FILL),
    change("a ring of float32", "ring", Tensor.float, TypeError, "bfloat16 or float16", "float32", FILL, CUDA),
    change("a ring of 2 dimensions", "ring", lambda x: x[0], ValueError, "[pool, L, 2 H K + HV V]", "[8, 12]", FILL),
    *(
        change(f"a ring of {length}", "ring", lambda x, n=length: x.new_zeros(5, n, 12), ValueError,
               "a power of two L of at least 4", str(length), FILL)
        for length in (0, 2, 6)
    ),
    change("a ring with gaps", "ring", every_other, ValueError, "contiguous elements", "strides", FILL),
    entry("a ring too small without slots", lambda a: {"ring": a["ring"][:1], "state_indices": None}, ValueError,
          "ring", "a pool of at least N = 2 rings", "1", FILL),
    change("inputs of another dtype", "inputs", Tensor.float, TypeError, "bfloat16", "float32", FILL),
    change("inputs of 2 dimensions", "inputs", lambda x: x[0], ValueError, "= [B, n, 12]", "[3, 12]", FILL),
    change("inputs of fewer channels", "inputs", lambda x: x[..., 1:], ValueError, "= [B, n, 12]", "[2, 3, 11]", FILL),
    change("no inputs", "inputs", lambda x: x[:, :0], ValueError, "1 to 8 inputs of a row", "0", FILL),
    change("nine inputs", "inputs", lambda x: x.repeat(1, 3, 1), ValueError, "1 to 8 inputs of a row", "9", FILL),
    change("positions of int64", "positions", Tensor.long, TypeError, "int32", "int64", FILL),
    change("positions of one row", "positions", lambda x: x[:1], ValueError, "[N] = [2]", "[1]", FILL),
    change("positions below 0", "positions", lambda x: x - 9, ValueError, "values of at least 0", "-8", FILL, CPU),
    change("slots of int64", "state_indices", Tensor.long, TypeError, "int32", "int64", FILL),
    change("slots of one row", "state_indices", lambda x: x[:1], ValueError, "[N] = [2]", "[1]", FILL),
    change("slots behind the ring", "state_indices", lambda x: x + 3, ValueError, "below the 5 states of ring", "5",
           FILL, CPU),
    change("a filled slot twice", "state_indices", lambda x: x * 0, ValueError,
           "slots that differ because they are written", "0 twice", FILL, CPU),
    value("null_slot", 1 << 31, ValueError, "a 32-bit integer", str(1 << 31), FILL),
    *(
        change(f"a {name} that requires a gradient", name, lambda x: x.clone().requires_grad_(), ValueError,
               "no gradient", "requires_grad=True", FILL)
        for name in ("ring", "inputs")
    ),
]  # fmt: skip
