"""Both kernels beside each other: the bits of one after the other, and what the emulator can say of their barriers."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch

import cula_cp_sm90
from cula_core.delta_rule import launch
from cula_core.delta_rule.config import PrepareConfig
from cula_core.delta_rule.plan import CostModel
from cula_cp_sm90.arch import TARGET
from cula_emulator import resources
from cula_emulator.memory import poisoned_memory
from cula_testing.comparing import same
from cula_testing.compiled import report
from cula_testing.kda import states
from cula_testing.kda.problems import make_problem
from cula_testing.kda.running import Run, compiler


def outcome(emulated, problem, schedule=None, **options):
    """schedule: changes of that of the test."""
    run = Run(TARGET, problem, emulated.empty, **options)
    compiled = compiler(emulated, TARGET, "sm_90a")
    run.launch(lambda config: partial(compiled(config), **schedule or {}))
    return run.outcome()


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize(
    "lengths, heads, machines, ctas, packed, tiles",
    [
        ((200,), (1, 3), 2, 1, False, 1),
        ((330, 330), (2, 4), 5, 2, False, 2),
        ((330, 330), (2, 4), 5, 2, True, 1),
        ((130,), (3, 3), 9, 1, False, 2),
        ((700,), (5, 5), 4, 3, False, 1),
        ((700,), (5, 5), 4, 3, True, 2),
        ((130, 0, 64, 1, 257, 70), (1, 2), 4, 1, True, 1),
        ((130, 0, 64, 1, 257, 70), (1, 2), 4, 1, True, 2),
        ((65, 300, 0), (2, 2), 3, 2, True, 2),
        ((1,) * 40, (1, 1), 5, 1, True, 1),
    ],
)
def test_same_bits(emulated, lengths, heads, machines, ctas, packed, tiles):
    problem = make_problem(lengths, heads, final="separate", gate_dtype="bfloat16", packed=packed)
    a, b = (outcome(emulated, problem, tiles=tiles, beside=way) for way in (None, (machines, ctas)))
    for x, y in zip(a, b):
        assert torch.equal(x, y) and x.isfinite().all()


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("warp", [0, 4, 7, 8, 9, 10, 24])
def test_no_warp_may_come_too_late(emulated, warp):
    """Whoever waits for what others do finds it, however far they are by then."""
    problem = make_problem(
        (130, 0, 64, 1, 257, 70), (1, 2), final="separate", gate_dtype="bfloat16", packed=True
    )
    ways = ({}, None), ({"slow_warp": warp}, (4, 1))
    a, b = (outcome(emulated, problem, how, tiles=2, beside=way) for how, way in ways)
    for x, y in zip(a, b):
        assert torch.equal(x, y)


def _forced(forced, way, tiles, segment_chunks):
    return forced(tiles, segment_chunks, way)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("tiles, machines, ctas", [(1, 3, 2), (2, 7, 1)])
@pytest.mark.parametrize(
    "name", [n for n, case in states.CASES.items() if not case.segment_chunks and not case.slots]
)
def test_states_as_engines_keep_them(emulated, monkeypatch, name, tiles, machines, ctas):
    case, outs = states.CASES[name], []
    compiled = compiler(emulated, TARGET, "sm_90a")
    forced = states.forced
    for way in (None, (machines, ctas)):
        given = case.given("cpu", torch.bfloat16)
        given["g"] = given["g"].bfloat16()
        monkeypatch.setattr(states, "forced", partial(_forced, forced, way))
        with poisoned_memory():
            result = states._call(cula_cp_sm90, given, case, tiles, compiled)
        outs.append(states.written(given, result))
    for key, x in outs[0].items():
        assert same(x, outs[1][key]), key


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize(
    "fields",
    [
        {"gate": "log", "rate": False, "bias": False},
        {"gate": "softplus", "kind": "typical", "bounded": True},
        {"gate": "safe", "bias": False, "strength": "doubled"},
        {"gate": "safe", "rate": False, "strength": "sigmoid", "l2norm": False},
        {"dtype": "float16", "gate_dtype": "float16"},
        {"operand": "bfloat16", "initial": False, "final": None},
    ],
)
def test_every_option(emulated, fields):
    problem = make_problem(
        (200, 70, 0),
        (1, 2),
        packed=True,
        **{"gate_dtype": "bfloat16", "final": "separate"} | fields,
    )
    a, b = (outcome(emulated, problem, beside=way, as_views=True) for way in (None, (3, 1)))
    for x, y in zip(a, b):
        assert x is y is None or same(x, y)


# ---- machine code ----------------------------------------------------------------------------------------------------

# Bytes a thread that have no place in 72 registers, which 25 warps leave.
SPILLED = {"safe": 48, "softplus": 48, "log": 192}


@pytest.mark.parametrize("index_dtype", [None, "int32"])
@pytest.mark.parametrize("gate", list(SPILLED))
def test_machine_code_of_the_kernel_that_prepares(gate, index_dtype):
    computed = gate != "log"
    config = PrepareConfig(
        "bfloat16", "bfloat16", "bfloat16", gate=gate, bounded=True, l2norm=True, rate=computed, bias=computed,
        index_dtype=index_dtype, beside=True,
    )  # fmt: skip
    kernel = report(launch.unit(TARGET, config, "sm_90a")).kernel
    expect = ("LDGSTS", "LDSM", "HMMA", "MEMBAR")
    resources.check(kernel, expect=expect, spills=True, stack=True)
    assert kernel.threads == (800, 1, 1) and kernel.registers <= 72
    assert max(kernel.spill_loads, kernel.spill_stores) <= SPILLED[gate]
    alone = report(launch.unit(TARGET, replace(config, beside=False), "sm_90a")).kernel
    assert kernel.count("HMMA") == alone.count("HMMA")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tiles", [1, 2])
def test_machine_code_of_the_recurrence(tiles, packed):
    config = TARGET.recurrence_config(
        "bfloat16", operand="float16", tiles=tiles, packed=packed, initial_state=True, final_state=True, beside=True,
        index_dtype="int32" if packed else None,
    )  # fmt: skip
    kernel = report(launch.unit(TARGET, config, "sm_90a")).kernel
    resources.check(kernel, expect=("HGMMA", "UBLKCP", "UTMALDG", "UTMASTG"))
    assert (kernel.count("LDL"), kernel.count("STL")) == (0, 0) and not kernel.warnings
    assert kernel.threads == (128 * (tiles + 1), 1, 1)
    # The compiler knows that all threads have the same operands in shared memory: else it moves every address from a
    # register that could differ, twice for each product, beside those of other warps.
    assert kernel.count("R2UR") < 3 * 28
    # As many products and waits as where the kernels follow each other.
    assert kernel.count("HGMMA") == 28 and kernel.count("WARPGROUP.DEPBAR") == 3
    assert kernel.count("UTMALDG") == tiles


# ---- on a GPU: what the emulator, which runs one kernel after the other, cannot show ---------------------------------


def given(device, tokens, heads=64, group=1, lengths=None, seed=0):
    torch.manual_seed(seed)
    x = {n: torch.randn(1, tokens, heads // group, 128, device=device).bfloat16() for n in "qk"}
    x |= {n: torch.randn(1, tokens, heads, 128, device=device).bfloat16() for n in "vg"}
    x["beta"] = torch.rand(1, tokens, heads, device=device)
    x |= {
        "A_log": torch.rand(heads, device=device),
        "dt_bias": torch.randn(heads * 128, device=device),
    }
    if lengths is not None:
        x["cu_seqlens_cpu"] = torch.tensor([0, *accumulate(lengths)])
        x["cu_seqlens"] = x["cu_seqlens_cpu"].to(device, torch.int32)
    return x | {
        "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "safe_gate": True, "lower_bound": -5.0,
        "output_final_state": True,
    }  # fmt: skip


def attend(x, beside):
    """Returns outputs and final states; "on": with both kernels beside each other, "off": one after the other."""
    with launch.scheduled(beside) as plans:
        outcome = cula_cp_sm90.chunk_kda(**x, use_intracard_cp=False)
    assert all((plan.beside is not None) == (beside == "on") for plan in plans) and plans
    return outcome


SIZES = {
    "dense": (4000, 64, 1, None),
    "long": (20_000, 32, 2, None),
    "few heads": (6000, 6, 1, None),
    "packed": (9000, 32, 4, (1, 64, 0, 4000, 2935, 2000)),
    "many short ones": (6400, 16, 1, (64,) * 100),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, heads, group, lengths", SIZES.values(), ids=list(SIZES))
def test_same_bits_on_a_gpu(cuda, tokens, heads, group, lengths):
    x = given(cuda, tokens, heads, group, lengths)
    expected = attend(x, "off")
    for _ in range(20):
        assert all(map(same, attend(x, "on"), expected))


@pytest.mark.gpu
def test_streams_side_by_side(cuda):
    """More calls than fit on the card at once: machines of one wait until CTAs of another are done."""
    problems = [given(cuda, 1000 + 700 * n, 64, seed=n) for n in range(6)]
    expected = [attend(x, "off") for x in problems]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in problems], []
    with launch.scheduled("on"):
        for _ in range(30):
            got = []
            for stream, x in zip(streams, problems):
                with torch.cuda.stream(stream):
                    got.append(cula_cp_sm90.chunk_kda(**x, use_intracard_cp=False))
        torch.cuda.synchronize()
    for one, other in zip(got, expected):
        assert all(map(same, one, other))


@pytest.mark.gpu
def test_calls_in_turns(cuda):
    """Memory is that of the call before, of which neither flags nor blocks may be taken for this one's."""
    problems = [given(cuda, 3000, 16, seed=n) for n in range(2)]
    expected = [attend(x, "off") for x in problems]
    with launch.scheduled("on"):
        for _ in range(10):
            for x, outcome in zip(problems, expected):
                got = cula_cp_sm90.chunk_kda(**x, use_intracard_cp=False)
                assert all(map(same, got, outcome))


def captured(x):
    """Returns a graph of a call whose kernels run beside each other, and what a replay writes."""
    with launch.scheduled("on"):
        cula_cp_sm90.chunk_kda(**x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = cula_cp_sm90.chunk_kda(**x)
    return graph, got


@pytest.mark.gpu
def test_a_captured_graph(cuda):
    x = given(cuda, 3000)
    expected = attend(x, "off")
    graph, got = captured(x)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(same, got, expected))


@pytest.mark.gpu
def test_a_lead_that_is_too_short(cuda, monkeypatch):
    """Teams wait for machines that wait for chunks which these teams have in hand, but not for ever."""
    decide = CostModel.beside

    def short(*facts):
        time, tiles, way = decide(*facts)
        return time, tiles, replace(way, lead=1)

    monkeypatch.setattr(CostModel, "beside", short)
    for heads in (4, 64):
        x = given(cuda, 3000, heads)
        expected = attend(x, "off")
        for _ in range(3):
            assert all(map(same, attend(x, "on"), expected))


@pytest.mark.gpu
def test_ten_thousand_times(cuda):
    x = given(cuda, 1000)
    expected = attend(x, "off")
    graph, got = captured(x)
    differ = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(10_000):
        for y in got:
            y.fill_(float("nan"))
        graph.replay()
        for y, z in zip(got, expected):
            differ += (y != z).sum()
    assert differ.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [16, 40, 104])
def test_a_part_of_the_card(cuda, count):
    """With fewer multiprocessors than CTAs were planned for, machines begin when others have prepared everything."""
    from torch.cuda.green_contexts import GreenContext

    x = given(cuda, 4000)
    expected = attend(x, "off")
    torch.cuda.synchronize()
    part = GreenContext.create(num_sms=count, device_id=torch.cuda.current_device())
    part.set_context()
    try:
        got = [attend(x, "on") for _ in range(3)]
        torch.cuda.synchronize()
    finally:
        part.pop_context()
    for outcome in got:
        assert all(map(same, outcome, expected))


FIRST = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from test_beside import attend, given
x = given("cuda", 4000)
torch.save([y.cpu() for y in attend(x, "on")], sys.argv[2])
"""


@pytest.mark.gpu
def test_the_first_call_of_a_process(cuda, tmp_path):
    """Modules are loaded when their kernels are launched first, which may wait for the card."""
    path = str(tmp_path / "outcome.pt")
    line = [sys.executable, "-c", FIRST, os.path.dirname(__file__), path]
    subprocess.run(line, env=os.environ | {"CUDA_MODULE_LOADING": "LAZY"}, timeout=300, check=True)
    expected = attend(given(cuda, 4000), "off")
    for y, z in zip(torch.load(path), expected):
        assert same(y, z.cpu())
