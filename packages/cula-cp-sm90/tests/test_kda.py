"""What every KDA package is tested for."""

from collections import Counter

import cula_cp_sm90
from cula_cp_sm90.arch import TARGET
from cula_emulator import resources
from cula_testing import kda

SUBJECT = kda.Subject(
    cula_cp_sm90,
    TARGET,
    # Products with kg and Aqk are two groups that one wait waits for. The emulator keeps memory longer than its CTA, so
    # nobody need wait for the last store.
    unnoticed=Counter({"wgmma.commit_group.sync.aligned": 1, "cp.async.bulk.wait_group 0": 1}),
)


class TestOperator(kda.Operator):
    subject = SUBJECT


class TestRecurrence(kda.Recurrence):
    subject = SUBJECT


class TestEmulated(kda.Emulated):
    subject = SUBJECT


class TestEngineStates(kda.EngineStates):
    subject = SUBJECT


class TestSlices(kda.Slices):
    subject = SUBJECT


class TestOnGpu(kda.OnGpu):
    subject = SUBJECT


class TestRefusalsOnGpu(kda.RefusalsOnGpu):
    subject = SUBJECT


class TestMachineCode(kda.MachineCode):
    subject = SUBJECT

    def check(self, kernel, config):
        expected = ["HGMMA", *(["USETMAXREG"] if config.tiles > 1 else [])]
        resources.check(kernel, expect=expected)
        assert kernel.threads == ({1: 160, 2: 384}[config.tiles], 1, 1)
        # Every product and every copy once: no loop that the compiler doubled, nothing that it found to be dead.
        products = {"x": 8, "u": 4, "state": 4} | ({} if config.scan else {"inter": 8, "intra": 4})
        assert kernel.count("HGMMA") == sum(products.values())
        assert kernel.count("UTMALDG") == config.tiles
        assert kernel.count("UTMASTG") == (0 if config.scan else 2)  # in the loop and after it
        # One wait per place where results are used: the compiler adds some where it does not trust the code. It repeats
        # the fence in front of a scan's products where the state may come from the caller.
        assert kernel.count("WARPGROUP.DEPBAR") == 3
        if not (config.scan and config.initial_state):
            assert kernel.count("WARPGROUP.ARRIVE") == 3 and not kernel.warnings
