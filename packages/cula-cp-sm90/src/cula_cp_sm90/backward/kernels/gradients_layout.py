"""What the threads share that compute the gradients of a chunk, and which tokens and channels they have."""

from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cula_core.delta_rule.kernels.block import WIDE

SUB_INDICES = [(b, half, m) for m in range(2) for half in range(2) for b in range(2)]
# Where matrices begin in shared memory, in elements of 16 bits. Running sums of decays have 32 bits, and so have gates
# in fp32, which they replace; gates in 16 bits have a place of their own.
DO, Y, Z, S, D, Q, K, G, GATES, END = (i * WIDE for i in (0, 1, 2, 3, 5, 7, 8, 9, 11, 12))


class Input(IntEnum):
    """What is loaded together, and given back together."""

    GATES = 0
    OUTPUTS = 1  # do, y
    Z = 2
    TOKENS = 3  # q, k, factors
    STATES = 4
    D_STATES = 5


class Shared(NamedTuple):
    """Shared memory of a CTA.

    full, empty: barriers of every `Input`. do, y, z, s, d, q, k, g: what is loaded; do is replaced by scaled numbers,
    and at last do and y, s by results. planes: running sums of decays [thread, 4 numbers] per tile of 8 tokens, and at
    last the gradient of decays. factors [4, token]: as `prepare` writes them. scales [2, token]: factors of q~ and k~.
    dA, inside: see `gradients_registers`. own [token, 2]: the diagonals of dA and of -y z^T. ends [channel, sub-block]:
    e, and 2^e. largest [warp]. sums: for rate and bias, where `inside` was.
    """

    full: cute.Pointer
    empty: cute.Pointer
    do: cute.Pointer
    y: cute.Pointer
    z: cute.Pointer
    s: cute.Pointer
    d: cute.Pointer
    q: cute.Pointer
    k: cute.Pointer
    g: cute.Pointer
    planes: cute.Pointer
    factors: cute.Pointer
    scales: cute.Tensor
    dA: cute.Pointer
    inside: cute.Pointer
    own: cute.Tensor
    ends: cute.Tensor
    largest: cute.Tensor
    sums: cute.Pointer


class Thread(NamedTuple):
    """tidx: of those that compute. w: its warp, of group w / 4. token: the first of its tokens of a tile of 8."""

    tidx: cutlass.Int32
    lane: cutlass.Int32
    w: cutlass.Int32
    token: cutlass.Int32
