"""The part of the card that decode on 80 multiprocessors runs on, and how the kernel package sees it."""

from contextlib import nullcontext

import pytest

from benchmarks.harness import gpu
from benchmarks.ops.decode import lightning_decode_80sm, lightning_decode_variants_80sm
from benchmarks.ops.decode.internals import multiprocessors
from cula_core import tensors
from cula_lightning_decode import launch


def test_the_package_chooses_tiles_for_the_part_of_the_card(monkeypatch):
    place = gpu.Place(80, 80, "green context, stream")
    asked = []
    monkeypatch.setattr(gpu, "green", lambda sms: asked.append(sms) or nullcontext(place))
    whole = tensors.multiprocessors
    for op in (lightning_decode_80sm.OP, lightning_decode_variants_80sm.OP):
        with op.place() as given:
            assert given is place and tensors.multiprocessors("cuda") == 80
    assert asked == [80, 80] and tensors.multiprocessors is whole


def test_choices_for_the_whole_card_are_forgotten_before_and_after(monkeypatch):
    cleared = []
    monkeypatch.setattr(
        launch.kernel_for, "cache_clear", lambda: cleared.append(tensors.multiprocessors)
    )
    whole = tensors.multiprocessors
    with pytest.raises(KeyError), multiprocessors(80):
        assert cleared == [whole]
        raise KeyError("an error inside the block")
    assert cleared == [whole, whole]
