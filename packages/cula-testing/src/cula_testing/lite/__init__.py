"""Calls of skip-list attention, and what must come out, for every package that has kernels of it."""

from .calls import (
    DENSE,
    LISTED,
    Call,
    Inputs,
    make_inputs,
    packed_bits,
    unpacked_bits,
    without_unlisted,
)
from .subject import Empty, Subject, empty_on

__all__ = [
    "DENSE",
    "LISTED",
    "Call",
    "Empty",
    "Inputs",
    "Subject",
    "empty_on",
    "make_inputs",
    "packed_bits",
    "unpacked_bits",
    "without_unlisted",
]
