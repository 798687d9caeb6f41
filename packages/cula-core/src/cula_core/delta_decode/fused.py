"""The argument contract of what a decode call does before and behind: short convolution and gated norm."""

from __future__ import annotations

from torch import Tensor

from .. import arguments
from ..reference.decode_fused import (
    CONVOLUTION_WIDTH,
    NORM_ACTIVATIONS,
    GatedNorm,
    ShortConvolution,
)
from .slots import NO_BACKWARD, STATES, Sizes, check_contiguous, check_dtype


def check_convolution(
    convolution: ShortConvolution, k: Tensor, v: Tensor, state: Tensor, sizes: Sizes
) -> None:
    """Raises unless the rings, positions and weights of a convolution fit the activations."""
    if not isinstance(convolution, ShortConvolution):
        got = type(convolution).__name__
        arguments.type_error("convolution", "a ShortConvolution", got)
    inputs, positions, weight, bias = convolution
    channels = 2 * sizes.heads * sizes.dim_k + sizes.heads_v * sizes.dim_v
    least = 1 << (sizes.tokens + CONVOLUTION_WIDTH - 2).bit_length()
    name = "convolution.inputs"
    arguments.tensor(name, inputs)
    check_dtype(name, inputs, (k.dtype,))
    if inputs.dim() != 3 or inputs.shape[0] != state.shape[0] or inputs.shape[2] != channels:
        expected = f"[pool, L, 2 H K + HV V] = [{state.shape[0]}, L, {channels}]"
        arguments.value_error(name, expected, list(inputs.shape))
    length = inputs.shape[1]
    if length < least or length & (length - 1):
        expected = f"a power of two L of at least {least} for {sizes.tokens} tokens"
        arguments.value_error(name, expected, length)
    name = "convolution.weight"
    arguments.tensor(name, weight)
    if weight.shape != (channels, CONVOLUTION_WIDTH):
        expected = f"[2 H K + HV V, {CONVOLUTION_WIDTH}] = [{channels}, {CONVOLUTION_WIDTH}]"
        arguments.value_error(name, expected, list(weight.shape))
    check_dtype(name, weight, STATES[sizes.kind])
    for name, x in (("convolution.inputs", inputs), ("convolution.weight", weight)):
        arguments.device(name, x, sizes.lead, sizes.lead_name)
        check_contiguous(name, x)
        if arguments.is_real(x) and x.data_ptr() % 16:
            expected = "an address that is a multiple of 16 bytes"
            arguments.value_error(name, expected, hex(x.data_ptr()))
    if bias is not None:
        name = "convolution.bias"
        arguments.tensor(name, bias)
        check_dtype(name, bias, (weight.dtype,))
        arguments.vector(name, bias, "2 H K + HV V", channels)
        arguments.device(name, bias, sizes.lead, sizes.lead_name)
    name = "convolution.positions"
    arguments.int32_vector(name, positions, "N", sizes.rows, sizes.lead, sizes.lead_name)
    if arguments.is_readable(positions) and bool((positions < 0).any()):
        arguments.value_error(name, "values of at least 0", positions.min().item())
    arguments.no_gradients(
        NO_BACKWARD,
        **{"convolution.inputs": inputs, "convolution.weight": weight, "convolution.bias": bias},
    )


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
    if activation not in NORM_ACTIVATIONS:
        expected = " or ".join(repr(name) for name in NORM_ACTIVATIONS)
        arguments.value_error("norm.activation", expected, repr(activation))
    arguments.no_gradients(NO_BACKWARD, **{"norm.gate": gate, "norm.weight": weight})
