"""Every kind of config cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import pytest
from kda_compiled import assert_ctas_fit, build, label
from kda_facts import TARGETS

from cula_cp_sm90 import launch
from cula_cp_sm90.config import (
    ACTIVATION_DTYPES,
    GATE_DTYPES,
    GATES,
    OPERAND_DTYPES,
    FactorsConfig,
    MergeConfig,
    PrepareConfig,
    RecurrenceConfig,
)
from cula_emulator import resources
from cula_emulator.covering import covering_cases

(TARGET,) = TARGETS
BOTH = (False, True)
PREPARE_CTAS = {True: 3, False: 2}  # per multiprocessor, by `bounded`

PREPARE = {
    "dtype": ACTIVATION_DTYPES,
    "gate_dtype": GATE_DTYPES,
    "beta_dtype": GATE_DTYPES,
    "operand": OPERAND_DTYPES,
    "gate": GATES,
    "bounded": BOTH,
    "l2norm": BOTH,
    "beta_sigmoid": BOTH,
    "neg_eigval": BOTH,
    "rate": BOTH,
    "bias": BOTH,
    "index_dtype": (None, "int32", "int64"),
}
RECURRENCE = {
    "dtype": ACTIVATION_DTYPES,
    "operand": OPERAND_DTYPES,
    # (tiles, split, scan)
    "work": ((1, False, False), (2, False, False), (1, True, False), (2, True, False), (2, True, True)),
    "packed": BOTH,
    "state_v_first": BOTH,
    "initial_state": BOTH,
    "final_state": BOTH,
    "indexed": BOTH,
    "in_place": BOTH,
}  # fmt: skip
MERGE = {
    "state_v_first": BOTH,
    "initial_state": BOTH,
    "indexed": BOTH,
    "index_dtype": (None, "int32", "int64"),
}


def prepare_is_possible(case: dict) -> bool:
    log, softplus = case["gate"] == "log", case["gate"] == "softplus"
    return (
        not (log and (case["rate"] or case["bias"]))
        and not (softplus and (case["bounded"] or not case["rate"]))
        and (case["beta_sigmoid"] or not case["neg_eigval"])
    )


def recurrence_is_possible(case: dict) -> bool:
    scan, initial, final = case["work"][2], case["initial_state"], case["final_state"]
    in_place = case["in_place"]
    return not (
        case["indexed"] and not initial or in_place and not (initial and final) or scan and final
    )


def merge_is_possible(case: dict) -> bool:
    return case["initial_state"] or not case["indexed"]


def recurrence(case: dict) -> RecurrenceConfig:
    tiles, split, scan = case["work"]
    others = {name: value for name, value in case.items() if name != "work"}
    return RecurrenceConfig(tiles=tiles, split=split, scan=scan, **others)


# Covering sets, and in front of them what asks most of registers and shared memory.
PREPARE_CONFIGS = [
    *(
        PrepareConfig(
            dtype, "float32", "float32", gate=gate, bounded=gate == "safe", beta_sigmoid=True,
            neg_eigval=True, index_dtype="int64",
        )
        for dtype in ACTIVATION_DTYPES for gate in ("safe", "softplus")
    ),
    *(PrepareConfig(**case) for case in covering_cases(PREPARE, prepare_is_possible)),
]  # fmt: skip
RECURRENCE_CONFIGS = [
    *(
        RecurrenceConfig(
            "bfloat16", "float16", tiles, split, scan, True, False, True, not scan, True, not scan
        )
        for tiles, split, scan in RECURRENCE["work"]
    ),
    *(recurrence(case) for case in covering_cases(RECURRENCE, recurrence_is_possible)),
]
MERGE_CONFIGS = [MergeConfig(**case) for case in covering_cases(MERGE, merge_is_possible)]


@pytest.mark.parametrize("config", PREPARE_CONFIGS, ids=label)
def test_prepare(config):
    kernel = build(TARGET, config)
    resources.check(kernel, expect=("HMMA", "LDSM"))
    assert kernel.threads == (256, 1, 1)
    assert_ctas_fit(kernel, PREPARE_CTAS[config.bounded])
    # Rows come and go in units of 16 bytes: 4 of a thread of q, of k and of gates, which are half of those in fp32, and
    # 24 units of results.
    assert kernel.count("LDGSTS.128") >= 12
    assert kernel.count("LDG.128") == (4 if config.gate_dtype == "float32" else 0)
    assert kernel.count("STG.128") >= 24


@pytest.mark.parametrize("config", RECURRENCE_CONFIGS, ids=label)
def test_recurrence(config):
    kernel = build(TARGET, config)
    expected = ["HGMMA", "UBLKCP", "LDSM"]
    expected += [] if config.scan else ["UTMASTG", "STSM"]
    expected += ["USETMAXREG"] if config.tiles > 1 else []
    resources.check(kernel, expect=expected)
    assert (kernel.count("LDL"), kernel.count("STL")) == (0, 0)
    assert kernel.threads == ({1: 160, 2: 384}[config.tiles], 1, 1)
    assert_ctas_fit(kernel, 1)

    # Every product and every copy once: no loop that the compiler doubled, nothing that it found to be dead.
    products = {"x": 8, "u": 4, "state": 4} | ({} if config.scan else {"inter": 8, "intra": 4})
    assert kernel.count("HGMMA") == sum(products.values())
    assert kernel.count("UTMALDG") == config.tiles
    # A block less what lies above the diagonals, for a scan without qg and Aqk.
    assert kernel.count("UBLKCP") == (4 if config.scan else 7)
    assert kernel.count("UTMASTG") == (0 if config.scan else 2)  # in the loop and after it
    # One wait per place where results are used: the compiler adds some where it does not trust the code. It repeats the
    # fence in front of a scan's products where the state may come from the caller.
    assert kernel.count("WARPGROUP.DEPBAR") == 3
    if not (config.scan and config.initial_state):
        assert kernel.count("WARPGROUP.ARRIVE") == 3 and not kernel.warnings


@pytest.mark.parametrize("operand", OPERAND_DTYPES)
@pytest.mark.parametrize("index_dtype", [None, "int32", "int64"])
def test_factors(operand, index_dtype):
    kernel = build(TARGET, FactorsConfig("bfloat16", operand, index_dtype))
    resources.check(kernel, expect=("HMMA", "LDSM", "STSM"))
    assert_ctas_fit(kernel, 3)
    # Of each of the two products 10 sub-blocks in two tiles; four units a thread of each matrix.
    assert kernel.count("HMMA") == 2 * 10 * 2 and kernel.count("STG.128") == 4 * 4


@pytest.mark.parametrize("config", MERGE_CONFIGS, ids=label)
def test_merge(config):
    kernel = build(TARGET, config)
    resources.check(kernel, expect=("HMMA",))
    assert_ctas_fit(kernel, 1)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_segment_table(index_dtype):
    resources.check(build(TARGET, launch.TableConfig(index_dtype)))
