"""The check that documents, comments and docstrings have no words of which only this repository knows the sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import wording

# Written so that the check does not find its own examples.
BAD = "every " + "room"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"Inside a package {BAD} has one duty.", BAD),
        ("slower where by" + "tes bind", "bytes bind"),
        ("a state is read as it" + "\n    lies", "as it lies"),
        ("of no" + "\n# account", "of no # account"),
    ],
)
def test_what_is_private_is_found(text: str, word: str) -> None:
    assert [found for _, found, _ in wording.offences(f"first\n{text}\nlast\n")] == [word]


@pytest.mark.parametrize(
    "text", ["there is no room for it", "bind(problem, inputs)", "as it is", "whatever it lies on"]
)
def test_standard_words_are_left_alone(text: str) -> None:
    assert list(wording.offences(text)) == []


def test_code_is_not_read() -> None:
    source = 'its_room = 1\n# a comment\ndef f():\n    """A docstring\n    of two lines."""\n    return "text"\n'
    lines = wording.prose(source).splitlines()
    assert lines[0] == "" and lines[1] == "# a comment" and "docstring" in lines[3]
    assert "return" not in lines[5] and '"text"' in lines[5]


def test_a_tree_is_searched(tmp_path: Path) -> None:
    module = tmp_path / "packages" / "x" / "src" / "x" / "a.py"
    module.parent.mkdir(parents=True)
    module.write_text(f'"""Right.\n\n{BAD}\n"""\n')
    (tmp_path / "README.md").write_text(f"fine\n{BAD}\n")
    found = [line.split(": ")[0] for line in wording.violations(tmp_path)]
    assert found == ["README.md:2", "packages/x/src/x/a.py:3"]
    assert wording.main(tmp_path) == 1


def test_the_repository_has_none() -> None:
    assert wording.violations() == []
