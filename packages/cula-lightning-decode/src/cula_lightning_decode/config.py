"""What is fixed when a decode kernel is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from cula_core.constants import STATE_DTYPES

MAX_TOKENS = 8
HEAD_DIMS = (64, 128, 256)
ACTIVATION_DTYPES = ("bfloat16", "float16")
MODES = ("decode", "verify", "commit")

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VECTOR_BYTES = 16
_WARP = 32


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: batch, pool size, head counts, strides and scale are not among them.

    mode: "decode" writes outputs and states, "verify" outputs only, "commit" states only.
    indexed: rows find their state through `state_indices`. stochastic: bf16 states are rounded stochastically. padded:
    a slot means padding.
    """

    dtype: str
    state_dtype: str
    head_dim_k: int
    head_dim_v: int
    tokens: int
    state_v_first: bool
    indexed: bool
    mode: str = "decode"
    stochastic: bool = False
    padded: bool = False

    @property
    def vector(self) -> int:
        """Elements of one 16-byte access to the state."""
        return _VECTOR_BYTES // _BYTES[self.state_dtype]

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if (
            self.dtype not in ACTIVATION_DTYPES
            or self.state_dtype not in STATE_DTYPES
            or self.mode not in MODES
        ):
            return f"unknown dtype or mode in {self}"
        if self.head_dim_k not in HEAD_DIMS or self.head_dim_v not in HEAD_DIMS:
            return (
                f"head dimensions must be in {HEAD_DIMS}, not {self.head_dim_k}, {self.head_dim_v}"
            )
        if not 1 <= self.tokens <= MAX_TOKENS:
            return f"1 to {MAX_TOKENS} tokens, not {self.tokens}"
        if self.stochastic and self.state_dtype != "bfloat16":
            return f"stochastic rounding is for bfloat16 states, not {self.state_dtype}"
        return None


@dataclass(frozen=True)
class Config:
    """A problem and the tile that one CTA works on: all of K times `tile_v` columns of V, spread over `threads`.

    The tile is seen as rows x columns, columns contiguous in memory: K x tile_v, or tile_v x K when `state_v_first`.
    direct: every thread reads its part of q, k, v from global memory; otherwise the CTA stages them in shared memory.
    """

    problem: Problem
    tile_v: int
    threads: int
    direct: bool = False

    @property
    def vector(self) -> int:
        return self.problem.vector

    @property
    def rows(self) -> int:
        return self.tile_v if self.problem.state_v_first else self.problem.head_dim_k

    @property
    def columns(self) -> int:
        return self.problem.head_dim_k if self.problem.state_v_first else self.tile_v

    @property
    def lanes(self) -> int:
        """Neighbouring threads that share a row."""
        return min(_WARP, self.columns // self.vector)

    @property
    def vectors_per_row(self) -> int:
        """16-byte accesses of one thread to one row."""
        return self.columns // (self.vector * self.lanes)

    @property
    def rows_per_thread(self) -> int:
        return self.rows * self.lanes // self.threads

    @property
    def bytes_per_thread(self) -> int:
        """State bytes that a thread has in flight."""
        return self.rows_per_thread * self.vectors_per_row * _VECTOR_BYTES

    def illegal(self) -> str | None:
        """Why the kernel cannot be built with this tile, or None."""
        if self.problem.head_dim_v % self.tile_v:
            return f"tile_v={self.tile_v} does not divide V={self.problem.head_dim_v}"
        if self.threads % _WARP or not 32 <= self.threads <= 1024:
            return f"threads={self.threads} is not a multiple of 32 up to 1024"
        if self.columns % self.vector:
            return f"{self.columns} columns are not whole 16-byte vectors"
        if (
            self.rows_per_thread < 1
            or self.rows_per_thread * self.threads != self.rows * self.lanes
        ):
            return f"{self.threads} threads do not cover {self.rows} rows evenly"
        if self.rows_per_thread * self.vectors_per_row * self.vector > 64:
            return "more than 64 state elements per thread do not fit the registers"
        return None
