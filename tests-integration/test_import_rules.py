"""The import rules hold in the tree, and every one of them fires when it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_rules import main, violations

PACKAGE = "packages/cula-x/src/cula_x"
KERNEL = f"{PACKAGE}/fwd.py"
EMULATOR = "packages/cula-emulator/src/cula_emulator"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A small repository with two kernel packages, a meta package and the given files on top."""
    base = {
        f"{PACKAGE}/__init__.py": "from .ops import fwd\n",
        f"{PACKAGE}/ops.py": "import torch\n\ndef fwd():\n    from . import launch\n    return launch\n",
        f"{PACKAGE}/config.py": "from dataclasses import dataclass\n",
        f"{PACKAGE}/launch.py": "import cutlass\nimport torch\nfrom .fwd import Fwd\n",
        KERNEL: "import cutlass.cute as cute\nfrom .config import Config\n",
        "packages/cula-y/src/cula_y/__init__.py": "",
        f"{EMULATOR}/__init__.py": "from .build import build\n",
        f"{EMULATOR}/build.py": "import subprocess\nimport torch\n",
        "meta/src/cula/__init__.py": "import torch\n",
        "meta/src/cula/_registry.py": 'FIRST_PARTY = ("cula_x",)\n',
    }
    for name, text in {**base, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_repository_holds_the_rules(root: Path) -> None:
    assert violations(root) == []


def test_clean_tree_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tree(tmp_path, {})) == 0
    assert capsys.readouterr().out == "import rules: all hold\n"


BROKEN = {
    "package imports cula": (f"{PACKAGE}/check.py", "import cula.varlen", "nothing else of ours"),
    "package imports a sibling": (
        f"{PACKAGE}/check.py",
        "from cula_y import f",
        "nothing else of ours",
    ),
    "package imports a sibling by name": (
        f"{PACKAGE}/check.py",
        "import importlib\nimportlib.import_module('cula_y.ops')",
        "nothing else of ours",
    ),
    "package imports fla": (f"{PACKAGE}/check.py", "import fla", "only torch, cutlass or triton"),
    "package imports the emulator": (f"{PACKAGE}/check.py", "import cula_emulator", "only torch"),
    "package imports matplotlib late": (
        f"{PACKAGE}/check.py",
        "def f():\n    import matplotlib",
        "only torch, cutlass or triton",
    ),
    "ops imports cutlass": (
        f"{PACKAGE}/check.py",
        "import cutlass",
        "only launch and kernel files",
    ),
    "spec imports triton late": (
        f"{PACKAGE}/_spec.py",
        "def f():\n    import triton",
        "only launch and kernel files",
    ),
    "config imports torch": (f"{PACKAGE}/config.py", "import torch", "config is pure Python"),
    "init imports launch at the top": (
        f"{PACKAGE}/__init__.py",
        "from . import launch",
        "imports launch at the top",
    ),
    "reference imports a kernel at the top": (
        f"{PACKAGE}/reference.py",
        "from cula_x.fwd import Fwd",
        "imports fwd at the top",
    ),
    "kernel imports torch": (
        KERNEL,
        "import cutlass\nimport torch",
        "a kernel knows neither torch",
    ),
    "kernel imports ops": (
        KERNEL,
        "import cutlass\nfrom . import ops",
        "a kernel knows neither torch",
    ),
    "kernel imports launch": (
        KERNEL,
        "import triton\nfrom .launch import run",
        "a kernel knows neither torch",
    ),
    "struct under future annotations": (
        KERNEL,
        "from __future__ import annotations\nimport cutlass.cute as cute\n@cute.struct\nclass S: ...",
        "breaks @cute.struct",
    ),
    "package test imports cula": (
        "packages/cula-x/tests/test_ops.py",
        "from cula import lightning",
        "passes its tests alone",
    ),
    "meta imports a kernel": (
        "meta/src/cula/kda.py",
        "def f():\n    from cula_x import fwd",
        "through the registry",
    ),
    "meta names a kernel": (
        "meta/src/cula/kda.py",
        "import importlib\nname = 'cula_x.ops'",
        "only the registry knows",
    ),
    "meta imports cutlass": ("meta/src/cula/kda.py", "import cutlass", "not for this part of cula"),
    "meta imports fla": ("meta/src/cula/kda.py", "import fla", "not for this part of cula"),
    "meta imports matplotlib": (
        "meta/src/cula/varlen.py",
        "import matplotlib",
        "not for this part of cula",
    ),
    "shared file imports its neighbour": (
        "meta/src/cula/_shared/gate.py",
        "from . import other",
        "so it stands alone",
    ),
    "benchmark imports the emulator": (
        "benchmarks/run.py",
        "import cula_emulator",
        "only tests may",
    ),
    "a file named like the emulator's benchmark elsewhere": (
        "benchmarks/ops/emulator.py",
        "import cula_emulator",
        "only tests may",
    ),
    "tool imports the emulator": (
        "tools/check.py",
        "def f():\n    import cula_emulator",
        "only tests may",
    ),
    "meta imports the emulator": (
        "meta/src/cula/kda.py",
        "def f():\n    import cula_emulator",
        "not for this part of cula",
    ),
    "emulator imports numpy": (
        f"{EMULATOR}/arguments.py",
        "import numpy",
        "may import cula_core, torch",
    ),
    "emulator imports cutlass": (
        f"{EMULATOR}/library.py",
        "def f():\n    import cutlass",
        "may import cula_core, torch",
    ),
    "emulator imports a kernel package": (
        f"{EMULATOR}/library.py",
        "def f():\n    import cula_x",
        "may import cula_core, torch",
    ),
    "emulator's front end imports cutlass at the top": (
        f"{EMULATOR}/cute.py",
        "import cutlass.cute as cute",
        "only a function may",
    ),
    "emulator imports pytest outside its plugin": (
        f"{EMULATOR}/mutation.py",
        "import pytest",
        "may import cula_core, torch",
    ),
    "emulator's test imports a kernel package": (
        "packages/cula-emulator/tests/test_cute.py",
        "import cula_x",
        "passes its tests alone",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rule_fires(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text, message = BROKEN[name]
    assert main(tree(tmp_path, {path: text + "\n"})) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:") and message in lines[0]
    assert lines[-1] == f"import rules: {len(lines) - 1} broken"


def test_line_number_is_that_of_the_import(tmp_path: Path) -> None:
    found = violations(tree(tmp_path, {f"{PACKAGE}/check.py": "import torch\n\nimport fla\n"}))
    assert [line.split(": ")[0] for line in found] == [f"{PACKAGE}/check.py:3"]


ALLOWED = {
    "fla in an integration": ("meta/src/cula/integrations/fla.py", "def f():\n    import fla.ops"),
    "matplotlib in the demo": ("meta/src/cula/demo/plot.py", "import matplotlib.pyplot"),
    "a kernel's name in the registry": ("meta/src/cula/_registry.py", "NAME = 'cula_x'"),
    "a kernel's name in a sentence": ("meta/src/cula/kda.py", '"""cula_x serves this op."""'),
    "launch under TYPE_CHECKING": (
        f"{PACKAGE}/ops.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import launch",
    ),
    "the emulator in a package's tests": (
        "packages/cula-x/tests/test_emulated.py",
        "import cula_emulator",
    ),
    "the emulator in its own benchmark": ("benchmarks/emulator_speed.py", "import cula_emulator"),
    "cutlass in the emulator's front end": (
        f"{EMULATOR}/cute.py",
        "def f():\n    import cutlass.cute as cute",
    ),
    "cutlass in the emulator's resource report": (
        f"{EMULATOR}/resources/tools.py",
        "def f():\n    import cutlass",
    ),
    "pytest in the emulator's plugin": (f"{EMULATOR}/pytest_plugin.py", "import pytest"),
    "cutlass and triton in the emulator's tests": (
        "packages/cula-emulator/tests/test_cute.py",
        "import cutlass\nimport triton",
    ),
    "a struct without future annotations": (
        KERNEL,
        "import cutlass.cute as cute\n@cute.struct\nclass S: ...",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_rule_spares(name: str, tmp_path: Path) -> None:
    path, text = ALLOWED[name]
    assert violations(tree(tmp_path, {path: text + "\n"})) == []
