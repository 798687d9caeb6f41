"""The page: all sections in the template, with the style sheet inside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmarks.harness import results
from benchmarks.report import sections
from benchmarks.report.sections import Section

FOLDER = Path(__file__).resolve().parent
# Names in result files -> what they are, and where; README.md names no others.
PROJECTS = {
    "fla": (
        "flash-linear-attention, Triton kernels",
        "https://github.com/fla-org/flash-linear-attention",
    ),
    "torch_flash": ("PyTorch's attention, flash backend", "https://github.com/pytorch/pytorch"),
    "torch_cudnn": ("PyTorch's attention, cuDNN backend", "https://github.com/pytorch/pytorch"),
    "lite_dense": ("our own attention kernel without lists", None),
    "copy_ceiling": ("a copy of as many bytes, which does nothing else", None),
    "inplace_ceiling": ("an update in place of as many bytes, which does nothing else", None),
    "floor": ("the op's bytes over the bandwidth that a copy attains on this GPU", None),
}
GROUPS = {
    "predicted": "Predicted by a model, not measured",
    "published": "Published by others",
    "cpu": "The emulator, on a CPU",
    "suite": "The tests of this repository",
}


@dataclass(frozen=True)
class Group:
    """The sections of one folder of results."""

    title: str
    sections: Sequence[Section]


def groups(root: Path = results.RESULTS) -> list[Group]:
    """All result files below `root`, by folder."""
    found = []
    paths = sections.files(root)
    for folder, members in itertools.groupby(paths, lambda path: path.parent.name):
        read = [sections.read(path) for path in members]
        title = GROUPS.get(folder) or read[0].badges[0].removeprefix("ran on ")
        found.append(Group(title, read))
    return found


def render(root: Path = results.RESULTS) -> str:
    """The whole page; ValueError names a result file that cannot be shown."""
    found = groups(root)
    if not found:
        raise ValueError(f"{root}: expected result files, found none")
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup
    return environment.get_template("template.html.j2").render(
        groups=found,
        gpus=[group.title for group in found if group.title not in GROUPS.values()],
        projects=PROJECTS,
        style=Markup((FOLDER / "style.css").read_text(encoding="utf-8")),
    )
