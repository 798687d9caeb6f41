"""What is fixed when the attention kernels are compiled. Pure Python."""

from __future__ import annotations

import functools
from dataclasses import dataclass

HEAD_DIMS = (64, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")
BLOCK_M = 128
PADDING = 8  # elements behind a row in shared memory
QUERY_GROUP, KEY_GROUP = 16, 64  # rows with one scale where scores are products of 8-bit integers
QUANTIZED_ROWS = 64  # of a CTA that rounds queries or keys to 8-bit integers
BLOCK_N = (64, 128)  # the first is the default
# Words of 32 tiles in a row of a mask: what the kernel's shared memory holds.
MAX_WORDS = 128
MAX_LISTED = 32 * MAX_WORDS + 8  # tiles, and one behind the last
SHARED_MEMORY = (
    101_376  # of a CTA on the architectures that have least, and nearly all of their multiprocessor
)
ONE_CTA = ("sm_86", "sm_89", "sm_120a", "sm_121a")


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: batch, lengths, head counts, strides, scale and threshold are not among them.

    head_dim: of q, k and v, a multiple of 8. skip: only listed key tiles are visited, and the list for the next call is
    written. must_do: some tiles stay listed whatever their scores. packed: the sequences are those of `cu_seqlens`.
    index_dtype: of `cu_seqlens`. on_device: the direction is an element in device memory. int8: scores are products of
    8-bit integers.
    """

    dtype: str
    head_dim: int
    causal: bool = False
    skip: bool = False
    block_n: int = BLOCK_N[0]
    must_do: bool = False
    packed: bool = False
    index_dtype: str = "int32"
    on_device: bool = False
    int8: bool = False

    @property
    def plain(self) -> Problem:
        """The same tensors without what only attention asks for: of kernels that do not depend on it."""
        return Problem(self.dtype, self.head_dim, packed=self.packed, index_dtype=self.index_dtype)

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if self.dtype not in DTYPES:
            return f"q, k and v must be {' or '.join(DTYPES)}, not {self.dtype}"
        if self.head_dim % 8 or not 8 <= self.head_dim <= HEAD_DIMS[-1]:
            return f"the head dimension must be a multiple of 8 up to {HEAD_DIMS[-1]}, not {self.head_dim}"
        if self.block_n not in BLOCK_N:
            return f"key tiles must have {' or '.join(map(str, BLOCK_N))} keys, not {self.block_n}"
        if self.must_do and not self.skip:
            return "tiles are only held on a list"
        return None


@dataclass(frozen=True)
class ForwardConfig:
    """A problem, and how the forward kernel is built for it.

    rows: query rows of a warp, 16 or 32. With 32, two blocks of rows share what is loaded of k and v from shared
    memory; with 16 there are twice as many warps, which hide more latency where only one CTA fits on a multiprocessor,
    and whose registers hold larger heads. query_in_registers: once q is loaded into registers, k and v take its place
    in shared memory.
    """

    problem: Problem
    rows: int
    query_in_registers: bool

    @property
    def width(self) -> int:
        """The head dimension, padded."""
        return next(d for d in HEAD_DIMS if d >= self.problem.head_dim)

    @property
    def step(self) -> int:
        """Keys of a step: scores of 64 do not fit into registers beside the widest outputs."""
        return 64 if self.width < 256 else 32

    @property
    def warps(self) -> int:
        return BLOCK_M // self.rows

    @property
    def score_columns(self) -> int:
        """16-bit columns of a row of q or k: two 8-bit integers each, of whole 16-byte units for every thread."""
        if not self.problem.int8:
            return self.width
        return int8_width(self.problem.head_dim) // 2

    @property
    def place(self) -> int:
        """16-bit elements of shared memory for q, k and v, and after them for outputs."""
        row, scored = self.width + PADDING, self.score_columns + PADDING
        tiles, queries = self.step * (row + scored), BLOCK_M * scored
        everything = max(tiles, queries) if self.query_in_registers else tiles + queries
        return max(everything, BLOCK_M * row)

    @property
    def outputs_over_keys(self) -> bool:
        """Whether outputs take more of the shared memory than the place of q."""
        return self.query_in_registers or self.score_columns < self.width

    @property
    def shared_bytes(self) -> int:
        lists = (2 * MAX_LISTED + 4 * (self.warps + 1) * MAX_WORDS) * self.problem.skip
        return 2 * self.place + lists

    def illegal(self) -> str | None:
        """Why the kernel cannot be built, or None."""
        if self.problem.illegal():
            return self.problem.illegal()
        if self.rows not in (16, 32):
            return f"a warp has 16 or 32 rows, not {self.rows}"
        if self.problem.int8 and self.query_in_registers:
            return "8-bit queries stay in shared memory"
        # Outputs, scores and probabilities, q and what is loaded of k or v; 32-bit registers of a thread.
        columns = self.width + 3 * self.step // 2 + self.width * self.query_in_registers // 2
        if self.rows * columns // 32 > 240:
            return f"{self.rows} rows of {self.width} do not fit into registers"
        if self.shared_bytes > SHARED_MEMORY:
            return f"{self.shared_bytes} bytes of shared memory are more than {SHARED_MEMORY}"
        return None


def int8_width(head_dim: int) -> int:
    """Bytes of a row of 8-bit queries or keys."""
    return next(d for d in (64, 128, 192, 256) if d >= head_dim)


def candidates(problem: Problem, arch: str) -> list[ForwardConfig]:
    """Every config worth compiling for a problem on "sm_89", "sm_90a", ..., the best first."""
    every = [
        ForwardConfig(problem, rows, query_in_registers)
        for rows in ((16, 32) if arch in ONE_CTA else (32, 16))
        for query_in_registers in (False, True)
    ]
    return [config for config in every if config.illegal() is None]


@functools.cache
def select(problem: Problem, arch: str) -> ForwardConfig:
    return candidates(problem, arch)[0]


ROLES = ("both", "keys", "queries")
# Queries and keys of a step of the backward kernels, by padded head dimension: what fits into 99 KB and 255 registers.
_BACKWARD_TILES = {64: (128, 64), 96: (64, 64), 128: (64, 64), 192: (64, 32), 256: (32, 32)}


@dataclass(frozen=True)
class BackwardConfig:
    """A problem, and how a backward kernel is built for it; `skip` means that only listed tiles count.

    role: "both" gives the gradients of k and v, and adds up that of q with atomics; "keys" gives those of k and v only,
    "queries" that of q only, in an order that does not depend on time. rows, keys: of a step. warps: 4 or 8, two of
    them in the direction of the rows.
    """

    problem: Problem
    role: str
    rows: int
    keys: int
    warps: int

    @property
    def width(self) -> int:
        """The head dimension, padded."""
        return next(d for d in HEAD_DIMS if d >= self.problem.head_dim)

    @property
    def shared_bytes(self) -> int:
        tiles = 2 * (self.rows + self.keys) * (self.width + PADDING)
        products = (1 + (self.role != "queries")) * self.rows * (self.keys + PADDING)
        return 2 * (tiles + products) + 8 * self.rows + 48 * self.problem.skip

    def illegal(self) -> str | None:
        """Why the kernel cannot be built, or None."""
        if self.problem.illegal():
            return self.problem.illegal()
        if self.role not in ROLES:
            return f"the role is one of {', '.join(ROLES)}, not {self.role}"
        if self.warps not in (4, 8) or self.rows % 32:
            return f"{self.warps} warps do not share {self.rows} rows"
        for columns in (self.keys, self.width):
            if columns % (8 * self.warps):
                return f"{self.warps} warps do not share {columns} columns"
        if BLOCK_M % self.rows or self.problem.block_n % self.keys:
            return f"{self.rows} x {self.keys} does not divide a tile"
        if self.shared_bytes > SHARED_MEMORY:
            return f"{self.shared_bytes} bytes of shared memory are more than {SHARED_MEMORY}"
        return None


@functools.cache
def select_backward(problem: Problem, role: str, arch: str) -> BackwardConfig:
    """The config for a problem on "sm_89", "sm_90a", ..."""
    width = next(d for d in HEAD_DIMS if d >= problem.head_dim)
    rows, keys = _BACKWARD_TILES[width]
    # Where one CTA fits on a multiprocessor, more warps hide more latency.
    every = [BackwardConfig(problem, role, rows, keys, warps) for warps in (8, 4)]
    return next(c for c in every if c.illegal() is None and (c.warps == 4 or arch in ONE_CTA))
