"""What the documents say exists and works: commands, files, extras, examples."""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cula
import noxfile
from cula import _registry, compat, delta, kda, lightning
from cula.integrations import fla

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "meta/*.md", "packages/*/*.md", "docs/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = [path.parent for path in ROOT.glob("*/src/*/__init__.py")] + [
    path.parent for path in ROOT.glob("packages/*/src/*/__init__.py")
]
# Files that a document names because something writes them.
MADE = {"dist/", "dist/sbom/cula-sm90.cdx.json"}
# Dotted names that are no modules: a group of entry points.
NO_MODULES = {"cula.kernels"}
SESSION = re.compile(r"(?:bash \.ci/run|nox(?: --no-venv)? -s) ((?:[\w()-]+ ?)+)")
# Examples that do not run here as they stand, by document and by a line of theirs, with the reason.
_PART = "a part of a kernel package that the reader writes"
_OWN = "a kernel of the reader's own"
FRAGMENTS = {
    ("packages/liteattention-sm89/README.md", "apply_lite_attention(pipe.transformer"): (
        "a pipeline of diffusers, whose weights are gigabytes"
    ),
    ("packages/cula-emulator/README.md", "kernel = emulator.compile("): _OWN,
    ("packages/cula-emulator/README.md", "cases = covering_cases("): "options of the reader's own",
    ("packages/cula-emulator/README.md", "report = mutation.run("): _OWN,
    ("packages/cula-emulator/README.md", "report = resources.compile("): _OWN,
    ("packages/cula-testing/README.md", "class TestEmulated("): "a part of a package's tests",
    ("docs/adding-a-kernel.md", "pytestmark = pytest.mark.emulated("): _PART,
    ("docs/adding-a-kernel.md", "report = mutation.run("): _PART,
    ("docs/adding-a-kernel.md", "report = resources.compile("): _PART,
    ("docs/emulator-instructions.md", '@emits("prmt"'): "a part of the emulator's own sources",
    ("docs/emulator-instructions.md", 'case("prmt"'): "a part of the emulator's own tests",
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def indented(text: str) -> list[str]:
    """Blocks that four spaces mark as code."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    return [textwrap.dedent(block).strip("\n") + "\n" for block in found if block.strip()]


def examples(document: str) -> list[str]:
    """The Python of a document: fenced, or indented behind an import."""
    text = (ROOT / document).read_text()
    own = [block for block in indented(text) if block.startswith(("import ", "from "))]
    return blocks(text, "python") + own


def commands(document: str) -> Iterator[str]:
    """Every line that a shell might be given: fenced, indented, and in a sentence."""
    text = (ROOT / document).read_text()
    for block in (*blocks(text, "bash"), *indented(text)):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", text)


def fragment(document: str, example: str) -> str | None:
    """Why an example is not run, or None."""
    for (where, line), reason in FRAGMENTS.items():
        if where == document and line in example:
            return reason
    return None


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    command = [sys.executable, "-m", "nox", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return set(re.findall(r"^[*-] ([\w-]+)", done.stdout, re.MULTILINE))


def named_sessions(document: str) -> set[str]:
    return {
        word
        for command in commands(document)
        for match in SESSION.finditer(command.partition(" -- ")[0].partition("#")[0])
        for word in match[1].split()
        if word[0].islower()  # neither an option nor a placeholder
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_session_named_exists(document: str, sessions: set[str]) -> None:
    assert named_sessions(document) <= sessions


def test_the_sessions_are_named() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "packages/cula-kda-sm100/README.md"):
        assert named_sessions(document), document


def quoted(document: str) -> list[str]:
    """What stands between backticks outside of blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def places(document: str) -> list[str]:
    """Files that a document may name by the end of their path.

    Those of its own package, of the packages that it names and of their base, or of all if it names none; and those of
    the benchmarks.
    """
    own = re.findall(r"packages/([a-z][\w-]*)", f"{document} {(ROOT / document).read_text()}")
    packages = sorted({*own, *noxfile.BASE}) if own else [""]
    folders = tuple((ROOT / "packages" / name).as_posix() for name in packages)
    return [
        path for path in all_files() if path.startswith((*folders, f"{ROOT.as_posix()}/benchmarks"))
    ]


@functools.cache
def all_files() -> tuple[str, ...]:
    paths = (path for name in ("packages", "benchmarks") for path in (ROOT / name).rglob("*"))
    return tuple(path.as_posix() for path in paths if "__pycache__" not in path.parts)


def is_there(name: str, document: str, found: list[str]) -> bool:
    """Whether a path is one from the root or from the document's folder, or ends the path of a file in `found`."""
    base = (ROOT, (ROOT / document).parent)
    return any((folder / name).exists() for folder in base) or any(
        path.endswith(f"/{name.rstrip('/')}") for path in found
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_named_exists(document: str) -> None:
    """The target of every link, and every path in backticks but placeholders such as `NAME/`."""
    text = (ROOT / document).read_text()
    links = {target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target}
    assert not [name for name in links if not ((ROOT / document).parent / name).exists()]
    wanted = {
        word.rstrip(".,;:")
        for text in quoted(document)
        for word in re.split(r"[\s\"'(){},=]+", text)
        if re.fullmatch(
            r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|json|toml|txt|cpp|h))", word.rstrip(".,;:")
        )
    }
    wanted = {name for name in wanted if not re.search(r"\b[A-Z]{2,}/", name)} - MADE
    found = places(document)
    assert not [name for name in sorted(wanted) if not is_there(name, document, found)]


@functools.cache
def all_tests() -> frozenset[str]:
    """The names of all test functions, those of shared suites included."""
    texts = (path.read_text() for path in ROOT.rglob("*.py") if ".nox" not in path.parts)
    return frozenset(name for text in texts for name in re.findall(r"\bdef (test_\w+)\(", text))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_named_exists(document: str) -> None:
    named = {name for name in quoted(document) if re.fullmatch(r"test_\w+", name)}
    assert named <= all_tests()


def top_level_names(tree: ast.Module) -> set[str]:
    """What a module defines or imports at the top."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
            }
    return names


def is_defined(name: str) -> bool:
    """Whether a dotted name is a module of ours, or what one has at the top; modules are read, not imported."""
    first, *rest = name.split(".")
    folder = next((path for path in SOURCES if path.name == first), None)
    if folder is None:
        return True
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    module = folder / "__init__.py"
    if rest and (folder / f"{rest[0]}.py").is_file():
        module = folder / f"{rest.pop(0)}.py"
    if not rest:
        return True
    known = top_level_names(ast.parse(module.read_text()))
    return rest[0] in known or "__getattr__" in known and f'"{rest[0]}"' in module.read_text()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_named_exists(document: str) -> None:
    """Dotted names in backticks that begin with a package of ours, and what they name in it."""
    packages = "|".join(path.name for path in SOURCES)
    names = {
        n
        for text in quoted(document)
        for n in re.findall(rf"(?<![\w./-])(?:{packages})(?:\.\w+)+", text)
    }
    assert not [name for name in sorted(names) if not (name in NO_MODULES or is_defined(name))]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("cula.varlen", True),
        ("cula.lite.LiteAttention", True),
        ("cula_core.delta_rule.plan.CostModel", True),
        ("cula_core.delta_rule.kernels", True),
        ("cula_core.delta_rule.planner", False),
        ("cula_core.delta_rule.plan.Nothing", False),
        ("cula.lite.Nothing", False),
    ],
)
def test_a_dotted_name_is_looked_up(name: str, there: bool) -> None:
    assert is_defined(name) is there


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("merge.py", True),
        ("kernels/", True),
        ("tools/sanitizer.py", True),
        ("varlen.md", True),
        ("layout.py", False),  # of another package
        ("rge.py", False),
        ("kernels/merge", False),
    ],
)
def test_a_path_is_looked_up(name: str, there: bool) -> None:
    document = "docs/kda-prefill.md"
    assert is_there(name, document, places(document)) is there


@functools.cache
def exit_code(*arguments: str) -> int:
    """Of Python with these arguments; a command that several documents name is run once."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, cwd=ROOT / "docs").returncode


@functools.cache
def help_of(subcommand: str) -> str:
    """What a subcommand of cula says of its options."""
    command = [sys.executable, "-m", "cula", subcommand, "--help"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_program_named_exists(document: str) -> None:
    """Scripts of the repository, folders of tests, and subcommands of cula with their options."""
    programs = ("python", "pytest", "bash", "nox")
    ours = re.compile(r"(?:tools|benchmarks|packages|meta)/[\w./-]+")
    for line in (line.partition("#")[0].strip() for line in commands(document)):
        words = line.split()
        paths = words[1:] if words[:1] and words[0] in programs else []
        for path in filter(ours.fullmatch, paths):
            placeholder = any(part.isupper() for part in path.split("/"))
            assert placeholder or (ROOT / path).exists(), line
        if not line.startswith("python -m cula ") or words[3] in ("demo", "bench"):
            continue
        if words[3] in ("compile", "cache"):  # which need files, or delete some
            options = (word for word in words if word.startswith("--"))
            assert all(option in help_of(words[3]) for option in options), line
        else:
            assert exit_code(*words[1:]) == 0, line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_extra_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    for name in noxfile.DISTRIBUTIONS:
        for extras in re.findall(rf"(?<![\w-]){name}\[([\w,-]+)\]", text):
            project = noxfile.nox.project.load_toml(
                ROOT / noxfile._folder(name) / "pyproject.toml"
            )["project"]
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras


EXAMPLES = [
    pytest.param(document, i, id=f"{document}-{i}")
    for document in DOCUMENTS
    for i in range(len(examples(document)))
]


@pytest.mark.parametrize(("document", "i"), EXAMPLES)
def test_example_runs_without_a_gpu(document: str, i: int) -> None:
    """As it stands, in a namespace of its own; one that needs what is not here must at least be Python."""
    example = examples(document)[i]
    if fragment(document, example):
        ast.parse(example)
    else:
        exec(compile(example, document, "exec"), {})


def test_every_reason_not_to_run_an_example_is_needed() -> None:
    for where, line in FRAGMENTS:
        assert len([found for found in examples(where) if line in found]) == 1, (where, line)


def test_every_kernel_package_and_both_front_pages_have_an_example() -> None:
    readmes = [f"packages/{name}/README.md" for name in noxfile.PACKAGES]
    for document in ("README.md", "meta/README.md", *readmes):
        assert any(fragment(document, example) is None for example in examples(document)), document


def test_every_kernel_package_runs_the_examples_of_its_docstrings() -> None:
    """`cula_testing.docstrings.Examples` does, and finds public names without one."""
    for name in noxfile.PACKAGES:
        test = (ROOT / noxfile._tests(name) / "test_docstrings.py").read_text()
        suite = f"class TestExamples(docstrings.Examples):\n    package = {noxfile._import_name(name)}\n"
        assert suite in test, name


def test_explanations_in_documents_are_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with every kernel package and without flash-linear-attention."""
    monkeypatch.setattr(fla, "importable", lambda package: False)
    _registry.refresh()
    names: dict[str, Any] = {"cula": cula, "torch": torch}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        told = doctest.DocTestParser().get_doctest(text, names, document, document, 0)
        assert runner.run(told).failed == 0, document
    assert runner.summarize(verbose=False).attempted > 0
    _registry.refresh()


def test_readme_names_the_two_commands() -> None:
    commands = blocks((ROOT / "README.md").read_text(), "bash")[0]
    assert re.search(r"^bash \.ci/run demo\b", commands, re.MULTILINE)
    assert re.search(r"^bash \.ci/run(?: +#|$)", commands, re.MULTILINE)


def test_migration_names_every_default_that_differs():
    theirs = {
        compat.kda.chunk_kda: kda.chunk_kda,
        compat.kda.kda_prefill_hopper: kda.kda_prefill_hopper,
        compat.kda.kda_decode: delta.delta_rule_decode,
        compat.kda.fused_sigmoid_gating_delta_rule_update: delta.delta_rule_decode,
        compat.lightning.lightning_attn_fwd: lightning.lightning_attn_fwd,
        compat.lightning.lightning_attn_fwd_varlen: lightning.lightning_attn_fwd_varlen,
        compat.lightning.linear_attention_decode: lightning.linear_attention_decode,
        compat.flashinfer.chunk_gated_delta_rule: lightning.chunk_gated_delta_rule,
        compat.flash_kda.fwd: kda.chunk_kda,
    }
    page = (ROOT / "docs" / "migration.md").read_text()
    missing, empty = [], inspect.Parameter.empty
    for function, ours in theirs.items():
        rows = page.partition("\n## Names that are the same")[2].partition("\n## ")[0].split("\n| ")
        start = [i for i, row in enumerate(rows) if f"`{function.__name__}`" in row.split("|")[0]]
        known = inspect.signature(ours).parameters
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in known or empty in (parameter.default, known[name].default):
                continue
            if parameter.default != known[name].default:
                told = f"`{name}={parameter.default!r}`"
                missing += (
                    [told] if not any(told in "".join(rows[i : i + 4]) for i in start) else []
                )
    assert not missing
