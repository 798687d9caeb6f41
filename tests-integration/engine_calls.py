"""Tensors as vLLM 0.33 and SGLang 0.5.23 hold them, for each of their calls that cula serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cula.integrations import _sglang_calls as sglang
from cula.integrations import _vllm_calls as vllm

H, HV = 2, 4
BLOCKS, DRAFTS, CHUNK = 16, 3, 64
PATTERN = 9.0

Memory = dict[str, Tensor]
# What an engine calls, given its memory, how many of the token rows there are, and an implementation; returns what is
# in no memory of the engine: "o" by token, and states.
Call = Callable[[Memory, int, str], Memory]


class Batch(NamedTuple):
    """Packed sequences in `rows` rows of tokens, and their slots, or one for each token of a draft.

    null: a slot of padding beside negative ones.
    """

    rows: int
    lengths: tuple[int, ...]
    slots: tuple[Any, ...]
    null: int = 0
    begins: tuple[bool, ...] = ()
    accepted: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    @property
    def live(self) -> int:
        return sum(self.lengths)

    def ends(self, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor((0, *self.lengths)).cumsum(0).to(dtype)

    def tokens(self, *shape: int, dtype: torch.dtype = torch.bfloat16, spare: int = 0) -> Tensor:
        """Random numbers of `[rows + spare, *shape]`, NaN where no sequence has a token, or none but padding."""
        x = torch.randn(self.rows + spare, *shape)
        first = torch.tensor(self.slots).view(len(self.slots), -1)[:, 0]
        padding = (first < 0) | (first == self.null)
        x[: self.live][padding.repeat_interleave(torch.tensor(self.lengths))] = float("nan")
        x[self.live :] = float("nan")
        return x.to(dtype)

    def heads(self, count: int, dim: int, norms: float = 1.0) -> Tensor:
        """Tokens `[rows, count, dim]` of these norms, contiguous."""
        return (normalize(self.tokens(count, dim).float(), dim=-1) * norms).bfloat16()

    def table(self) -> Tensor:
        """vLLM's table of blocks, whose first columns are the slots."""
        slots = torch.tensor(self.slots, dtype=torch.int32).view(len(self.slots), -1)
        return torch.cat((slots, torch.full((len(slots), 5), BLOCKS - 1, dtype=torch.int32)), 1)


class Site(NamedTuple):
    """A call of an engine. operands: memory for a batch, with heads of a dimension and pools of a dtype.

    reads: states are only read.
    """

    operands: Callable[[Batch, int, torch.dtype], Memory]
    call: Call
    batches: tuple[Batch, Batch]
    pools: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    reads: bool = False


# The second batch has other sequences, and more padding.
PREFILLS = (
    Batch(320, (70, 0, 131, 64, 0, 1), (4, 2, 7, 1, 5, 8), begins=(True, True, False, True, False, True),
          chunks=(1, -1, 2, -1, -1, -1)),
    Batch(320, (129, 2, 70, 0, 0, 0), (3, 6, 8, -1, 0, 0), begins=(False, True, True, True, True, True),
          chunks=(2, -1, 1, -1, -1, -1)),
)  # fmt: skip
# Items that are scored one by one share the state in front of them.
ITEMS = (
    Batch(320, (70, 0, 131, 64), (4, 2, 4, 2)),
    Batch(320, (129, 2, 0, 0), (6, 6, 0, -1)),
)
ROWS = (
    Batch(6, (1,) * 6, (3, 0, 5, 1, 7, 2)),
    Batch(6, (1,) * 6, (6, 4, 0, 0, 0, 0)),
)
ROWS_OR_NEGATIVE = (
    Batch(6, (1,) * 6, (3, -1, 5, 1, 7, 2)),
    Batch(6, (1,) * 6, (6, 4, -1, 0, 0, -1)),
)
ROWS_AND_PREFILLS = (
    Batch(6, (1, 1, 1, 1, 0, 0), (3, 9, 5, 1, 7, 2)),
    Batch(6, (1, 1, 0, 0, 0, 0), (6, 4, 0, 0, 0, 0)),
)
DRAFT_ROWS = (
    Batch(15, (3, 3, 2, 1, 0), ((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (0, 0, 0)), accepted=(2, 1, 3, 1, 1)),
    Batch(15, (2, 3, 0, 0, 0), ((13, 2, 14), (5, 1, 7), (0, 0, 0), (0, 0, 0), (0, 0, 0)), accepted=(3, 2, 1, 1, 1)),
)  # fmt: skip
CHAINS = (
    Batch(15, (3, 2, 3, 1, 0), (3, 5, 8, 2, 0)),
    Batch(15, (1, 3, 0, 0, 0), (6, 4, -1, 0, 0)),
)
DECODES = 2  # in front of the prefills of one of vLLM's batches
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


def split(x: Tensor, keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k `[1, L, keys, dim]` and v `[1, L, HV, dim]` in the rows of a fused projection."""
    widths = (keys * dim, keys * dim, HV * dim)
    q, k, v = x[None, :, : sum(widths)].split(widths, -1)
    return q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, dim))  # type: ignore[return-value]


def fused(batch: Batch, keys: int, dim: int) -> Tensor:
    """Rows of q, k, v and a gate for the output. Norms of q and k are far from 1."""
    x = batch.tokens((2 * keys + 2 * HV) * dim)
    x[:, : keys * dim] *= 0.1
    x[:, keys * dim : 2 * keys * dim] *= 10
    return x


# ---- vLLM: gated delta rule ------------------------------------------------------------------------------------------


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


# ---- vLLM: KDA -------------------------------------------------------------------------------------------------------


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


# ---- vLLM: Lightning attention ---------------------------------------------------------------------------------------


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


# ---- SGLang ----------------------------------------------------------------------------------------------------------


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


# ---- all of them -----------------------------------------------------------------------------------------------------

MODEL = (torch.bfloat16,)  # a pool of vLLM's Lightning attention has the dtype of the model
GDN, KDA = False, True
SITES = {
    "vllm-gdn-prefill": Site(vllm_prefill, prefill, PREFILLS),
    "vllm-gdn-prefill-kept": Site(vllm_prefill_kept, prefill_kept, PREFILLS),
    "vllm-gdn-decode": Site(vllm_gdn, gdn_decode, ROWS),
    "vllm-gdn-rows": Site(vllm_gdn, gdn_rows, ROWS_AND_PREFILLS),
    "vllm-gdn-drafts": Site(vllm_gdn, gdn_rows, DRAFT_ROWS),
    "vllm-gdn-drafts-norm": Site(vllm_gdn, gdn_drafts_and_norm, DRAFT_ROWS),
    "vllm-kda-prefill": Site(vllm_kda_prefill, partial(kda_prefill, None), PREFILLS),
    "vllm-kda-prefill-bound": Site(vllm_kda_prefill, partial(kda_prefill, -5.0), PREFILLS),
    "vllm-kda-prefill-buffers": Site(vllm_kda_prefill, kda_prefill_into_buffers, PREFILLS),
    "vllm-kda-decode": Site(vllm_kda, kda_decode, ROWS),
    "vllm-kda-rows": Site(vllm_kda, kda_rows, ROWS_AND_PREFILLS),
    "vllm-kda-drafts": Site(vllm_kda, kda_rows, DRAFT_ROWS),
    "vllm-lightning-prefill": Site(vllm_lightning, lightning_prefill, LIGHTNING_PREFILLS, MODEL),
    "vllm-lightning-decode": Site(vllm_lightning, lightning_decode, LIGHTNING_ROWS, MODEL),
    "sglang-gdn-extend": Site(sglang_gdn_extend, gdn_extend, PREFILLS),
    "sglang-gdn-extend-gathered": Site(sglang_gathered, partial(gdn_extend_plain, True), PREFILLS),
    "sglang-gdn-extend-items": Site(sglang_gdn_extend, partial(gdn_extend_plain, False), ITEMS, reads=True),
    "sglang-kda-extend": Site(partial(sglang_delta, KDA), partial(kda_extend, None), PREFILLS),
    "sglang-kda-extend-bound": Site(partial(sglang_delta, KDA), partial(kda_extend, -4.0), PREFILLS),
    "sglang-gdn-packed": Site(partial(sglang_delta, GDN), partial(packed_decode, GDN), ROWS_OR_NEGATIVE),
    "sglang-kda-packed": Site(partial(sglang_delta, KDA), partial(packed_decode, KDA), ROWS_OR_NEGATIVE),
    "sglang-gdn-decode": Site(partial(sglang_delta, GDN), partial(decode, GDN), ROWS_OR_NEGATIVE),
    "sglang-kda-decode": Site(partial(sglang_delta, KDA), partial(decode, KDA), ROWS_OR_NEGATIVE),
    "sglang-gdn-verify": Site(partial(sglang_verify, GDN), partial(verify, GDN), CHAINS),
    "sglang-kda-verify": Site(partial(sglang_verify, KDA), partial(verify, KDA), CHAINS),
    "sglang-lightning-prefill": Site(sglang_lightning, segments, PREFILLS),
    "sglang-lightning-decode": Site(sglang_lightning, segments, ROWS_OR_NEGATIVE),
}  # fmt: skip
