"""The kernels whose emulation `speed.py` times, and the process that times them.

    python benchmarks/emulator/workloads.py [--only NAME ...] [--seconds S]

Prints one JSON object. Which emulator is measured is decided by PYTHONPATH, so that two trees can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GENERATED_LINES = 10_000

_HEADER = ".version 8.4\n.target sm_90a\n.address_size 64\n"
_ENTRY = """
.visible .entry {name}(.param .u64 in, .param .u64 out, .param .u32 n)
{{
    .reg .pred %p<8>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %rd<16>;
    ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mad.lo.u32 %r5, %r3, %r4, %r2;
    mul.wide.u32 %rd3, %r5, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    {body}
    ret;
}}
"""


@dataclass
class Workload:
    """A built kernel: `run` executes it once, `module` is its EmulatedModule, `check` raises on a wrong result."""

    module: Any
    run: Callable[[], None]
    check: Callable[[], None]


def _ptx(name: str, body: str, shared: str = "") -> str:
    lines = body.replace(";", ";\n")
    return _HEADER + shared + _ENTRY.format(name=name, body=lines)


def _module(
    name: str, body: str, grid: int, block: int, steps: int, expected, shared: str = ""
) -> Workload:
    """A kernel (in, out, steps) with one fp32 word per thread; `expected(x)` gives the output."""
    import cula_emulator as emulator

    module = emulator.EmulatedModule(_ptx(name, body, shared))
    x = torch.linspace(-1.0, 1.0, grid * block)
    out = torch.empty_like(x)

    def run() -> None:
        out.fill_(float("nan"))
        module.launch(name, (grid,), (block,), (x, out, steps))

    return Workload(
        module, run, lambda: torch.testing.assert_close(out, expected(x), rtol=1e-4, atol=1e-4)
    )


def scalar() -> Workload:
    """fp32 multiply-adds and one ex2 per step, no memory in the loop."""
    steps = 2000
    body = """
        ld.global.f32 %f1, [%rd4]; mov.u32 %r6, 0;
        L: mul.f32 %f2, %f1, %f1; fma.rn.f32 %f3, %f2, 0f3E800000, %f1; neg.f32 %f4, %f2;
        ex2.approx.ftz.f32 %f5, %f4; fma.rn.f32 %f6, %f3, 0f3F000000, %f5; sub.f32 %f7, %f6, %f5;
        fma.rn.f32 %f8, %f7, 0f3F800000, 0f3C23D70A; min.f32 %f1, %f8, 0f3F800000;
        add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, %r1; @%p1 bra L;
        st.global.f32 [%rd5], %f1;
    """

    def expected(x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            power = torch.exp2(-x * x)
            x = ((x * x * 0.25 + x) * 0.5 + power - power + 0.01).clamp(max=1.0)
        return x

    return _module("scalar", body, 4, 256, steps, expected)


def warp() -> Workload:
    """Row softmax in a warp: two butterfly reductions and an ex2 per step."""
    steps = 100

    def butterfly(combine: str) -> str:
        return "".join(
            f"mov.b32 %r9, %f2; shfl.sync.bfly.b32 %r10, %r9, {distance}, 31, -1; mov.b32 %f3, %r10;"
            f"{combine}.f32 %f2, %f2, %f3;"
            for distance in (16, 8, 4, 2, 1)
        )

    body = f"""
        ld.global.f32 %f1, [%rd4]; mov.u32 %r6, 0;
        L: mov.f32 %f2, %f1; {butterfly("max")} mov.f32 %f4, %f2;
        sub.f32 %f5, %f1, %f4; mul.f32 %f5, %f5, 0f3FB8AA3B; ex2.approx.ftz.f32 %f6, %f5;
        mov.f32 %f2, %f6; {butterfly("add")}
        div.rn.f32 %f1, %f6, %f2;
        add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, %r1; @%p1 bra L;
        st.global.f32 [%rd5], %f1;
    """

    def expected(x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, 32)
        for _ in range(steps):
            rows = rows.softmax(dim=1)
        return rows.flatten()

    return _module("warp", body, 4, 256, steps, expected)


def shared() -> Workload:
    """A 16x16 tile transposed through shared memory and a tree reduction over 256 threads, each step with barriers."""
    steps = 100
    tree = "".join(
        f"""setp.lt.u32 %p2, %r2, {half}; @!%p2 bra T{half}; ld.shared.f32 %f4, [%r8+{4 * half}];
        ld.shared.f32 %f5, [%r8]; add.f32 %f5, %f5, %f4; st.shared.f32 [%r8], %f5; T{half}: bar.sync 0;"""
        for half in (128, 64, 32, 16, 8, 4, 2, 1)
    )
    body = f"""
        ld.global.f32 %f1, [%rd4]; mov.u32 %r6, 0; mov.u32 %r7, tile; shl.b32 %r8, %r2, 2; add.u32 %r8, %r8, %r7;
        and.b32 %r9, %r2, 15; shr.u32 %r10, %r2, 4; shl.b32 %r9, %r9, 4; add.u32 %r9, %r9, %r10;
        shl.b32 %r9, %r9, 2; add.u32 %r9, %r9, %r7;
        L: st.shared.f32 [%r8], %f1; bar.sync 0; ld.shared.f32 %f2, [%r9]; bar.sync 0;
        {tree}
        ld.shared.f32 %f3, [%r7]; bar.sync 0; fma.rn.f32 %f1, %f3, 0f3A800000, %f2;
        add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, %r1; @%p1 bra L;
        st.global.f32 [%rd5], %f1;
    """

    def expected(x: torch.Tensor) -> torch.Tensor:
        tiles = x.double().view(-1, 16, 16)
        for _ in range(steps):
            tiles = tiles.transpose(1, 2) + tiles.sum((1, 2), keepdim=True) / 1024
        return tiles.flatten().float()

    return _module("shared", body, 4, 256, steps, expected, ".shared .align 16 .b8 tile[1024];\n")


def _fake(dtype: str, order: tuple[int, int] = (1, 0)):
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    types = {"bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}
    sizes = tuple(cute.sym_int(divisibility=16) for _ in range(2))
    return make_fake_compact_tensor(types[dtype], sizes, stride_order=order, assumed_align=16)


def _gemm(kernel, arch: str, m: int, n: int, k: int) -> Workload:
    import cula_emulator as emulator

    fakes = (_fake("bfloat16"), _fake("bfloat16"), _fake("float32"))
    built = emulator.compile(kernel, *fakes, arch=arch)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, k, generator=generator).bfloat16() for size in (m, n))
    c = torch.empty(m, n)

    def run() -> None:
        c.fill_(float("nan"))
        built(a, b, c)

    wanted = a.float() @ b.float().t()
    return Workload(
        built.module, run, lambda: torch.testing.assert_close(c, wanted, rtol=1e-3, atol=1e-3)
    )


def ampere_gemm() -> Workload:
    """bf16 GEMM 256x256x512 for sm_80: cp.async, ldmatrix, mma.sync."""
    from kernels.ampere_gemm import ampere_gemm as kernel

    return _gemm(kernel, "sm_80", 256, 256, 512)


def hopper_gemm() -> Workload:
    """bf16 GEMM 512x256x512 for sm_90a: TMA, mbarrier pipeline, wgmma."""
    from kernels.hopper_gemm import HopperGemm

    return _gemm(HopperGemm(tile=(64, 128, 64)), "sm_90a", 512, 256, 512)


def blackwell_gemm() -> Workload:
    """bf16 GEMM 512x512x512 for sm_100a: TMA, tcgen05.mma, tensor memory."""
    from kernels.blackwell_gemm import blackwell_gemm as kernel

    return _gemm(kernel, "sm_100a", 512, 512, 512)


def decode() -> Workload:
    """cula-lightning-decode for sm_90a: 8 sequences, 4 heads of 128x128, fp32 state, one token."""
    from cula_core.compiled.artifacts import ENTRY, artifacts
    from cula_core.reference.lightning_decode import linear_attention_decode
    from cula_emulator import EmulatedKernel
    from cula_lightning_decode import launch
    from cula_lightning_decode.config import Problem
    from cula_lightning_decode.plan import select

    problem = Problem("bfloat16", "float32", 128, 128, 1, False, False)
    made = artifacts(launch.unit(select(problem, "sm_90a"), "sm_90a"))
    built = EmulatedKernel.load(made.ptx, made.host_object, ENTRY)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, 1, 4, 128, generator=generator).bfloat16() for _ in range(3))
    start = torch.randn(8, 4, 128, 128, generator=generator)
    decay = torch.linspace(0.1, 0.4, 4)
    out, state = torch.empty_like(v), start.clone()

    def run() -> None:
        out.fill_(float("nan"))
        state.copy_(start)
        built(q, k, v, state, decay, None, None, None, out, 1.0)

    def check() -> None:
        wanted_state = start.clone()
        wanted = linear_attention_decode(q, k, v, wanted_state, decay, scale=1.0)
        torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(state, wanted_state)

    return Workload(built.module, run, check)


WORKLOADS = {
    w.__name__: w for w in (scalar, warp, shared, decode, ampere_gemm, hopper_gemm, blackwell_gemm)
}


def generated_ptx(lines: int = GENERATED_LINES) -> str:
    """Straight-line code of about `lines` lines in 20 blocks, with loads, stores and predication among them."""
    body, block_lines = [], lines // 20
    group = (
        "ld.global.f32 %f{a}, [%rd4];", "fma.rn.f32 %f{b}, %f{a}, %f{c}, %f{b};", "mov.b32 %r{b}, %f{b};",
        "shl.b32 %r{c}, %r{b}, 3;", "xor.b32 %r{a}, %r{c}, %r{b};", "setp.gt.s32 %p3, %r{a}, 7;",
        "@%p3 add.u32 %r{b}, %r{a}, 5;", "max.f32 %f{c}, %f{a}, %f{b};", "cvt.rn.f32.s32 %f{a}, %r{b};",
        "st.global.f32 [%rd5], %f{c};",
    )  # fmt: skip
    for number in range(lines - 20):
        if number % block_lines == 0:
            body.append(f"B{number}: setp.eq.u32 %p1, %r1, {number};\n @%p1 bra END;\n")
        a, b, c = (10 + (number // 10 * k + k) % 50 for k in (7, 11, 13))
        body.append(group[number % 10].format(a=a, b=b, c=c) + "\n")
    return _HEADER + _ENTRY.format(name="generated", body="".join(body) + "END:")


def _cpu_seconds() -> float:
    """CPU time of this process and of the compilers that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def build_once(prepare: bool) -> float:
    """CPU seconds that make the generated PTX runnable; `prepare` builds the emulator's own library before that."""
    import cula_emulator as emulator

    text = generated_ptx()
    if prepare:
        emulator.EmulatedModule(_ptx("empty", ""))
    start = _cpu_seconds()
    emulator.EmulatedModule(text)
    return _cpu_seconds() - start


def build_times() -> dict[str, float]:
    """Seconds of `build_once` with an empty cache, and again in a new process with a warm one."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"CULA_EMULATOR_CACHE": cache}

        def run(step: str) -> float:
            command = [sys.executable, __file__, "--build", step]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return float(done.stdout.splitlines()[-1])

        lines = generated_ptx().count("\n")
        return {"lines": lines, "cold_seconds": run("cold"), "warm_seconds": run("warm")}


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Runs a workload until it has taken so many seconds, after checking its results."""
    workload = WORKLOADS[name]()
    workload.run()
    workload.check()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        # The emulator has one thread, so its CPU time leaves out other programs of the machine.
        start = time.process_time()
        workload.run()
        times.append(time.process_time() - start)
    counted = getattr(workload.module, "statistics", None)
    return {
        "about": (WORKLOADS[name].__doc__ or "").strip(),
        "median_seconds": statistics.median(times),
        "runs": len(times),
        "instructions": getattr(counted, "instructions", None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times emulated kernels; prints JSON.")
    parser.add_argument("--only", nargs="*", choices=[*WORKLOADS, "build"])
    parser.add_argument("--seconds", type=float, default=2.0, help="at least so long per kernel")
    parser.add_argument("--build", choices=("cold", "warm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        print(build_once(prepare=options.build == "cold"))
        return
    torch.set_num_threads(1)
    chosen = options.only or [*WORKLOADS, "build"]
    result: dict[str, Any] = {"kernels": {}, "build": None}
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if name == "build":
            result["build"] = build_times()
        else:
            result["kernels"][name] = measure(name, options.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
