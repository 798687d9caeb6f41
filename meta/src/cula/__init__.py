"""cula: linear attention and skip-list attention, served by the kernel that fits the call and the machine.

    cula.lightning    Lightning attention, simple GLA and the gated delta rule: prefill and decode
    cula.kda          Kimi Delta Attention: prefill and decode
    cula.delta        gated delta rule and KDA: decode on a pool of states, replay
    cula.lite         skip-list softmax attention
    cula.distributed  context parallelism: a batch over the GPUs of a process group
    cula.varlen       packed sequences: lengths, masks, cu_seqlens, packing, chunk schedules
    cula.reference    the same operations in plain torch, and token-by-token oracles
    cula.compat       functions of other libraries under their own names
    cula.explain      which implementation serves a problem, and why the others do not

Submodules load at first use; importing `cula` imports neither torch nor a kernel.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cula import (
        compat,
        delta,
        distributed,
        integrations,
        kda,
        lightning,
        lite,
        reference,
        varlen,
    )
    from cula._registry import explain

__version__ = "0.1.0"
__all__ = [
    "compat",
    "delta",
    "distributed",
    "explain",
    "integrations",
    "kda",
    "lightning",
    "lite",
    "reference",
    "varlen",
]


def __getattr__(name: str) -> Any:
    if name == "explain":
        value: Any = importlib.import_module("cula._registry").explain
    elif name in __all__:
        value = importlib.import_module(f"cula.{name}")
    else:
        raise AttributeError(f"module 'cula' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("CULA_FLA", "").strip() == "1":
    # Who sets the variable wants FLA's functions served before anything else is done; it costs the import of FLA.
    importlib.import_module("cula.integrations.fla_plugin").register()
