"""KDA prefill for NVIDIA Hopper: long sequences are spread over the multiprocessors of one GPU."""

from cula_core.delta_rule.prefill import Prefill

from .arch import TARGET
from .backward import ops

__version__ = "0.1.0"
__all__ = ["chunk_kda", "kda_workspace_bytes"]

_prefill = Prefill(TARGET, ops.trained)
chunk_kda = _prefill.chunk_kda
kda_workspace_bytes = _prefill.kda_workspace_bytes
# For a dispatcher that spreads sequences over GPUs.
begin_chunk_kda = _prefill.begin_chunk_kda
begin_chunk_kda_backward = ops.begin_chunk_kda_backward
fold_slices = _prefill.fold_slices
