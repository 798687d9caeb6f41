"""Context parallelism: one batch of sequences over the GPUs of a process group.

Every rank holds some of the tokens. `ContextParallel` says which, and the operators take it as `cp_context`: what a
rank computes continues from the states of the ranks that hold the earlier tokens.
"""

from cula.distributed.context import ContextParallel
from cula.distributed.layout import balanced_bounds

__all__ = ["ContextParallel", "balanced_bounds"]
