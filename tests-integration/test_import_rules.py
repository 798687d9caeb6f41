"""The import rules hold in the tree, and every one of them fires when it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_rules import main, violations

PACKAGE = "packages/cula-x/src/cula_x"
KERNEL = f"{PACKAGE}/kernels/fwd.py"
EMULATOR = "packages/cula-emulator/src/cula_emulator"
CORE = "packages/cula-core/src/cula_core"
TESTING = "packages/cula-testing/src/cula_testing"
# A package with a folder for its device code.
FOLDERS = "packages/cula-z/src/cula_z"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A small repository with two kernel packages, a meta package and the given files on top."""
    base = {
        f"{PACKAGE}/__init__.py": "from .ops import fwd\n",
        f"{PACKAGE}/ops.py": "import torch\n\ndef fwd():\n    from . import launch\n    return launch\n",
        f"{PACKAGE}/config.py": "from dataclasses import dataclass\n",
        f"{PACKAGE}/launch.py": "import torch\nfrom .config import Config\n",
        f"{PACKAGE}/build.py": "import cutlass\nfrom .kernels.fwd import Fwd\n",
        KERNEL: "import cutlass.cute as cute\nfrom ..config import Config\n",
        "packages/cula-y/src/cula_y/__init__.py": "",
        f"{FOLDERS}/__init__.py": "from cula_core.delta_rule.prefill import Prefill\nfrom .arch import TARGET\n",
        f"{FOLDERS}/arch.py": "from cula_core.delta_rule.target import Target\n",
        f"{FOLDERS}/kernels/scan.py": (
            "import cutlass\nfrom cula_core.delta_rule.config import CHUNK\nfrom ..arch import TARGET\n"
        ),
        f"{CORE}/__init__.py": "",
        f"{CORE}/cute/compile.py": "import cutlass.cute as cute\n",
        f"{CORE}/delta_rule/prefill.py": (
            "import torch\n\ndef run():\n    from .launch import run\n    return run\n"
        ),
        f"{CORE}/delta_rule/launch.py": "import torch\nfrom .config import CHUNK\n",
        f"{CORE}/delta_rule/build.py": (
            "import cutlass\nfrom ..cute.compile import cute\nfrom .kernels.scan import Scan\n"
        ),
        f"{CORE}/delta_rule/kernels/scan.py": "import cutlass\nfrom ..config import CHUNK\n",
        f"{TESTING}/plugin.py": "import pytest\nimport cula_emulator\nimport cula_core\n",
        f"{TESTING}/__init__.py": "",
        f"{EMULATOR}/__init__.py": "from .build import build\n",
        f"{EMULATOR}/build.py": "import subprocess\nimport torch\n",
        "meta/src/cula/__init__.py": "import torch\n",
        "meta/src/cula/_discovery.py": 'FIRST_PARTY = ("cula_x",)\n',
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
    "package imports cula": (
        f"{PACKAGE}/check.py",
        "import cula.varlen",
        "nothing of ours but cula_core",
    ),
    "package imports a sibling": (
        f"{PACKAGE}/check.py",
        "from cula_y import f",
        "nothing of ours but cula_core",
    ),
    "package imports a sibling by name": (
        f"{PACKAGE}/check.py",
        "import importlib\nimportlib.import_module('cula_y.ops')",
        "nothing of ours but cula_core",
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
        "only build and kernel files",
    ),
    "spec imports triton late": (
        f"{PACKAGE}/_spec.py",
        "def f():\n    import triton",
        "only build and kernel files",
    ),
    "config imports torch": (f"{PACKAGE}/config.py", "import torch", "config is pure Python"),
    "init imports build at the top": (
        f"{PACKAGE}/__init__.py",
        "from . import build",
        "imports cula_x.build at the top",
    ),
    "reference imports a kernel at the top": (
        f"{PACKAGE}/reference.py",
        "from cula_x.kernels.fwd import Fwd",
        "imports cula_x.kernels.fwd at the top",
    ),
    "kernel imports torch": (
        KERNEL,
        "import cutlass\nimport torch",
        "a kernel knows neither torch",
    ),
    "kernel imports ops": (
        KERNEL,
        "import cutlass\nfrom .. import ops",
        "a kernel knows neither torch",
    ),
    "kernel imports launch": (
        KERNEL,
        "import cutlass\nfrom ..launch import run",
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
        "only _discovery knows",
    ),
    "meta imports cutlass": ("meta/src/cula/kda.py", "import cutlass", "not for this part of cula"),
    "meta imports fla": ("meta/src/cula/kda.py", "import fla", "not for this part of cula"),
    "meta imports matplotlib": (
        "meta/src/cula/varlen.py",
        "import matplotlib",
        "not for this part of cula",
    ),
    "package has a second kernel language": (
        f"{PACKAGE}/build.py",
        "import cutlass\nimport triton",
        "imports triton beside cutlass: one kernel language",
    ),
    "package imports the suites": (f"{PACKAGE}/check.py", "import cula_testing", "only torch"),
    "host file imports core's build at the top": (
        f"{FOLDERS}/__init__.py",
        "from cula_core.delta_rule.build import kernel",
        "imports cula_core.delta_rule.build at the top",
    ),
    "host file imports its kernel at the top": (
        f"{FOLDERS}/arch.py",
        "from .kernels.scan import Scan",
        "imports cula_z.kernels.scan at the top",
    ),
    "kernel in a folder imports torch": (
        f"{FOLDERS}/kernels/scan.py",
        "import torch",
        "a kernel knows neither torch",
    ),
    "kernel in a folder imports core's caller": (
        f"{FOLDERS}/kernels/scan.py",
        "from cula_core.delta_rule.call import Call",
        "a kernel knows neither torch",
    ),
    "core imports a kernel package": (
        f"{CORE}/delta_rule/prefill.py",
        "def f():\n    import cula_x",
        "cula_core imports torch, and cutlass only in",
    ),
    "core imports cula": (f"{CORE}/arguments.py", "import cula", "cula_core imports torch, and"),
    "core imports cutlass in a host file": (
        f"{CORE}/arguments.py",
        "def f():\n    import cutlass",
        "cutlass only in cute/, kernels/ and build",
    ),
    "core imports build at the top": (
        f"{CORE}/delta_rule/prefill.py",
        "from .build import kernel",
        "imports cula_core.delta_rule.build at the top",
    ),
    "core imports its DSL helpers at the top": (
        f"{CORE}/tensors.py",
        "from .cute.compile import cute",
        "imports cula_core.cute.compile at the top",
    ),
    "core's kernel imports torch": (
        f"{CORE}/delta_rule/kernels/scan.py",
        "import torch",
        "a kernel knows neither torch",
    ),
    "core's kernel imports its launcher": (
        f"{CORE}/delta_rule/kernels/scan.py",
        "from ..launch import run",
        "a kernel knows neither torch",
    ),
    "core's planner imports torch": (
        f"{CORE}/delta_rule/plan.py",
        "import torch",
        "plan is pure Python",
    ),
    "core's test imports a kernel package": (
        "packages/cula-core/tests/test_plan.py",
        "import cula_x",
        "passes its tests alone",
    ),
    "suites import a kernel package": (
        f"{TESTING}/kda.py",
        "import cula_x",
        "told which package it tests",
    ),
    "suites import cula": (f"{TESTING}/kda.py", "import cula", "told which package it tests"),
    "meta imports core's build": (
        "meta/src/cula/kda.py",
        "def f():\n    from cula_core.delta_rule import build",
        "cula does without a kernel language",
    ),
    "meta imports the suites": (
        "meta/src/cula/kda.py",
        "import cula_testing",
        "not for this part of cula",
    ),
    "benchmark imports the suites": (
        "benchmarks/run.py",
        "import cula_testing",
        "imports cula_testing, which only tests may",
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


CIRCLES = {
    "two modules": (
        {"meta/src/cula/a.py": "from cula import b\n", "meta/src/cula/b.py": "from . import a\n"},
        "meta/src/cula/a.py:1: closes a circle: cula.a imports cula.b imports cula.a",
    ),
    "three modules of a package": (
        {
            f"{PACKAGE}/a.py": "import torch\nfrom .b import f\n",
            f"{PACKAGE}/b.py": "import cula_x.c\n",
            f"{PACKAGE}/c.py": "from cula_x.a import g\n",
        },
        f"{PACKAGE}/a.py:2: closes a circle: "
        "cula_x.a imports cula_x.b imports cula_x.c imports cula_x.a",
    ),
    "a package and its module": (
        {f"{PACKAGE}/ops.py": "from cula_x import NAME\n"},
        f"{PACKAGE}/__init__.py:1: closes a circle: cula_x imports cula_x.ops imports cula_x",
    ),
    "tools": (
        {"tools/a.py": "from tools.b import f\n", "tools/b.py": "import tools.a\n"},
        "tools/a.py:1: closes a circle: tools.a imports tools.b imports tools.a",
    ),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_circle_is_found_once(name: str, tmp_path: Path) -> None:
    files, line = CIRCLES[name]
    assert violations(tree(tmp_path, files)) == [line]


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "from cula import b\n", "b.py": "def f():\n    from cula import a\n"},
        {"a.py": "from . import b\nfrom . import c\n", "b.py": "from . import c\n", "c.py": ""},
        {"__init__.py": "from . import a\n", "a.py": "from cula import b\n", "b.py": ""},
        {"__init__.py": "from . import a\n", "a.py": "import cula.b\n", "b.py": ""},
    ],
    ids=["late", "diamond", "module of the package", "module by its full name"],
)
def test_what_is_no_circle(files: dict[str, str], tmp_path: Path) -> None:
    placed = {f"meta/src/cula/{name}": text for name, text in files.items()}
    assert violations(tree(tmp_path, placed)) == []


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
    "core in the meta package": ("meta/src/cula/kda.py", "from cula_core.arguments import tensor"),
    "core in a package": (f"{PACKAGE}/check.py", "from cula_core import arguments"),
    "core's build in a package's build": (
        f"{PACKAGE}/build.py",
        "from cula_core.cute.compile import cute",
    ),
    "the suites in a package's tests": (
        "packages/cula-x/tests/test_emulated.py",
        "from cula_testing import plugin",
    ),
    "the suites in core's tests": (
        "packages/cula-core/tests/test_plan.py",
        "from cula_testing import plugin",
    ),
    "fla in an integration": ("meta/src/cula/integrations/fla.py", "def f():\n    import fla.ops"),
    "matplotlib in the demo": ("meta/src/cula/demo/plot.py", "import matplotlib.pyplot"),
    "a kernel's name in _discovery": ("meta/src/cula/_discovery.py", "NAME = 'cula_x'"),
    "a kernel's name in a sentence": ("meta/src/cula/kda.py", '"""cula_x serves this op."""'),
    "build under TYPE_CHECKING": (
        f"{PACKAGE}/ops.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import build",
    ),
    "the emulator in a package's tests": (
        "packages/cula-x/tests/test_emulated.py",
        "import cula_emulator",
    ),
    "the emulator in its own benchmark": ("benchmarks/emulator/speed.py", "import cula_emulator"),
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
