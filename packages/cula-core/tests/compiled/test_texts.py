"""What is read out of the texts that the DSL writes."""

from __future__ import annotations

from cula_core.compiled.texts import assembler_log, launch_shared_bytes


def test_the_log_is_what_the_assembler_printed():
    remarks = (
        "--- !Analysis\n  - Remark:      'ptxas output: one ''kernel''\nptxas info    : Compile time = 3 ms\n'\n...\n"
        "  - Remark:      'something else'\n  - Remark:  'ptxas output: two\n'\n"
    )
    assert assembler_log(remarks) == "one 'kernel'\n\ntwo"
    assert assembler_log("") == ""


FUNCTION = """
  llvm.func @{name}() {{
    %0 = llvm.mlir.constant({bytes} : i64) : i64
    %1 = llvm.mlir.constant(7 : i64) : i64
    %2 = llvm.getelementptr %9[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.{config}
    llvm.store {value}, %2 : i64, !llvm.ptr
  }}"""
CONFIG = "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def test_shared_memory_of_each_launch():
    def function(name: str, size: int, value: str = "%0", config: str = CONFIG) -> str:
        return FUNCTION.format(name=name, bytes=size, value=value, config=config)

    assert launch_shared_bytes(function("a", 1024) + function("b", 2048)) == [1024, 2048]
    assert launch_shared_bytes(function("a", 1024, "%arg0") + function("b", 1, "%1")) == [7]
    assert launch_shared_bytes(function("a", 1024, config="struct<(i64)>")) == []
