"""Functions of other libraries under their own names, with their argument order, defaults and layouts.

    cula.compat.kda, cula.compat.lightning, cula.compat.ops, cula.compat.utils    cuLA of inclusionAI, commit fa742a2
    cula.compat.flash_kda                                                         FlashKDA
    cula.compat.flashinfer                                                        FlashInfer

A program migrates by its imports: `from cula.kda import chunk_kda` of cuLA becomes `from cula.compat.kda import
chunk_kda`. Every function is one call of ours with `impl="auto"`, so it runs wherever that does. What is refused is
refused by our function, whose names the message has; keywords that nobody knows are a TypeError.
"""

from __future__ import annotations

from cula.compat import flash_kda, flashinfer, kda, lightning, ops, utils

__all__ = ["flash_kda", "flashinfer", "kda", "lightning", "ops", "utils"]
