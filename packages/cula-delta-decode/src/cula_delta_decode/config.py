"""What is fixed when a decode kernel is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

MAX_TOKENS = 8
CONVOLUTION_WIDTH = 4
HEAD_DIMS = (64, 128)
MAX_GRID = 65535  # rows, and heads
ACTIVATION_DTYPES = ("bfloat16", "float16")
DTYPES = ("float32", "bfloat16", "float16")
GATES = ("none", "log", "softplus", "safe")
STRENGTHS = ("one", "given", "logits")
NORM_ACTIVATIONS = ("silu", "sigmoid")

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VECTOR_BYTES = 16
_WARP = 32


@dataclass(frozen=True)
class Gate:
    """What g and beta are.

    kind: "log" decays as they are given; "softplus" and "safe" are raw gates. channels: a gate for every channel of K.
    bias: dtype of dt_bias, None without. strength: what beta is. doubled: twice the sigmoid of its logits.
    """

    kind: str
    channels: bool = False
    dtype: str = "float32"
    rate: bool = False
    bias: str | None = None
    strength: str = "one"
    strength_dtype: str = "float32"
    doubled: bool = False


@dataclass(frozen=True)
class Fused:
    """What a call does besides. convolution: dtype of the weights of a short convolution of q, k and v, None without.
    bias: it has one. norm: activation of the gate of an RMSNorm of the output, None without. weight: dtype of its
    weight."""

    convolution: str | None = None
    bias: bool = False
    norm: str | None = None
    weight: str = "float32"

    def __bool__(self) -> bool:
        return self.convolution is not None or self.norm is not None


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: rows, pool size, head counts, strides and numbers are not among them.

    tokens: the most that a row has. begins: a row begins with the state of a slot, else at zero. slots: dimensions of
    state_indices, 0 without. ends: the state after the last token is stored. redirected: in slots of their own.
    every_token: the state after each token is stored. packed: rows of different length. replay: the pool lacks records.
    counted: how many tokens were accepted is given. commits: no output, and a row has as many tokens as were accepted.
    flushes: no tokens at all, only records to apply. long: rows of any length, `tokens` at a time. fused: what is done
    before and behind. aligned: q, k and gates begin at multiples of 16 bytes for every token and head; where tokens are
    staged that makes no difference.
    """

    dtype: str
    state_dtype: str
    head_dim_k: int
    head_dim_v: int
    tokens: int
    state_v_first: bool
    gate: Gate
    l2norm: bool = True
    begins: bool = True
    slots: int = 1
    ends: bool = True
    redirected: bool = False
    every_token: bool = False
    packed: bool = False
    replay: bool = False
    counted: bool = False
    commits: bool = False
    flushes: bool = False
    long: bool = False
    fused: Fused = Fused()
    aligned: bool = True

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, because every call looks up the kernel of its problem."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def vector(self) -> int:
        """Elements of one 16-byte access to the state."""
        return _VECTOR_BYTES // _BYTES[self.state_dtype]

    @property
    def direct(self) -> bool:
        """Whether every thread reads its part of a token from global memory; otherwise the CTA stages all tokens."""
        return self.tokens == 1 and not self.fused

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if self.dtype not in ACTIVATION_DTYPES or self.state_dtype not in DTYPES:
            return f"unknown dtype in {self}"
        if self.head_dim_k not in HEAD_DIMS or self.head_dim_v not in HEAD_DIMS:
            dims = f"{self.head_dim_k}, {self.head_dim_v}"
            return f"head dimensions must be in {HEAD_DIMS}, not {dims}"
        if not 1 <= self.tokens <= MAX_TOKENS:
            return f"1 to {MAX_TOKENS} tokens, not {self.tokens}"
        if self.gate.kind not in GATES or self.gate.strength not in STRENGTHS:
            return f"unknown gate in {self.gate}"
        if self.fused.norm not in (None, *NORM_ACTIVATIONS):
            return f"unknown activation in {self.fused}"
        return None


@dataclass(frozen=True)
class Config:
    """A problem and the tile that one CTA works on: all of K times `tile_v` columns of V, spread over `threads`.

    The tile is seen as rows x columns, columns contiguous in memory: K x tile_v, or tile_v x K when `state_v_first`.
    lanes: neighbouring threads that share a row. resident: CTAs that shall fit a multiprocessor at once, 0: any number.
    """

    problem: Problem
    tile_v: int
    threads: int
    lanes: int
    resident: int = 0

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
    def cluster(self) -> int:
        """CTAs that share the norm of an output: all tiles of a state. More than one need sm_90 or newer."""
        return self.problem.head_dim_v // self.tile_v if self.problem.fused.norm else 1

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
        if self.problem.head_dim_v % self.tile_v or self.tile_v % 8:
            return f"tile_v={self.tile_v} does not divide V={self.problem.head_dim_v} into eights"
        if self.problem.fused.norm and self.tile_v % _WARP:
            return f"a warp that normalizes has whole columns of tile_v={self.tile_v}"
        if self.threads % _WARP or not 32 <= self.threads <= 1024:
            return f"threads={self.threads} is not a multiple of 32 up to 1024"
        if self.lanes not in (2, 4, 8, 16, 32) or self.columns % (self.vector * self.lanes):
            return f"{self.columns} columns are not whole 16-byte vectors of {self.lanes} lanes"
        if not self.problem.state_v_first and self.vectors_per_row != 1:
            return "a thread has one vector of a row of [K, V] states"
        rows = self.rows_per_thread
        if rows < 1 or rows * self.threads != self.rows * self.lanes or rows & (rows - 1):
            return f"{self.threads} threads do not cover {self.rows} rows evenly"
        if rows * self.vectors_per_row * self.vector > 64:
            return "more than 64 state elements per thread do not fit the registers"
        if self.problem.state_v_first and rows > self.lanes:
            return f"{self.lanes} threads that share {rows} rows cannot write an output each"
        if not self.problem.state_v_first and self.threads < self.tile_v:
            return f"{self.threads} threads are fewer than {self.tile_v} columns"
        return None
