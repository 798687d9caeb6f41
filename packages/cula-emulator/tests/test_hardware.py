"""Every kernel of `cases` on the GPU and in the emulator. CULA_HARDWARE_JSON=PATH keeps the result."""

import os
from pathlib import Path

import hardware
import pytest
import torch
from cases.compare import Difference, of_bits, of_cases, of_values


@pytest.fixture(scope="session")
def agreement():
    result = hardware.agreement()
    if path := os.environ.get("CULA_HARDWARE_JSON"):
        hardware.save(result, Path(path))
    return result


def _disagreements(result, families=None):
    rows = [r for r in result["rows"] if families is None or r["family"] in families]
    assert rows, "no case ran"
    wrong = [r for r in rows if r["status"] not in hardware.AGREE]
    return [
        f"{r['status']}: {r['family']}, {r['name']}: {'; '.join(r['complaints'])[:300]}"
        for r in wrong
    ]


@pytest.mark.gpu
def test_the_emulator_agrees_with_the_gpu(agreement):
    wrong = _disagreements(agreement)
    assert not wrong, "\n".join(
        [f"{len(wrong)} of {len(agreement['rows'])} disagree:", *wrong[:40]]
    )


@pytest.mark.gpu
def test_every_family_ran(agreement):
    assert {f["family"] for f in agreement["families"]} >= {
        "integer",
        "wgmma",
        "tma",
        "CuTe DSL kernels",
    }
    assert all(row["cases"] > 0 for row in agreement["families"])


def test_the_comparison_itself_without_a_gpu(tmp_path):
    """Another schedule of the emulator plays the GPU: the whole path, from workers to the file, on two groups."""
    result = hardware.agreement(["control", "barriers"], jobs=2, stand_in=True)
    hardware.save(result, tmp_path / "agreement.json")
    assert not _disagreements(result)
    assert [f["family"] for f in result["families"]] == ["barriers", "control"]
    assert (tmp_path / "agreement.json").read_text().count('"status": "identical"') == len(
        result["rows"]
    )


def test_a_case_that_kills_its_process_is_named_and_the_rest_still_runs(tmp_path, monkeypatch):
    """The first worker dies inside a case, as one does whose GPU context is lost."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import json, sys\n"
        "done = json.load(open(sys.argv[3]))\n"
        "with open(sys.argv[2], 'a') as f:\n"
        "    for name in [n for n in 'abc' if n not in done]:\n"
        "        f.write(json.dumps({'begin': name, 'family': 'x'}) + '\\n')\n"
        "        if name == 'b': f.flush(); sys.exit(5)\n"
        "        f.write(json.dumps({'family': 'x', 'name': name, 'status': 'identical'}) + '\\n')\n"
    )
    monkeypatch.setattr(hardware, "WORKER", program)
    rows = hardware._run_group("x", tmp_path, stand_in=True)
    assert {r["name"]: r["status"] for r in rows} == {
        "a": "identical",
        "b": "failed",
        "c": "identical",
    }


@pytest.mark.parametrize(
    "kind, a, b, ulp, different",
    [
        ("f32", 0x3F800000, 0x3F800000, 0, 0),
        ("f32", 0x3F800000, 0x3F800003, 3, 1),
        ("f32", 0x00000001, 0x80000001, 2, 1),
        ("f32", 0x7FC00000, 0xFFFFFFFF, 0, 0),
        ("f16", 0x3C00, 0x3BFF, 1, 1),
        ("bf16x2", 0x3F803F80, 0x3F813F7E, 2, 2),
        ("f64", 0x3FF0000000000000, 0x3FF0000000000001, 1, 1),
        ("u32", 5, 6, 0, 1),
    ],
)
def test_distance_of_two_bit_patterns(kind, a, b, ulp, different):
    found = of_bits(kind, a, b)
    assert (found.ulp, found.different) == (ulp, different)


def test_an_infinity_beside_a_number_is_far():
    assert of_bits("f32", 0x7F800000, 0x7F7FFFFF).relative == float("inf")


def test_undefined_outputs_do_not_count():
    a, b = [1, 2, 3, 4], [1, 9, 3, 9]
    assert of_cases(("b32", "b32"), (1, 1), a, b, lambda thread, index: index == 0) == Difference(2)


def test_values_are_compared_to_their_size():
    a, b = torch.tensor([1.0, float("nan"), 100.0]), torch.tensor([1.0, float("nan"), 101.0])
    found = of_values(a, b, torch.tensor([1.0, 1.0, 1000.0]).double())
    assert found.different == 1 and found.relative == pytest.approx(1e-3)
