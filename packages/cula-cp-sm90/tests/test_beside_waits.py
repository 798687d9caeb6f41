"""Which waits of kernels beside each other matter."""

from collections import Counter

import pytest

import cula_cp_sm90
from cula_core.delta_rule.config import PrepareConfig, RecurrenceConfig
from cula_cp_sm90.arch import TARGET
from cula_emulator import mutation
from cula_testing import kda
from cula_testing.kda import emulated as kda_emulated
from cula_testing.kda.problems import make_problem


class Every:
    def __contains__(self, config):
        return True


@pytest.fixture(autouse=True)
def every_config(monkeypatch):
    monkeypatch.setattr(kda_emulated, "emulated_configs", lambda target: Every())


SUBJECT = kda.Subject(cula_cp_sm90, TARGET)
UNNOTICED = Counter(
    {
        "fence.acq_rel.gpu": 2, "bar.warp.sync": 1, "bar.sync": 1, "wgmma.commit_group.sync.aligned": 1,
        "cp.async.bulk.wait_group 0": 1,
    }
)  # fmt: skip


def problem(tokens, heads):
    return make_problem((tokens,), heads, gate_dtype="bfloat16", final="separate")


class TestWaits:
    subject = SUBJECT
    run = kda.Emulated.run
    mutate = kda.Emulated.mutate

    @pytest.mark.emulated(schedules="immediate")
    def test_prepare(self, mutate):
        """But that of a warp whose stores another one announces: here the other kernel runs later in any case."""
        calls = [
            (problem(330, (1, 2)), {"beside": (2, 1)}),
            (problem(700, (1, 1)), {"beside": (1, 1)}),
        ]
        report = mutate(lambda config: isinstance(config, PrepareConfig), *calls)
        assert mutation.opcodes(report.unnoticed) == Counter({"bar.warp.sync": 1}), str(report)

    @pytest.mark.emulated(schedules="immediate")
    @pytest.mark.parametrize("tiles", [1, 2])
    def test_chain(self, mutate, tiles):
        """But what orders words and blocks of other kernels and CTAs, which are there in any case, and what the other
        recurrence need not wait for either."""
        calls = [
            (problem(tokens, (1, heads)), {"beside": (machines, 1), "tiles": tiles})
            for tokens, heads, machines in ((400, 1, 1), (330, 3, 2), (64, 3, 1))
        ]
        report = mutate(lambda config: isinstance(config, RecurrenceConfig), *calls)
        assert mutation.opcodes(report.unnoticed) == UNNOTICED, str(report)
