"""Every kind of the recurrence's configs cross-compiles, and the machine code is what it is meant to be."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from cula_core.delta_rule import launch
from cula_core.delta_rule.config import ACTIVATION_DTYPES, OPERAND_DTYPES, RecurrenceConfig
from cula_emulator import resources
from cula_emulator.covering import covering_cases

from ..compiled import report
from ..machine_code import assert_ctas_fit, label
from .emulated import emulated_configs
from .slices import slice_configs
from .states import engine_configs
from .subject import Subject

BOTH = (False, True)
FLAGS = ("packed", "state_v_first", "initial_state", "final_state", "indexed", "in_place")


def is_possible(case: dict) -> bool:
    """Whether there can be a call with these values."""
    scan, initial, final = case["work"][2], case["initial_state"], case["final_state"]
    in_place, keeps = case["in_place"], case["checkpoints"] is not None
    return not (
        (case["indexed"] and not initial)
        or (in_place and not (initial and final))
        or (scan and (final or keeps))
        or (case["redirected"] and not in_place)
        or (case["fresh"] and not initial)
        or (case["placed"] and not keeps)
    )


def recurrences(subject: Subject) -> list[tuple[str, RecurrenceConfig]]:
    """Returns architectures and configs with every value: what asks most, what is emulated, and what these leave.

    Pairs of values are for the emulator, which asks each of its kernels for spills.
    """
    target, most = subject.target, subject.tiles[-1]
    first = []
    # (tiles, split, scan)
    works = [(tiles, split, False) for split in BOTH for tiles in subject.tiles] + [
        (most, True, True)
    ]
    for arch in subject.architectures:
        for tiles, split, scan in works:
            flags = dict.fromkeys(FLAGS, True) | {"state_v_first": False}
            flags |= {
                "final_state": not scan,
                "in_place": not scan,
                "redirected": not scan,
                "fresh": True,
            }
            flags |= {"checkpoints": None if scan else "every", "placed": not scan}
            fields = {"dtype": "bfloat16", "operand": "float16", "work": (tiles, split, scan)}
            first.append({"arch": arch, **fields, **flags})
    for config in (*emulated_configs(target), *engine_configs(target), *slice_configs(target)):
        if isinstance(config, RecurrenceConfig):
            fields = asdict(config)
            del fields["v_tile"], fields["stages"]
            fields["work"] = tuple(fields.pop(name) for name in ("tiles", "split", "scan"))
            first.append({"arch": subject.architectures[0], **fields})
    factors = {
        "arch": subject.architectures,
        "dtype": ACTIVATION_DTYPES,
        "operand": OPERAND_DTYPES,
        "work": works,
        **dict.fromkeys(FLAGS, BOTH),
        "redirected": BOTH,
        "fresh": BOTH,
        "checkpoints": (None, "every", "once"),
        "placed": BOTH,
    }
    found = {}
    for case in covering_cases(factors, is_possible, first, strength=1):
        fields = dict(case)
        arch, (tiles, split, scan) = fields.pop("arch"), fields.pop("work")
        config = target.recurrence_config(tiles=tiles, split=split, scan=scan, **fields)
        found[arch, config] = None
    return list(found)


class MachineCode:
    """The recurrence's machine code; a package adds what holds of its own instructions."""

    subject: Subject

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes with what depends on the subject."""
        if "config" in metafunc.fixturenames:
            metafunc.parametrize("arch, config", recurrences(self.subject), ids=label)

    def check(self, kernel: resources.KernelResources, config: RecurrenceConfig) -> None:
        """Checks the instructions of the package's own architecture."""
        raise NotImplementedError

    def test_recurrence(self, arch, config):
        kernel = report(launch.unit(self.subject.target, config, arch)).kernel
        outputs = () if config.scan else ("UTMASTG", "STSM")
        resources.check(kernel, expect=("UBLKCP", "LDSM", *outputs))
        assert (kernel.count("LDL"), kernel.count("STL")) == (0, 0)
        assert_ctas_fit(kernel, 1)
        # A block less what lies above the diagonals, for a scan without qg and Aqk.
        assert kernel.count("UBLKCP") == (4 if config.scan else 7)
        self.check(kernel, config)
