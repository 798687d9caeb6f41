"""Verdicts of mutation tests: when they are kept, and what makes them run again."""

import textwrap

import pytest
from test_mutation import ROTATE

from cula_emulator import mutation, verdicts

pytest_plugins = ["pytester"]

SOURCE = """
import pytest, torch
import cula_emulator as emulator
from cula_emulator import mutation

ROTATE = {ptx!r}
X = torch.arange(64, dtype=torch.float32)

def test(emulated):
    module = emulated.ptx(ROTATE).module

    def check(options):
        if options.ignore_line:
            open({log!r}, "a").write("x")
        out = torch.full((64,), float("nan"))
        module.launch("rotate", (1,), (64,), (X, out, 0), options=options)
        assert torch.equal(out, X.view(2, 32).flip(0).reshape(-1))

    for schedules in {schedules}:
        report = mutation.run(check, module, schedules=[emulator.Options(mode) for mode in schedules])
        print("REPORT", report)
        assert {condition}
"""
DEFAULTS = {
    "ptx": ROTATE,
    "schedules": [["immediate", "lazy"]],
    "condition": "len(report.noticed) == 1",
}
INI = "[pytest]\naddopts = --strict-markers --strict-config\n"


@pytest.fixture
def run(pytester, tmp_path, monkeypatch):
    """run(..., changed parts of SOURCE) -> (how many mutants ran, what pytest printed)."""
    kept, log = {}, tmp_path / "log"
    monkeypatch.setattr(verdicts, "load", kept.get)
    monkeypatch.setattr(verdicts, "save", kept.__setitem__)

    def run(*arguments, conftest="", **parts):
        log.write_text("")
        verdicts.sources.cache_clear()
        pytester.makeini(INI)
        pytester.makeconftest(conftest)
        pytester.makepyfile(test_inner=SOURCE.format(**{**DEFAULTS, "log": str(log), **parts}))
        plugins = ("-p", "cula_emulator.pytest_plugin", "-p", "no:hypothesispytest")
        result = pytester.runpytest_inprocess(*plugins, "-rP", "-k", "immediate", *arguments)
        return len(log.read_text()), result.stdout.str()

    return run


def test_verdicts_are_kept_and_reported_as_kept(run):
    first, shown = run()
    assert (
        first == 3
        and "1 passed" in shown
        and "verdicts kept" not in shown
        and "kept ones" not in shown
    )
    again, shown_again = run()
    assert again == 0 and "1 passed" in shown_again
    assert "the verdicts of 1 mutation test(s) are kept ones" in shown_again
    assert "(immediate, lazy-0, verdicts kept from an earlier run)" in shown_again
    tables = [
        [line for line in text.splitlines() if line.startswith("| ")]
        for text in (shown, shown_again)
    ]
    assert tables[0] == tables[1] and len(tables[0]) == 5


def test_the_option_runs_every_mutant(run):
    assert run()[0] == 3
    ran, shown = run("--emulator-no-verdicts")
    assert ran == 3 and "verdicts kept" not in shown and "kept ones" not in shown
    assert run()[0] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"ptx": ROTATE.replace("griddepcontrol.wait", "fence.acq_rel.cta")},
        {"schedules": [["lazy", "immediate"]]},
        {"condition": "len(report.noticed) < 2"},
        {"conftest": "import json"},
    ],
    ids=["ptx", "schedules", "test", "conftest"],
)
def test_what_a_verdict_depends_on(run, change):
    assert run()[0] == 3
    ran, shown = run(**change)
    assert ran and "1 passed" in shown and "verdicts kept" not in shown and "kept ones" not in shown


def test_each_report_of_a_test_has_its_own(run):
    twice = {"schedules": [["immediate"], ["immediate"]]}
    assert run(**twice)[0] == 4
    assert run(**twice)[0] == 0


def test_a_kept_verdict_fails_the_test_again(run):
    wrong = {"condition": "not report.unnoticed"}
    assert run(**wrong)[0] == 3
    ran, shown = run(**wrong)
    assert (
        ran == 0 and "1 failed" in shown and "**UNNOTICED**" in shown and "are kept ones" in shown
    )


def test_verdicts_that_depend_on_time_are_not_kept(monkeypatch):
    kept = []
    monkeypatch.setattr(verdicts, "save", lambda name, findings: kept.append(name))
    for how in ("hangs", "killed by signal 9", "TimeLimitExceeded", "DataRace"):
        mutation._keep(how, {1: (), 2: (mutation.Finding("immediate", how, ""),)})
    assert kept == ["DataRace"]


def test_the_file_and_a_damaged_one(tmp_path, monkeypatch):
    monkeypatch.setenv("CULA_EMULATOR_CACHE", str(tmp_path))
    finding = mutation.Finding("lazy-0", "NaN", "not a number")
    mutation._keep("name", {3: (finding,), 4: ()})
    assert mutation._kept("name", {3, 4}) == {3: (finding,), 4: ()}
    assert mutation._kept("name", {3, 5}) is None and mutation._kept("other", {3, 4}) is None
    (path,) = tmp_path.glob("*.verdicts")
    for damage in ("[1]", '{"3": 1}', '{"x": []}', '{"3": [["a"]], "4": []}', "{"):
        path.write_text(damage)
        assert mutation._kept("name", {3, 4}) is None
    assert not path.exists()  # the last one was no JSON at all


# ---- sources -------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """write(name, text) writes a file and returns the digest of the sources of project/tests/test_it.py."""
    project = tmp_path / "project"

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return verdicts.sources.__wrapped__(project / "tests" / "test_it.py", project)

    (project / "tests").mkdir(parents=True)
    (project / "tests" / "test_it.py").write_text(
        "def test():\n    from verdict_package import module\n    import verdict_helper, torch, absent_here\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "sources")
    for name in ("verdict_package/__init__.py", "verdict_package/module.py", "verdict_helper.py"):
        write(f"sources/{name}", "")
    return write


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("project/tests/test_it.py", True),
        ("project/tests/conftest.py", True),
        ("project/conftest.py", True),
        ("conftest.py", False),
        ("project/tests/test_other.py", False),
        ("sources/verdict_helper.py", True),
        ("sources/verdict_package/module.py", True),
        ("sources/verdict_package/loaded_by_name.py", True),
        ("sources/verdict_package/data.txt", True),
        ("sources/verdict_stranger.py", False),
    ],
)
def test_sources_that_count(tree, name, counts):
    before = tree("sources/verdict_stranger.py", "")
    text = (
        "import verdict_helper\nfrom verdict_package import module" if "test_it" in name else "pass"
    )
    assert (tree(name, text) != before) == counts


def test_sources_of_sources_count(tree):
    tree("project/conftest.py", 'pytest_plugins = ["verdict_plugin.fixtures"]')
    tree("sources/verdict_plugin/__init__.py", "")
    before = tree("sources/verdict_plugin/fixtures.py", "import verdict_deep.er")
    assert tree("sources/verdict_plugin/fixtures.py", "import verdict_deep.er as deep") != before
    before = tree("sources/verdict_deep.py", "")
    assert tree("sources/verdict_deep.py", "A = 1") != before


def test_the_emulator_and_what_is_installed_count(tree, monkeypatch):
    before = tree("sources/verdict_stranger.py", "")
    monkeypatch.setattr(verdicts, "_installed", lambda site: "another torch")
    changed = tree("sources/verdict_stranger.py", "")
    assert changed != before
    monkeypatch.setattr(verdicts, "_content", lambda path: path.name)
    names = []
    monkeypatch.setattr(verdicts, "_content", lambda path: names.append(path.name) or path.name)
    tree("sources/verdict_stranger.py", "")
    assert {"race.cpp", "core.h", "mutation.py", "memory.py"} <= set(names)
