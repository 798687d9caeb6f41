"""Which ops there are, and how settings and peers are chosen."""

import dataclasses

import pytest

from benchmarks.harness import registry


def test_registry_lists_ops_and_refuses_unknown_ones():
    assert {"lightning_decode", "lightning_decode_80sm"} <= set(registry.names())
    assert not any(name.startswith("_") for name in registry.names())
    with pytest.raises(ValueError, match="lightning_decode"):
        registry.get("nothing")


@pytest.mark.parametrize("name", registry.names())
def test_every_op_declares_unique_settings_and_one_of_ours(name):
    op = registry.get(name)
    assert op.name == name
    for quick in (True, False):
        names = [s.name for s in op.settings(quick)]
        assert len(names) == len(set(names)) > 0
    assert all(op.floor_bytes(s) > 0 and op.set_bytes(s) > 0 for s in op.settings(False))


def test_settings_are_selected_by_pattern_in_their_own_order(toy):
    both = toy.settings(False)
    assert registry.select(both, None) == both
    assert registry.select(both, ["large", "s*"]) == both
    assert [s.name for s in registry.select(both, ["l*"])] == ["large"]
    with pytest.raises(ValueError, match="'x\\*' matches none"):
        registry.select(both, ["l*", "x*"])


def test_peers_are_chosen_by_name(toy):
    assert [p.name for p in registry.choose(toy, None)] == ["ours", "other", "limit"]
    assert [p.name for p in registry.choose(toy, ["none"])] == ["ours", "limit"]
    assert [p.name for p in registry.choose(toy, ["other"])] == ["ours", "other", "limit"]
    with pytest.raises(ValueError, match="no peer named limit"):
        registry.choose(toy, ["limit"])


def test_an_op_has_exactly_one_of_ours(toy):
    with pytest.raises(ValueError, match="exactly one"):
        dataclasses.replace(toy, providers=toy.providers[1:])
