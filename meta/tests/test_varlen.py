"""cula.varlen against plain Python lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cula import varlen

LENGTHS = st.lists(st.one_of(st.just(0), st.just(1), st.integers(0, 40)), max_size=8)
DTYPES = st.sampled_from([torch.int32, torch.int64])
CHUNKS = st.sampled_from([1, 2, 16, 64])
SIDES = st.sampled_from(["left", "right"])


def ends(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def padded(lengths: list[int], width: int, padding: str, fill: int = 0) -> list[list[int]]:
    """Rows that hold the token numbers 1, 2, ... of the packed order."""
    rows, token = [], 1
    for length in lengths:
        row, token = list(range(token, token + length)), token + length
        gap = [fill] * (width - length)
        rows.append(row + gap if padding == "right" else gap + row)
    return rows


@given(LENGTHS, DTYPES)
def test_lengths_and_cu_seqlens(lengths: list[int], dtype: torch.dtype) -> None:
    cu = varlen.cu_seqlens_from_lengths(lengths, dtype=dtype)
    assert cu.tolist() == ends(lengths) and cu.dtype == dtype
    from_tensor = varlen.cu_seqlens_from_lengths(
        torch.tensor(lengths, dtype=torch.int64), dtype=dtype
    )
    assert torch.equal(from_tensor, cu) and from_tensor.dtype == dtype
    assert varlen.lengths_from_cu_seqlens(cu).tolist() == lengths
    assert varlen.lengths_from_cu_seqlens(cu).dtype == dtype
    assert varlen.host_lengths(cu) == lengths


@given(st.integers(0, 5), st.integers(0, 9), DTYPES)
def test_uniform(batch: int, length: int, dtype: torch.dtype) -> None:
    cu = varlen.uniform_cu_seqlens(batch, length, dtype=dtype)
    assert cu.tolist() == ends([length] * batch) and cu.dtype == dtype


def test_uniform_keeps_no_tensors() -> None:
    assert varlen.uniform_cu_seqlens(3, 4).data_ptr() != varlen.uniform_cu_seqlens(3, 4).data_ptr()


@given(LENGTHS, st.integers(0, 3), SIDES, DTYPES)
def test_masks(lengths: list[int], extra: int, padding: str, dtype: torch.dtype) -> None:
    cu = varlen.cu_seqlens_from_lengths(lengths, dtype=dtype)
    width = max(lengths, default=0) + extra
    mask = varlen.mask_from_cu_seqlens(cu, width, padding=padding)
    expected = [[bool(x) for x in row] for row in padded(lengths, width, padding)]
    assert mask.dtype == torch.bool and mask.shape == (len(lengths), width)
    assert mask.tolist() == expected
    for kind in (mask, mask.long()):
        assert torch.equal(varlen.cu_seqlens_from_mask(kind, dtype=dtype), cu)


def test_mask_counts_tokens_anywhere() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 7]])
    assert varlen.cu_seqlens_from_mask(mask).tolist() == [0, 2, 2, 5]


@given(LENGTHS, st.integers(0, 3), st.integers(0, 3), SIDES, DTYPES)
def test_pack_and_unpack(
    lengths: list[int], extra: int, tail: int, padding: str, dtype: torch.dtype
) -> None:
    cu = varlen.cu_seqlens_from_lengths(lengths, dtype=dtype)
    total, width = sum(lengths), max(lengths, default=0) + extra
    rows = torch.tensor(padded(lengths, width, padding, fill=-1), dtype=torch.float64).reshape(
        len(lengths), width
    )
    x = torch.stack((rows, -rows), -1)

    packed = varlen.pack(x, cu, padding=padding)
    assert packed.shape == (1, total, 2)
    assert packed[0, :, 0].tolist() == [float(t) for t in range(1, total + 1)]
    longer = varlen.pack(x, cu, total + tail, padding=padding)
    assert torch.equal(longer[:, :total], packed) and not longer[:, total:].any()

    back = varlen.unpack(packed, cu, width, padding=padding, value=7.0)
    expected = padded(lengths, width, padding, fill=7)
    assert back[..., 0].tolist() == [[float(t) for t in row] for row in expected]


@given(LENGTHS, SIDES)
def test_pack_and_unpack_carry_gradients(lengths: list[int], padding: str) -> None:
    cu = varlen.cu_seqlens_from_lengths(lengths)
    width = max(lengths, default=0) + 1
    x = torch.randn(len(lengths), width, requires_grad=True)
    weight = torch.randn(len(lengths), width)
    (
        varlen.unpack(varlen.pack(x, cu, padding=padding), cu, width, padding=padding) * weight
    ).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight * varlen.mask_from_cu_seqlens(cu, width, padding=padding))


@given(LENGTHS, st.integers(0, 3), DTYPES)
def test_sequence_ids_and_positions(lengths: list[int], tail: int, dtype: torch.dtype) -> None:
    cu = varlen.cu_seqlens_from_lengths(lengths, dtype=dtype)
    ids = [n for n, length in enumerate(lengths) for _ in range(length)]
    positions = [t for length in lengths for t in range(length)]
    assert varlen.sequence_ids(cu).tolist() == ids and varlen.sequence_ids(cu).dtype == dtype
    assert varlen.positions(cu).tolist() == positions and varlen.positions(cu).dtype == dtype
    total = len(ids) + tail
    assert varlen.sequence_ids(cu, total).tolist() == ids + [-1] * tail
    assert varlen.positions(cu, total).tolist() == positions + [-1] * tail


@given(LENGTHS, CHUNKS, DTYPES)
def test_chunk_schedule(lengths: list[int], chunk: int, dtype: torch.dtype) -> None:
    cu = varlen.cu_seqlens_from_lengths(lengths, dtype=dtype)
    counts = [-(-length // chunk) for length in lengths]
    rows = [[n, c] for n, count in enumerate(counts) for c in range(count)]
    offsets = varlen.chunk_offsets(cu, chunk)
    assert offsets.tolist() == ends(counts) and offsets.dtype == dtype
    indices = varlen.chunk_indices(cu, chunk)
    assert indices.tolist() == rows and indices.dtype == dtype
    if lengths:
        bound = varlen.capacity(sum(lengths), len(lengths), chunk)
        assert bound >= len(rows)
        assert varlen.chunk_indices(cu, chunk, bound).tolist() == rows + [[-1, -1]] * (
            bound - len(rows)
        )


@given(st.integers(0, 60), st.integers(1, 8), CHUNKS)
def test_capacity_is_reached(tokens: int, sequences: int, chunk: int) -> None:
    first = min(tokens, sequences)
    worst = [1] * first + [0] * (sequences - first)
    if first:
        worst[0] += tokens - first
    assert sum(-(-length // chunk) for length in worst) == varlen.capacity(tokens, sequences, chunk)


@given(LENGTHS, st.integers(0, 3), DTYPES)
def test_pad_cu_seqlens(lengths: list[int], extra: int, dtype: torch.dtype) -> None:
    cu = varlen.cu_seqlens_from_lengths(lengths, dtype=dtype)
    assert varlen.pad_cu_seqlens(cu, len(lengths) + extra).tolist() == ends(lengths + [0] * extra)


def on_device(cu: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every function that promises not to read a device, on shapes alone."""
    n, width, total = cu.shape[0] - 1, 6, 11
    x = torch.empty(n, width, 3, device=cu.device)
    return {
        "cu_seqlens_from_lengths": varlen.cu_seqlens_from_lengths(cu[1:]),
        "lengths": varlen.lengths_from_cu_seqlens(cu),
        "mask": varlen.mask_from_cu_seqlens(cu, width),
        "cu_seqlens_from_mask": varlen.cu_seqlens_from_mask(x[..., 0] > 0),
        "uniform": varlen.uniform_cu_seqlens(n, 5, device=cu.device),
        "pad": varlen.pad_cu_seqlens(cu, n + 2),
        "ids": varlen.sequence_ids(cu, total),
        "positions": varlen.positions(cu, total),
        "pack": varlen.pack(x, cu, total),
        "unpack": varlen.unpack(x.reshape(1, n * width, 3), cu, width, padding="left"),
        "offsets": varlen.chunk_offsets(cu, 2),
        "indices": varlen.chunk_indices(cu, 2, varlen.capacity(total, n, 2)),
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_function_reads_a_device(dtype: torch.dtype) -> None:
    # Meta and fake tensors have no contents, so reading one raises.
    shapes = {
        "cu_seqlens_from_lengths": (4,), "lengths": (3,), "mask": (3, 6), "cu_seqlens_from_mask": (4,),
        "uniform": (4,), "pad": (6,), "ids": (11,), "positions": (11,), "pack": (1, 11, 3), "unpack": (3, 6, 3),
        "offsets": (4,), "indices": (7, 2),
    }  # fmt: skip
    found = on_device(torch.empty(4, dtype=dtype, device="meta"))
    assert {name: tuple(x.shape) for name, x in found.items()} == shapes
    assert all(x.device.type == "meta" for x in found.values())
    with FakeTensorMode():
        found = on_device(torch.empty(4, dtype=dtype))
    assert {name: tuple(x.shape) for name, x in found.items()} == shapes


CU = torch.tensor([0, 2, 5])
META = torch.empty(3, dtype=torch.int32, device="meta")
X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: varlen.cu_seqlens_from_lengths([1, -2]),
            ValueError,
            "lengths: expected values >= 0, got -2",
        ),
        (
            lambda: varlen.cu_seqlens_from_lengths([1, 2.0]),
            TypeError,
            "lengths: expected ints, got float",
        ),
        (
            lambda: varlen.cu_seqlens_from_lengths([True]),
            TypeError,
            "lengths: expected ints, got bool",
        ),
        (lambda: varlen.cu_seqlens_from_lengths([2**31]), ValueError, "lengths: expected a total"),
        (
            lambda: varlen.cu_seqlens_from_lengths([1], dtype=torch.int16),
            TypeError,
            "dtype: expected int32 or int64, got int16",
        ),
        (
            lambda: varlen.cu_seqlens_from_lengths(torch.zeros(2)),
            TypeError,
            "lengths: expected an integer dtype",
        ),
        (
            lambda: varlen.cu_seqlens_from_lengths(torch.tensor([-1])),
            ValueError,
            "lengths: expected values >= 0",
        ),
        (
            lambda: varlen.cu_seqlens_from_lengths(CU[None]),
            ValueError,
            "lengths: expected one dimension",
        ),
        (
            lambda: varlen.lengths_from_cu_seqlens([0, 1]),
            TypeError,
            "cu_seqlens: expected a torch.Tensor, got list",
        ),
        (
            lambda: varlen.lengths_from_cu_seqlens(CU[:0]),
            ValueError,
            "cu_seqlens: expected at least one entry",
        ),
        (
            lambda: varlen.lengths_from_cu_seqlens(CU.short()),
            TypeError,
            "cu_seqlens: expected int32 or int64, got ",
        ),
        (
            lambda: varlen.cu_seqlens_from_mask(X),
            TypeError,
            "mask: expected a bool or integer dtype",
        ),
        (
            lambda: varlen.cu_seqlens_from_mask(CU),
            ValueError,
            r"mask: expected shape \[B, T\], got \[3\]",
        ),
        (
            lambda: varlen.cu_seqlens_from_mask([1]),
            TypeError,
            "mask: expected a torch.Tensor, got list",
        ),
        (
            lambda: varlen.mask_from_cu_seqlens(CU, 2),
            ValueError,
            "max_length: expected room for .* 3 tokens, got 2",
        ),
        (
            lambda: varlen.mask_from_cu_seqlens(CU, 3, padding="up"),
            ValueError,
            "padding: expected 'left' or",
        ),
        (
            lambda: varlen.mask_from_cu_seqlens(CU, 3.0),
            TypeError,
            "max_length: expected an int, got float",
        ),
        (
            lambda: varlen.uniform_cu_seqlens(-1, 2),
            ValueError,
            "batch: expected an int >= 0, got -1",
        ),
        (
            lambda: varlen.uniform_cu_seqlens(2, -2),
            ValueError,
            "length: expected an int >= 0, got -2",
        ),
        (
            lambda: varlen.uniform_cu_seqlens(2, 2**30),
            ValueError,
            "length: expected batch . length that",
        ),
        (
            lambda: varlen.pad_cu_seqlens(CU, 1),
            ValueError,
            "num_seqs: expected at least N = 2, got 1",
        ),
        (
            lambda: varlen.sequence_ids(META),
            ValueError,
            "total: expected an int because cu_seqlens is on meta",
        ),
        (lambda: varlen.positions(META), ValueError, "total: expected an int because"),
        (lambda: varlen.positions(CU, -1), ValueError, "total: expected an int >= 0, got -1"),
        (lambda: varlen.chunk_indices(META, 2), ValueError, "num_chunks: expected an int because"),
        (
            lambda: varlen.chunk_indices(CU, 0),
            ValueError,
            "chunk_size: expected an int >= 1, got 0",
        ),
        (
            lambda: varlen.chunk_offsets(CU, 2.0),
            TypeError,
            "chunk_size: expected an int, got float",
        ),
        (
            lambda: varlen.capacity(3, 0, 2),
            ValueError,
            "num_seqs: expected at least 1 for 3 tokens, got 0",
        ),
        (lambda: varlen.capacity(-3, 1, 2), ValueError, "tokens: expected an int >= 0, got -3"),
        (lambda: varlen.pack(X[0], CU), ValueError, r"x: expected shape \[N, T, ...\], got \[3\]"),
        (lambda: varlen.pack(X, CU[:2]), ValueError, r"cu_seqlens: expected N \+ 1 = 3 entries"),
        (
            lambda: varlen.pack(X[:, :2], CU),
            ValueError,
            "x: expected room for the longest sequence, 3",
        ),
        (
            lambda: varlen.pack(X, META, 5),
            ValueError,
            "cu_seqlens: expected a tensor on cpu, as x, got meta",
        ),
        (lambda: varlen.pack([1], CU), TypeError, "x: expected a torch.Tensor, got list"),
        (
            lambda: varlen.unpack(X, CU, 3),
            ValueError,
            r"x: expected shape \[1, total, ...\], got \[2, 3\]",
        ),
        (lambda: varlen.unpack(X[:1], CU, 2), ValueError, "max_length: expected room"),
    ],
)
def test_errors_name_the_argument(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()
