"""Skip-list attention over the ranks of a group: by heads where they divide, otherwise keys and values go round."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from cula.distributed.context import group_of
from cula.distributed.exchange import moved, start_all_to_all
from cula.lite import of_the_package
from cula_core import arguments

_merge = of_the_package("merge")
_Parts: Any = of_the_package("SeqParallelLiteAttention")


class SeqParallelLiteAttention(_Parts):
    """One `LiteAttention` for each of `num_nodes` parts of the keys, that of the kernel package; or all of a group.

    Without a group it is the class of the kernel package, which computes one part at a time. With one, every rank calls
    the module with its own queries, keys and values and gets its queries' attention to the keys of all ranks; it is not
    causal. Where the heads of the queries and those of the keys divide by the ranks, two exchanges around
    `lite_attention.0` give each rank all tokens of some heads, and the lists are those of one device. Otherwise keys
    and values go from rank to rank, `lite_attention.j` attends to those of rank j, and the results are merged in
    float32; a part judges tiles by its own maxima, so that its lists are longer.

    All ranks make the same calls, with the same shapes but for the tokens, and the same inputs require gradients.

    Args:
        num_nodes: how many parts; with a group None, or its size.
        enable_skipping, threshold, max_batch_size, use_int8, config, threshold_mode: as of `LiteAttention`.
        group: a ProcessGroup, or a DeviceMesh of one dimension.
    """

    def __init__(
        self,
        num_nodes: int | None = None,
        enable_skipping: bool = True,
        threshold: float | None = None,
        max_batch_size: int = 2,
        use_int8: bool = False,
        config: Any = None,
        threshold_mode: str = "max",
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        found = None if group is None else group_of("group", group)
        if found is not None:
            ranks = dist.get_world_size(found)
            if num_nodes not in (None, ranks):
                arguments.value_error("num_nodes", f"None or {ranks} as in group", num_nodes)
            num_nodes = ranks
        super().__init__(
            num_nodes, enable_skipping, threshold, max_batch_size, use_int8, config, threshold_mode
        )
        self.group = found

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        split_idx: int | None = None,
        scale: float | None = None,
        return_softmax_lse: bool = False,
        must_do_list: Sequence[int] | Tensor | None = None,
        must_skip_list: Sequence[int] | Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries to the keys of all ranks; without a group, to part `split_idx`.

        Args:
            query: `[B, S, Hq, D]`. key, value: `[B, S, Hkv, D]`, this rank's tokens; Hq a multiple of Hkv.
            split_idx: which part key and value hold; None with a group.
            scale, return_softmax_lse: as of `LiteAttention`.
            must_do_list, must_skip_list: the same; with a group token ranges count from the begin of rank 0, and they
                are refused where heads do not divide.
            lengths: the tokens of every rank, each at least 1; None: as many as this rank has.

        Returns: `[B, S, Hq, D]` in the dtype of the query, or (that, log-sum-exp `[B, Hq, S]`).

        Raises:
            TypeError, ValueError: an argument does not fit; nothing was sent.
        """
        if self.group is None:
            if lengths is not None:
                arguments.value_error("lengths", "None without a group", type(lengths).__name__)
            return super().forward(
                query, key, value, split_idx, scale, return_softmax_lse, must_do_list, must_skip_list
            )  # fmt: skip
        if split_idx is not None:
            arguments.value_error("split_idx", "None with a group", split_idx)
        counts = self._counts(query, key, value, lengths)
        if all(x.shape[2] % self.num_nodes == 0 for x in (query, key)):
            out, lse = self._by_heads(
                query, key, value, counts, scale, return_softmax_lse, must_do_list, must_skip_list
            )
        else:
            for name, given in (("must_do_list", must_do_list), ("must_skip_list", must_skip_list)):
                if given is not None:
                    arguments.value_error(
                        name, "None where heads do not divide by the ranks", type(given).__name__
                    )
            out, lse = self._around(query, key, value, counts, scale)
        if not return_softmax_lse:
            return out
        assert lse is not None
        return out, lse

    def _counts(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int] | None
    ) -> list[int]:
        for name, x in (("query", query), ("key", key), ("value", value)):
            arguments.tensor(name, x)
            arguments.four_dims(name, x, "[B, S, heads, dim]")
            if x.dtype != query.dtype or x.device != query.device:
                arguments.type_error(
                    name, f"{query.dtype} on {query.device} as query", f"{x.dtype} on {x.device}"
                )
            shape = query.shape if name == "query" else key.shape
            if (*x.shape[:2], x.shape[3]) != (*query.shape[:2], query.shape[3]) or x.shape != shape:
                arguments.value_error(
                    name, "[B, S, heads, D] with B, S and D as in query, one shape of key and value", list(x.shape)
                )  # fmt: skip
        batch, tokens = query.shape[:2]
        if batch > self.lite_attention[0].max_batch_size:
            arguments.value_error(
                "query", f"at most max_batch_size = {self.lite_attention[0].max_batch_size} rows", batch
            )  # fmt: skip
        counts = [tokens] * self.num_nodes if lengths is None else [index(n) for n in lengths]
        own = dist.get_rank(self.group)
        if len(counts) != self.num_nodes or min(counts) < 1 or counts[own] != tokens:
            arguments.value_error(
                "lengths", f"{self.num_nodes} numbers from 1, that of rank {own} {tokens}", counts
            )
        return counts

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, counts: list[int], scale: float | None,
        with_lse: bool, must_do: Any, must_skip: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        group, ranks, own = self.group, self.num_nodes, [query.shape[1]] * self.num_nodes
        assert group is not None
        shares = [x.unflatten(2, (ranks, x.shape[2] // ranks)) for x in (query, key, value)]
        rows = torch.cat(shares, 3).permute(2, 1, 0, 3, 4).flatten(0, 1)
        whole = moved(rows, counts, own, group).movedim(0, 1)
        parts = whole.split([x.shape[3] for x in shares], 2)
        found = self.lite_attention[0](*parts, scale, with_lse, must_do, must_skip)
        out, lse = found if with_lse else (found, None)

        def back(x: Tensor) -> Tensor:
            """`[tokens, B, heads, ..]` of all tokens -> `[ranks, S, B, heads, ..]`."""
            return moved(x, own, counts, group).unflatten(0, (ranks, own[0]))

        out = back(out.movedim(1, 0)).permute(2, 1, 0, 3, 4).flatten(2, 3)
        if lse is not None:
            lse = back(lse.permute(2, 0, 1)).permute(2, 0, 3, 1).flatten(1, 2)
        return out, lse

    def _around(
        self, query: Tensor, key: Tensor, value: Tensor, counts: list[int], scale: float | None
    ) -> tuple[Tensor, Tensor]:
        assert self.group is not None
        ranks, own = self.num_nodes, dist.get_rank(self.group)
        learns = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
        send = moved if learns else start_all_to_all
        held = torch.stack((key, value)).movedim(2, 0)  # [S, 2, B, Hkv, D]
        out = lse = None
        for step in range(ranks):
            part = (own - step) % ranks
            if step + 1 < ranks:  # what comes travels while what is held is attended to
                gives, takes = [0] * ranks, [0] * ranks
                gives[(own + 1) % ranks], takes[own - 1] = counts[part], counts[part - 1]
                coming = send(held, takes, gives, self.group)
            found = super().forward(query, *held.movedim(0, 2).unbind(), part, scale, True)
            if out is None:
                out, lse = found[0].to(torch.promote_types(query.dtype, torch.float32)), found[1]
            else:
                out, lse = _merge((out, found[0]), (lse, found[1]))
            if step + 1 < ranks:
                held = coming if learns else collectives.wait_tensor(coming)
        assert out is not None and lse is not None
        return out.to(query.dtype), lse
