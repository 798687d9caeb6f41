"""KDA prefill with sequences cut into given numbers of segments."""

import math

import pytest

from benchmarks.ops.kda import internals, kda_prefill_parts
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import setting
from benchmarks.ops.kda.providers import CEILING
from cula_core.delta_rule import launch  # noqa: F401 (only what is imported is pretended)
from cula_core.delta_rule import plan as planning
from cula_testing.shortcuts import pretended_gpu


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_parts_are_those_that_the_planner_may_take(card, capability):
    card(*capability)
    package = internals.package()
    problem = setting(5 * 1024, heads=1)
    variants = {p.name: p for p in kda_prefill_parts.OP.providers if p.role == "variant"}
    served = {name for name, p in variants.items() if p.supports(problem) is None}
    assert served == {f"parts_{n}" for n in range(1, 6)}
    shape = (1, 5 * 1024, 1, None, 132)
    chosen = internals.plan(package, *shape)
    for name in served:
        with kda_prefill_parts._cut(kda_prefill_parts.VARIANTS[name]):
            assert name == f"parts_{internals.plan(package, *shape).segments}"
    assert internals.plan(package, *shape) == chosen


def test_every_run_is_cut_as_its_provider_says(monkeypatch):
    """Neither a list that cula leaves behind nor a plan with kernels beside each other changes what is launched."""
    # The planner always has kernels beside each other.
    monkeypatch.setattr(planning.CostModel, "apart_us", lambda *facts: math.inf)
    problem = setting(4096, heads=1)
    x = kda.make_inputs(problem, "cpu", 0)
    with pretended_gpu() as launches:
        for provider in kda_prefill_parts.OP.providers[:5]:
            call = provider.bind(problem, x)
            for _ in range(3):
                launches.seen.clear()
                call()
                found = [unit.config for unit, *_ in launches.seen]
                cut = provider.name not in ("cula", "parts_1")
                assert len(found) == (4 if cut else 2)
                assert found[-1].beside == (provider.name == "cula")
                if cut:
                    (maps,) = [
                        shape
                        for _, _, dtype, shape, _ in filter(_is_tensor, launches.seen[1])
                        if shape[-2:] == (256, 128)
                    ]
                    assert provider.name == f"parts_{maps[0]}"


def _is_tensor(described):
    return isinstance(described, tuple) and len(described) == 5


def test_every_number_of_parts_is_checked_and_timed(small, monkeypatch, segments_chosen):
    seen = []

    def chunk_kda(q, k, v, **options):
        seen.append(segments_chosen())
        return v, None

    def result(problem, x):
        chunk_kda(x.q, x.k, x.v)
        return kda.oracle(problem, x, [0, 1, 2, 3])

    monkeypatch.setattr("cula_cp_sm90.chunk_kda", chunk_kda)
    monkeypatch.setitem(kda_providers._RESULTS, "cula", result)
    problem = setting(40, heads=4)
    x = kda.make_inputs(problem, "cpu", 0)
    for provider in kda_prefill_parts.OP.providers:
        if provider.role == "variant":
            provider.bind(problem, x)()
            assert kda_prefill_parts.check(provider, problem, "cpu")["output"] < kda.LIMIT
    assert seen == [n for n in kda_prefill_parts.PARTS for _ in range(2)]
    assert kda_prefill_parts.check(CEILING, problem, "cpu") == {}
