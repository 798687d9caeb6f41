"""KDA forward for NVIDIA Blackwell (TMA, tcgen05, tensor memory) with context parallelism inside one GPU."""

from .ops import chunk_kda, kda_workspace_bytes

__version__ = "0.1.0"
__all__ = ["chunk_kda", "kda_workspace_bytes"]
