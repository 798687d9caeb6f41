"""Every config cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import re

import pytest

from cula_core.compiled.artifacts import artifacts
from cula_emulator import resources
from cula_testing.compiled import assert_closed, report
from liteattention_sm90 import launch
from liteattention_sm90.config import (
    BACKWARD_REGISTERS,
    ENDS_THREADS,
    REGISTERS,
    THREADS,
    BackwardConfig,
    Config,
    ConvertConfig,
    ForwardConfig,
    QueriesConfig,
    SumsConfig,
)

SHARED_MEMORY = 232448  # bytes of a CTA on Hopper
CONFIGS = [
    *(ForwardConfig("bfloat16", dim, skip=skip) for dim in (64, 128) for skip in (False, True)),
    ForwardConfig("float16", 128, causal=True),
    ForwardConfig("bfloat16", 128, True, True, 128, True, True),
    ForwardConfig("float16", 80, True, True, 64, True, True),
    ForwardConfig("bfloat16", 8, skip=True, block_n=128),
    *(ForwardConfig("bfloat16", 128, skip=skip, packed="int32") for skip in (False, True)),
    ForwardConfig("bfloat16", 128, True, True, 128, True, True, True, packed="int64"),
    ForwardConfig("float16", 64, True, True, 64, packed="int64"),
]
KEYS_ONLY = {"keys_only": True}
GRADIENTS = [
    BackwardConfig("bfloat16", 128),
    BackwardConfig("float16", 64, causal=True, skip=True, ordered=True),
    *(BackwardConfig("bfloat16", dim, **KEYS_ONLY) for dim in (64, 128)),
    BackwardConfig("float16", 80, True, True, 64, True, **KEYS_ONLY),
    BackwardConfig("bfloat16", 128, True, True, 128, True, **KEYS_ONLY),
    *(QueriesConfig("bfloat16", dim) for dim in (64, 128)),
    QueriesConfig("float16", 80, True, True, 64, True),
    QueriesConfig("bfloat16", 128, True, True, 128, True),
    QueriesConfig("float16", 128, skip=True),
    QueriesConfig("bfloat16", 8, skip=True, block_n=128),
    QueriesConfig("bfloat16", 128, packed="int32"),
    QueriesConfig("float16", 128, True, True, 64, True, "int64"),
    BackwardConfig("bfloat16", 128, skip=True, packed="int64", **KEYS_ONLY),
]


def label(config: Config) -> str:
    names = ("causal", "skip", "must_do", "on_device", "ordered", "keys_only")
    flags = [name for name in names if getattr(config, name, False)]
    packed = getattr(config, "packed", None)
    flags += [f"packed_{packed}"] if packed else []
    kind = type(config).__name__.removesuffix("Config")
    return "-".join([kind, config.dtype, f"D{config.head_dim}", f"N{config.block_n}", *flags])


@pytest.mark.parametrize("config", CONFIGS + GRADIENTS, ids=label)
def test_machine_code(config):
    unit = launch.unit(config)
    kernel, made = report(unit).kernel, artifacts(unit)
    expect = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")
    resources.check(kernel, expect=expect)
    # Sums in memory are only those of gradients of q that may come in any order.
    adds = isinstance(config, BackwardConfig) and not config.keys_only
    assert (kernel.count("UTMAREDG") > 0) == adds and kernel.count("RED") == 0
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
    load, multiply = BACKWARD_REGISTERS if isinstance(config, BackwardConfig) else REGISTERS
    assert set(map(int, asked)) == {load, multiply}
    assert 128 * (load + 2 * multiply) <= kernel.registers * THREADS


@pytest.mark.parametrize("config", [
    BackwardConfig("bfloat16", 64, packed="int32"), BackwardConfig("bfloat16", 128, packed="int64"),
    BackwardConfig("float16", 128, True, True, 64, True, "int32"),
], ids=str)  # fmt: skip
def test_machine_code_of_packed_gradients(config):
    unit = launch.unit(config)
    kernel, made = report(unit).kernel, artifacts(unit)
    resources.check(kernel, expect=("HGMMA", "UTMALDG", "UTMAREDG", "UTMASTG", "USETMAXREG"))
    assert "serialized" not in made.log and "C7510" not in made.log
    spilled = (kernel.spill_stores, kernel.spill_loads, kernel.count("LDL"), kernel.count("STL"))
    assert spilled == (0, 0, 0, 0)
    assert kernel.shared_bytes + kernel.dynamic_shared_bytes <= SHARED_MEMORY


@pytest.mark.parametrize("config, loads, stores, narrow", [
    (SumsConfig("bfloat16", 128, True), 8, 8, 2), (SumsConfig("float16", 64), 4, 4, 2),
    (SumsConfig("bfloat16", 8), 4, 4, 2),
    (SumsConfig("bfloat16", 128, True, with_acc=False), 8, 0, 2), (ConvertConfig("bfloat16", 128), 8, 0, 8),
    (ConvertConfig("float16", 40), 4, 0, 4),
    (SumsConfig("bfloat16", 128, True, "int64"), 8, 8, 2), (ConvertConfig("bfloat16", 128, "int32"), 8, 0, 8),
])  # fmt: skip
def test_machine_code_around_the_backward_pass(config, loads, stores, narrow):
    """loads, stores: of 16 bytes. narrow: other stores."""
    unit = launch.unit(config)
    kernel, ptx = report(unit).kernel, artifacts(unit).ptx
    resources.check(kernel, expect=("LDG", "STG"))
    assert (kernel.spill_stores, kernel.spill_loads) == (0, 0)
    assert kernel.threads == (ENDS_THREADS, 1, 1) and kernel.registers <= 64
    assert kernel.dynamic_shared_bytes == 0 and kernel.count("BAR") == 0
    assert ptx.count("ld.global.v4") == loads and ptx.count("st.global.v4") == stores
    assert len(re.findall(r"st\.global\.(?!v4)", ptx)) == narrow


@pytest.mark.parametrize(
    "config",
    [
        CONFIGS[0],
        CONFIGS[-1],
        *(c("bfloat16", 64) for c in (QueriesConfig, SumsConfig, ConvertConfig)),
    ],
    ids=str,
)
def test_the_keys_of_kernels_hold_every_source_that_makes_them(config):
    assert_closed(launch.unit(config))
