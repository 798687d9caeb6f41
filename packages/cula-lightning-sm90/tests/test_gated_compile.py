"""Every config of the gated delta rule's prefill cross-compiles without a GPU, and its machine code is as meant."""

from __future__ import annotations

import re

import pytest

from cula_core.compiled.artifacts import artifacts
from cula_core.constants import STATE_DTYPES
from cula_emulator import resources
from cula_emulator.covering import covering_cases
from cula_lightning_sm90.config import SHARED_MEMORY
from cula_lightning_sm90.gated import launch
from cula_lightning_sm90.gated.config import (
    ACTIVATION_DTYPES,
    Config,
    PrepareConfig,
    RecurrenceConfig,
)
from cula_lightning_sm90.gated.kernels import prepare, recurrence
from cula_testing.compiled import assert_closed, report

OPERANDS = {
    "dtype": ACTIVATION_DTYPES,
    "operand": ("float16", "bfloat16"),
    "l2norm": (True, False),
    "index_dtype": (None, "int32", "int64"),
}
PREPARE = OPERANDS | {
    # (gate, gate_dtype, bias)
    "gate": (
        (None, "float32", False),
        ("log", "float32", False),
        ("log", "bfloat16", False),
        ("softplus", "float16", False),
        ("softplus", "bfloat16", True),
    ),
    # (strength, strength_dtype)
    "strength": (
        (None, "float32"),
        ("given", "float32"),
        ("logits", "bfloat16"),
        ("doubled logits", "float16"),
    ),
    "cut": (True, False),
}
RECURRENCE = OPERANDS | {
    "tiles": (1, 2),
    "state_v_first": (True, False),
    # (initial_state, final_state, indexed, redirected, fresh, in_place)
    "states": (
        (False, True, False, False, False, False),
        (False, False, False, False, False, False),
        (True, True, False, False, True, False),
        (True, False, True, False, False, False),
        (True, True, True, False, True, True),
        (True, True, True, True, True, True),
    ),
    # (checkpoints, placed)
    "kept": ((None, False), ("every", False), ("every", True), ("once", False), ("once", True)),
    "cut": (True, False),
    "state_dtype": STATE_DTYPES,
}
SCAN = OPERANDS | {
    "state_v_first": (True, False),
    # (initial_state, final_state, indexed, redirected, fresh, in_place)
    "states": (
        (False, False, False, False, False, False),
        (True, False, False, False, True, False),
        (True, False, True, False, False, False),
    ),
    "state_dtype": STATE_DTYPES,
}


def config_of(case: dict) -> Config:
    operands = [case[name] for name in OPERANDS]
    if "gate" in case:
        return PrepareConfig(*operands, *case["gate"], *case["strength"], case["cut"])
    walk, states = (case["state_v_first"], *case["states"]), {"state_dtype": case["state_dtype"]}
    if "cut" not in case:
        return RecurrenceConfig(*operands, 2, *walk, scan=True, **states)
    kept, cut = case["kept"], case["cut"]
    return RecurrenceConfig(*operands, case["tiles"], *walk, *kept, cut=cut, **states)


def possible(case: dict) -> bool:
    return config_of(case).illegal() is None


# What asks most of registers and shared memory: all that a call can want, in each form of a CTA.
HEAVY_PREPARE = {
    "dtype": "bfloat16", "operand": "float16", "l2norm": True, "index_dtype": "int64", "gate": PREPARE["gate"][-1],
    "strength": PREPARE["strength"][-1], "cut": True,
}  # fmt: skip
HEAVY_RECURRENCES = [
    {
        "dtype": "bfloat16", "operand": operand, "l2norm": l2norm, "index_dtype": "int64", "tiles": tiles,
        "state_v_first": v_first, "states": RECURRENCE["states"][-1], "kept": ("every", True), "cut": cut,
        "state_dtype": states,
    }
    for tiles, v_first, operand, l2norm, cut, states in (
        (1, False, "float16", True, True, "bfloat16"),
        (1, True, "bfloat16", False, False, "float32"),
        (2, False, "bfloat16", False, False, "bfloat16"),
        (2, True, "float16", True, True, "float32"),
    )
]  # fmt: skip
# Of slices, whose ends a scan comes to.
HEAVY_SCANS = [
    {
        "dtype": "bfloat16", "operand": operand, "l2norm": l2norm, "index_dtype": "int32", "state_v_first": False,
        "states": SCAN["states"][1], "state_dtype": "float32",
    }
    for operand, l2norm in (("float16", True), ("bfloat16", False))
]  # fmt: skip
# The other values once: pairs are for the emulator, which spares no kernel that spills either.
CONFIGS = [
    config_of(case)
    for factors, heavy in (
        (PREPARE, [HEAVY_PREPARE]),
        (RECURRENCE, HEAVY_RECURRENCES),
        (SCAN, HEAVY_SCANS),
    )
    for case in covering_cases(factors, possible, heavy, strength=1)
]


def label(config: Config) -> str:
    facts = [str(value) for value in vars(config).values()]
    return "-".join((type(config).__name__.removesuffix("Config"), *facts)).replace(" ", "_")


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_machine_code(config):
    unit = launch.unit(config)
    kernel, ptx, log = report(unit).kernel, artifacts(unit).ptx, artifacts(unit).log
    walks = isinstance(config, RecurrenceConfig)
    writes = walks and not config.scan
    resources.check(
        kernel, expect=("HGMMA", "UTMALDG", "UBLKCP", *(("UTMASTG",) if writes else ()))
    )
    assert "spill stores" in log and "serialized" not in log
    spilled = (kernel.spill_stores, kernel.spill_loads, kernel.count("LDL"), kernel.count("STL"))
    assert spilled == (0, 0, 0, 0)
    assert not re.search(r"\b(ld|st)\.local|\.local \.", ptx)
    assert kernel.shared_bytes == 0 and kernel.dynamic_shared_bytes <= SHARED_MEMORY

    # What the warpgroups ask for adds up to what the launch gives.
    asked = set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)))
    given = kernel.registers
    if not walks:
        assert kernel.threads == (prepare.THREADS, 1, 1) and asked == set(prepare.REGISTERS)
        makers, feeders, writers = prepare.REGISTERS
        assert prepare.GROUPS * makers + feeders + writers <= given * prepare.THREADS // 128
    else:
        many, few = recurrence.REGISTERS[config.tiles]
        groups = config.tiles + 2
        assert kernel.threads == (128 * groups, 1, 1) and asked == {many, few}
        assert config.tiles * many + 2 * few <= groups * given
    # Asking for more by the instruction that gives back, or the other way round, is illegal on the card.
    for direction, count in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx):
        assert (int(count) > given) == (direction == "inc")
    assert ptx.count("griddepcontrol.wait") == (walks and config.waits)
    beside = not walks and not config.cut
    assert ptx.count("griddepcontrol.launch_dependents") == beside
    if walks:
        # Products with the state, with T' and Aqk, and the update; once more where a chunk may not be full. A scan
        # needs half of the others.
        copies = 1 + config.partly
        assert kernel.count("HGMMA") == copies * ((1 + writes) * (8 + 4) + 4)
        assert kernel.count("WARPGROUP.ARRIVE") >= copies * (3 + writes)
        # One wait per place where results are used: the compiler adds some where it does not trust the code.
        assert kernel.count("WARPGROUP.DEPBAR") == copies * (4 + 2 * writes)
    else:
        assert kernel.count("HGMMA") == 2 * 8
        assert kernel.count("WARPGROUP.DEPBAR") == 1


def test_the_keys_of_kernels_hold_every_source_that_makes_them():
    for config in (PrepareConfig("bfloat16"), RecurrenceConfig("bfloat16")):
        assert_closed(launch.unit(config))
