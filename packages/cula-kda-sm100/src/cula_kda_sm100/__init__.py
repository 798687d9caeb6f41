"""KDA forward for NVIDIA Blackwell (TMA, tcgen05, tensor memory) with context parallelism inside one GPU."""

from cula_core.delta_rule.prefill import Prefill

from .arch import TARGET

__version__ = "0.1.0"
__all__ = ["chunk_kda", "kda_workspace_bytes"]

_prefill = Prefill(TARGET)
chunk_kda = _prefill.chunk_kda
kda_workspace_bytes = _prefill.kda_workspace_bytes
# For a dispatcher that spreads sequences over GPUs.
begin_chunk_kda = _prefill.begin_chunk_kda
fold_slices = _prefill.fold_slices
