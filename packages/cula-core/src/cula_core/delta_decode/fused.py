"""The argument contract of what a decode call does before and behind: short convolution and gated norm."""

from __future__ import annotations

from torch import Tensor

from .. import arguments
from ..reference.decode_fused import (
    CONVOLUTION_WIDTH,
    NORM_ACTIVATIONS,
    GatedNorm,
    ShortConvolution,
    least_length,
)
from .slots import (
    NO_BACKWARD,
    STATES,
    Sizes,
    check_contiguous,
    check_dtype,
    check_null_slot,
    check_one_slot,
    check_slots_once,
)


def check_convolution(
    convolution: ShortConvolution, k: Tensor, v: Tensor, state: Tensor, sizes: Sizes
) -> None:
    """Raises unless the rings, positions and weights of a convolution fit the activations."""
    if not isinstance(convolution, ShortConvolution):
        got = type(convolution).__name__
        arguments.type_error("convolution", "a ShortConvolution", got)
    inputs, positions, weight, bias = convolution
    channels = 2 * sizes.heads * sizes.dim_k + sizes.heads_v * sizes.dim_v
    name = "convolution.inputs"
    arguments.tensor(name, inputs)
    check_dtype(name, inputs, (k.dtype,))
    if inputs.dim() != 3 or inputs.shape[0] != state.shape[0] or inputs.shape[2] != channels:
        expected = f"[pool, L, 2 H K + HV V] = [{state.shape[0]}, L, {channels}]"
        arguments.value_error(name, expected, list(inputs.shape))
    _length(name, inputs, sizes.tokens, f" for {sizes.tokens} tokens")
    name = "convolution.weight"
    arguments.tensor(name, weight)
    if weight.shape != (channels, CONVOLUTION_WIDTH):
        expected = f"[2 H K + HV V, {CONVOLUTION_WIDTH}] = [{channels}, {CONVOLUTION_WIDTH}]"
        arguments.value_error(name, expected, list(weight.shape))
    check_dtype(name, weight, STATES[sizes.kind])
    for name, x in (("convolution.inputs", inputs), ("convolution.weight", weight)):
        arguments.device(name, x, sizes.lead, sizes.lead_name)
        check_contiguous(name, x)
        if x.is_cuda and arguments.is_real(x) and x.data_ptr() % 16:
            expected = "an address that is a multiple of 16 bytes"
            arguments.value_error(name, expected, hex(x.data_ptr()))
    if bias is not None:
        name = "convolution.bias"
        arguments.tensor(name, bias)
        check_dtype(name, bias, (weight.dtype,))
        arguments.vector(name, bias, "2 H K + HV V", channels)
        arguments.device(name, bias, sizes.lead, sizes.lead_name)
    _positions("convolution.positions", positions, sizes)
    arguments.no_gradients(
        NO_BACKWARD,
        **{"convolution.inputs": inputs, "convolution.weight": weight, "convolution.bias": bias},
    )


def check_fill_convolution_ring(
    ring: Tensor,
    inputs: Tensor,
    positions: Tensor,
    state_indices: Tensor | None,
    null_slot: int | None,
) -> None:
    """Raises unless the arguments of `fill_convolution_ring` fit together."""
    arguments.tensor("ring", ring)
    kind = "cuda" if ring.is_cuda else "cpu"
    check_dtype("ring", ring, arguments.ACTIVATIONS[kind])
    if ring.dim() != 3:
        arguments.value_error("ring", "[pool, L, 2 H K + HV V]", list(ring.shape))
    length, channels = ring.shape[1:]
    _length("ring", ring, 1)
    check_contiguous("ring", ring)
    arguments.tensor("inputs", inputs)
    check_dtype("inputs", inputs, (ring.dtype,))
    if inputs.dim() != 3 or inputs.shape[2] != channels:
        expected = f"[B, n, 2 H K + HV V] = [B, n, {channels}]"
        arguments.value_error("inputs", expected, list(inputs.shape))
    rows, count = inputs.shape[:2]
    if not 1 <= count <= length:
        expected = f"1 to {length} inputs of a row (dimension 1), which the ring holds"
        arguments.value_error("inputs", expected, count)
    arguments.device("inputs", inputs, ring, "ring")
    sizes = Sizes(kind, rows, count, 0, 0, 0, 0, None, ring, "ring")
    _positions("positions", positions, sizes)
    check_null_slot(null_slot)
    check_one_slot(ring, state_indices, sizes, "ring")
    arguments.no_gradients(NO_BACKWARD, ring=ring, inputs=inputs)
    check_slots_once(ring, state_indices, null_slot, "ring")


def _length(name: str, ring: Tensor, tokens: int, what: str = "") -> None:
    """Checks how many inputs a ring holds, for calls of so many tokens."""
    length, least = ring.shape[1], least_length(tokens)
    if length < least or length & (length - 1):
        arguments.value_error(name, f"a power of two L of at least {least}{what}", length)


def _positions(name: str, x: Tensor, sizes: Sizes) -> None:
    """Checks where the next token of every row is."""
    arguments.int32_vector(name, x, "N", sizes.rows, sizes.lead, sizes.lead_name)
    if arguments.is_readable(x) and bool((x < 0).any()):
        arguments.value_error(name, "values of at least 0", x.min().item())


def check_norm(norm: GatedNorm, v: Tensor, sizes: Sizes) -> None:
    """Raises unless the gate and the weight of a norm fit the output."""
    if not isinstance(norm, GatedNorm):
        arguments.type_error("norm", "a GatedNorm", type(norm).__name__)
    gate, weight, eps, activation = norm
    name = "norm.gate"
    arguments.tensor(name, gate)
    if gate.shape != v.shape:
        arguments.value_error(name, f"the shape of v, {list(v.shape)}", list(gate.shape))
    arguments.activation(name, gate, v, "v")
    name = "norm.weight"
    arguments.tensor(name, weight)
    check_dtype(name, weight, STATES[sizes.kind])
    arguments.vector(name, weight, "V", sizes.dim_v)
    arguments.device(name, weight, sizes.lead, sizes.lead_name)
    if eps is None:
        arguments.type_error("norm.eps", "a float", "NoneType")
    arguments.number("norm.eps", eps)
    if not eps >= 0:
        arguments.value_error("norm.eps", "a number of at least 0", eps)
    if not isinstance(activation, str) or activation not in NORM_ACTIVATIONS:
        expected = " or ".join(repr(name) for name in NORM_ACTIVATIONS)
        arguments.value_error("norm.activation", expected, repr(activation))
    arguments.no_gradients(NO_BACKWARD, **{"norm.gate": gate, "norm.weight": weight})
