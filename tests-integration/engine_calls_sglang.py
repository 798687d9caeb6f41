"""Tensors as SGLang 0.5.23 holds them, for each of its calls that cula serves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from engine_batches import (
    BLOCKS,
    CHUNK,
    DRAFTS,
    HV,
    PATTERN,
    PREFILLS,
    Batch,
    H,
    Memory,
    Site,
    fused,
    split,
)
from torch import Tensor

from cula.integrations import _sglang_calls as sglang

GDN, KDA = False, True
# In front of the padding that a graph needs are rows that a batch was padded with, all on slot 0.
SHARED = PREFILLS[1]._replace(lengths=(129, 2, 70, 1, 1, 0), slots=(3, 6, 8, 0, 0, -1))
EXTENDS = (PREFILLS[0], SHARED)
# Items that are scored one by one share the state in front of them.
ITEMS = (
    Batch(320, (70, 0, 131, 64), (4, 2, 4, 2)),
    Batch(320, (129, 2, 0, 0), (6, 6, 0, -1)),
)
ROWS_OR_NEGATIVE = (
    Batch(6, (1,) * 6, (3, -1, 5, 1, 7, 2)),
    Batch(6, (1,) * 6, (6, 4, -1, 0, 0, -1)),
)
CHAINS = (
    Batch(15, (3, 2, 3, 1, 0), (3, 5, 8, 2, 0)),
    Batch(15, (1, 3, 2, 1, 0), (6, 4, -1, 0, 0)),
)


def sglang_delta(kda: bool, batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    """Raw gates have more rows than q; a layer's pool lies in pages of three layers. Indices are of either kind."""
    integer = torch.int64 if dtype == torch.bfloat16 else torch.int32
    layers = torch.randn(BLOCKS, 3, HV, dim, dim).to(dtype)
    layers[0] = float("nan")
    memory = {
        "mixed": fused(batch, HV if kda else H, dim), "a": batch.tokens(HV * (dim if kda else 1), spare=2),
        "b": batch.tokens(HV, spare=2), "A_log": torch.rand(1, 1, HV, 1) - 1, "layers": layers,
        "dt_bias": torch.randn(HV * (dim if kda else 1)), "slots": torch.tensor(batch.slots, dtype=integer),
        "ends": batch.ends(),
    }  # fmt: skip
    if batch.chunks:
        # Rows without a state to keep are undefined where it has to be converted.
        name = "kept" if dtype == torch.float32 else "kept by rows"
        memory[name] = torch.full((len(batch.lengths), HV, dim, dim), PATTERN)
        memory["chunks"] = torch.tensor(batch.chunks, dtype=torch.int32)
    return memory


def sglang_gdn_extend(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    memory = sglang_delta(False, batch, dim, dtype)
    memory["a"] = -memory["a"].float().square()
    memory["a"][: batch.live].nan_to_num_(-1)  # the sign of a gate is checked on a CPU
    memory["b"] = memory["b"].float().sigmoid()
    return memory | {"out": torch.full((batch.rows + 2, HV, dim), PATTERN).bfloat16()}


def where(m: Memory) -> dict[str, Tensor]:
    pool = m["layers"][:, m["layers"].shape[1] // 2]
    return {"ssm_states": pool, "cache_indices": m["slots"], "query_start_loc": m["ends"]}


def tracked(m: Memory) -> tuple[dict[str, Tensor], Memory]:
    """The keywords for the prefix cache, and the rows that both batches keep."""
    kept = m["kept"] if "kept" in m else m["kept by rows"]
    return {"track_state": kept, "track_chunk_idx": m["chunks"]}, {"kept rows": kept[0:3:2]}


def gdn_extend(m: Memory, rows: int, impl: str) -> Memory:
    keep, kept = tracked(m)
    q, k, v = split(m["mixed"][:rows], H, m["layers"].shape[-1])
    sglang.gdn_extend(
        q,
        k,
        v,
        m["a"][None],
        m["b"][None],
        output=m["out"][None, :rows],
        layer_id=3,
        **where(m),
        **keep,
        impl=impl,
    )
    return kept


def sglang_gathered(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    """States that SGLang has gathered for a call: a row per sequence, none of which is padding."""
    gathered = torch.randn(len(batch.lengths), 1, HV, dim, dim).to(dtype)
    slots = torch.arange(len(gathered), dtype=torch.int32)
    return sglang_gdn_extend(batch, dim, dtype) | {"layers": gathered, "slots": slots}


def gdn_extend_plain(update: bool, m: Memory, rows: int, impl: str) -> Memory:
    q, k, v = split(m["mixed"][:rows], H, m["layers"].shape[-1])
    o, *_ = sglang.gdn_extend(
        q, k, v, m["a"][None], m["b"][None], inplace_update=update, **where(m), impl=impl
    )
    return {"o": o[0]}


def kda_extend(bound: float | None, m: Memory, rows: int, impl: str) -> Memory:
    keep, kept = tracked(m)
    dim = m["layers"].shape[-1]
    o, _ = sglang.kda_extend(
        *split(m["mixed"][:rows], HV, dim), m["a"][None].unflatten(-1, (HV, dim)), m["b"][None], A_log=m["A_log"],
        dt_bias=m["dt_bias"], lower_bound=bound, beta_is_raw=True, return_intermediate_states=True, **where(m), **keep,
        impl=impl,
    )  # fmt: skip
    return kept | {"o": o[0]}


def packed_decode(kda: bool, m: Memory, rows: int, impl: str) -> Memory:
    dim = m["layers"].shape[-1]
    a = m["a"][:rows]
    o = sglang.packed_decode(
        m["mixed"][:rows, : (2 * (HV if kda else H) + HV) * dim], a.unflatten(-1, (HV, dim)) if kda else a,
        m["b"][None, :rows], A_log=m["A_log"], dt_bias=m["dt_bias"], scale=dim**-0.5,
        ssm_states=m["layers"][:, 1], cache_indices=m["slots"], num_v_heads=HV, head_v_dim=dim,
        lower_bound=-4.0 if kda else None, impl=impl,
    )  # fmt: skip
    return {"o": o[0]}


def decode(kda: bool, m: Memory, rows: int, impl: str) -> Memory:
    q, k, v = split(m["mixed"][:rows], HV if kda else H, m["layers"].shape[-1])
    o = sglang.decode(
        q, k, v, m["a"][:rows, None] if kda else m["a"][:rows], m["b"][:rows], A_log=m["A_log"], dt_bias=m["dt_bias"],
        impl=impl, **where(m),
    )  # fmt: skip
    return {"o": o[0]}


def sglang_verify(kda: bool, batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    """Rows of padding share the last one of the buffer."""
    memory = sglang_delta(kda, batch, dim, dtype)
    names = torch.tensor((2, 0, 1, 3, 4), dtype=memory["slots"].dtype)
    buffer = torch.full((len(batch.lengths), DRAFTS, HV, dim, dim), PATTERN).to(dtype)
    return memory | {"buffer": buffer, "names": names}


def verify(kda: bool, m: Memory, rows: int, impl: str) -> Memory:
    q, k, v = split(m["mixed"][:rows], HV if kda else H, m["layers"].shape[-1])
    o = sglang.target_verify(
        m["A_log"], m["dt_bias"], q, k, v, m["a"][None], m["b"], intermediate_states_buffer=m["buffer"],
        intermediate_state_indices=m["names"], cache_steps=DRAFTS, retrieve_parent_token=None, stable_rows=True,
        impl=impl, **where(m),
    )  # fmt: skip
    return {"o": o[0]}


def sglang_lightning(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    memory = {name: batch.tokens(HV, dim).float() for name in ("q", "k", "v")}
    delta = sglang_delta(False, batch, dim, dtype)
    memory |= {name: delta[name] for name in ("layers", "slots", "ends")}
    # A new sequence begins from zero, whatever its slot holds.
    begins = torch.tensor(batch.begins or (True,) * len(batch.slots))
    memory["layers"][memory["slots"][~begins], 1] = float("nan")
    if batch.chunks:
        memory["track"] = torch.tensor(batch.chunks, dtype=torch.int32).clamp(min=0) * CHUNK
        memory["targets"] = torch.tensor((10, -1, 11, -1, -1, -1))
    return memory | {"decay": torch.linspace(0.02, 0.5, HV).view(HV, 1, 1), "begins": begins}


def segments(m: Memory, rows: int, impl: str) -> Memory:
    meta = SimpleNamespace(
        batch_size=len(m["slots"]),
        q_offsets=m["ends"],
        s_offsets=m["slots"],
        s_scales=m["begins"],
        mask=None,
    )
    tokens = (m[name][:rows] for name in ("q", "k", "v"))
    o = sglang.seg_la_fwd(
        *tokens, m["layers"][:, 1], m["decay"], meta, track_lens=m.get("track"), track_state_indices=m.get("targets"),
        impl=impl,
    )  # fmt: skip
    return {"o": o}


SITES = {
    "gdn-extend": Site(sglang_gdn_extend, gdn_extend, EXTENDS),
    "gdn-extend-gathered": Site(sglang_gathered, partial(gdn_extend_plain, True), PREFILLS),
    "gdn-extend-items": Site(sglang_gdn_extend, partial(gdn_extend_plain, False), ITEMS, reads=True),
    "kda-extend": Site(partial(sglang_delta, KDA), partial(kda_extend, None), EXTENDS),
    "kda-extend-bound": Site(partial(sglang_delta, KDA), partial(kda_extend, -4.0), EXTENDS),
    "gdn-packed": Site(partial(sglang_delta, GDN), partial(packed_decode, GDN), ROWS_OR_NEGATIVE),
    "kda-packed": Site(partial(sglang_delta, KDA), partial(packed_decode, KDA), ROWS_OR_NEGATIVE),
    "gdn-decode": Site(partial(sglang_delta, GDN), partial(decode, GDN), ROWS_OR_NEGATIVE),
    "kda-decode": Site(partial(sglang_delta, KDA), partial(decode, KDA), ROWS_OR_NEGATIVE),
    "gdn-verify": Site(partial(sglang_verify, GDN), partial(verify, GDN), CHAINS),
    "kda-verify": Site(partial(sglang_verify, KDA), partial(verify, KDA), CHAINS),
    "lightning-prefill": Site(sglang_lightning, segments, EXTENDS),
    "lightning-decode": Site(sglang_lightning, segments, ROWS_OR_NEGATIVE),
}  # fmt: skip
