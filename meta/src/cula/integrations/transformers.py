"""cula behind models of transformers: after `register()` their linear attention runs on kernels of cula.

Kimi-Linear, Qwen3-Next and others call flash-linear-attention, which `fla_plugin` serves. The Lightning attention of
MiniMax is plain torch inside transformers, a loop over blocks and in decode over tokens: `register` replaces the method
`forward` of its class, so that models which exist already are served too.
"""

from __future__ import annotations

import functools
import inspect
import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cula._installed import importable
from cula.integrations import fla_plugin

__all__ = ["register", "registered", "unregister"]

_logger = logging.getLogger("cula")
_MODULE, _CLASS = "transformers.models.minimax.modeling_minimax", "MiniMaxLightningAttention"
# Those of transformers 5.17 and 5.23; earlier releases have one more, which nothing reads.
_PARAMETERS = (
    "self",
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    "past_key_values",
    "kwargs",
)
_UNREAD = "cache_position"
_DECODED = 8
_original: Any = None
_impl = ""


def register(impl: str | None = None) -> None:
    """Serves the linear attention of transformers' models in this process. A second call changes `impl` alone.

    The states of MiniMax are kept in float32, which transformers rounds to the dtype of the model after every block
    and token, and the step of a decode updates them in place.

    Args:
        impl: an implementation as `cula.explain` names it; None: any kernel, and what the model does without cula
            where none serves.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: FLA is installed and cannot be served (see `fla_plugin.register`).

    Example:
        >>> from cula.integrations import transformers
        >>> transformers.register()  # doctest: +SKIP
    """
    global _impl, _original
    from cula._registry import KERNELS_ONLY

    if not importable("transformers"):
        raise ImportError("transformers is not installed: pip install transformers")
    if importable("fla"):
        fla_plugin.register(impl)
    else:
        _logger.info(
            "flash-linear-attention is not installed, so models that call it are not served"
        )
    _impl = KERNELS_ONLY if impl is None else impl
    if _original is not None:
        return
    theirs = getattr(import_module(_MODULE), _CLASS)
    parameters = tuple(
        name for name in inspect.signature(theirs.forward).parameters if name != _UNREAD
    )
    if parameters != _PARAMETERS:
        _logger.warning(
            "%s.forward has other parameters than in transformers 5.17, and stays", _CLASS
        )
        return
    _original = theirs.forward
    theirs.forward = functools.wraps(_original)(_forward)


def unregister() -> None:
    """Takes back what `register` did; does nothing where it was not called."""
    global _impl, _original
    fla_plugin.unregister()
    _impl = ""
    if _original is not None:
        getattr(import_module(_MODULE), _CLASS).forward = _original
        _original = None


def registered() -> bool:
    """Whether models of transformers ask cula in this process."""
    return bool(_impl)


def _forward(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None,
    past_key_values: Any = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`MiniMaxLightningAttention.forward`: hidden_states `[B, T, D]`, attention_mask `[B, T]`, 0: padding."""
    from cula._registry import Refused, log_once

    state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    # A padded token adds no product of key and value; the state decays over it, as it does in transformers.
    if attention_mask is not None and attention_mask.shape[1] == hidden_states.shape[1]:
        qkv = torch.where(attention_mask.bool()[..., None], qkv, 0)
    heads = (*hidden_states.shape[:2], self.num_attention_heads)
    q, k, v = qkv.view(*heads, 3 * self.head_dim).split(self.head_dim, -1)
    try:
        o, state = _attend(q, k, v, self.slope_rate, state, past_key_values is not None)
    except (Refused, ValueError, TypeError) as error:
        log_once(logging.INFO, f"{_CLASS} is left to transformers: {error}")
        return _original(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )
    o = self.norm(o.reshape(*heads[:2], -1))
    o = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * o)
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, state)
    return o, state


def _attend(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, state: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, H, D]` and the state `[B, H, D, D]` behind them. slope: `[H, 1, 1]`."""
    from cula.lightning import lightning_attn_fwd, linear_attention_decode

    decay = slope.view(-1).float()
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if state is None or learns or q.shape[1] > _DECODED:
        return lightning_attn_fwd(
            q, k, v, decay, scale=1.0, initial_state=state, output_final_state=keep, impl=_impl
        )
    state = state.contiguous()
    return linear_attention_decode(q, k, v, state, decay, scale=1.0, impl=_impl), state
