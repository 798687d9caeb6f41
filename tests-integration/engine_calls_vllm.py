"""Tensors as vLLM 0.33 holds them, for each of its calls that cula serves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from engine_batches import (
    BLOCKS,
    CHUNK,
    DRAFTS,
    HV,
    PATTERN,
    PREFILLS,
    ROWS,
    Batch,
    H,
    Memory,
    Site,
    fused,
    split,
)
from torch import Tensor

from cula.integrations import _vllm_calls as vllm

MODEL = (torch.bfloat16,)  # a pool of vLLM's Lightning attention has the dtype of the model
ROWS_AND_PREFILLS = (
    Batch(6, (1, 1, 1, 1, 0, 0), (3, 9, 5, 1, 7, 2)),
    Batch(6, (1, 1, 0, 0, 0, 0), (6, 4, 0, 0, 0, 0)),
)
DRAFT_ROWS = (
    Batch(15, (3, 3, 2, 1, 0), ((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (0, 0, 0)), accepted=(2, 1, 3, 1, 1)),
    Batch(15, (2, 3, 0, 0, 0), ((13, 2, 14), (5, 1, 7), (0, 0, 0), (0, 0, 0), (0, 0, 0)), accepted=(3, 2, 1, 1, 1)),
)  # fmt: skip
DECODES = 2  # in front of the prefills of a batch
LIGHTNING_PREFILLS = (
    Batch(320, (1, 1, 70, 0, 131, 64), (4, 0, 7, 1, 5, 8), -1),
    Batch(320, (1, 1, 129, 5, 0, 0), (3, 6, 8, 0, -1, -1), -1),
)
LIGHTNING_ROWS = (
    Batch(6, (1,) * 6, (3, -1, 5, 0, 7, 2), -1),
    Batch(6, (1,) * 6, (6, 4, -1, -1, -1, -1), -1),
)


def pages(dim: int, dtype: torch.dtype) -> Tensor:
    """Memory of vLLM's pool: in each block something else, the states of HV heads, and padding. Block 0 holds NaN."""
    x = torch.randn(BLOCKS, 64 + HV * dim * dim + 32).to(dtype)
    x[0] = float("nan")
    return x


def states(x: Tensor, dim: int) -> Tensor:
    return x[:, 64 : 64 + HV * dim * dim].unflatten(1, (HV, dim, dim))


# ---- gated delta rule ------------------------------------------------------------------------------------------------


def vllm_prefill(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    return {
        "q": batch.heads(H, dim), "k": batch.heads(H, dim), "v": batch.tokens(HV, dim),
        "g": -batch.tokens(HV, dtype=torch.float32).square(),
        "beta": batch.tokens(HV, dtype=torch.float32).sigmoid(),
        "initial": torch.randn(len(batch.lengths), HV, dim, dim).to(dtype), "ends": batch.ends(),
    }  # fmt: skip


def vllm_prefill_kept(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    starts = (torch.tensor((0, *batch.lengths)) // CHUNK).cumsum(0)
    kept = torch.full((6, HV, dim, dim), PATTERN)
    return vllm_prefill(batch, dim, dtype) | {"starts": starts, "kept": kept}


def prefill(m: Memory, rows: int, impl: str) -> Memory:
    tokens = (m[name][None, :rows] for name in ("q", "k", "v", "g", "beta"))
    o, final = vllm.chunk_gated_delta_rule(
        *tokens, initial_state=m["initial"], output_final_state=True, cu_seqlens=m["ends"],
        use_qk_l2norm_in_kernel=False, impl=impl,
    )  # fmt: skip
    assert final is not None and final.dtype == m["initial"].dtype
    return {"o": o[0], "final": final}


def prefill_kept(m: Memory, rows: int, impl: str) -> Memory:
    tokens = (m[name][None, :rows] for name in ("q", "k", "v", "g", "beta"))
    o, final = vllm.fi_chunk_gated_delta_rule(
        *tokens, initial_state=m["initial"], output_final_state=True, cu_seqlens=m["ends"],
        use_qk_l2norm_in_kernel=False, state_checkpoints=m["kept"], checkpoint_cu_starts=m["starts"],
        checkpoint_every_n_tokens=CHUNK, impl=impl,
    )  # fmt: skip
    assert final is not None
    return {"o": o[0], "final": final}


def vllm_gdn(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    """Of decode: b and a lie in the same rows, and dt_bias has the dtype of the model."""
    memory = {
        "mixed": fused(batch, H, dim), "ba": batch.tokens(2 * HV), "A_log": torch.rand(HV) - 1,
        "dt_bias": torch.randn(HV).bfloat16(), "pages": pages(dim, dtype), "table": batch.table(),
        "ends": batch.ends(), "out": torch.full((batch.rows + 2, HV, dim), PATTERN).bfloat16(),
    }  # fmt: skip
    if batch.accepted:
        memory["accepted"] = torch.tensor(batch.accepted, dtype=torch.int32)
        memory["weight"] = torch.rand(dim).bfloat16()
    return memory


def gdn_decode(m: Memory, rows: int, impl: str) -> Memory:
    dim = m["out"].shape[2]
    b, a = m["ba"][:rows].chunk(2, -1)
    vllm.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=m["mixed"][:rows, : (2 * H + HV) * dim], a=a, b=b, A_log=m["A_log"], dt_bias=m["dt_bias"],
        scale=dim**-0.5, initial_state=states(m["pages"], dim), out=m["out"][:rows].unsqueeze(1),
        ssm_state_indices=m["table"][:, 0], use_qk_l2norm_in_kernel=True, impl=impl,
    )  # fmt: skip
    return {}


def gdn_rows(m: Memory, rows: int, impl: str) -> Memory:
    dim = m["out"].shape[2]
    b, a = m["ba"][:rows].chunk(2, -1)
    q, k, v = split(m["mixed"][:rows], H, dim)
    drafts = {"ssm_state_indices": m["table"][:, 0]}
    if "accepted" in m:
        drafts = {
            "ssm_state_indices": m["table"][:, :DRAFTS],
            "num_accepted_tokens": m["accepted"],
        }
    o, _ = vllm.fused_sigmoid_gating_delta_rule_update(
        A_log=m["A_log"], a=a, b=b, dt_bias=m["dt_bias"], q=q, k=k, v=v, initial_state=states(m["pages"], dim),
        inplace_final_state=True, cu_seqlens=m["ends"], use_qk_l2norm_in_kernel=True, impl=impl, **drafts,
    )  # fmt: skip
    return {"o": o[0]}


def gdn_drafts_and_norm(m: Memory, rows: int, impl: str) -> Memory:
    dim = m["out"].shape[2]
    b, a = m["ba"][:rows].chunk(2, -1)
    width = (2 * H + HV) * dim
    vllm.fused_gdn_decode_post_conv_mtp(
        m["mixed"][:rows, :width], a, b, m["A_log"], m["dt_bias"], m["table"][:, :DRAFTS], m["ends"], m["accepted"],
        states(m["pages"], dim), m["mixed"][:rows, width:].unflatten(1, (HV, dim)), m["weight"], out=m["out"][:rows],
        scale=dim**-0.5, norm_eps=1e-5, impl=impl,
    )  # fmt: skip
    return {}


# ---- KDA -------------------------------------------------------------------------------------------------------------


def vllm_kda(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    memory = {
        "mixed": fused(batch, HV, dim), "g": batch.tokens(HV * dim + 8), "beta": batch.tokens(HV + 3),
        "A_log": torch.rand(HV) - 1, "dt_bias": torch.randn(HV * dim), "pages": pages(dim, dtype),
        "table": batch.table(), "ends": batch.ends(), "out": torch.full((batch.rows + 2, HV, dim), PATTERN).bfloat16(),
    }  # fmt: skip
    if batch.accepted:
        memory["accepted"] = torch.tensor(batch.accepted, dtype=torch.int32)
    return memory


def vllm_kda_prefill(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    count = len(batch.lengths)
    return vllm_kda(batch, dim, dtype) | {
        "q": batch.heads(HV, dim, 0.1), "k": batch.heads(HV, dim, 10), "v": batch.tokens(HV, dim),
        "initial": torch.randn(count, HV, dim, dim).to(dtype),
        "final": torch.full((count + 2, HV, dim, dim), PATTERN).to(dtype),
    }  # fmt: skip


def gates(m: Memory, rows: int) -> tuple[Tensor, Tensor]:
    """raw_g `[1, L, HV, K]` and raw_beta `[1, L, HV]`, of any row stride."""
    dim = m["dt_bias"].numel() // HV
    return m["g"][None, :rows, : HV * dim].unflatten(-1, (HV, dim)), m["beta"][None, :rows, :HV]


def kda_prefill(bound: float | None, m: Memory, rows: int, impl: str) -> Memory:
    tokens = (m[name][None, :rows] for name in ("q", "k", "v"))
    o, final = vllm.chunk_kda_with_fused_gate(
        *tokens, *gates(m, rows), A_log=m["A_log"], g_bias=m["dt_bias"], lower_bound=bound,
        initial_state=m["initial"], output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=m["ends"],
        impl=impl,
    )  # fmt: skip
    assert final is not None and final.dtype == m["initial"].dtype
    return {"o": o[0], "final states": final}


def kda_prefill_into_buffers(m: Memory, rows: int, impl: str) -> Memory:
    q, k, v = (m[name][None, :rows] for name in ("q", "k", "v"))
    g, beta = gates(m, rows)
    vllm._flashkda_prefill(
        q=q, k=k, v=v, g=g, beta=beta, A_log=m["A_log"], dt_bias=m["dt_bias"], lower_bound=-5.0,
        initial_state=m["initial"], cu_seqlens=m["ends"], out=m["out"][None, :rows],
        final_state=m["final"][: len(m["initial"])], workspace=torch.empty(0), impl=impl,
    )  # fmt: skip
    return {}


def kda_decode(m: Memory, rows: int, impl: str) -> Memory:
    dim = m["out"].shape[2]
    o, _ = vllm.fused_recurrent_kda_packed_decode(
        m["mixed"][:rows, : 3 * HV * dim], *gates(m, rows), m["A_log"], m["dt_bias"], -5.0,
        states(m["pages"], dim), m["table"][:, 0], impl=impl,
    )  # fmt: skip
    return {"o": o[0]}


def kda_rows(m: Memory, rows: int, impl: str) -> Memory:
    dim = m["out"].shape[2]
    drafts = "accepted" in m
    vllm.fused_recurrent_kda(
        *split(m["mixed"][:rows], HV, dim), *gates(m, rows), m["A_log"], m["dt_bias"], None,
        initial_state=states(m["pages"], dim), cu_seqlens=m["ends"],
        ssm_state_indices=m["table"][:, :DRAFTS] if drafts else m["table"][:, 0],
        num_accepted_tokens=m["accepted"] if drafts else None, out=m["out"][None, :rows], impl=impl,
    )  # fmt: skip
    return {}


# ---- Lightning attention ---------------------------------------------------------------------------------------------


def vllm_lightning(batch: Batch, dim: int, dtype: torch.dtype) -> Memory:
    """q, k, v are float32, of numbers that a 16-bit pool has too; block 0 is one like others."""
    memory = {name: batch.tokens(HV, dim, dtype=dtype).float() for name in ("q", "k", "v")}
    memory["q"] *= 0.125
    memory |= {"pages": pages(dim, dtype), "table": batch.table(), "ends": batch.ends()}
    memory["pages"][0] = 1
    return memory | {"decay": torch.linspace(0.02, 0.5, HV).view(HV, 1, 1)}


def lightning_prefill(m: Memory, rows: int, impl: str) -> Memory:
    q, k, v = (m[name][:rows] for name in ("q", "k", "v"))
    slots, pool = m["table"][:, 0], states(m["pages"], q.shape[2])
    meta = SimpleNamespace(
        num_prefills=len(slots) - DECODES, num_decodes=DECODES, num_decode_tokens=DECODES, query_start_loc=m["ends"],
        state_indices_tensor_p=slots[DECODES:],
    )  # fmt: skip

    def decode(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, meta: Any) -> Tensor:
        return vllm.linear_attention_decode(
            q, k, v, pool, m["decay"], slots, q_start=0, q_end=DECODES, slot_start=0, slot_end=DECODES, impl=impl
        )  # fmt: skip

    o = vllm.linear_attention_prefill_and_mix(
        q=q, k=k, v=v, kv_cache=pool, state_indices_tensor=slots, attn_metadata=meta, slope_rate=m["decay"],
        block_size=256, decode_fn=decode, prefix_fn=decode, layer_idx=1, impl=impl,
    )  # fmt: skip
    return {"o": o}


def lightning_decode(m: Memory, rows: int, impl: str) -> Memory:
    q, k, v = (m[name][:rows] for name in ("q", "k", "v"))
    pool = states(m["pages"], q.shape[2])
    o = vllm.linear_attention_decode(
        q,
        k,
        v,
        pool,
        m["decay"],
        m["table"][:, 0],
        q_start=0,
        q_end=rows,
        slot_start=0,
        slot_end=rows,
        impl=impl,
    )
    return {"o": o}


SITES = {
    "gdn-prefill": Site(vllm_prefill, prefill, PREFILLS),
    "gdn-prefill-kept": Site(vllm_prefill_kept, prefill_kept, PREFILLS),
    "gdn-decode": Site(vllm_gdn, gdn_decode, ROWS),
    "gdn-rows": Site(vllm_gdn, gdn_rows, ROWS_AND_PREFILLS),
    "gdn-drafts": Site(vllm_gdn, gdn_rows, DRAFT_ROWS),
    "gdn-drafts-norm": Site(vllm_gdn, gdn_drafts_and_norm, DRAFT_ROWS),
    "kda-prefill": Site(vllm_kda_prefill, partial(kda_prefill, None), PREFILLS),
    "kda-prefill-bound": Site(vllm_kda_prefill, partial(kda_prefill, -5.0), PREFILLS),
    "kda-prefill-buffers": Site(vllm_kda_prefill, kda_prefill_into_buffers, PREFILLS),
    "kda-decode": Site(vllm_kda, kda_decode, ROWS),
    "kda-rows": Site(vllm_kda, kda_rows, ROWS_AND_PREFILLS),
    "kda-drafts": Site(vllm_kda, kda_rows, DRAFT_ROWS),
    "lightning-prefill": Site(vllm_lightning, lightning_prefill, LIGHTNING_PREFILLS, MODEL),
    "lightning-decode": Site(vllm_lightning, lightning_decode, LIGHTNING_ROWS, MODEL),
}  # fmt: skip
