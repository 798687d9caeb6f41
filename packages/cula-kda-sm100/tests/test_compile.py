"""Every kind of config cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import pytest
from kda_sm100_compiled import assert_ctas_fit, build, label
from kda_sm100_facts import TARGETS

from cula_emulator import resources
from cula_emulator.covering import covering_cases
from cula_kda_sm100 import launch
from cula_kda_sm100.arch import TARGETS as BY_CAPABILITY
from cula_kda_sm100.config import (
    ACTIVATION_DTYPES,
    CHUNK,
    GATE_DTYPES,
    GATES,
    HEAD_DIM,
    OPERAND_DTYPES,
    FactorsConfig,
    MergeConfig,
    PrepareConfig,
    RecurrenceConfig,
)
from cula_kda_sm100.recurrence import TMEM_COLUMNS, Tmem

BOTH = (False, True)
PREPARE_CTAS = {True: 3, False: 2}  # per multiprocessor, by `bounded`

PREPARE = {
    "target": TARGETS,
    "dtype": ACTIVATION_DTYPES,
    "gate_dtype": GATE_DTYPES,
    "operand": OPERAND_DTYPES,
    "gate": GATES,
    "bounded": BOTH,
    "l2norm": BOTH,
    "index_dtype": (None, "int32", "int64"),
}
RECURRENCE = {
    "target": TARGETS,
    "dtype": ACTIVATION_DTYPES,
    "operand": OPERAND_DTYPES,
    # (split, scan)
    "work": ((False, False), (True, False), (True, True)),
    "packed": BOTH,
    "state_v_first": BOTH,
    "initial_state": BOTH,
    "final_state": BOTH,
    "indexed": BOTH,
    "in_place": BOTH,
}


def prepare_is_possible(case: dict) -> bool:
    return case["gate"] != "softplus" or not case["bounded"]


def recurrence_is_possible(case: dict) -> bool:
    scan, initial, final = case["work"][1], case["initial_state"], case["final_state"]
    in_place = case["in_place"]
    return not (
        case["indexed"] and not initial or in_place and not (initial and final) or scan and final
    )


def prepare(case: dict) -> tuple[str, PrepareConfig]:
    others = {name: value for name, value in case.items() if name != "target"}
    constants = case["gate"] != "log"
    return case["target"], PrepareConfig(
        beta_dtype="float32", rate=constants, bias=constants, **others
    )


def recurrence(case: dict) -> tuple[str, RecurrenceConfig]:
    split, scan = case["work"]
    others = {name: value for name, value in case.items() if name not in ("work", "target")}
    return case["target"], RecurrenceConfig(split=split, scan=scan, **others)


PREPARES = [prepare(case) for case in covering_cases(PREPARE, prepare_is_possible)]
# Covering sets, and in front of them what asks most of registers and shared memory.
RECURRENCES = [
    *(
        (
            target,
            RecurrenceConfig(
                "bfloat16", "float16", 1, split, scan, True, False, True, not scan, True, not scan
            ),
        )
        for target in TARGETS
        for split, scan in RECURRENCE["work"]
    ),
    *(recurrence(case) for case in covering_cases(RECURRENCE, recurrence_is_possible)),
]


def test_the_targets():
    assert tuple(BY_CAPABILITY.values()) == TARGETS


def test_tensor_memory_is_divided_up():
    """Operands have two elements to a column, sums one; there are two sums of o."""
    columns = {
        Tmem.S: HEAD_DIM // 2, Tmem.X: CHUNK // 2, Tmem.U: CHUNK // 2, Tmem.X_SUM: CHUNK, Tmem.U_SUM: CHUNK,
        Tmem.S_SUM: HEAD_DIM, Tmem.O_SUM: 2 * CHUNK,
    }  # fmt: skip
    assert set(columns) == set(Tmem)
    free = 0
    for first, width in sorted(columns.items()):
        assert first == free
        free += width
    assert free == TMEM_COLUMNS == 512


@pytest.mark.parametrize("target, config", PREPARES, ids=label)
def test_prepare(target, config):
    kernel = build(target, config)
    resources.check(kernel, expect=("HMMA", "LDSM"))
    assert kernel.threads == (256, 1, 1)
    assert_ctas_fit(kernel, PREPARE_CTAS[config.bounded])
    # Rows come and go in units of 16 bytes: 4 of a thread of q, of k and of gates, which are half of those in fp32, and
    # 24 units of results.
    assert kernel.count("LDGSTS.128") >= 12
    assert kernel.count("STG.128") >= 24


@pytest.mark.parametrize("target, config", RECURRENCES, ids=label)
def test_recurrence(target, config):
    kernel = build(target, config)
    expected = ["UTCHMMA", "LDTM", "STTM", "UBLKCP", "LDSM", "USETMAXREG"]
    expected += [] if config.scan else ["UTMASTG", "STSM"]
    resources.check(kernel, expect=expected)
    assert (kernel.count("LDL"), kernel.count("STL")) == (0, 0)
    assert kernel.threads == (384, 1, 1)
    assert_ctas_fit(kernel, 1)

    # Every product and every copy once: no loop that the compiler doubled, nothing that it found to be dead.
    products = {"x": 8, "u": 4, "state": 4} | ({} if config.scan else {"inter": 8, "intra": 4})
    assert kernel.count("UTCHMMA") == sum(products.values())
    # Sums, by halves of 16 lanes, of x, u and the state; of o in the loop and after it. Operands likewise.
    assert kernel.count("LDTM") == 2 * (3 if config.scan else 5)
    assert kernel.count("STTM") == 2 * 3
    # v in two panels; a block less what lies above the diagonals, for a scan without qg and Aqk; o in two panels, in
    # the loop and after it.
    assert kernel.count("UTMALDG") == 2
    assert kernel.count("UBLKCP") == (4 if config.scan else 7)
    assert kernel.count("UTMASTG") == (0 if config.scan else 4)
    # A commit for each of the signals of a chunk, and for its stage.
    assert kernel.count("UTCBAR") == (4 if config.scan else 5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operand", OPERAND_DTYPES)
def test_factors(target, operand):
    kernel = build(target, FactorsConfig("bfloat16", operand, "int64"))
    resources.check(kernel, expect=("HMMA", "LDSM", "STSM"))
    assert_ctas_fit(kernel, 3)
    # Of each of the two products 10 sub-blocks in two tiles; four units a thread of each matrix.
    assert kernel.count("HMMA") == 2 * 10 * 2 and kernel.count("STG.128") == 4 * 4


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("indexed", BOTH)
def test_merge(target, indexed):
    kernel = build(target, MergeConfig(initial_state=True, indexed=indexed, index_dtype="int64"))
    resources.check(kernel, expect=("HMMA",))
    assert_ctas_fit(kernel, 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_segment_table(target, index_dtype):
    resources.check(build(target, launch.TableConfig(index_dtype)))
