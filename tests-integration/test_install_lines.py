"""The check that no document or message tells to install what no package index has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import install_lines

NAMES = {"cula", "cula-x"}
# Written so that the check does not find its own examples.
PIP = "pip" + " install"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"{PIP} cula", "cula"),
        (f"run `{PIP} cula-x` first", "cula-x"),
        (f"{PIP} 'cula[sm90]'", "cula"),
        (f'{PIP} -U "cula-x[cu13]==0.1.0"', "cula-x"),
        (f"uv {PIP} torch cula_x", "cula_x"),
        (f"python -m {PIP} --quiet cula-x.", "cula-x"),
        ('f"missing: ' + PIP + ' {NAME}"', "{NAME}"),
    ],
)
def test_what_fails_is_found(line: str, name: str) -> None:
    text = f"first\n{line}\nlast\n"
    assert list(install_lines.offences(text, NAMES)) == [(2, name)]


@pytest.mark.parametrize(
    "line",
    [
        f"{PIP} --find-links dist cula",
        f"{PIP} 'cula[sm90]' --find-links=dist",
        f"{PIP} -f dist cula-x",
        'f"' + PIP + ' --find-links dist {NAME}"',
        f"{PIP} ./packages/cula-core ./packages/cula-x",
        f"{PIP} -e ./meta[demo]",
        f"{PIP} fla-core",
        f"{PIP} torch  # then cula",
        f"`{PIP} torch` before cula",
        f"{PIP} cula-xylophone",
        "cula installs with pip",
    ],
)
def test_what_works_is_left_alone(line: str) -> None:
    assert list(install_lines.offences(line, NAMES)) == []


def test_a_tree_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "meta/pyproject.toml": 'name = "cula"\n',
        "packages/cula-x/pyproject.toml": '[project]\nname = "cula-x"\n',
        "packages/cula-x/README.md": f"\n`{PIP} cula-x`\n",
        "meta/src/cula/lite.py": f'raise ImportError("{PIP} cula")\n',
        ".nox/venv/README.md": f"{PIP} cula\n",
        "dist/README.md": f"{PIP} cula\n",
        "docs/plot.png": f"{PIP} cula\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert install_lines.distributions(tmp_path) == NAMES
    assert install_lines.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "meta/src/cula/lite.py:1: pip finds no cula on an index; name a path, or --find-links dist",
        "packages/cula-x/README.md:2: pip finds no cula-x on an index; name a path, or --find-links dist",
        "install lines: 2 would fail",
    ]


def test_the_repository_holds_the_rule(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"cula", "cula-emulator", "cula-cp-sm90"} <= install_lines.distributions(root)
    assert install_lines.main(root) == 0
    assert capsys.readouterr().out == "install lines: all work\n"
