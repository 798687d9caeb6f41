"""Resource reports: what the cubin says, against NVIDIA's own tools (machine_code/reference.json), and the log."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cula_emulator import resources
from cula_emulator.resources import cubin as cubins
from cula_emulator.resources import ptxas, sass

HERE = Path(__file__).parent / "machine_code"
REFERENCE = json.loads((HERE / "reference.json").read_text())
SOURCES = sorted(path.stem for path in HERE.glob("*.ptx"))


def bits_of(modifiers: list[str]) -> str:
    """The width in a disassembler's mnemonic of a load or store; 32 bits go without saying."""
    sizes = [m.lstrip("US") for m in modifiers if re.fullmatch(r"[US]?(8|16)|64|128|256", m)]
    return sizes[-1] if sizes else "32"


def short(mnemonic: str) -> str:
    """The disassembler's mnemonic in our words."""
    name, *modifiers = mnemonic.split(".")
    if name in {"LD", "LDG", "LDS", "LDL", "ST", "STG", "STS", "STL", "LDGSTS"}:
        return f"{name}.{bits_of(modifiers)}"
    if name in {"LDSM", "STSM"}:
        return f"{name}.{modifiers[-1] if modifiers[-1] in ('2', '4') else '1'}"
    return f"{name}.{modifiers[0]}" if name in {"MUFU", "WARPGROUP"} else name


def shortened(counts: dict[str, int]) -> Counter:
    total: Counter = Counter()
    for mnemonic, n in counts.items():
        total[short(mnemonic)] += n
    return total


def disassembler() -> str | None:
    found = ("nvidia/cu*/bin/nvdisasm", "triton/backends/nvidia/bin/nvdisasm")
    return next(map(str, ptxas._in_packages(found)), None) or shutil.which("nvdisasm")


@pytest.mark.parametrize("name", REFERENCE)
def test_instruction_counts_equal_the_disassembler(name):
    kernel = resources.report(HERE / f"{name}.cubin").kernel
    assert kernel.instructions == shortened(REFERENCE[name]["nvdisasm"])
    assert not kernel.unknown


@pytest.mark.parametrize("name", SOURCES)
def test_numbers_of_the_cubin_equal_those_of_ptxas(name):
    kernel = resources.report((HERE / f"{name}.cubin").read_bytes()).kernel
    told = REFERENCE[name]["ptxas"]
    assert {fact: getattr(kernel, fact) for fact in told} == told
    assert kernel.arch == "sm_" + "".join(filter(str.isdigit, name.rpartition("_")[2]))


def test_families_and_widths():
    kernel = resources.report(HERE / "memory.sm_80.cubin").kernel
    assert {n: kernel.count(f"LDGSTS.{n}") for n in (32, 64, 128)} == {32: 1, 64: 1, 128: 1}
    assert {n: kernel.count(f"LDSM.{n}") for n in (1, 2, 4)} == {1: 1, 2: 1, 4: 1}
    assert {n: kernel.count(f"LDG.{n}") for n in (8, 16, 32, 64, 128)} == {
        8: 2,
        16: 1,
        32: 1,
        64: 2,
        128: 1,
    }
    assert kernel.count("LDG") == 7 and kernel.count("LD") == 0
    functions = ("EX2", "LG2", "RCP", "RSQ", "SIN", "COS", "TANH", "SQRT")
    assert [kernel.count(f"MUFU.{name}") for name in functions] == [1] * 8 and kernel.count(
        "MUFU"
    ) == 8
    assert (
        kernel.count("HMMA")
        == kernel.count("IMMA")
        == kernel.count("RED")
        == kernel.count("ATOMS")
        == 1
    )
    assert kernel.count("ATOM") == kernel.count("ATOMG") + kernel.count("ATOMS") == 2
    tensor = resources.report(HERE / "tensor_kinds.sm_100a.cubin").kernel
    assert [tensor.count(f"UTC{kind}MMA") for kind in "HQIO"] == [3, 3, 1, 3] and tensor.count(
        "UTCMMA"
    ) == 10
    assert (tensor.count("LDG.256"), tensor.count("STG.256"), tensor.count("FFMA2")) == (1, 1, 1)
    hopper = resources.report(HERE / "hopper_gemm.sm_90a.cubin").kernel
    assert (
        hopper.count("HGMMA") == 4
        and hopper.count("WARPGROUP.DEPBAR") == hopper.count("WARPGROUP.ARRIVE") == 1
    )
    warp = resources.report(HERE / "warp_mma.sm_120a.cubin").kernel
    assert [warp.count(name) for name in ("QMMA", "OMMA", "HMMA")] == [3, 1, 1]


def test_what_the_kernel_declares():
    hopper = resources.report(HERE / "hopper_gemm.sm_90a.cubin").kernel
    assert (hopper.threads, hopper.registers, hopper.barriers, hopper.mbarriers) == (
        (256, 1, 1),
        58,
        1,
        4,
    )
    assert (hopper.shared_bytes, hopper.stack_bytes, hopper.parameter_bytes) == (0, 0, 400)
    content = cubins.read_cubin((HERE / "spilled.sm_90a.cubin").read_bytes())
    assert content.sm == 90 and content.kernels["spilled"].toolkit >= (12, 9)
    assert content.kernels["spilled"].max_registers == 24
    assert (
        content.kernels["spilled"].max_threads == (128, 1, 1)
        and content.kernels["spilled"].required_threads is None
    )


def test_an_opcode_without_a_name_is_reported_not_guessed():
    code = b"".join(word.to_bytes(16, "little") for word in (0x7918, 0x0FF, 0x0FF, 0x5EA | 1 << 73))
    assert sass.tally(code, 100) == {"NOP": 1, "unknown 0x0ff": 2, "unknown 0x5ea": 1}
    kernel = replace(
        resources.report(HERE / "memory.sm_80.cubin").kernel,
        instructions=dict(sass.tally(code, 100)),
    )
    assert kernel.unknown == {"unknown 0x0ff": 2, "unknown 0x5ea": 1}
    with pytest.raises(AssertionError, match="0x0ff"):
        resources.check(kernel, stack=True)


def test_one_opcode_means_different_operations_on_different_architectures():
    half, reduce = 0x235, 0x98E
    assert [sass.mnemonic(half, sm) for sm in (80, 90, 120)] == ["HFMA2", "HFMA2", "IADD"]
    assert [sass.mnemonic(reduce, sm) for sm in (80, 89, 90, 100)] == ["RED", "RED", "REDG", "REDG"]
    assert [sass.mnemonic(0x249, sm) for sm in (100, 120)] == ["FFMA2", "UVIADD"]
    assert [sass.mnemonic(0x210 | 1 << 76, sm) for sm in (90, 100, 120)] == [
        "IADD3",
        "IADD",
        "IADD3",
    ]


def test_marks_in_the_cubin_tell_spills_from_arrays():
    array = resources.report(HERE / "memory.sm_80.cubin").kernel
    assert array.stack_bytes == 64 and array.count("STL") and not array.spills
    spilled = resources.report(HERE / "spilled.sm_90a.cubin").kernel
    assert (
        spilled.spills
        and spilled.spill_stores > 100
        and spilled.spill_loads >= spilled.spill_stores
    )
    for kernel, wrong in ((array, "stack of 64 B"), (spilled, "spills registers")):
        with pytest.raises(AssertionError, match=wrong):
            resources.check(kernel)
    resources.check(array, stack=True)
    resources.check(spilled, stack=True, spills=True)


def test_without_marks_local_memory_counts_as_a_spill():
    spilled = replace(
        resources.report(HERE / "spilled.sm_90a.cubin").kernel, spill_stores=None, spill_loads=None
    )
    assert spilled.spills and "spill stores unknown" in str(spilled)
    assert not replace(spilled, instructions={"FFMA": 3}).spills


def test_an_older_assembler_leaves_spills_unknown():
    """Only where local memory is accessed: what never touches it cannot spill."""
    for name, amount in (("spilled.sm_90a", None), ("warp_mma.sm_120a", 0)):
        cubin = (HERE / f"{name}.cubin").read_bytes()
        toolkit = bytes((4, 0x37, 4, 0))
        at = cubin.index(toolkit) + 4
        assert cubin[at] >= 129
        kernel = resources.report(cubin[:at] + bytes((128,)) + cubin[at + 1 :]).kernel
        assert (kernel.spill_stores, kernel.spill_loads) == (amount, amount)
        assert kernel.spills == (amount is None)


def test_check_lists_everything_that_is_wrong():
    kernel = resources.report(HERE / "hopper_gemm.sm_90a.cubin").kernel
    resources.check(kernel, expect=("HGMMA", "UTMALDG", "SYNCS", "WARPGROUP.DEPBAR"))
    limit = resources.SHARED_LIMITS[90]
    resources.check(replace(kernel, shared_bytes=1000, dynamic_shared_bytes=limit - 1000))
    big = replace(kernel, shared_bytes=1000, dynamic_shared_bytes=limit - 999, registers=257)
    with pytest.raises(AssertionError) as caught:
        resources.check(big, expect=("UTCMMA", "HGMMA"))
    for part in ("no UTCMMA", f"{limit + 1} B of shared memory", "257 registers for 256 threads"):
        assert part in str(caught.value)
    assert "no HGMMA" not in str(caught.value)
    with pytest.raises(AssertionError, match="the limit is 100"):
        resources.check(replace(kernel, shared_bytes=101), shared_limit=100)
    resources.check(replace(kernel, registers=256))
    with pytest.raises(ValueError, match="sm_999 is not in SHARED_LIMITS"):
        resources.check(replace(kernel, arch="sm_999"))


def test_wrong_input_is_refused(tmp_path):
    cubin = (HERE / "memory.sm_80.cubin").read_bytes()
    for broken in (b"", b"\x7fELF", b"PK" + cubin[2:], cubin[:200], cubin[: len(cubin) // 2]):
        with pytest.raises(resources.CubinError):
            resources.report(broken)
    turing = bytearray(cubin)
    turing[49] = 75
    with pytest.raises(resources.CubinError, match="sm_75"):
        resources.report(turing)
    with pytest.raises(ValueError, match="KeepCUBIN"):
        resources.report(object())
    with pytest.raises(FileNotFoundError):
        resources.report(tmp_path / "none.cubin")


def test_the_table_reads_well():
    text = str(resources.report(HERE / "hopper_gemm.sm_90a.cubin"))
    assert "(sm_90, 256x1x1 threads)" in text and "registers 58, spill stores" in text
    assert re.search(r"HGMMA 4\b", text) and re.search(r"UTMALDG 2\b", text) and "NOP" not in text


# The log


SERIAL = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in function 'two'"
LOG = f"""ptxas info    : (C7517) warpgroup.wait is injected in around line 12 by compiler in function 'one'
ptxas warning : Stack size for entry function 'two' cannot be statically determined
ptxas info    : {SERIAL}
ptxas info    : {SERIAL}
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    864 bytes stack frame, 1436 bytes spill stores, 1532 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 864 bytes cumulative stack size
ptxas info    : Function properties for two
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
"""


def test_the_log_is_read():
    assert ptxas.parse_spills(LOG) == {
        "one": ptxas.Spills(864, 1436, 1532),
        "two": ptxas.Spills(8, 0, 4),
    }
    waits, stack, serial = ptxas.parse_warnings(LOG)
    assert waits.startswith("(C7517) warpgroup.wait is injected") and serial == SERIAL
    assert stack == "Stack size for entry function 'two' cannot be statically determined"


# PTX text: needs ptxas or nvJitLink


@pytest.mark.parametrize("name", SOURCES)
def test_ptx_is_compiled_and_its_log_agrees_with_the_cubin(name):
    ptx = (HERE / f"{name}.ptx").read_text()
    from_log = resources.report(ptx)
    from_cubin = resources.report(resources.compile_ptx(ptx)[0], from_log.kernel.arch)
    assert from_log.log and replace(from_log.kernel, warnings=()) == from_cubin.kernel
    assert from_log.kernel.arch == name.rpartition(".")[2]
    assert resources.report(HERE / f"{name}.ptx").kernel == from_log.kernel


def test_newer_ptx_is_offered_under_the_version_that_the_assembler_knows():
    ptx = (HERE / "memory.sm_80.ptx").read_text()
    newer = ptx.replace(".version 8.0", ".version 99.9")
    assert newer != ptx
    assert resources.report(newer).kernel == resources.report(ptx).kernel


RECURSION = """.version 8.0
.target sm_90a
.address_size 64
.func (.param .b32 r) power(.param .b32 x) {
    .reg .f32 %f<4>; .reg .pred %p;
    ld.param.f32 %f1, [x]; setp.lt.f32 %p, %f1, 0f3F000000; mov.f32 %f2, %f1;
    @%p bra END;
    { .param .b32 a; .param .b32 b; mul.f32 %f3, %f1, 0f3F000000; st.param.f32 [a], %f3;
      call (b), power, (a); ld.param.f32 %f2, [b]; }
END:
    mul.f32 %f2, %f2, %f1; st.param.f32 [r], %f2;
    ret;
}
.visible .entry caller(.param .u64 out) {
    .reg .f32 %f<4>; .reg .b64 %rd1;
    ld.param.u64 %rd1, [out]; ld.global.f32 %f1, [%rd1];
    { .param .b32 a; .param .b32 b; st.param.f32 [a], %f1; call (b), power, (a); ld.param.f32 %f2, [b]; }
    st.global.f32 [%rd1], %f2;
    ret;
}
"""


def test_a_called_function_counts_for_its_kernel_and_recursion_leaves_the_stack_open():
    found = resources.report(RECURSION)
    assert list(found.kernels) == ["caller"] and found.kernel.stack_bytes is None
    assert found.kernel.spills and found.kernel.spill_stores == 4 * found.kernel.count("STL.32") > 0
    alone = resources.report(resources.compile_ptx(RECURSION)[0]).kernel
    assert alone.stack_bytes is alone.spill_stores is None and alone.spills
    with pytest.raises(AssertionError, match="stack of unknown size"):
        resources.check(found.kernel, spills=True)


def test_options_reach_the_assembler():
    ptx = (HERE / "spilled.sm_90a.ptx").read_text().replace(" .maxntid 128 .maxnreg 24", "")
    assert not resources.report(ptx).kernel.spills
    cubin, log = resources.compile_ptx(ptx, options=("--maxrregcount=24",))
    assert resources.report(cubin).kernel.spills and not re.search(r"\b0 bytes spill stores", log)


def test_rejected_ptx_gives_the_log():
    with pytest.raises(resources.AssemblyFailed, match="frobnicate"):
        resources.report(
            (HERE / "memory.sm_80.ptx").read_text().replace("bar.sync 0;", "frobnicate;")
        )
    with pytest.raises(resources.AssemblyFailed, match="no .target|without a .target"):
        resources.report("// nothing\n")


def test_without_an_assembler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ptxas, "_in_packages", lambda patterns: iter(()))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setattr(ptxas.shutil, "which", lambda name: None)
    monkeypatch.setattr(ptxas.Path, "is_file", lambda path: False)
    with pytest.raises(resources.AssemblerNotFound, match="pip install nvidia-cuda-nvcc"):
        resources.compile_ptx((HERE / "memory.sm_80.ptx").read_text())


def test_packages_come_first(monkeypatch, tmp_path):
    """A ptxas inside a package is found without PATH, and its failure is not hidden by a later one's."""
    tool = tmp_path / "nvidia" / "cu13" / "bin" / "ptxas"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho 'ptxas fatal : this is the packaged one'\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(ptxas.shutil, "which", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert next(ptxas._ptxas_paths()) == tool
    with pytest.raises(resources.AssemblyFailed, match="the packaged one"):
        resources.compile_ptx("not PTX at all", "sm_90a")


@pytest.mark.skipif(
    not any(ptxas._in_packages(ptxas._NVJITLINK_IN_PACKAGES)), reason="needs nvidia-nvjitlink"
)
@pytest.mark.parametrize("name", ["memory.sm_80", "spilled.sm_90a"])
def test_nvjitlink_compiles_the_same(monkeypatch, name):
    monkeypatch.setattr(ptxas, "_ptxas_paths", lambda: iter(()))
    ptx = (HERE / f"{name}.ptx").read_text()
    kernel, told = resources.report(ptx).kernel, REFERENCE[name]["ptxas"]
    assert {fact: getattr(kernel, fact) for fact in told} == told
    assert resources.report(re.sub(r"\.version \S+", ".version 99.9", ptx)).kernel == kernel
    with pytest.raises(resources.AssemblyFailed, match="frobnicate"):
        resources.compile_ptx(ptx.replace("bar.sync 0;", "frobnicate;"))


# CuTe DSL


@pytest.mark.filterwarnings("ignore:This static loop has")  # it is meant to be unrolled
def test_cute_reports_a_spill_with_the_log_of_its_own_assembler(fake):
    from kernels.register_hungry import RegisterHungry

    def build(ctas: int, arch: str) -> resources.Report:
        return resources.compile(RegisterHungry(ctas), fake("float32", (256, 96)), arch=arch)

    tight = build(4, "sm_90a").kernel
    assert (
        tight.registers == 64
        and tight.spills
        and tight.spill_stores > 200
        and tight.stack_bytes > 200
    )
    assert tight.count("STL") and tight.count("LDL")
    with pytest.raises(AssertionError, match="spills registers"):
        resources.check(tight)
    roomy = build(1, "sm_100a").kernel
    resources.check(roomy, expect=("LDG", "STG"))
    assert (roomy.spill_stores, roomy.stack_bytes, roomy.arch) == (0, 0, "sm_100a")


def test_cute_reports_serialised_wgmma(fake):
    from kernels.wgmma_with_print import WgmmaWithPrint

    plain, printing = (
        resources.compile(WgmmaWithPrint(p), fake("float32", (64, 64))) for p in (False, True)
    )
    assert plain.log and not plain.warnings and not plain.kernel.serialized
    resources.check(plain.kernel, expect=("HGMMA", "WARPGROUP.DEPBAR"))
    assert printing.kernel.serialized and printing.kernel.warnings == printing.warnings
    assert "Potential Performance Loss: wgmma.mma_async instructions are serialized" in str(
        printing
    )
    assert printing.kernel.count("WARPGROUP.DEPBAR") > plain.kernel.count("WARPGROUP.DEPBAR")
    with pytest.raises(AssertionError, match="WGMMA is serialised"):
        resources.check(printing.kernel, stack=True)
    # Two operands of 64x64 bf16.
    assert plain.kernel.dynamic_shared_bytes == 2 * 64 * 64 * 2


def test_a_cubin_is_read_with_what_was_kept_beside_it():
    cubin = (HERE / "hopper_gemm.sm_90a.cubin").read_bytes()
    bare = resources.report(cubin, "sm_90a")
    name = bare.kernel.name
    warning = f"(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in '{name}'"
    found = resources.report(
        cubin, "sm_90a", log=f"ptxas info    : {warning}\n", dynamic_shared_bytes=(4096,)
    )
    assert found.kernel == replace(bare.kernel, warnings=(warning,), dynamic_shared_bytes=4096)
    assert found.kernel.serialized and found.warnings == (warning,)
    # Of two launches it isn't clear which is meant.
    assert resources.report(cubin, "sm_90a", dynamic_shared_bytes=(1, 2)) == bare


def test_a_compiled_cute_function_is_read_from_its_artifacts(fake, tmp_path):
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir
    from kernels.vector_add import vector_add

    arguments = [fake("float32", (None,)) for _ in range(3)]
    base = (cute.GPUArch("sm_90a"), cute.EnableTVMFFI, DumpDir(str(tmp_path)))
    for keep in ((cute.KeepCUBIN,), (cute.KeepCUBIN, cute.KeepPTX), (cute.KeepPTX,)):
        found = resources.report(cute.compile[(*base, *keep)](vector_add, *arguments))
        assert found.kernel.arch == ("sm_90a" if cute.KeepPTX in keep else "sm_90")
        assert found.kernel.count("FADD") == 1 and (found.log is None) == (cute.KeepCUBIN in keep)
        assert found.kernel.dynamic_shared_bytes == 0
    with pytest.raises(ValueError, match="KeepCUBIN"):
        resources.report(cute.compile[base](vector_add, *arguments))


@pytest.mark.skipif(disassembler() is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_fresh_machine_code_equals_the_disassembler(fake, tmp_path, arch):
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir
    from kernels.ampere_gemm import ampere_gemm

    arguments = [fake(kind, (None, None)) for kind in ("float16", "float16", "float32")]
    options = (cute.GPUArch(arch), cute.EnableTVMFFI, cute.KeepCUBIN, DumpDir(str(tmp_path)))
    path = tmp_path / "fresh.cubin"
    path.write_bytes(cute.compile[options](ampere_gemm, *arguments).artifacts.CUBIN)
    listing = subprocess.run(
        [disassembler(), "-c", str(path)], capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r"(?m)^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing)
    assert len(names) > 100 and resources.report(path).kernel.instructions == Counter(
        map(short, names)
    )
