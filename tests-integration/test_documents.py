"""What README.md and CONTRIBUTING.md say exists: commands, files, examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENTS = ("README.md", "CONTRIBUTING.md")
SESSION = re.compile(r"(?:bash \.ci/run|nox(?: --no-venv)? -s) ((?:[\w()-]+ ?)+)")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def sessions(root: Path) -> set[str]:
    command = [sys.executable, "-m", "nox", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    return set(re.findall(r"^[*-] ([\w-]+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_session_named_exists(document: str, root: Path, sessions: set[str]) -> None:
    text = (root / document).read_text()
    commands = [line for block in blocks(text, "bash") for line in block.splitlines()]
    commands += re.findall(r"`([^`\n]+)`", text)
    named = {
        word
        for command in commands
        for match in SESSION.finditer(command.partition(" -- ")[0].partition("#")[0])
        for word in match[1].split()
        if word[0].islower()  # neither an option nor a placeholder
    }
    assert named, "no session is named"
    assert named <= sessions


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_named_exists(document: str, root: Path) -> None:
    text = (root / document).read_text()
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    quoted = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|toml|py|txt))`", text)
    missing = [name for name in {*links, *quoted} if not (root / name).exists()]
    assert not missing


def test_readme_example_runs(root: Path) -> None:
    examples = blocks((root / "README.md").read_text(), "python")
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def test_readme_names_the_two_commands(root: Path) -> None:
    commands = blocks((root / "README.md").read_text(), "bash")[0]
    assert re.search(r"^bash \.ci/run demo\b", commands, re.MULTILINE)
    assert re.search(r"^bash \.ci/run(?: +#|$)", commands, re.MULTILINE)
