"""Every tile of the decode kernel on 80 multiprocessors (a green context)."""

from __future__ import annotations

import dataclasses

from benchmarks.ops.decode import lightning_decode_80sm, lightning_decode_variants

OP = dataclasses.replace(
    lightning_decode_variants.OP,
    name="lightning_decode_variants_80sm",
    title=f"Lightning decode on {lightning_decode_80sm.SMS} multiprocessors, every tile, H=64, K=V=128",
    place=lightning_decode_80sm.OP.place,
)
