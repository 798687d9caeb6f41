"""LiteAttention in the transformers of diffusers: every self-attention of a model keeps lists of its own.

```python
from liteattention_sm89.diffusers import apply_lite_attention

pipe = WanPipeline.from_pretrained(...).to("cuda")
lite = apply_lite_attention(pipe.transformer, threshold=-6.0)
for prompt in prompts:
    lite.reset()
    video = pipe(prompt).frames
    print(lite.density())  # share of the tiles that the last step left
lite.remove()
```

Projections, norms, rotary embeddings and text streams stay the model's own: its processors run as they are, and only
the `scaled_dot_product_attention` inside them is another one. Models bring diffusers along; nothing here imports it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from cula_core.dtypes import dtype_name

from .calibration import LiteAttentionRunConfig
from .config import DTYPES, HEAD_DIMS
from .masks import tiles_of_tokens
from .module import LiteAttention
from .state import SkipState, check_int

__all__ = ["AppliedLiteAttention", "LiteProcessor", "apply_lite_attention"]

SIDES = ("first", "last")
DEVICES = ("cpu", "cuda")
# Attention over something else than the tokens of the picture, in the names that diffusers gives it.
_ELSEWHERE = re.compile(r"(^|\.)(audio|text_|txt_|token_refiner|context_)")
_CROSS = re.compile(r"cross|(^|\.)attn2$|_to_[^.]*$")
_ANY_BATCH = 2**31 - 1  # nothing is allocated for it


def apply_lite_attention(
    model: nn.Module,
    threshold: float | None = None,
    *,
    threshold_mode: str = "max",
    config: Any = None,
    layers: Iterable[str] | Callable[[str, nn.Module], bool] | None = None,
    min_tokens: int = 1024,
    text: str | None = None,
    text_tokens: int | None = None,
    must_do_list: Sequence[int] | None = None,
    dense_steps: int = 0,
    cross_attention: bool = False,
) -> AppliedLiteAttention:
    """Puts a `LiteAttention` into every self-attention of a diffusers model, and returns the handle on them.

    Call `reset` of the handle before every prompt. The rows of a batch have lists of their own, so guidance within one
    batch needs nothing else. Guidance in separate calls needs a branch for each: the model's `cache_context("cond")`
    and `cache_context("uncond")`, which most pipelines use, are branches, and so is `branch` of the handle.

    A call that LiteAttention cannot serve runs the model's own attention, and every reason is said once, as a
    RuntimeWarning: dropout; masks, except boolean ones `[B, 1, 1, keys]` over padded keys; on a GPU other dtypes than
    bfloat16 and float16 (after autocast) and head sizes that are no multiples of 8 up to 256. Calls that `min_tokens`,
    `dense_steps` and `cross_attention` leave out run it too, without a word.

    Wrap before `torch.compile` (the processors of wrapped layers then run uncompiled), after loading processors of
    others such as IP adapters, and `remove` before saving weights, or the lists are saved with them. Gradient
    checkpointing calls a layer twice and so would advance its lists twice.

    Args:
        model: has attention modules with a `processor`: `pipe.transformer`, not the pipeline.
        threshold: as of `LiteAttention`; -10 if neither it nor `config` is given. A `LiteAttentionRegistry` made from
            the model replaces it by layer and step; follow it with a reset.
        threshold_mode, config: as of `LiteAttention`.
        layers: names of attention modules as in `model.named_modules()`, or a function of name and module that is true
            for those to wrap. None: all but cross attentions and those over text or audio alone, judged by
            `is_cross_attention` of the module and by their names.
        min_tokens: calls with fewer keys run the model's own attention.
        text, text_tokens: for joint attention: that many text tokens are the "first" or the "last" of the keys, and
            their tiles stay listed. First: Flux, CogVideoX, QwenImage. Last: HunyuanVideo, Mochi, Stable Diffusion 3.
        must_do_list: flat token ranges of keys whose tiles stay listed too, as of `LiteAttention`.
        dense_steps: the first calls after a reset that run the model's own attention, counted in every layer and
            branch. Thresholds by step are counted from the call after them.
        cross_attention: True wraps attention with other keys than queries too. Text tokens are not kept there.

    Raises:
        TypeError, ValueError: an argument does not fit, a name in `layers` is none of an attention, nothing is left to
            wrap, or something is wrapped already. Nothing was changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: expected an nn.Module such as pipe.transformer, got {type(model).__name__}"
        )
    if threshold is not None and config is not None:
        raise ValueError("threshold, config: expected one of the two, got both")
    options = _Options.of(min_tokens, text, text_tokens, must_do_list, dense_steps, cross_attention)
    model = getattr(model, "_orig_mod", model)
    chosen = _chosen(model, layers, cross_attention)
    processors = {}
    for name, module in chosen.items():
        lite = LiteAttention(max_batch_size=_ANY_BATCH, threshold_mode=threshold_mode)
        if threshold is not None:
            config = LiteAttentionRunConfig(threshold, threshold_mode)
        if config is not None:
            lite.configure(config)
        own = module.processor
        kind = _class_for(type(own))  # type: ignore[arg-type]
        processors[name] = kind(name, own, lite, options)
    for name, processor in processors.items():
        chosen[name].processor = processor
    return AppliedLiteAttention(model, chosen, processors, options)


class AppliedLiteAttention:
    """What `apply_lite_attention` put into a model."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, Any],
        processors: dict[str, LiteProcessor],
        options: _Options,
    ) -> None:
        self._model = model
        self._modules = modules
        self._processors = processors
        self._options = options
        self._outer = getattr(model, "cache_context", None)
        self._outer_is_own = "cache_context" in vars(model)
        if callable(self._outer):
            model.cache_context = self._cache_context  # type: ignore[assignment]

    @property
    def layers(self) -> dict[str, LiteAttention]:
        """Name of the attention module -> its `LiteAttention`, which holds the lists of the branch that came first."""
        return {name: p.lite_attention for name, p in self._processors.items()}

    def reset(self) -> None:
        """Every tile is listed again in all layers and branches, and steps start again: before every prompt."""
        for processor in self._processors.values():
            processor.reset()

    def density(self) -> Tensor:
        """Share of the tiles that the next calls visit, the mean over layers: float32 scalar, without waiting.

        A layer that has not skipped anything counts as 1, whatever the reason.
        """
        shares = list(self.density_per_layer().values())
        return torch.stack([share.to(shares[0].device) for share in shares]).mean()

    def density_per_layer(self) -> dict[str, Tensor]:
        """Name of the attention module -> mean over its branches."""
        return {name: processor.density() for name, processor in self._processors.items()}

    @contextlib.contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Calls inside of it use lists of their own, the same ones whenever the name is the same.

        For guidance whose conditional and unconditional parts are calls of their own: a branch starts with all tiles.
        Branches nest; `cache_context` of the model is a branch too.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: expected a str, got {type(name).__name__}")
        before = self._options.branch
        self._options.branch = (*before, name)
        try:
            yield
        finally:
            self._options.branch = before

    def remove(self) -> None:
        """Gives the layers their own processors back. A processor that somebody has replaced since stays."""
        for name, module in self._modules.items():
            processor = self._processors[name]
            if module.processor is processor:
                del module.processor  # a module gives way to no other value
                module.processor = processor.processor
        if vars(self._model).get("cache_context") == self._cache_context:
            del self._model.cache_context
            if self._outer_is_own:
                self._model.cache_context = self._outer  # type: ignore[assignment]

    @contextlib.contextmanager
    def _cache_context(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        with self.branch(name), self._outer(name, *args, **kwargs):  # type: ignore[misc]
            yield


class LiteProcessor(nn.Module):
    """An attention processor that runs another one, with `lite_attention` in the place of its attention."""

    def __init__(
        self, name: str, processor: Any, lite_attention: LiteAttention, options: _Options
    ) -> None:
        super().__init__()
        self.name = name
        self.processor = processor
        self.lite_attention = lite_attention
        self._options = options
        self._branches: dict[tuple, _Branch] = {}

    @torch.compiler.disable
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the other processor makes of these arguments."""
        processor = self.processor
        if hasattr(processor, "_attention_backend"):
            # Other backends pass scaled_dot_product_attention by; `_own` still asks for the one that is set.
            processor = copy.copy(processor)
            processor._attention_backend = "native"
        with _Redirection(self) as redirection:
            out = processor(*args, **kwargs)
        if not redirection.calls:
            self._say("its processor does not call scaled_dot_product_attention")
        return out

    def attend(self, call: _Call, index: int) -> Tensor:
        """One attention `[B, H, S, D]`, the one with this index of those that the other processor asks for."""
        options = self._options
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        if keys < options.min_tokens or (queries != keys and not options.cross_attention):
            return self._own(call)
        call = call.autocast()
        refusal = call.refusal()
        if refusal:
            self._say(refusal)
            return self._own(call)
        branch = self._branch((index, *options.branch))
        if branch.dense < options.dense_steps:
            branch.dense += 1
            return self._own(call)
        must_do = options.must_do(keys, joint=queries == keys)
        return call.run(self.lite_attention, must_do_list=must_do, state=branch.state)

    def reset(self) -> None:
        self.lite_attention.reset_skip_state()
        for branch in self._branches.values():
            branch.state.reset()
            branch.dense = 0

    def density(self) -> Tensor:
        shares = [b.state.density() for b in self._branches.values() if b.state.key is not None]
        return torch.stack(shares).mean() if shares else self.lite_attention.density()

    def _branch(self, key: tuple) -> _Branch:
        if key not in self._branches:
            state = self.lite_attention.state
            self._branches[key] = _Branch(SkipState(state.alternate) if self._branches else state)
        return self._branches[key]

    def _own(self, call: _Call) -> Tensor:
        """The model's own attention."""
        dispatch = sys.modules.get("diffusers.models.attention_dispatch")
        if dispatch is None or not hasattr(self.processor, "_attention_backend"):
            return scaled_dot_product_attention(**call._asdict())
        tokens_first = [x.transpose(1, 2) for x in call[:3]]
        backend = self.processor._attention_backend
        return dispatch.dispatch_attention_fn(*tokens_first, *call[3:], backend=backend).transpose(
            1, 2
        )

    def _say(self, reason: str) -> None:
        if reason not in self._options.said:
            self._options.said.add(reason)
            warnings.warn(
                f"{self.name}: {reason}; such calls run the model's own attention",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def _attention_backend(self) -> Any:
        return self.processor._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.processor._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.processor._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.processor._parallel_config = config


@functools.cache
def _class_for(kind: type) -> type[LiteProcessor]:
    """`LiteProcessor` with the signature of processors of a kind: diffusers passes no other arguments than it names."""

    @functools.wraps(kind.__call__)
    def __call__(self: LiteProcessor, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    body = {"__call__": __call__, "__module__": __name__, "__doc__": LiteProcessor.__doc__}
    return type(f"Lite{kind.__name__}", (LiteProcessor,), body)


class _Redirection(TorchFunctionMode):
    """Hands every scaled_dot_product_attention of this thread to a processor, as long as it is entered."""

    def __init__(self, processor: LiteProcessor) -> None:
        super().__init__()
        self.processor = processor
        self.calls = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.processor.attend(_Call(*args, **(kwargs or {})), self.calls - 1)


class _Call(NamedTuple):
    """The arguments of scaled_dot_product_attention, tensors `[B, H, S, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def autocast(self) -> _Call:
        """The call in the dtype that autocast gives it."""
        kind = self.query.device.type
        if kind not in DEVICES or not torch.is_autocast_enabled(kind):
            return self
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in self[:3])
        return self._replace(query=query, key=key, value=value)

    def refusal(self) -> str | None:
        """Why LiteAttention cannot serve this call, or None."""
        query, key, value, mask = self[:4]
        if self.dropout_p:
            return "there is dropout"
        if any(x.dim() != 4 or x.shape[0] != query.shape[0] for x in (query, key, value)):
            return "tensors are not [B, H, S, D] with the same B"
        if query.shape[1] != key.shape[1] and not self.enable_gqa:
            return "heads differ without enable_gqa"
        batch, keys = key.shape[0], key.shape[2]
        if mask is not None and not (
            mask.dtype == torch.bool and tuple(mask.shape) in ((batch, 1, 1, keys), (1, 1, 1, keys))
        ):
            return "there is an attention mask, not a boolean one [B, 1, 1, keys]"
        if self.is_causal and (mask is not None or query.shape[2] != keys):
            return "is_causal with a mask, or with fewer queries than keys"
        kind, dims = query.device.type, (query.shape[3], value.shape[3])
        if kind not in DEVICES:
            return f"tensors are on {kind}"
        if kind == "cuda" and dtype_name(query.dtype) not in DTYPES:
            return f"the dtype is {dtype_name(query.dtype)}, not {' or '.join(DTYPES)}"
        if kind == "cuda" and any(dim % 8 or dim > HEAD_DIMS[-1] for dim in dims):
            return f"heads have {dims[0]} and {dims[1]} elements, not a multiple of 8 up to {HEAD_DIMS[-1]}"
        return None

    def run(self, attention: LiteAttention, **arguments: Any) -> Tensor:
        """This attention by LiteAttention."""
        query, key, value = (x.transpose(1, 2) for x in self[:3])
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
        shape = query.shape
        if self.attn_mask is not None:
            query, key, value, packing = _packed(query, key, value, self.attn_mask[:, 0, 0])
            arguments |= packing
        out = attention(query, key, value, self.scale, causal=self.is_causal, **arguments)
        return out.reshape(*shape[:3], value.shape[3]).transpose(1, 2)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """A batch whose keys are not all valid, as packed sequences: nothing waits for the number of valid keys.

    Each row of the batch becomes two sequences: its queries with its valid keys, and no queries with the other keys.
    The order of the valid keys stays.
    """
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    rows = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    order = valid.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    key, value = (x[rows[:-1, None], order].flatten(0, 1).unsqueeze(0) for x in (key, value))
    lengths = valid.sum(1, dtype=torch.int32)
    inner_q, inner_k = rows[1:] * queries, rows[:-1] * keys + lengths
    starts = [
        torch.cat((torch.stack((rows[:-1] * size, inner), 1).flatten(), rows[-1:] * size))
        for size, inner in ((queries, inner_q), (keys, inner_k))
    ]
    packing = {
        "cu_seqlens_q": starts[0],
        "cu_seqlens_k": starts[1],
        "max_seqlen_q": queries,
        "max_seqlen_k": keys,
    }
    return query.flatten(0, 1).unsqueeze(0), key, value, packing


@dataclass
class _Branch:
    """What one attention of a layer remembers in one branch."""

    state: SkipState
    dense: int = 0  # calls since the last reset that ran the model's own attention


@dataclass
class _Options:
    """What the layers of a model share."""

    min_tokens: int
    text: str | None
    text_tokens: int
    ranges: tuple[int, ...]
    dense_steps: int
    cross_attention: bool
    branch: tuple[str, ...] = ()
    said: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        min_tokens: int,
        text: str | None,
        text_tokens: int | None,
        must_do_list: Sequence[int] | None,
        dense_steps: int,
        cross_attention: bool,
    ) -> _Options:
        """TypeError, ValueError unless the arguments are those of `apply_lite_attention`."""
        check_int("min_tokens", min_tokens, 0)
        check_int("dense_steps", dense_steps, 0)
        if text is not None and text not in SIDES:
            raise ValueError(f"text: expected one of {SIDES} or None, got {text!r}")
        if (text is None) != (text_tokens is None):
            raise ValueError("text, text_tokens: expected both or none of them")
        if text_tokens is not None:
            check_int("text_tokens", text_tokens, 1)
        if not isinstance(cross_attention, bool):
            raise TypeError(
                f"cross_attention: expected a bool, got {type(cross_attention).__name__}"
            )
        ranges: tuple[int, ...] = ()
        if must_do_list is not None:
            try:
                ranges = tuple(must_do_list)
                # Whether the ranges end inside the keys turns out when there are keys.
                tiles_of_tokens(ranges, max((0, *ranges)), 1, inward=False)
            except (TypeError, ValueError) as error:
                raise type(error)(f"must_do_list: {error}") from None
        return cls(min_tokens, text, text_tokens or 0, ranges, dense_steps, cross_attention)

    def must_do(self, keys: int, joint: bool) -> tuple[int, ...] | None:
        """The token ranges that stay listed in a call with as many keys."""
        ranges = self.ranges
        if self.text is not None and joint:
            size = min(self.text_tokens, keys)
            ranges += (0, size) if self.text == "first" else (keys - size, keys)
        return ranges or None


def _chosen(
    model: nn.Module,
    layers: Iterable[str] | Callable[[str, nn.Module], bool] | None,
    cross_attention: bool,
) -> dict[str, Any]:
    """Name -> attention module, of those that get a LiteAttention."""
    found = {
        name: module
        for name, module in model.named_modules()
        if callable(getattr(module, "processor", None)) and not isinstance(module, LiteProcessor)
    }
    if layers is None:
        names = [
            name
            for name, module in found.items()
            if not _ELSEWHERE.search(name) and (cross_attention or not _is_cross(name, module))
        ]
    elif callable(layers):
        names = [name for name, module in found.items() if layers(name, module)]
    elif isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers: expected names or a function, got {type(layers).__name__}")
    else:
        names = list(layers)
        unknown = [name for name in names if name not in found]
        if unknown:
            raise ValueError(f"layers: the model has no attention modules {unknown}")
    if not names:
        raise ValueError("model: expected attention modules with a processor, found none to wrap")
    chosen: dict[str, Any] = {name: found[name] for name in names}
    wrapped = [n for n, module in chosen.items() if isinstance(module.processor, LiteProcessor)]
    if wrapped:
        raise ValueError(f"model: {wrapped} are wrapped already; remove() that first")
    return chosen


def _is_cross(name: str, module: nn.Module) -> bool:
    said = getattr(module, "is_cross_attention", None)
    return bool(_CROSS.search(name)) if said is None else bool(said)
