"""PTX on a real GPU through the driver API, with the calls of `EmulatedModule`, so that one test body serves both."""

from __future__ import annotations

import ctypes as C
import struct
from collections.abc import Sequence

import torch

from cula_emulator import LaunchError
from cula_emulator.ptx import parse

_LOG_BYTES = 65536
_INFO_LOG, _INFO_LOG_SIZE, _ERROR_LOG, _ERROR_LOG_SIZE = 3, 4, 5, 6  # CUjit_option
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PORTABLE_CLUSTER = 8
_MAP_BYTES = 128


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; `name` is the error's name, such as CUDA_ERROR_INVALID_PTX."""

    def __init__(self, name: str, where: str, log: str = "") -> None:
        self.name = name
        super().__init__(f"{where}: {name}" + (f"\n{log.strip()}" if log.strip() else ""))


class _LaunchAttribute(C.Structure):
    _fields_ = [("id", C.c_int), ("padding", C.c_char * 4), ("value", C.c_uint32 * 16)]


class _LaunchConfig(C.Structure):
    _fields_ = [
        ("grid", C.c_uint * 3),
        ("block", C.c_uint * 3),
        ("dynamic_shared_bytes", C.c_uint),
        ("stream", C.c_void_p),
        ("attributes", C.POINTER(_LaunchAttribute)),
        ("attribute_count", C.c_uint),
    ]


class Driver:
    """libcuda on torch's current device. Its methods raise DriverError when a call fails."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes torch's primary context the current one
        self._library = C.CDLL("libcuda.so.1")

    def call(self, function: str, *arguments: object, log: C.Array | None = None) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            name = C.c_char_p()
            self._library.cuGetErrorName(status, C.byref(name))
            text = log.value.decode(errors="replace") if log is not None else ""
            raise DriverError((name.value or b"error %d" % status).decode(), function, text)

    def encode_tiled(
        self,
        dtype: int,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int = 0,
        fill: int = 0,
        promotion: int = 0,
    ) -> bytes:
        """The 128 bytes of cuTensorMapEncodeTiled. Sizes and box in elements, innermost first; strides in bytes, from
        dimension 1 on. dtype, swizzle, fill and promotion are the numbers of the driver's enumerations."""
        rank = len(sizes)
        where, buffer = _aligned(bytes(_MAP_BYTES))
        self.call(
            "cuTensorMapEncodeTiled",
            C.c_void_p(where),
            C.c_int(dtype),
            C.c_uint32(rank),
            C.c_void_p(address),
            (C.c_uint64 * rank)(*sizes),
            (C.c_uint64 * max(rank - 1, 1))(*strides),
            (C.c_uint32 * rank)(*box),
            (C.c_uint32 * rank)(*([1] * rank)),
            C.c_int(0),  # no interleave
            C.c_int(swizzle),
            C.c_int(promotion),
            C.c_int(fill),
        )
        return C.string_at(where, _MAP_BYTES)


class DriverModule:
    """The kernels of one PTX text on the GPU.

    image: PTX text, or a cubin as bytes together with the PTX in `ptx`, from which parameter sizes are read.
    Raises DriverError with the compiler's log when the PTX is refused.
    """

    def __init__(
        self, image: str | bytes, ptx: str | None = None, driver: Driver | None = None
    ) -> None:
        if ptx is None:
            if isinstance(image, bytes):
                raise TypeError("a cubin needs its PTX beside it")
            ptx = image
        self.driver = driver or Driver()
        self.parameters = {k.name: [p.size for p in k.parameters] for k in parse(ptx).kernels}
        self._module = C.c_void_p()
        data = image.encode() + b"\0" if isinstance(image, str) else image
        log, information = C.create_string_buffer(_LOG_BYTES), C.create_string_buffer(_LOG_BYTES)
        options = (C.c_int * 4)(_INFO_LOG, _INFO_LOG_SIZE, _ERROR_LOG, _ERROR_LOG_SIZE)
        values = (C.c_void_p * 4)(
            C.addressof(information), _LOG_BYTES, C.addressof(log), _LOG_BYTES
        )
        self.driver.call(
            "cuModuleLoadDataEx", C.byref(self._module), data, C.c_uint(4), options, values, log=log
        )
        self._functions: dict[str, C.c_void_p] = {}

    @property
    def kernels(self) -> list[str]:
        return list(self.parameters)

    def _function(self, kernel: str) -> C.c_void_p:
        if kernel not in self._functions:
            function = C.c_void_p()
            self.driver.call(
                "cuModuleGetFunction", C.byref(function), self._module, kernel.encode()
            )
            self._functions[kernel] = function
        return self._functions[kernel]

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence = (),
        cluster: Sequence[int] = (1, 1, 1),
        shared_bytes: int = 0,
        options: object = None,
        synchronise: bool = True,
    ) -> None:
        """As `EmulatedModule.launch`, with CUDA tensors. `options` exists for the emulator and is ignored.

        With `synchronise` (default) errors of the kernel itself are raised here too.
        """
        if kernel not in self.parameters:
            raise LaunchError(f"no kernel {kernel!r}; the module has {self.kernels}")
        sizes = self.parameters[kernel]
        if len(arguments) != len(sizes):
            raise LaunchError(f"{kernel} has {len(sizes)} parameters, got {len(arguments)}")
        function, full = self._function(kernel), (*cluster, 1, 1)[:3]
        if shared_bytes:
            self.driver.call(
                "cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, C.c_int(shared_bytes)
            )
        if full[0] * full[1] * full[2] > _PORTABLE_CLUSTER:
            self.driver.call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, C.c_int(1))
        # The driver reads as many bytes as the parameter has; 64-byte aligned, as a tensor map must be.
        packed = [_aligned(_packed(a, n)) for a, n in zip(arguments, sizes)]
        pointers = (C.c_void_p * max(len(packed), 1))(*(address for address, _ in packed))
        attribute = _LaunchAttribute(_CLUSTER_DIMENSION, b"", (C.c_uint32 * 16)(*full))
        clustered = full != (1, 1, 1)
        configuration = _LaunchConfig(
            (C.c_uint * 3)(*(*grid, 1, 1)[:3]),
            (C.c_uint * 3)(*(*block, 1, 1)[:3]),
            shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            C.pointer(attribute),
            int(clustered),
        )
        self.driver.call("cuLaunchKernelEx", C.byref(configuration), function, pointers, None)
        if synchronise:
            self.driver.call("cuCtxSynchronize")


def _packed(argument: object, size: int) -> bytes:
    if isinstance(argument, torch.Tensor):
        if argument.device.type != "cuda":
            raise TypeError(f"the GPU works on CUDA tensors, got one on {argument.device}")
        return struct.pack("<Q", argument.data_ptr())
    if isinstance(argument, (bytes, bytearray)):
        return bytes(argument).ljust(size, b"\0")
    if isinstance(argument, float):
        return struct.pack("<d" if size == 8 else "<f", argument)
    return (int(argument or 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _aligned(data: bytes) -> tuple[int, C.Array]:
    """(address, buffer that keeps it alive) of a copy of `data` at 64 bytes."""
    buffer = C.create_string_buffer(len(data) + 64)
    address = (C.addressof(buffer) + 63) // 64 * 64
    C.memmove(address, data, len(data))
    return address, buffer
