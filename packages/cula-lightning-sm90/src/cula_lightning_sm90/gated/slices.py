"""A call over slices of sequences: the state in front of a slice may become known while the call is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_rule.call import Slice
from cula_core.delta_rule.slices import Begun, bits

from .call import Call
from .config import HEAD_DIM, UNCUT
from .launch import Launch, Maps, new_launch
from .plan import plan


class _Steps:
    """What is left to launch of a call whose chunks are prepared."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self.kernels = launch, launch.kernels
        self.segment_tokens, self.cut = launch.segment_tokens, launch.spread.segment < UNCUT
        self._maps: Maps | None = None

    def scan(self) -> Tensor:
        self._maps = self._launch.scan()
        found, marks = self._maps
        found[:, :, HEAD_DIM:].masked_fill_((marks != 0)[:, :, None, None], 0.0)
        return found

    def finish(self, starts: Tensor, final: Tensor, maps: Tensor | None) -> Tensor:
        launch = replace(self._launch, initial=starts, final=final, fresh=None)
        # Of slices that are whole nothing is read of these.
        own = self._maps or launch.new_maps(1)
        merged = launch.merge(own) if self.cut else own.found[:, :, :HEAD_DIM]
        launch.recurrence(own, merged)
        return launch.call.out


def begin(call: Call, slices: Sequence[Slice], **options: Any) -> Begun:
    """Launches what needs no state in front of the slices that continue a sequence, on torch's current stream.

    The call has tensors as the kernels read them, cu_seqlens as slices say, initial states (those of slices that
    continue a sequence are not read) and no pool. options: those of `launch.run`.
    """
    copy = torch.tensor([part.start for part in slices] + [slices[-1].stop])
    launch = new_launch(
        call._replace(cu_seqlens_cpu=copy), **{"planner": partial(plan, sliced=True)} | options
    )
    launch = replace(launch, fresh=bits(slices, call.q.device))
    launch.prepare()
    return Begun(_Steps(launch), slices)
