"""Lightning attention decode on a pool of states: one read and one write of the state for 1 to 8 tokens."""

from .ops import linear_attention_commit, linear_attention_decode

__version__ = "0.1.0"
__all__ = ["linear_attention_commit", "linear_attention_decode"]
