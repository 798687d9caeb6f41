"""Decode of the gated delta rule and KDA on a pool of states: one read and one write of the state for 1 to 8 tokens."""

__version__ = "0.1.0"
