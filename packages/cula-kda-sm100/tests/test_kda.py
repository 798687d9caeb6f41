"""What every KDA package is tested for."""

from collections import Counter

import cula_kda_sm100
from cula_kda_sm100.arch import TARGET
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


class TestOnGpu(kda.OnGpu):
    subject = SUBJECT


class TestRefusalsOnGpu(kda.RefusalsOnGpu):
    subject = SUBJECT
