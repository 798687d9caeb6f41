"""Reads texts that the DSL writes. Nothing of the DSL is imported."""

from __future__ import annotations

import re


def assembler_log(remarks: str) -> str:
    """Returns what the assembler printed, out of the DSL's remarks (YAML), but for the time that it took."""
    texts = re.findall(r"- Remark:\s+'ptxas output: ((?:[^']|'')*)'", remarks)
    lines = "\n".join(texts).replace("''", "'").splitlines()
    return "\n".join(line for line in lines if "Compile time" not in line)


def launch_shared_bytes(host_code: str) -> list[int]:
    """Returns the bytes of dynamic shared memory of every launch in host code (MLIR text) that asks for a constant."""
    # Field 2 of cudaLaunchConfig_t; SSA names are unique within a function only.
    config = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    field = rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] [^\n]*{config}"
    found = []
    for function in re.split(r"(?m)^  llvm\.func ", host_code):
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        for name in re.findall(field, function):
            stored = re.search(rf"llvm\.store (%\w+), {name} : i64", function)
            if stored and stored[1] in constants:
                found.append(int(constants[stored[1]]))
    return found
