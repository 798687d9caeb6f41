"""What is fixed when a decode kernel is compiled, and which tile serves which problem. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 8
HEAD_DIMS = (64, 128, 256)
ACTIVATION_DTYPES = ("bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16", "float16")
MODES = ("decode", "verify", "commit")

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VECTOR_BYTES = 16
_WARP = 32


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: batch, pool size, head counts, strides and scale are not among them.

    mode: "decode" writes outputs and states, "verify" outputs only, "commit" states only.
    indexed: rows find their state through `state_indices`. stochastic: bf16 states are rounded stochastically.
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


# (fp32 state, state_v_first) -> threads, state bytes per thread, direct. Measured on an H200, the narrow ones on 80 of
# its multiprocessors; docs/lightning-decode.md has the figures of the others.
_ONE_TOKEN = {
    (True, False): (1024, 32, True),
    (True, True): (1024, 32, True),
    (False, False): (512, 64, True),
    (False, True): (64, 64, True),
}
_ONE_TOKEN_NARROW = {
    (True, False): (512, 64, True),
    (True, True): (64, 64, False),
    (False, False): (128, 128, False),
    (False, True): (64, 128, False),
}
_SEVERAL_TOKENS = {
    (True, False): (128, 256, False),
    (True, True): (128, 256, False),
    (False, False): (256, 64, False),
    (False, True): (64, 128, False),
}


def candidates(problem: Problem) -> list[Config]:
    """Every tile worth compiling for a problem, the one that `select` takes included.

    Reading the tokens directly pays for one token and little state per thread only.
    """
    every = [
        Config(problem, tile_v, threads, direct)
        for tile_v in (8, 16, 32, 64, 128, 256)
        for threads in (64, 128, 256, 512, 1024)
        for direct in (False, True)
    ]
    return [
        c
        for c in every
        if c.illegal() is None
        and c.bytes_per_thread >= 32
        and not (c.direct and (problem.tokens > 1 or c.bytes_per_thread > 64))
        and not (problem.tokens > 1 and c.bytes_per_thread < 64)
    ]


def select(problem: Problem, arch: str, multiprocessors: int = 132) -> Config:
    """The tile for every batch size on an architecture ("sm_80", "sm_90a", ...) with so many multiprocessors.

    With few multiprocessors, or few threads on each (sm_86 and its like hold 1536), a thread has to keep more bytes in
    flight to fill the memory.
    """
    narrow = multiprocessors < 100 or arch.startswith(("sm_86", "sm_87", "sm_89", "sm_12"))
    table = _SEVERAL_TOKENS if problem.tokens > 1 else _ONE_TOKEN_NARROW if narrow else _ONE_TOKEN
    threads, bytes_per_thread, direct = table[
        problem.state_dtype == "float32", problem.state_v_first
    ]
    return min(
        (c for c in candidates(problem) if c.direct == direct),
        key=lambda c: (
            abs(c.threads - threads),
            abs(c.bytes_per_thread - bytes_per_thread),
            c.tile_v,
        ),
    )


def supports_overlap(arch: str) -> bool:
    """Programmatic dependent launch: the next kernel's launch overlaps the end of this one."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90
