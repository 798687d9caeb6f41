"""Skip-list softmax attention for NVIDIA GPUs: attention over listed key tiles, and the list for the next call."""

from . import masks
from .calibration import (
    LiteAttentionCalibConfig,
    LiteAttentionRegistry,
    LiteAttentionRunConfig,
)
from .functional import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from .module import LiteAttention, SeqParallelLiteAttention, merge
from .ops import lite_attention
from .state import SkipState

__version__ = "0.1.0"
__all__ = [
    "LiteAttention",
    "LiteAttentionCalibConfig",
    "LiteAttentionRegistry",
    "LiteAttentionRunConfig",
    "SeqParallelLiteAttention",
    "SkipState",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "lite_attention",
    "masks",
    "merge",
]
