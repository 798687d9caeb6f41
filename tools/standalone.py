"""Proves that one distribution stands alone here: `python -I tools/standalone.py IMPORT_NAME OTHER ...`."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


def main(name: str, *others: str) -> int:
    present = [other for other in others if find_spec(other)]
    if present:
        print(f"{name} is not alone: {', '.join(present)} can be imported")
        return 1
    module = importlib.import_module(name)
    heavy = {"cutlass", "triton"} & set(sys.modules)
    if heavy:
        print(f"import {name} also imports {', '.join(sorted(heavy))}")
        return 1
    installed = version(name.replace("_", "-"))
    if module.__version__ != installed:
        print(f"{name}.__version__ is {module.__version__}, the installed wheel says {installed}")
        return 1
    if "site-packages" not in Path(module.__file__).parts:
        print(f"{name} was imported from {module.__file__}, not from its wheel")
        return 1
    print(f"{name} {installed} imports alone")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
