"""Every config cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import re

import pytest

from cula_core.compiled.artifacts import artifacts
from cula_emulator import resources
from cula_testing.compiled import assert_closed, report
from liteattention_sm90 import launch
from liteattention_sm90.config import REGISTERS, THREADS, ForwardConfig

SHARED_MEMORY = 232448  # bytes of a CTA on Hopper
CONFIGS = [
    *(ForwardConfig("bfloat16", dim, skip=skip) for dim in (64, 128) for skip in (False, True)),
    ForwardConfig("float16", 128, causal=True),
    ForwardConfig("bfloat16", 128, True, True, 128, True, True),
    ForwardConfig("float16", 80, True, True, 64, True, True),
    ForwardConfig("bfloat16", 8, skip=True, block_n=128),
]


def label(config: ForwardConfig) -> str:
    names = ("causal", "skip", "must_do", "on_device")
    flags = [name for name in names if getattr(config, name)]
    return "-".join([config.dtype, f"D{config.head_dim}", f"N{config.block_n}", *flags])


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_machine_code(config):
    unit = launch.unit(config)
    kernel, made = report(unit).kernel, artifacts(unit)
    resources.check(kernel, expect=("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"))
    # C7510: products that the assembler serialises, because it cannot prove that nobody touches their registers.
    assert "spill stores" in made.log
    assert "serialized" not in made.log and "C7510" not in made.log
    spilled = (kernel.spill_stores, kernel.spill_loads, kernel.count("LDL"), kernel.count("STL"))
    assert spilled == (0, 0, 0, 0)
    assert not re.search(r"\b(ld|st)\.local|\.local \.", made.ptx)
    assert kernel.threads == (THREADS, 1, 1)
    assert kernel.shared_bytes + kernel.dynamic_shared_bytes <= SHARED_MEMORY
    # What the roles ask for is no more than the launch gives.
    asked = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", made.ptx)
    assert set(map(int, asked)) == set(REGISTERS)
    load, multiply = REGISTERS
    assert 128 * (load + 2 * multiply) <= kernel.registers * THREADS


def test_the_keys_of_kernels_hold_every_source_that_makes_them():
    assert_closed(launch.unit(CONFIGS[0]))
