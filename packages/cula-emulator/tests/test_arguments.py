"""What may be passed to a kernel, where it lies in memory, and what is refused by name."""

import struct

import pytest
import torch

import cula_emulator as emulator
from cula_emulator import arguments
from cula_emulator.arguments import extent, pack_parameter, resident

COPY = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 in, .param .u64 out, .param .u32 n)
{
.reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<6>; .reg .b16 %h<2>;
ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; ld.param.u32 %r1, [n];
mov.u32 %r2, %tid.x;
setp.ge.u32 %p1, %r2, %r1;
@%p1 ret;
cvt.u64.u32 %rd3, %r2;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
ld.global.u8 %h1, [%rd4];
st.global.u8 [%rd5], %h1;
ret;
}
"""


@pytest.fixture(scope="module")
def copy():
    module = emulator.EmulatedModule(COPY)

    def run(source, target, count):
        module.launch("copy", (1,), (128,), (source, target, count))

    return run


def floats(count, skip):
    """fp32 zeros that start `skip` elements behind an address aligned to 4 KiB, in a storage that starts there too."""
    raw = bytearray(4 * (count + skip) + 8192)
    probe = torch.frombuffer(raw, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(raw, dtype=torch.float32, offset=-probe % 4096 + 4 * skip, count=count)


# ---- addresses ------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [0, 1, 17, 32, 63])
def test_storage_is_resident_at_the_alignment_of_a_gpu(skip):
    tensor = floats(100, skip)
    with resident([tensor]) as addresses:
        address = addresses[id(tensor)]
        assert address % 256 == 0 or tensor.data_ptr() % 128 == 0
        assert (address == tensor.data_ptr()) == (4 * skip % 128 == 0)


def test_views_keep_their_distance_and_write_back():
    base = floats(100, 1)
    head, tail = base[:10], base[40:]
    with resident([head, (tail, [base])]) as addresses:
        assert addresses[id(tail)] - addresses[id(head)] == 160
        assert addresses[id(base)] == addresses[id(head)] != base.data_ptr()
        arguments.C.memmove(addresses[id(tail)], struct.pack("<f", 3.0), 4)
        assert base[40] == 0  # the kernel works on the copy
    assert base[40] == 3 and base.count_nonzero() == 1


def test_storages_that_overlap_stay_one_memory():
    raw = bytearray(1024)
    first = torch.frombuffer(raw, dtype=torch.int32, offset=4, count=100)
    second = torch.frombuffer(raw, dtype=torch.int32, offset=8, count=100)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    with resident([second, first]) as addresses:
        assert addresses[id(second)] - addresses[id(first)] == 4
        arguments.C.memmove(addresses[id(second)], struct.pack("<i", 9), 4)
    assert first[1] == second[0] == 9 and first[0] == 0


def test_expanded_and_strided_tensors_are_not_copied_apart():
    base = torch.arange(24.0).reshape(4, 6)
    row, column, every = base[1].expand(5, 6), base[:, 2], base[::2, ::3]
    with resident([row, column, every]) as addresses:
        for tensor in (row, column, every):
            assert addresses[id(tensor)] - addresses[id(row)] == tensor.data_ptr() - row.data_ptr()
    assert [extent(t) for t in (row, column, every)] == [24, (3 * 6 + 1) * 4, (2 * 6 + 3 + 1) * 4]


def test_empty_and_scalar_tensors():
    empty, view, scalar = torch.empty(0, 5), torch.zeros(8)[3:3], torch.tensor(2.5)
    with resident([empty, view, scalar]) as addresses:
        assert addresses[id(scalar)] % 4 == 0
    assert (extent(empty), extent(view), extent(scalar)) == (0, 0, 4)


def test_kernel_reads_and_writes_through_views(copy):
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    copy(source[5:25], target[30:50], 20)
    assert target[30:50].tolist() == list(range(5, 25)) and target.count_nonzero() == 20
    copy(target[:0], target, 0)
    with pytest.raises(emulator.OutOfBounds):
        copy(source[5:25], target[30:50], 21)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bfloat16,
        torch.complex64,
    ],
)
def test_a_plain_launch_takes_every_dtype(copy, dtype):
    source = (torch.randn(16) * 2).to(dtype)
    target = torch.zeros(16, dtype=dtype)
    copy(source, target, 16 * dtype.itemsize)
    assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: torch.empty(3, device="meta"), "CPU tensors, got one on meta"),
        (lambda: torch.zeros(3, 3).to_sparse(), "strided tensors, got layout torch.sparse_coo"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "conjugated view"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "negated"),
    ],
)
def test_tensor_that_a_kernel_cannot_use_is_a_type_error(copy, make, message):
    with pytest.raises(TypeError, match=message):
        copy(make(), torch.zeros(3), 1)


def test_a_cuda_tensor_is_a_type_error():
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)

    tensor = torch.zeros(3).as_subclass(Elsewhere)
    with pytest.raises(TypeError, match="CPU tensors, got one on cuda:1"), resident([(tensor,)]):
        pass


# ---- PTX parameters -------------------------------------------------------------------------


class Index:
    """Neither a number nor known to the DSL."""


@pytest.mark.parametrize(
    "value, size, packed",
    [
        (7, 4, b"\x07\0\0\0"),
        (-1, 2, b"\xff\xff"),
        (255, 1, b"\xff"),
        (-128, 1, b"\x80"),
        ((1 << 64) - 1, 8, b"\xff" * 8),
        (-(1 << 63), 8, b"\0" * 7 + b"\x80"),
        (True, 1, b"\x01"),
        (None, 8, b"\0" * 8),
        (1.5, 4, struct.pack("<f", 1.5)),
        (1.5, 8, struct.pack("<d", 1.5)),
        (emulator.Pointer(0x1000), 8, b"\0\x10" + b"\0" * 6),
        (b"ab", 4, b"ab\0\0"),
        (bytearray(b"abcd"), 4, b"abcd"),
    ],
)
def test_parameter_bytes(value, size, packed):
    assert pack_parameter(value, size, {}) == packed


def test_numpy_numbers_are_numbers():
    import numpy

    assert pack_parameter(numpy.int64(-2), 8, {}) == b"\xfe" + b"\xff" * 7
    assert pack_parameter(numpy.uint8(200), 1, {}) == b"\xc8"
    assert pack_parameter(numpy.float32(0.25), 4, {}) == struct.pack("<f", 0.25)
    assert pack_parameter(numpy.bool_(True), 1, {}) == b"\x01"


@pytest.mark.parametrize(
    "value, size, error, message",
    [
        (256, 1, ValueError, "256 does not fit 1 bytes"),
        (-129, 1, ValueError, "-129 does not fit 1 bytes"),
        (1 << 64, 8, ValueError, "does not fit 8 bytes"),
        (b"abcde", 4, ValueError, "5 bytes for a parameter of 4"),
        (1.5, 2, TypeError, "a float has 4 or 8 bytes, and the parameter has 2"),
        (torch.zeros(1), 4, TypeError, "an address of 8 bytes, and the parameter has 4"),
        ("12", 4, TypeError, "cannot pass a str"),
        (1j, 8, TypeError, "cannot pass a complex"),
        (Index(), 8, TypeError, "cannot pass a Index"),
    ],
)
def test_parameter_that_does_not_fit(value, size, error, message):
    with pytest.raises(error, match=message):
        pack_parameter(value, size, {})


def test_address_inside_a_tuple_is_found():
    assert arguments.holds_address([1, (2, [emulator.Pointer(5)])])
    assert not arguments.holds_address([emulator.Pointer(0), 5, None, (torch.zeros(1),)])


# ---- tvm-ffi --------------------------------------------------------------------------------


def packed(value):
    with resident([value]) as addresses:
        packer = arguments._Packer(addresses)
        return packer, packer.any(value)


@pytest.mark.parametrize("dtype", arguments._DTYPES)
def test_tensor_for_the_host_code(dtype):
    """torch's own DLPack capsule says the same type, shape and strides."""
    tensor = torch.zeros(3, 8, dtype=getattr(torch, dtype))[:, ::2]
    packer, _ = packed(tensor)
    ours = next(x for x in packer.keep_alive if isinstance(x, arguments._DLTensor))
    get = arguments.C.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = arguments.C.c_void_p, [arguments.C.py_object, arguments.C.c_char_p]
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    theirs = arguments._DLTensor.from_address(get(capsule, b"dltensor"))
    for name in ("ndim", "code", "bits", "lanes"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.shape[:2] == theirs.shape[:2] == [3, 4]
    assert ours.strides[:2] == theirs.strides[:2] == [8, 2]
    assert ours.device_type == 2  # the host code insists on CUDA


def test_dtype_without_a_name_in_dlpack_is_a_type_error():
    with pytest.raises(TypeError, match="cannot pass a tensor of torch.complex64"):
        packed(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "value, kind, bits",
    [
        (None, 0, 0),
        (5, 1, 5),
        (-5, 1, -5),
        (True, 2, 1),
        (0.5, 3, 0x3FE0000000000000),
        (emulator.Pointer(64), 4, 64),
    ],
)
def test_number_for_the_host_code(value, kind, bits):
    _, any_ = packed(value)
    assert (any_.type_index, any_.value) == (kind, bits)


@pytest.mark.parametrize(
    "value, error", [("text", TypeError), ({}, TypeError), (1 << 64, ValueError), (1j, TypeError)]
)
def test_value_that_the_host_code_cannot_take(value, error):
    with pytest.raises(error):
        packed(value)
    with pytest.raises(error):
        packed((1, value))


def test_scalars_of_the_dsl_are_numbers():
    cutlass = pytest.importorskip("cutlass")
    for value, plain in (
        (cutlass.Int32(3), 3),
        (cutlass.Float32(0.5), 0.5),
        (cutlass.Boolean(True), 1),
    ):
        assert arguments._number(value) == plain and type(arguments._number(value)) is type(plain)
