"""Names, lengths and offsets of problems over sequences."""

import pytest
import torch

from benchmarks.ops import sequences
from benchmarks.ops.sequences import LENGTHS, lengths_of, named


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("tokens", [20, 21, 40, 4096, 8192, 16384])
@pytest.mark.parametrize("sequences", [1, 2, 10, 20])
def test_lengths_make_up_the_tokens(sequences, tokens, kind):
    lengths = lengths_of(sequences, tokens, kind)
    assert len(lengths) == sequences and sum(lengths) == tokens and min(lengths) >= 1
    assert lengths == lengths_of(sequences, tokens, kind)
    if kind == "uniform":
        assert max(lengths) - min(lengths) <= 1
    if kind == "skewed" and sequences > 1 and tokens >= 40:
        assert max(lengths) == tokens // 2


def test_skewed_lengths_are_a_geometric_series_beside_the_long_one():
    lengths = sorted(lengths_of(10, 16384, "skewed"), reverse=True)
    assert lengths[0] == 8192
    assert all(b / a == pytest.approx(0.7, abs=0.02) for a, b in zip(lengths[1:], lengths[2:]))


def test_one_long_sequence_stands_before_short_ones():
    assert lengths_of(1, 4096, "long") == [4096]
    assert lengths_of(2, 33 * 1024, "long") == [32 * 1024, 1024]
    assert lengths_of(6, 69 * 1024, "long") == [64 * 1024, *[1024] * 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, "uniform"), "sequences: expected 1..8, got 0"),
        ((9, 8, "uniform"), "sequences: expected 1..8, got 9"),
        ((2, 8, "even"), "kind: expected one of"),
        ((3, 3071, "long"), "tokens: expected at least 3072, got 3071"),
    ],
)
def test_unknown_lengths_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lengths_of(*arguments)


def test_names_say_what_a_problem_is():
    dense = named(64, 2, 8, None, "uniform", None, "-gate", mode="gate")
    assert (dense.name, sequences.offsets_of(dense, "cpu")) == ("B2-T64-H8-gate", None)
    assert dense.params == {"B": 2, "T": 64, "H": 8, "mode": "gate", "feature": False}
    assert sequences.spans(dense) == [(0, 0, 64), (1, 0, 64)]
    packed = named(10, 1, 8, 3, "uniform", "gva")
    assert packed.name == "N3-T10-uniform-H8+gva"
    assert packed.params == {"N": 3, "T": 10, "lengths": "uniform", "H": 8, "feature": "gva"}
    assert sequences.spans(packed) == [(0, 0, 3), (0, 3, 6), (0, 6, 10)]
    assert (sequences.sequences_of(packed), sequences.query_heads(packed)) == (3, 2)


def test_offsets_are_made_once():
    problem = named(10, 1, 8, 3, "uniform", None)
    offsets = sequences.offsets_of(problem, "cpu")
    assert sequences.offsets_of(problem, "cpu") is offsets
    assert (offsets.int32.dtype, offsets.int64.dtype) == (torch.int32, torch.int64)
    assert (
        offsets.int32.tolist() == offsets.int64.tolist() == offsets.host.tolist() == [0, 3, 6, 10]
    )


def test_main_sizes_are_ten_dense_and_eighteen_packed_problems():
    common = {"batch": 1, "heads": 8, "sequences": None, "lengths": "uniform", "feature": None}
    main = [named(**common | size) for size in sequences.main_sizes()]
    assert len({s.name for s in main}) == len(main) == 28
    dense = {(s.params["B"], s.params["T"]) for s in main if not sequences.is_packed(s)}
    assert dense == {(b, t) for b in (1, 2) for t in (512, 1024, 4096, 8192, 16384)}
    packed = [s.params for s in main if sequences.is_packed(s)]
    assert {(p["N"], p["T"], p["lengths"]) for p in packed} == {
        (n, t, kind)
        for n in (10, 20)
        for t in (4096, 8192, 16384)
        for kind in ("uniform", "random", "skewed")
    }


@pytest.mark.parametrize("feature", [None, "state", "pool"])
def test_initial_states(feature):
    """Sequences own rows of a pool, which has SPARE_ROWS more."""
    problem = named(10, 1, 4, 3, "uniform", feature)
    state, indices = sequences.initial_states(problem, 2, torch.Generator().manual_seed(0))
    v = torch.zeros(1, 10, 4, 2)
    first, last = (sequences.initial_state_of(n, state, indices, v, [1, 3]) for n in (0, 2))
    assert first.dtype == torch.float64 and first.shape == (2, 2, 2)
    assert (state is None) == (feature is None) and (indices is None) == (feature != "pool")
    if feature is None:
        assert not first.any()
    elif feature == "state":
        assert state.shape == (3, 4, 2, 2) and torch.equal(last, state[2, [1, 3]].double())
    else:
        assert state.shape == (5, 4, 2, 2) and len(set(indices.tolist())) == 3
        assert torch.equal(last, state[int(indices[2]), [1, 3]].double())


def test_bytes_of_inputs_and_outputs():
    """10 tokens in 3 sequences, 4 value heads of 2 channels; gva has one query head."""
    moved = {
        f: (sequences.input_bytes(p, 2), sequences.output_bytes(p, 2))
        for f in (None, "gva", "state", "pool")
        for p in [named(10, 1, 4, 3, "uniform", f)]
    }
    states, offsets = 3 * 4 * 2 * 2 * 4, 4 * 4
    assert moved[None] == (10 * 3 * 4 * 2 * 2 + offsets, 10 * 4 * 2 * 2 + states)
    assert moved["gva"] == (10 * (1 + 1 + 4) * 2 * 2 + offsets, moved[None][1])
    assert moved["state"] == (moved[None][0] + states, moved[None][1])
    assert moved["pool"] == (moved["state"][0] + 3 * 4, moved[None][1])
