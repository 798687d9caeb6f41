"""KDA prefill for NVIDIA Hopper: long sequences are spread over the multiprocessors of one GPU."""

from .ops import chunk_kda, kda_workspace_bytes

__version__ = "0.1.0"
__all__ = ["chunk_kda", "kda_workspace_bytes"]
