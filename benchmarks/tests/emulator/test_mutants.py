"""What the counts of mutation tests are made of: which tests run, what a row holds, and the tables."""

import copy
import json
import sys

import pytest

from benchmarks import tables
from benchmarks.emulator import mutant_rows, mutants
from benchmarks.emulator import tables as emulator_tables
from benchmarks.harness import results
from benchmarks.report import sections

# Of its three barriers the first guards values, the second a store of the same value again, and the third nothing.
TESTS = '''
import pytest, torch
import cula_emulator as emulator
from cula_emulator import mutation

X = torch.arange(64, dtype=torch.float32)
SCHEDULES = [emulator.Options(mode, detect_races=RACES) for mode in ("immediate", "lazy")]
ROTATE = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry rotate(.param .u64 from, .param .u64 to)
{
    .reg .b32 %r<16>; .reg .b64 %rd<8>;
    .shared .align 16 .b8 tile[256];
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    griddepcontrol.wait;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.u32 %r3, [%rd4];
    mov.u32 %r4, tile;
    shl.b32 %r5, %r2, 2;
    add.u32 %r6, %r4, %r5;
    st.shared.u32 [%r6], %r3;
    bar.sync 0;
    xor.b32 %r7, %r5, 128;
    add.u32 %r8, %r4, %r7;
    ld.shared.u32 %r9, [%r8];
    bar.sync 1;
    st.shared.u32 [%r6], %r3;
    bar.sync 2;
    st.global.u32 [%rd5], %r9;
    ret;
}
"""

@pytest.fixture
def mutate(emulated):
    module = emulated.ptx(ROTATE)

    def check(options):
        out = torch.full((64,), float("nan"))
        module.module.launch("rotate", (1,), (64,), (X, out), options=options)
        assert torch.equal(out, X.view(2, 32).flip(0).reshape(-1))

    return lambda: mutation.run(check, module, schedules=SCHEDULES)

@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("kind", ["toy"])
def test_toy(mutate, kind):
    assert mutate().mutants == mutate().mutants

@pytest.mark.emulated(schedules="immediate")
def test_that_mutates_nothing(emulated):
    assert False

def test_without_emulation():
    check = kernel = None
    assert mutation.run(check, kernel)
'''
ROW = {
    "package": "toy",
    "test": "packages/toy/tests/test_toy.py::test_toy[toy]",
    "target": "sm_90a",
    "mutants": 4,
    "noticed_every": 2,
    "noticed_first": 2,
    "noticed_none": 1,
    "not_modelled": 1,
    "unnoticed": [{"instruction": "bar.sync 2", "count": 1, "reason": "guards nothing"}],
}
OTHER = ROW | {
    "package": "other",
    "target": "sm_89",
    "mutants": 10,
    "noticed_every": 10,
    "noticed_first": 9,
    "noticed_none": 7,
    "not_modelled": 0,
    "unnoticed": [],
}
CONTENT = {
    "title": "Mutants",
    "provenance": {
        "compiler": "g++ 12",
        "cpu": "Some CPU",
        "versions": {"torch": "2.13.0"},
        "date": "2026-01-02T03:04:05Z",
        "commit": "0123456789",
        "dirty": False,
    },
    "rows": [ROW, ROW | {"target": "sm_100a"}, ROW, OTHER],
}


@pytest.fixture
def record(pytester, monkeypatch):
    """record(reasons, races) -> (rows, what pytest printed, its status) of the tests above."""

    def record(reasons, races=True):
        monkeypatch.setattr(mutant_rows, "REASONS", {"test_toy.py::test_toy": reasons})
        pytester.makeini("[pytest]\n")
        path = pytester.mkdir("packages").joinpath("toy", "tests", "test_toy.py")
        path.parent.mkdir(parents=True)
        path.write_text(TESTS.replace("RACES", str(races)))
        recorder = mutants.Recorder()
        plugins = ("-p", "cula_emulator.pytest_plugin", "-p", "no:hypothesispytest")
        options = ("--emulator-no-verdicts", "--emulator-no-rebuild")
        done = pytester.runpytest_inprocess(*plugins, *options, path, plugins=[recorder])
        return recorder.rows, done.stdout.str(), done.ret

    return record


def test_mutation_tests_alone_run_and_a_kernel_counts_once(record):
    rows, shown, status = record({"bar.sync 2": "guards nothing"})
    assert rows == [ROW] and status == 0 and "1 passed" in shown


def test_what_nobody_notices_needs_a_reason(record):
    rows, shown, status = record({"bar.sync 1": "another one"})
    assert rows == [] and status == 1 and "REASONS has none for bar.sync 2" in shown


def test_schedules_of_tests_detect_races(record):
    rows, shown, status = record({"bar.sync 2": "guards nothing"}, races=False)
    assert rows == [] and status == 1 and "expected races to be detected everywhere" in shown


def test_races_are_detected_in_the_first_schedules():
    from cula_emulator import mutation

    schedules = mutation.SCHEDULES[:3]
    found = [[o.detect_races for o in mutants.with_races(schedules, n)] for n in (0, 1, 3)]
    assert found == [[False] * 3, [True, False, False], [True] * 3]
    assert mutants.with_races(schedules, 3) == list(schedules)


def test_the_command_writes_what_the_report_reads(monkeypatch, tmp_path):
    asked = []

    def run(arguments, plugins):
        asked.extend(arguments)
        plugins[0].rows.append(ROW)
        return 0

    path = tmp_path / "cpu" / "mutants.json"
    monkeypatch.setattr("pytest.main", run)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", "cula-cp-sm90", "--json", str(path)])
    assert mutants.main() == 0
    assert asked[-1] == str(mutants.ROOT / "packages" / "cula-cp-sm90" / "tests")
    assert json.loads(path.read_text())["rows"] == [ROW]
    section = sections.read(path)
    assert section.badges == ["emulated"] and len(section.tables) == 3


def test_a_test_that_fails_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("pytest.main", lambda arguments, plugins: 1)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--json", str(tmp_path / "mutants.json")])
    assert mutants.main() != 0
    assert "the mutation tests failed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"mutants": 5}, "do not add up"),
        ({"noticed_first": 0}, "none <= first <= every"),
        ({"noticed_first": 3}, "none <= first <= every"),
        ({"more": 1}, "expected"),
    ],
)
def test_rows_that_cannot_be(change, complaint):
    mutant_rows.validate(CONTENT)
    with pytest.raises(ValueError, match=complaint):
        mutant_rows.validate({"rows": [ROW, ROW | change]})


def test_tables_add_up_by_package_and_target():
    _, lines = mutant_rows.table(CONTENT)
    assert lines == [
        ["other", "sm_89", "1", "10", "10", "9", "7", "0", "0"],
        ["toy", "sm_100a", "1", "4", "2", "2", "1", "1", "1"],
        ["toy", "sm_90a", "2", "8", "4", "4", "2", "2", "2"],
        ["all", "", "4", "22", "16", "15", "10", "3", "3"],
    ]
    header, lines = mutant_rows.kernel_table(CONTENT)
    assert lines[0] == ["test_toy.py::test_toy[toy]", "toy", "sm_90a", "4", "2", "2", "1", "1", "1"]
    assert len(header) == len(lines[0]) and len(lines) == 4
    _, lines = mutant_rows.reason_table(CONTENT)
    assert lines == [["test_toy.py::test_toy[toy]", "toy", "bar.sync 2", "1", "guards nothing"]] * 3


def test_a_region_has_the_table_and_its_origin(tmp_path):
    path = results.result_path(mutant_rows.OP, "cpu", tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps(CONTENT))
    text = tables.rendered("<!-- bench:mutants:cpu -->\n<!-- /bench -->\n", tmp_path)
    assert "| toy | sm_90a | 2 | 8 | 4 | 4 | 2 | 2 | 2 |" in text
    assert "g++ 12, torch 2.13.0, 2026-01-02, commit 0123456." in text
    wrong = copy.deepcopy(CONTENT)
    wrong["rows"][0]["mutants"] = 7
    with pytest.raises(ValueError, match="do not add up"):
        emulator_tables.mutants(wrong)


def test_the_committed_file_bears_out_what_documents_say():
    content = json.loads(mutants.RESULT.read_text())
    mutant_rows.validate(content)
    rows = content["rows"]
    # README of cula-emulator: the first schedule finds the races of all.
    assert all(row["noticed_first"] == row["noticed_every"] for row in rows)
    used = {
        (mutant_rows.key(row["test"]), u["instruction"]) for row in rows for u in row["unnoticed"]
    }
    assert used == {(test, name) for test, names in mutant_rows.REASONS.items() for name in names}
    assert {row["package"] for row in rows} >= {"cula-core", "cula-cp-sm90", "cula-kda-sm100"}
