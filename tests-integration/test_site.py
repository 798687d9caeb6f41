"""The documentation site, without the program that builds it: navigation, links, tables, environment variables."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import noxfile
from cula import delta, kda, lightning, lite, reference, varlen
from cula._facts import OPS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.name for path in ROOT.glob("docs/*.md"))
# Where code of ours reads the environment; tests set what they like.
CODE = ("noxfile.py", "tools/*.py", "meta/src/**/*.py", "packages/*/src/**/*", "benchmarks/**/*.py")
VARIABLE = re.compile(r"\bCULA_[A-Z]+(?:_[A-Z]+)*\b")
DEBUGGING = "debugging.md"
MODULES = {module.__name__: module for module in (delta, kda, lightning, lite, varlen)}


def navigation() -> list[str]:
    """Every file that the navigation of mkdocs.yml names."""
    text = (ROOT / "mkdocs.yml").read_text()
    nav = text[text.index("\nnav:") : text.index("\nhooks:")]
    return re.findall(r": ([\w./-]+\.md)$", nav, re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors of the headings of a document, and of the modules and functions whose docstrings it shows."""
    text = document.read_text()
    shown = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    shown |= {f"{m}.{name}" for m in shown & set(MODULES) for name in MODULES[m].__all__}
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", title.lower()) for title in titles)
    return shown | {re.sub(r"[-\s]+", "-", word.strip()) for word in words}


def broken(text: str, folder: Path) -> list[str]:
    """The relative links of a document's text that lead nowhere, `#anchors` of documents included."""
    found = []
    for target, anchor in re.findall(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)", text):
        if "://" in target:
            continue
        path = folder / target
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            found.append(f"{target}#{anchor}" if anchor else target)
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    named = navigation()
    assert sorted(name for name in named if "/" not in name) == PAGES
    assert len(named) == len(set(named))


def test_the_navigation_names_files_that_exist() -> None:
    outside = [name for name in navigation() if "/" in name]
    assert outside
    for name in outside:
        folder, _, path = name.partition("/")
        assert folder == "repository" and (ROOT / path).is_file(), name


def test_every_kernel_package_has_a_page() -> None:
    readmes = {f"repository/packages/{name}/README.md" for name in noxfile.PACKAGES}
    assert readmes <= set(navigation())


def test_every_public_name_of_cula_is_in_the_reference() -> None:
    shown = (ROOT / "docs/api.md").read_text()
    for module in MODULES:
        assert f"::: {module}\n" in shown, module
    assert "::: cula._registry.explain\n" in shown
    assert [name for name in reference.__all__ if not re.search(rf"\b{name}\b", shown)] == []


@pytest.mark.parametrize("package", noxfile.PACKAGES)
def test_every_public_name_of_a_kernel_package_is_in_the_reference(package: str) -> None:
    shown = (ROOT / "docs/api-packages.md").read_text()
    names = importlib.import_module(noxfile._import_name(package)).__all__
    assert [name for name in names if not re.search(rf"\b{name}\b", shown)] == []
    assert f"- packages/{package}/src\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_resolves(page: str) -> None:
    assert not broken((ROOT / "docs" / page).read_text(), ROOT / "docs")


@pytest.mark.parametrize(
    ("link", "there"),
    [
        ("[a](varlen.md)", True),
        ("[a](varlen.md#the-contract)", True),
        ("[a](../CONTRIBUTING.md#tests)", True),
        ("[a](api.md#cula.kda)", True),
        ("[a](api.md#cula.kda.chunk_kda)", True),
        ("[a](api.md#cula.kda.nothing)", False),
        ("[a](nothing.md)", False),
        ("[a](varlen.md#nothing)", False),
        ("[a](../packages)", False),
    ],
)
def test_a_link_is_looked_up(link: str, there: bool) -> None:
    assert (not broken(link, ROOT / "docs")) is there


def read_variables() -> set[str]:
    paths = [path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file()]
    kept = [
        path for path in paths if path.suffix in (".py", ".h", ".cpp") and "tests" not in path.parts
    ]
    return {name for path in kept for name in VARIABLE.findall(path.read_text())}


def test_every_environment_variable_is_in_the_page_on_debugging() -> None:
    found = read_variables()
    assert {"CULA_DISABLE", "CULA_CACHE_DIR", "CULA_EMULATOR_CACHE"} <= found
    assert found == set(VARIABLE.findall((ROOT / "docs" / DEBUGGING).read_text()))


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    command = [sys.executable, "-I", str(ROOT / "tools/site_tables.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_tables_name_every_package_and_every_operation(tables: dict[str, str]) -> None:
    for name in noxfile.PACKAGES:
        assert all(f"`{name}`" in table for table in tables.values()), name
    assert all(f"| `{op}` |" in tables["served"] for op in OPS)


def test_tables_say_what_the_packages_say(tables: dict[str, str]) -> None:
    rows = {row.split(" | ")[0].strip("| "): row for row in tables["accepted"].splitlines()}
    decode = "| bfloat16, float16 | 64 or 128 or 256 | float32, bfloat16, float16 |"
    assert decode in rows["`cula-lightning-decode`"]
    assert "| multiples of 8 up to 256 |" in rows["`liteattention-sm89`"]
    assert rows["`liteattention-sm89`"].endswith("| 128 x 64 or 128 | yes |")
    assert "nvidia-cutlass-dsl" in tables["versions"]


def test_every_table_has_its_place_in_a_page(tables: dict[str, str]) -> None:
    markers = [
        name
        for page in PAGES
        for name in re.findall(r"<!-- table:(\w+) -->", (ROOT / "docs" / page).read_text())
    ]
    assert sorted(markers) == sorted(tables)
