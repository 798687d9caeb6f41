"""Signatures of an engine, recorded from its sources without importing it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tools import record_contracts

FILES = {
    "engine/__init__.py": "raise RuntimeError('must not be imported')\n",
    "engine/ops/__init__.py": "from .chunk import chunk as run\n",
    "engine/ops/chunk.py": """
if True:
    @decorated
    def chunk(q, /, k, scale: float = 128 ** -0.5, *rest, out=None, **more): ...
class Layer(Base):
    name = "layer"
    size: int = 4
    async def forward(self, x): ...
""",
    "engine/caller.py": "from engine.ops import run\nrun(1, 2, out=3)\nx.run(*y, **z)\n",
}
RUN = [
    ["q", "POSITIONAL_ONLY", None], ["k", "POSITIONAL_OR_KEYWORD", None],
    ["scale", "POSITIONAL_OR_KEYWORD", "128 ** (-0.5)"], ["rest", "VAR_POSITIONAL", None],
    ["out", "KEYWORD_ONLY", "None"], ["more", "VAR_KEYWORD", None],
]  # fmt: skip
FORWARD = [["self", "POSITIONAL_OR_KEYWORD", None], ["x", "POSITIONAL_OR_KEYWORD", None]]


@pytest.fixture(params=["folder", "wheel"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "engine.whl", "w") as wheel:
            for name, text in FILES.items():
                wheel.writestr(name, text)
        return tmp_path / "engine.whl"
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_signatures_classes_and_calls_are_recorded(source: Path, capsys) -> None:
    names = ["engine.ops.run", "engine.ops.chunk.Layer", "engine.ops.chunk.Layer.forward"]
    given = [str(source), *names, "--engine", "e", "--version", "1", "--callers", "engine.caller"]
    assert record_contracts.main(given) == 0
    assert json.loads(capsys.readouterr().out) == {
        "engine": "e", "version": "1",
        "functions": {"engine.ops.run": RUN, "engine.ops.chunk.Layer.forward": FORWARD},
        "classes": {
            "engine.ops.chunk.Layer": {
                "bases": ["Base"], "attributes": {"name": "'layer'", "size": "4"}, "methods": {"forward": FORWARD},
            }
        },
        "calls": {"run": [["engine.caller", 2, ["out"]], ["engine.caller", 1, ["None"]]]},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["engine.ops.nothing", "engine.ops.chunk.Layer.nothing", "other"])
def test_a_name_that_is_not_there_fails(source: Path, name: str, capsys) -> None:
    with pytest.raises(SystemExit):
        record_contracts.main([str(source), name, "--engine", "e", "--version", "1"])
    assert name in capsys.readouterr().err
