"""Names of dtypes, for modules that do without torch."""

from __future__ import annotations


def dtype_name(dtype: object) -> str:
    """Returns the name of a torch dtype, such as "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
