"""What is fixed when a kernel is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16")
INDICES = ("int32", "int64")  # of cu_seqlens
BLOCK_M = 128
BLOCK_N = (64, 128)  # keys of a tile
UNIT = 64  # keys of half a step
STEP = 128
MAX_DIM = 128
MAX_WORDS = 128  # of 32 tiles in a row of a mask: what shared memory has votes for
MAX_TILES = 32 * MAX_WORDS
STAGES = 2  # of k, of v and of queries
THREADS = 384
ENDS_THREADS = 256  # of the kernels before and after the backward
REGISTERS = 40, 232  # of the warpgroup that loads, and of those that multiply
BACKWARD_REGISTERS = 24, 240
# Of what CTAs draw from, behind the number drawn so far: how many CTAs have helped with the order, and the order.
ARRIVED, NUMBERS = 1, 4
CLASSES = 4  # of query tiles, by the lengths of their lists
ORDERED_FROM = 2048  # query tiles, of which the order is worth a kernel of its own
KEYS_ORDERED_FROM = 256  # tiles of 128 keys in the backward pass


class HeadDim:
    """A head dimension, and what it is padded to."""

    head_dim: int

    @property
    def width(self) -> int:
        """The padded head dimension: what one box of TMA has, or two."""
        return UNIT if self.head_dim <= UNIT else MAX_DIM


@dataclass(frozen=True)
class ForwardConfig(HeadDim):
    """The static facts of a call: batch, lengths, head counts, strides, scale and threshold are not among them.

    head_dim: of q, k and v, a multiple of 8. skip: only listed key tiles are visited, and the list for the next call is
    written. must_do: some tiles stay listed whatever their scores. on_device: the direction is an element in device
    memory. ordered: query tiles with long lists are drawn first. packed: the dtype of cu_seqlens; None: a batch.
    """

    dtype: str
    head_dim: int
    causal: bool = False
    skip: bool = False
    block_n: int = BLOCK_N[0]
    must_do: bool = False
    on_device: bool = False
    ordered: bool = False
    packed: str | None = None

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if self.dtype not in DTYPES:
            return f"q, k and v must be {' or '.join(DTYPES)}, not {self.dtype}"
        if self.head_dim % 8 or not 8 <= self.head_dim <= MAX_DIM:
            return (
                f"the head dimension must be a multiple of 8 up to {MAX_DIM}, not {self.head_dim}"
            )
        if self.block_n not in BLOCK_N:
            return f"key tiles must have {' or '.join(map(str, BLOCK_N))} keys, not {self.block_n}"
        if (self.must_do or self.ordered) and not self.skip:
            return "tiles are only held on a list, and only lists have lengths"
        if self.packed not in (None, *INDICES):
            return f"cu_seqlens must be {' or '.join(INDICES)}, not {self.packed}"
        return None


@dataclass(frozen=True)
class OrderConfig:
    """The static facts of the order of query tiles, as of `ForwardConfig`. of_keys: of tiles of 128 keys."""

    causal: bool
    block_n: int
    of_keys: bool = False
    packed: str | None = None


@dataclass(frozen=True)
class BackwardConfig(HeadDim):
    """The static facts of a backward pass: as of `ForwardConfig`; skip: only listed tiles count; ordered: tiles of keys
    that many query tiles list come first. keys_only: gradients of q are another kernel's (`QueriesConfig`).
    """

    dtype: str
    head_dim: int
    causal: bool = False
    skip: bool = False
    block_n: int = BLOCK_N[0]
    ordered: bool = False
    packed: str | None = None
    keys_only: bool = False

    @property
    def branches(self) -> bool:
        """Whether steps with hidden keys take a branch of their own. That keeps exponentials in front of a wait, and is
        faster but for gradients of wide heads that no mask is on."""
        return self.causal or self.keys_only or self.by_turns

    @property
    def by_turns(self) -> bool:
        """Whether warpgroups compute gradients of q in turns, and not half of their columns each."""
        return self.width == UNIT


@dataclass(frozen=True)
class QueriesConfig(HeadDim):
    """The static facts of a kernel of the gradients of q alone, each in one order: as of `ForwardConfig`."""

    dtype: str
    head_dim: int
    causal: bool = False
    skip: bool = False
    block_n: int = BLOCK_N[0]
    ordered: bool = False
    packed: str | None = None


@dataclass(frozen=True)
class SumsConfig(HeadDim):
    """The static facts of what comes before a backward pass. with_dlse: the log-sum-exp has a gradient too. with_acc:
    gradients of q are added up in memory, which is zeroed.
    """

    dtype: str
    head_dim: int
    with_dlse: bool = False
    packed: str | None = None
    with_acc: bool = True


@dataclass(frozen=True)
class ConvertConfig(HeadDim):
    """The static facts of what comes after a backward pass."""

    dtype: str
    head_dim: int
    packed: str | None = None


Config = ForwardConfig | OrderConfig | BackwardConfig | QueriesConfig | SumsConfig | ConvertConfig
