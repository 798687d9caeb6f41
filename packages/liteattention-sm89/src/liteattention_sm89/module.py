"""Attention modules that remember between calls which key tiles mattered, and leave the others out of the next call."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import images
from .ops import lite_attention
from .state import (
    TILE_SHAPE,
    SkipKey,
    SkipPass,
    SkipState,
    TileLists,
    check_int,
    decoded,
    encoded,
    full_mask,
    without,
)
from .thresholds import (
    DEFAULT_THRESHOLD,
    Policy,
    Search,
    at_step,
    check_mode,
    check_threshold,
    policy_of,
)

__all__ = ["LiteAttention", "SeqParallelLiteAttention", "SkipKey", "SkipState", "merge"]


class LiteAttention(nn.Module):
    """Attention `(batch, tokens, heads, head_dim)` that skips key tiles which did not matter in the calls before.

    Use one module per layer. Calls with other shapes, heads, dtype, device or batch size (larger or smaller) start from
    full masks again; so use another state for another branch of guidance (`state.fork()`, argument `state`).

    Args:
        enable_skipping: False computes every tile; see `enable_skip_optimization`.
        threshold: log2 units, at most 0 or +-inf; -10 by default. A tile leaves the list when none of its scores comes
            within `threshold` of the maximum that its row met before: at -10 every dropped probability was at most
            2**-10 of its row's largest. More negative keeps more; -inf keeps all, 0 the tiles that raise a row's
            maximum, +inf the first one that is visited.
        max_batch_size: the largest batch (sequences, if packed) that a call may have. Nothing is allocated for it.
        reverse_skip_list: True alternates the direction of the traversal from call to call, up first. False goes down
            in every call; a tile is then judged by the tiles after it alone.
        use_int8: scores from queries and keys rounded to 8-bit integers, see `lite_attention`; not for training.
        config: instead of a threshold: an object with an attribute `threshold` (`LiteAttentionRunConfig`), a sequence
            of those, one per step (the last one serves all further steps, with a warning), or a
            `LiteAttentionCalibConfig`, which finds the threshold of every step. A step is a call that skips, counted
            from the last reset. What is set here or by `set_threshold` goes before what a registry sets.
        threshold_mode: "max" as above. "length": 2**threshold limits what all dropped keys of a row hold together, as
            a share of its largest probability: `threshold - log2(number of keys of the call)`, at most 0, serves, and
            thresholds may be any numbers. It holds for every threshold of the module, those that calibration finds
            included; a config of the other mode is refused.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import LiteAttention
        >>> attention = LiteAttention(threshold=-10.0)
        >>> q, k = torch.ones(2, 1, 256, 2, 64)  # each [B, S, H, D]: two query tiles, four key tiles
        >>> v = torch.randn(1, 256, 2, 64)
        >>> k[:, 64:] = 0.0  # the scores of all keys but the first 64 are lower by 8, in log2 units by 11.5
        >>> out = attention(q, k, v)  # the first call visits every tile
        >>> out.shape, attention.density().item()  # the next call visits a quarter of them
        (torch.Size([1, 256, 2, 64]), 0.25)
        >>> torch.allclose(attention(q, k, v), out, atol=0.01)
        True
        >>> attention.reset_skip_state()
        >>> attention.density().item()
        1.0
    """

    def __init__(
        self,
        enable_skipping: bool = True,
        threshold: float | None = None,
        max_batch_size: int = 2,
        reverse_skip_list: bool = True,
        use_int8: bool = False,
        config: Any = None,
        threshold_mode: str = "max",
    ) -> None:
        super().__init__()
        if threshold is not None and config is not None:
            raise ValueError("threshold, config: expected one of the two, got both")
        if not isinstance(use_int8, bool):
            raise TypeError(f"use_int8: expected a bool, got {type(use_int8).__name__}")
        check_int("max_batch_size", max_batch_size, 1)
        self._threshold_mode = check_mode(threshold_mode)
        self.enable_skipping = bool(enable_skipping)
        self.max_batch_size = max_batch_size
        self.use_int8 = use_int8
        self.state = SkipState(alternate=bool(reverse_skip_list))
        self._own: Policy | None = None
        self._given: Policy | None = None
        self._found: dict[int, float] = {}
        self._lists = TileLists()
        self._dense: tuple[Any, Tensor | None] = (None, None)
        if threshold is not None:
            self.set_threshold(threshold)
        elif config is not None:
            self._own = policy_of(config, self._threshold_mode)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        return_softmax_lse: bool = False,
        must_do_list: Sequence[int] | Tensor | None = None,
        must_skip_list: Sequence[int] | Tensor | None = None,
        causal: bool = False,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        state: SkipState | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over the listed tiles; the list for the next call is written.

        Args:
            query: `[B, Sq, Hq, D]`. key: `[B, Sk, Hkv, D]`, Hq a multiple of Hkv. value: `[B, Sk, Hkv, DV]`.
            scale: factor of the scores; None: D ** -0.5.
            return_softmax_lse: return also the log-sum-exp of the scores, float32 `[B, Hq, Sq]`, natural log, -inf and
                an output of 0 where a row sees nothing. `merge` joins results over parts of the keys with it.
            must_do_list: flat token ranges `[start, end, start, end, ...]` of the keys, ends exclusive, ints or a 1-D
                tensor on the CPU. Tiles that hold one of these tokens are visited and stay listed as long as the ranges
                are given; those dropped before come back when the ranges are first given.
            must_skip_list: the same format. Tiles that hold none but these tokens leave the list, from this call (any
                call) until a reset. Before the first call with new ranges the device is waited for, once.
            causal: key j is visible to query i if j <= i + Sk - Sq.
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: packed sequences, query `[1, Tq, Hq, D]`, and the
                longest lengths. Token ranges then count from the start of each sequence.
            state: the masks to use in place of the module's own.

        Returns: `[B, Sq, Hq, DV]` in the dtype of the query, or (that, log-sum-exp `[B, Hq, Sq]`, packed `[Hq, Tq]`).

        Raises:
            TypeError, ValueError: an argument does not fit, the batch is larger than `max_batch_size`, a range is
                empty, reversed or outside the keys, the two lists share tokens of a tile, or a query tile is left
                without any key tile. The masks are as before.
        """
        skip_key = SkipKey.of(
            query, key, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
        if skip_key.batch > self.max_batch_size:
            raise ValueError(
                f"query: expected a batch of at most max_batch_size = {self.max_batch_size}, got {skip_key.batch}"
            )
        lengths = None
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            lengths = torch.stack((cu_seqlens_q.diff().long(), cu_seqlens_k.diff().long()))
        lists = self._tile_lists(skip_key, must_do_list, must_skip_list)
        attend: Callable[..., Any] = functools.partial(
            lite_attention, query, key, value, threshold_mode=self._threshold_mode, scale=scale, causal=causal,
            block_m=skip_key.block_m, block_n=skip_key.block_n,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, use_int8=self.use_int8,
        )  # fmt: skip
        if not self.enable_skipping:
            mask = self._dense_mask(skip_key, lists, lengths)
            # Without ranges the dense kernel serves, which writes no list.
            out, lse, _ = attend(mask, threshold=None if mask is None else -math.inf)
            return (out, lse) if return_softmax_lse else out
        state = self.state if state is None else state
        call = state.begin(skip_key, lists, lengths)
        attend = functools.partial(attend, must_do=lists.do)
        policy = self._policy()
        if isinstance(policy, tuple):
            threshold = policy[0] if len(policy) == 1 else at_step(policy, state.step)
        else:
            threshold = _calibrate(policy, attend, call, self._threshold_mode)
            # Branches and runs that share the module agree on the strictest threshold of a step.
            self._found[state.step] = min(threshold, self._found.get(state.step, threshold))
        out, lse, written = attend(call.mask, threshold=threshold, direction=call.direction)
        state.finish(call, written)
        # torch.compile would specialise on a count that every call changes.
        if not isinstance(policy, tuple) or len(policy) > 1:
            state.step += 1
        return (out, lse) if return_softmax_lse else out

    @property
    def threshold(self) -> float:
        """The threshold of the next call, log2 units of `threshold_mode`. RuntimeError while calibration finds it."""
        policy = self._policy()
        if not isinstance(policy, tuple):
            raise RuntimeError("threshold: there is none while the module calibrates")
        return policy[min(self.state.step, len(policy) - 1)]

    @threshold.setter
    def threshold(self, threshold: float) -> None:
        self.set_threshold(threshold)

    def set_threshold(self, threshold: float) -> None:
        """One threshold for every call from now on, in log2 units of `threshold_mode`. The masks stay.

        TypeError unless it is a number, ValueError for NaN and, in the mode "max", for finite ones above 0.
        """
        self._own = (check_threshold(threshold, self._threshold_mode),)

    @property
    def threshold_mode(self) -> str:
        """What the thresholds limit, "max" or "length"; the constructor sets it."""
        return self._threshold_mode

    def configure(self, config: Any, force: bool = False) -> None:
        """Sets what serves when the module has no threshold or config of its own; `force` removes that one.

        The steps start again, and what calibration found is forgotten. TypeError, ValueError as of the constructor's
        `config`; then nothing changes.
        """
        self._given = policy_of(config, self._threshold_mode)
        if force:
            self._own = None
        self._found.clear()
        self.state.step = 0

    @property
    def has_own_config(self) -> bool:
        """Whether a threshold or config was given to the constructor, or a threshold set since."""
        return self._own is not None

    @property
    def found_thresholds(self) -> list[float]:
        """What calibration found, per step."""
        return [self._found[step] for step in sorted(self._found)]

    def enable_skip_optimization(self, enable: bool = True) -> None:
        """Switches skipping on or off. Off computes every tile but those of `must_skip_list`; the state is kept."""
        self.enable_skipping = bool(enable)

    def reset_skip_state(self) -> None:
        """Every tile is listed again, and directions and steps start again: before another prompt or scene."""
        self.state.reset()

    def density(self) -> Tensor:
        """Share of the tiles that the next call visits, in [0, 1]: float32 scalar on the device, without waiting."""
        return self.state.density()

    def density_per_head(self) -> Tensor:
        """The same for every row of the batch and head, float32 `[B, Hq]`."""
        return self.state.density_per_head()

    @property
    def read_mask(self) -> Tensor | None:
        """The tiles that the last call visited: int32 `[B, Hq, Mt, W]`, or None. A later call overwrites it."""
        return self.state.read

    @property
    def write_mask(self) -> Tensor | None:
        """The tiles that the last call kept and the next one visits. A later call overwrites it."""
        return self.state.written

    @property
    def read_list(self) -> Tensor | None:
        """`read_mask` as LiteAttention's list, int16 `[B, Hq, Mt, Nt + 2]`, in the direction of the call before."""
        return self.state.to_ranges(read=True)

    @property
    def write_list(self) -> Tensor | None:
        """`write_mask` as LiteAttention's list, in the direction of the last call."""
        return self.state.to_ranges()

    @staticmethod
    def get_tile_shape(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        """Queries and keys of a tile: what a bit of a mask stands for. The same for every head size and dtype."""
        check_int("head_dim", head_dim, 1)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch.dtype, got {type(dtype).__name__}")
        return TILE_SHAPE

    @staticmethod
    @torch.no_grad()
    def calc_error(a: Tensor, b: Tensor) -> dict[str, float]:
        """How far `a` is from `b`: {"Cossim": 1 - cosine, "L1": sum|a - b| / sum|b|, "RMSE"}. Waits for the device."""
        if a.shape != b.shape:
            raise ValueError(f"a: expected the shape of b, {list(b.shape)}, got {list(a.shape)}")
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = a.to(dtype), b.to(dtype)
        d = a - b
        terms = (a * b, a * a, b * b, d.abs(), b.abs(), d * d)
        ab, aa, bb, l1, size, dd = torch.stack([x.sum(dtype=torch.float64) for x in terms]).tolist()
        return {
            "Cossim": 1 - ab / math.sqrt(aa * bb) if aa and bb else float(aa != bb),
            "L1": l1 / size if size else (math.inf if l1 else 0.0),
            "RMSE": math.sqrt(dd / max(a.numel(), 1)),
        }

    @torch.no_grad()
    def visualize_skips(
        self,
        query: Tensor,
        key: Tensor,
        heads_list: Iterable[int] | Tensor,
        scale: float | None = None,
        save_path: str | os.PathLike[str] = ".",
        max_res: int = 520,
        name_prefix: str = "",
        do_softmax: bool = True,
    ) -> list[Path]:
        """Draws the attention map of query and key, coloured where the next call visits it and grey where it does not.

        Writes `save_path/batch_B/head_H/NAME.png`, NAME being `name_prefix` or "visualization", and returns the paths.
        A pixel is the largest value of its cell, at most `max_res` cells a side: the probability, from black at 2**-20,
        or with do_softmax=False the score, from the smallest to the largest. Grey that is bright is what was dropped
        wrongly. Slow: it is for looking, not for the loop.
        """
        return images.draw(
            self.state, query, key, heads_list, scale, Path(save_path), max_res,
            name_prefix or "visualization", do_softmax,
        )  # fmt: skip

    def get_extra_state(self) -> Tensor:
        """The skip state as one uint8 tensor, because there are savers that take nothing but tensors."""
        return encoded(self.state.state_dict())

    def set_extra_state(self, state: Tensor) -> None:
        """Continues from a saved skip state. ValueError if the module has masks of another shape."""
        self.state.load_state_dict(decoded(state))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        # Weights that were saved without a skip state still load, and leave the state alone.
        missing_keys += [name for name in missing if name != prefix + "_extra_state"]

    def extra_repr(self) -> str:
        policy = self._policy()
        shown = ", ".join(map(str, policy)) if isinstance(policy, tuple) else str(policy)
        mode = "" if self._threshold_mode == "max" else f", threshold_mode={self._threshold_mode!r}"
        int8 = ", use_int8=True" if self.use_int8 else ""
        return f"enable_skipping={self.enable_skipping}, threshold={shown}{mode}{int8}"

    def _policy(self) -> Policy:
        return self._own or self._given or (DEFAULT_THRESHOLD,)

    def _tile_lists(self, key: SkipKey, do: Any, skip: Any) -> TileLists:
        if do is None and skip is None:
            return TileLists()
        self._lists = TileLists.of(do, skip, key, self._lists)
        return self._lists

    def _dense_mask(self, key: SkipKey, lists: TileLists, lengths: Tensor | None) -> Tensor | None:
        if lists.skip is None:
            return None
        name = (key, lists.tokens)
        if self._dense[0] != name:
            self._dense = name, without(lists.skip, full_mask(key), key, lengths)
        return self._dense[1]


class SeqParallelLiteAttention(nn.Module):
    """One `LiteAttention` for each of `num_nodes` parts of the keys, each with masks of its own.

    For sequence parallelism: keys and values travel between the nodes, and every part that arrives has its own history.
    The arguments are those of `LiteAttention`; the parts are its submodules `lite_attention.0`, `lite_attention.1`, ...
    With threshold_mode="length" every part counts its own keys, and 2**threshold limits what each of them drops.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import LiteAttention, SeqParallelLiteAttention, merge
        >>> parts, whole = SeqParallelLiteAttention(num_nodes=2, threshold=-10.0), LiteAttention(threshold=-10.0)
        >>> q, k, v = torch.randn(3, 1, 256, 2, 64)  # each [B, S, H, D]
        >>> found = [
        ...     parts(q, k[:, half], v[:, half], split_idx=i, return_softmax_lse=True)
        ...     for i, half in enumerate((slice(128), slice(128, 256)))
        ... ]
        >>> out, lse = merge(*zip(*found))
        >>> out.shape, torch.allclose(out, whole(q, k, v), atol=1e-5)
        (torch.Size([1, 256, 2, 64]), True)
    """

    def __init__(
        self,
        num_nodes: int,
        enable_skipping: bool = True,
        threshold: float | None = None,
        max_batch_size: int = 2,
        use_int8: bool = False,
        config: Any = None,
        threshold_mode: str = "max",
    ) -> None:
        super().__init__()
        check_int("num_nodes", num_nodes, 1)
        self.num_nodes = num_nodes
        self.lite_attention = nn.ModuleList(
            LiteAttention(
                enable_skipping, threshold, max_batch_size, True, use_int8, config, threshold_mode
            )
            for _ in range(num_nodes)
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        split_idx: int,
        scale: float | None = None,
        return_softmax_lse: bool = False,
        must_do_list: Sequence[int] | Tensor | None = None,
        must_skip_list: Sequence[int] | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`LiteAttention.forward` over part `split_idx` of the keys; `merge` joins the results of the parts.

        split_idx is the part that key and value hold, not the node that computes. Token ranges count from the start of
        the part. ValueError unless 0 <= split_idx < num_nodes.
        """
        check_int("split_idx", split_idx, 0)
        if split_idx >= self.num_nodes:
            raise ValueError(f"split_idx: expected less than {self.num_nodes}, got {split_idx}")
        part = self.lite_attention[split_idx]
        return part(query, key, value, scale, return_softmax_lse, must_do_list, must_skip_list)

    def reset_skip_state(self) -> None:
        """`LiteAttention.reset_skip_state` of every part."""
        for part in self._parts():
            part.reset_skip_state()

    def set_threshold(self, threshold: float) -> None:
        """`LiteAttention.set_threshold` of every part."""
        check_threshold(threshold, self.threshold_mode)
        for part in self._parts():
            part.set_threshold(threshold)

    @property
    def threshold_mode(self) -> str:
        """The mode of all parts."""
        return next(self._parts()).threshold_mode

    def enable_skip_optimization(self, enable: bool = True) -> None:
        """`LiteAttention.enable_skip_optimization` of every part."""
        for part in self._parts():
            part.enable_skip_optimization(enable)

    def _parts(self) -> Iterator[LiteAttention]:
        yield from self.lite_attention  # type: ignore[misc]


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attentions over parts of them, exactly, by their log-sum-exps.

    outs: `[B, S, H, D]` each. lses: `[B, H, S]` each, natural log (packed: `[1, T, H, D]` and `[H, T]`). Returns
    (out, lse) in the dtypes of the first part; the arithmetic is in float32, float64 if anything is. A row that saw
    nothing in any part has out 0 and lse -inf. Differentiable. ValueError unless every part has a log-sum-exp of its
    shape.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import merge
        >>> outs = torch.full((1, 4, 2, 8), 1.0), torch.full((1, 4, 2, 8), 5.0)  # each [B, S, H, D]
        >>> lses = torch.tensor(3.0).log().expand(1, 2, 4), torch.zeros(1, 2, 4)  # weights of 3 and 1
        >>> out, lse = merge(outs, lses)
        >>> out.shape, out.unique(), lse.exp().unique()  # (3 * 1 + 1 * 5) / 4
        (torch.Size([1, 4, 2, 8]), tensor([2.]), tensor([4.]))
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs, lses: expected as many, at least one, got {len(outs)} and {len(lses)}"
        )
    for out, lse in zip(outs, lses):
        rows = (lse if lse.dim() == 3 else lse.unsqueeze(0)).shape
        if out.shape != outs[0].shape or out.dim() != 4 or lse.dim() not in (2, 3):
            raise ValueError(
                f"outs: expected [B, S, H, D] each, got {[list(x.shape) for x in outs]}"
            )
        if (rows[0], rows[2], rows[1]) != tuple(out.shape[:3]):
            raise ValueError(
                f"lses: expected [B, H, S] for outs {list(out.shape)}, got {list(lse.shape)}"
            )
    dtype = torch.promote_types(torch.promote_types(lses[0].dtype, outs[0].dtype), torch.float32)
    stacked = torch.stack([lse.to(dtype) for lse in lses])
    # The shift cancels in value and gradient; 0 in place of -inf keeps both from becoming NaN.
    top = stacked.detach().amax(0)
    top = top.masked_fill(top == -math.inf, 0)
    weights = (stacked - top).exp()
    total = weights.sum(0)
    blind = total == 0
    total = total.masked_fill(blind, 1)
    lse = (top + total.log()).masked_fill(blind, -math.inf)
    shares = (weights / total).transpose(-1, -2).unsqueeze(-1)
    out = sum(share * out.to(dtype) for share, out in zip(shares, outs))
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


@torch.no_grad()
def _calibrate(search: Search, attend: Callable[..., tuple], call: SkipPass, mode: str) -> float:
    """The threshold whose list would make the error that is asked for in a next call with the inputs of this one."""
    exact = attend(call.mask, threshold=-math.inf, direction=call.direction)[0]

    def error_of(threshold: float) -> float:
        listed = attend(call.mask, threshold=threshold, direction=call.direction)[2]
        out = attend(listed, threshold=-math.inf, direction=call.direction)[0]
        return LiteAttention.calc_error(out, exact)[search.metric]

    return check_threshold(search.search(error_of), mode)
