"""Every tile of the decode kernel of the delta rule on 80 multiprocessors (a green context)."""

from __future__ import annotations

import dataclasses

from benchmarks.ops.delta import delta_decode_80sm, delta_decode_variants
from benchmarks.ops.part_of_card import SMS

OP = dataclasses.replace(
    delta_decode_variants.OP,
    name="delta_decode_variants_80sm",
    title=f"GDN and KDA decode on {SMS} multiprocessors, every tile, HV=32, K=V=128",
    place=delta_decode_80sm.OP.place,
)
