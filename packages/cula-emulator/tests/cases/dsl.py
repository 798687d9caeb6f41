"""CuTe DSL kernels for both sides: compiled once, the same PTX runs on the GPU and in the emulator."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

FAMILY = "CuTe DSL kernels"
_TYPES = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}
# The tensor core's sums, relative to |A| |B|: it keeps about 25 bits of each partial sum.
_ROUNDING = 2.0**-18


@dataclass(frozen=True)
class DslCase:
    """`config` of HopperGemm, or none for the other kernels. Every case runs with "exact" and with "random" inputs."""

    kernel: str
    dtype: str
    m: int
    n: int
    k: int
    majors: str = "kk"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = "_".join(f"{key}={value}" for key, value in self.config.items())
        return (
            f"{self.kernel}_{self.dtype}_{self.majors}_{self.m}x{self.n}x{self.k}_{options}".rstrip(
                "_"
            )
        )

    def _function(self):
        if self.kernel == "hopper_gemm":
            from kernels.hopper_gemm import HopperGemm

            return HopperGemm(**self.config)
        if self.kernel == "ampere_gemm":
            from kernels.ampere_gemm import ampere_gemm

            return ampere_gemm
        from kernels.vector_add import vector_add

        return vector_add

    @contextlib.contextmanager
    def compiled(self) -> Iterator:
        """The DSL's compiled function, with its PTX kept."""
        import cutlass.cute as cute
        from cutlass.base_dsl.compiler import DumpDir

        with tempfile.TemporaryDirectory() as scratch:
            chosen = (cute.GPUArch("sm_90a"), cute.EnableTVMFFI, cute.KeepPTX, DumpDir(scratch))
            yield cute.compile[chosen](self._function(), *self._fakes())

    def _fakes(self) -> list:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor

        def fake(dtype: str, order: tuple[int, ...]):
            sizes = tuple(cute.sym_int(divisibility=16) for _ in order)
            kind = getattr(cutlass, _TYPES[dtype])
            return make_fake_compact_tensor(kind, sizes, stride_order=order, assumed_align=16)

        if self.kernel == "vector_add":
            return [fake("float32", (0,)) for _ in range(3)]
        orders = [(1, 0) if major == "k" else (0, 1) for major in self.majors]
        return [*(fake(self.dtype, order) for order in orders), fake("float32", (1, 0))]

    def tensors(self, kind: str) -> list[torch.Tensor]:
        """Inputs, and the output filled with NaN."""
        g = torch.Generator().manual_seed(0)
        dtype = getattr(torch, self.dtype)

        def values(*shape: int) -> torch.Tensor:
            if kind == "exact":
                return torch.randint(-4, 5, shape, generator=g).to(dtype)
            return torch.randn(shape, generator=g).to(dtype)

        if self.kernel == "vector_add":
            return [values(self.m), values(self.m), torch.full((self.m,), float("nan"))]
        a, b = values(self.m, self.k), values(self.n, self.k)
        a, b = (
            x.t().contiguous().t() if major != "k" else x for x, major in zip((a, b), self.majors)
        )
        return [a, b, torch.full((self.m, self.n), float("nan"))]

    def expected(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(result in float64, the size that its rounding is relative to)."""
        a, b, _ = (t.double() for t in tensors)
        return (
            (a + b, (a + b).abs())
            if self.kernel == "vector_add"
            else (a @ b.t(), a.abs() @ b.abs().t())
        )

    def limit(self, kind: str) -> float:
        return 0.0 if kind == "exact" or self.kernel == "vector_add" else _ROUNDING


def _cases() -> list[DslCase]:
    def hopper(
        m: int, n: int, k: int, dtype: str = "bfloat16", majors: str = "kk", **config
    ) -> DslCase:
        return DslCase("hopper_gemm", dtype, m, n, k, majors, config)

    found = [hopper(128, 128, 192), hopper(128, 128, 192, "float16")]
    for majors in ("mk", "km", "mm"):
        found += [
            hopper(128, 128, 64, "float16", majors, tile=t)
            for t in ((64, 32, 64), (64, 128, 32), (64, 16, 16))
        ]
    found += [hopper(64, 2 * n, 64, tile=(64, n, 64)) for n in (16, 96, 192, 256)]
    found += [
        hopper(64, 64, 128, a_in_registers=True),
        hopper(64, 64, 64, "float16", "km", a_in_registers=True),
    ]
    found += [
        hopper(256, 128, 192, cluster_m=2),
        hopper(256, 128, 320, "float16", "mm", cluster_m=2, stages=3),
    ]
    found.append(hopper(256, 256, 512, stages=4, tile=(64, 128, 64)))
    found += [DslCase("ampere_gemm", dtype, 128, 64, 96) for dtype in ("bfloat16", "float16")]
    found.append(DslCase("vector_add", "float32", 304, 0, 0))
    return found


CASES = _cases()
