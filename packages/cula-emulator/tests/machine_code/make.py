"""Makes the cubins of this folder and reference.json, which says what NVIDIA's own tools say about them.

    python machine_code/make.py NVDISASM        (from tests/; needs nvidia-cutlass-dsl and ptxas)

reference.json: per cubin "nvdisasm", how often each mnemonic occurs with all its modifiers, and for those of *.ptx
"ptxas", the numbers in the log of `ptxas -v`.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_compact_tensor
from kernels.ampere_gemm import ampere_gemm
from kernels.blackwell_gemm import blackwell_gemm
from kernels.hopper_gemm import HopperGemm

from cula_emulator import resources

HERE = Path(__file__).parent
GEMMS = {
    "ampere_gemm.sm_80": (ampere_gemm, cutlass.Float16),
    "hopper_gemm.sm_90a": (HopperGemm(cluster_m=2), cutlass.BFloat16),
    "blackwell_gemm.sm_100a": (blackwell_gemm, cutlass.BFloat16),
}


def compile_gemm(kernel, dtype, arch: str) -> bytes:
    def fake(kind):
        sizes = (cute.sym_int(divisibility=16), cute.sym_int(divisibility=16))
        return make_fake_compact_tensor(kind, sizes, stride_order=(1, 0), assumed_align=16)

    with tempfile.TemporaryDirectory() as scratch:
        keep = (cute.GPUArch(arch), cute.EnableTVMFFI, cute.KeepCUBIN, DumpDir(scratch))
        compiled = cute.compile[keep](kernel, fake(dtype), fake(dtype), fake(cutlass.Float32))
        return compiled.artifacts.CUBIN


def disassemble(nvdisasm: str, path: Path) -> dict[str, int]:
    """Number of times that each mnemonic occurs, with its modifiers."""
    text = subprocess.run(
        [nvdisasm, "-c", "-ndf", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return dict(
        sorted(
            Counter(
                re.findall(r"(?m)^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
            ).items()
        )
    )


def numbers(log: str) -> dict[str, int]:
    stack, stores, loads = re.search(
        r"(\d+) bytes stack.*, (\d+) bytes spill s.*, (\d+) bytes spill l", log
    ).groups()
    registers, barriers = re.search(r"Used (\d+) registers, used (\d+) barriers", log).groups()
    shared = re.search(r"(\d+) bytes smem", log)
    values = {
        "registers": registers,
        "stack_bytes": stack,
        "spill_stores": stores,
        "spill_loads": loads,
    }
    values |= {"barriers": barriers, "shared_bytes": shared[1] if shared else 0}
    return {name: int(value) for name, value in values.items()}


def main() -> None:
    reference = {}
    for name, (kernel, dtype) in GEMMS.items():
        HERE.joinpath(f"{name}.cubin").write_bytes(
            compile_gemm(kernel, dtype, name.rpartition(".")[2])
        )
        reference[name] = {}
    for source in sorted(HERE.glob("*.ptx")):
        cubin, log = resources.compile_ptx(source.read_text())
        source.with_suffix(".cubin").write_bytes(cubin)
        reference[source.stem] = {"ptxas": numbers(log)}
    for name, facts in reference.items():
        facts["nvdisasm"] = disassemble(sys.argv[1], HERE / f"{name}.cubin")
    HERE.joinpath("reference.json").write_text(json.dumps(reference, indent=1) + "\n")


if __name__ == "__main__":
    main()
