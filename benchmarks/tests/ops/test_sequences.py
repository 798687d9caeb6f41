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
