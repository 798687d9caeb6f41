"""The recurrence alone, on the CPU, from exact blocks."""

from __future__ import annotations

import pytest
import torch

from cula_core.delta_rule.config import CHUNK
from cula_core.dtypes import dtype_name

from ..comparing import relative_rmse
from ..tensors import one_thread
from .blocks import blocks_of, factors, packed
from .problems import make_problem
from .running import compiler
from .subject import Subject

ERROR = 3e-3  # relative RMSE
PROBLEMS = {
    "dense": {"lengths": (130, 130), "gate_dtype": "bfloat16", "beta_dtype": "bfloat16"},
    "weak": {"lengths": (100,), "kind": "near_zero"},
}


class Recurrence:
    """State and outputs of the recurrence's kernel against their definition in fp64."""

    subject: Subject

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes with what depends on the subject."""
        if "tiles" in metafunc.fixturenames:
            metafunc.parametrize("tiles", self.subject.tiles)

    @pytest.mark.parametrize("name", PROBLEMS)
    def test_the_recurrence(self, emulated, name, tiles):
        problem = make_problem(heads=(1, 2), **PROBLEMS[name])
        v, heads_v = problem.given["v"], problem.given["v"].shape[2]
        blocks = blocks_of(problem, emulated)
        with one_thread():
            for (slot, head), parts in factors(problem).items():
                blocks[slot, head] = packed(parts, blocks.dtype)
        out = emulated.empty(v.shape, v.dtype)
        initial = problem.initial[: len(problem.lengths)].clone()
        final = emulated.empty(initial.shape, torch.float32)
        target = self.subject.target
        config = target.recurrence_config(
            dtype_name(v.dtype), operand=problem.operand, tiles=tiles, initial_state=True
        )
        compiler(emulated, target, self.subject.architectures[0])(config)(
            blocks, v, out, initial, None, None, None, final, *[None] * 7, -1, CHUNK, max(v.shape[1], CHUNK), 0,
            len(problem.lengths) * heads_v,
        )  # fmt: skip
        assert relative_rmse(out, problem.expected.out) <= ERROR
        assert relative_rmse(final, problem.expected.states) <= ERROR
