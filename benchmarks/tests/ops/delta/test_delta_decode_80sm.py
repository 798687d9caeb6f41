"""The part of the card that decode with the delta rule on 80 multiprocessors runs on."""

from __future__ import annotations

from contextlib import nullcontext

from benchmarks.harness import gpu
from benchmarks.ops.delta import delta_decode_80sm, delta_decode_variants_80sm
from cula_core import tensors
from cula_delta_decode import launch


def test_the_package_chooses_tiles_for_the_part_of_the_card(monkeypatch):
    place = gpu.Place(80, 80, "green context, stream")
    asked, cleared = [], []
    monkeypatch.setattr(gpu, "green", lambda sms: asked.append(sms) or nullcontext(place))
    monkeypatch.setattr(launch.kernel_for, "cache_clear", lambda: cleared.append(True))
    whole = tensors.multiprocessors
    for op in (delta_decode_80sm.OP, delta_decode_variants_80sm.OP):
        with op.place() as given:
            assert given is place and tensors.multiprocessors("cuda") == 80
    assert asked == [80, 80] and tensors.multiprocessors is whole
    assert len(cleared) == 4  # before and after each
