"""What every KDA package is tested for."""

from collections import Counter

import cula_cp_sm90
from cula_cp_sm90.arch import TARGET
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


class TestOnGpu(kda.OnGpu):
    subject = SUBJECT


class TestRefusalsOnGpu(kda.RefusalsOnGpu):
    subject = SUBJECT
