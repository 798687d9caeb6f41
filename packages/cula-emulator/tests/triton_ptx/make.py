"""Writes the PTX of two Triton kernels for tests/test_triton.py: `python make.py`, with Triton but without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax(x, o, n, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < n
    v = tl.load(x + row * n + column, mask=inside, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(o + row * n + column, v / tl.sum(v, 0), mask=inside)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    d = tl.arange(0, BK)
    sum = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + i[:, None] * K + (k + d)[None, :])
        sum += tl.dot(left, tl.load(b + (k + d)[:, None] * N + j[None, :]))
    tl.store(c + i[:, None] * N + j[None, :], sum)


_TILE = {"BM": 64, "BN": 64, "BK": 32}
SOURCES = {
    "softmax": ASTSource(
        softmax,
        {"x": "*fp32", "o": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        {"BLOCK": 256},
    ),
    "matmul": ASTSource(
        matmul,
        dict.fromkeys("ab", "*fp16")
        | {"c": "*fp32"}
        | dict.fromkeys("MNK", "i32")
        | dict.fromkeys(_TILE, "constexpr"),
        _TILE,
    ),
}


def main() -> None:
    for name, source in SOURCES.items():
        for capability in (80, 90):
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 3}
            )
            text = compiled.asm["ptx"].partition("\t.section")[0]  # without debug information
            text = re.sub(r"^\s*(\.loc|\.file|//).*\n|\s*//.*$", "", text, flags=re.M)
            head = f"// Triton {triton.__version__}, {compiled.metadata.shared} bytes of dynamic shared memory\n"
            Path(__file__).with_name(f"{name}.sm_{capability}.ptx").write_text(head + text.lstrip())


if __name__ == "__main__":
    main()
