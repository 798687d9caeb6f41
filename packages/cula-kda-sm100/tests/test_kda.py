"""What every KDA package is tested for."""

from collections import Counter

import cula_kda_sm100
from cula_core.delta_rule.config import CHUNK, HEAD_DIM
from cula_emulator import resources
from cula_kda_sm100.arch import TARGET
from cula_kda_sm100.kernels.recurrence import TMEM_COLUMNS, Tmem
from cula_testing import kda

SUBJECT = kda.Subject(
    cula_kda_sm100,
    TARGET,
    # The emulator keeps memory longer than its CTA, so nobody need wait for the last store.
    unnoticed=Counter({"cp.async.bulk.wait_group 0": 1}),
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
        resources.check(kernel, expect=("UTCHMMA", "LDTM", "STTM", "USETMAXREG"))
        assert kernel.threads == (384, 1, 1)
        # Every product and every copy once: no loop that the compiler doubled, nothing that it found to be dead.
        products = {"x": 8, "u": 4, "state": 4} | ({} if config.scan else {"inter": 8, "intra": 4})
        assert kernel.count("UTCHMMA") == sum(products.values())
        # Sums, by halves of 16 lanes, of x, u and the state; of o in the loop and after it. Operands likewise.
        assert kernel.count("LDTM") == 2 * (3 if config.scan else 5)
        assert kernel.count("STTM") == 2 * 3
        # v in two panels; o in two panels, in the loop and after it.
        assert kernel.count("UTMALDG") == 2
        assert kernel.count("UTMASTG") == (0 if config.scan else 4)
        # A commit for each of the signals of a chunk, and for its stage.
        assert kernel.count("UTCBAR") == (4 if config.scan else 5)


def test_the_architectures():
    assert SUBJECT.architectures == ("sm_100a", "sm_103a")


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
