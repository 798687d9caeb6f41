"""An extension of griffe, which reads docstrings for the documentation site."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OurSections(griffe.Extension):
    """Reads a section `Example:` like the `Examples:` that griffe knows, and what is returned without its backticks."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"^(Returns:\n +)`([^`]+)`:", r"\1\2:", text, flags=re.MULTILINE)
            obj.docstring.value = text
