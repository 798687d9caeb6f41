"""An extension of griffe, which reads docstrings for the documentation site."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):
    """Reads a section `Example:`, as our docstrings have it, like the `Examples:` that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
