"""A sequence has the same bits alone, among any others and in any place, whole or in segments of a given length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import cula_cp_sm90
import cula_delta_decode
import cula_lightning_decode
import cula_lightning_sm90
import liteattention_sm89
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution
from cula_testing.comparing import same

pytestmark = pytest.mark.gpu

D = 128
BF16 = torch.bfloat16
# Some are too short to be cut, some would be, and all together are more than an H100 has room for at once.
LENGTHS = (1, 63, 64, 65, 4100, 517, 128, 2048, 700, 5, 1999, 320) * 4
Sequences = Sequence[dict[str, Tensor]]


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def prompt(number: int, heads: int) -> dict[str, Tensor]:
    """A sequence, `[1, T, ..]`, and the state that it begins with."""
    source, tokens = torch.Generator().manual_seed(number), LENGTHS[number]
    return {
        "q": normal(source, 1, tokens, heads, D),
        "k": normal(source, 1, tokens, heads, D),
        "v": normal(source, 1, tokens, heads, D),
        "g": logsigmoid(normal(source, 1, tokens, heads, D, dtype=torch.float32)),
        "beta": normal(source, 1, tokens, heads).sigmoid(),
        "initial_state": normal(source, 1, heads, D, D, dtype=torch.float32),
    }


def decay(heads: int) -> Tensor:
    return torch.linspace(0.01, 0.5, heads, device="cuda")


def lightning(q, k, v, g, beta, initial_state, cu_seqlens, segment):
    rows = torch.arange(len(initial_state), dtype=torch.int32, device="cuda")
    return cula_lightning_sm90.lightning_attn_fwd_varlen(
        q, k, v, decay(v.shape[2]), cu_seqlens, state_pool=initial_state.clone(),
        initial_state_indices=rows, num_splits=1 if segment is None else None, segment_tokens=segment,
    )  # fmt: skip


def simple_gla(q, k, v, g, beta, segment, **more):
    return cula_lightning_sm90.chunk_simple_gla(
        q, k, v, g=g[..., 0].contiguous(), output_final_state=True,
        num_splits=1 if segment is None else None, segment_tokens=segment, **more,
    )  # fmt: skip


def gated(q, k, v, g, beta, segment, **more):
    return cula_lightning_sm90.chunk_gated_delta_rule(
        q, k, v, g[..., 0].contiguous(), beta, use_qk_l2norm_in_kernel=True,
        output_final_state=True, use_intracard_cp="auto" if segment else False, segment_tokens=segment, **more,
    )  # fmt: skip


def kda(q, k, v, g, beta, segment, **more):
    return cula_cp_sm90.chunk_kda(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True,
        use_intracard_cp="auto" if segment else False, segment_tokens=segment, **more,
    )  # fmt: skip


def packed(
    prefill: Callable, sequences: Sequences, segment: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Returns the output and the final state of every sequence of a packed call."""
    lengths = [x["v"].shape[1] for x in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    x = {
        name: torch.cat([one[name] for one in sequences], 1)
        for name in ("q", "k", "v", "g", "beta")
    }
    begin = torch.cat([one["initial_state"] for one in sequences])
    out, final = prefill(**x, initial_state=begin, cu_seqlens=starts, segment=segment)
    return list(zip(out.split(lengths, 1), final.split(1), strict=True))


@pytest.mark.parametrize("segment", [None, 1024])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("prefill", [lightning, simple_gla, gated, kda])
def test_prefill(prefill, heads, segment):
    prompts = [prompt(number, heads) for number in range(len(LENGTHS))]
    expected = [packed(prefill, [x], segment)[0] for x in prompts]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    for batch in (order, order[::-1], order[:7], order[7:30], order[:3]):
        results = packed(prefill, [prompts[i] for i in batch], segment)
        for number, found in zip(batch, results, strict=True):
            assert all(map(same, found, expected[number])), (number, len(batch))


@pytest.mark.parametrize("segment", [None, 1024, 2048])
@pytest.mark.parametrize("prefill", [simple_gla, gated, kda])
def test_rows_of_a_dense_prefill_are_packed_sequences(prefill, segment):
    rows = [prompt(number, 4) for number in range(len(LENGTHS)) if LENGTHS[number] == 2048]
    expected = [packed(prefill, [x], segment)[0] for x in rows]
    for count in (1, len(rows)):
        x = {name: torch.cat([row[name] for row in rows[:count] * 9]) for name in rows[0]}
        out, final = prefill(**x, segment=segment)
        for number in range(9 * count):
            found = out[number : number + 1], final[number : number + 1]
            assert all(map(same, found, expected[number % count]))


# ---- decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A decode function as a call of rows of a batch and of their states; several tokens or one."""

    call: Callable[..., Tensor]
    tokens: int = 1
    state_dtype: torch.dtype = torch.float32


def linear(q, k, v, g, beta, state, rows):
    return cula_lightning_decode.linear_attention_decode(
        q, k, v, state, decay(v.shape[2]), state_indices=rows
    )


def delta(q, k, v, g, beta, state, rows):
    return cula_delta_decode.delta_rule_decode(
        q, k, v, state=state, g=g[..., 0].contiguous(), beta=beta, A_log=decay(v.shape[2]),
        dt_bias=decay(v.shape[2]), state_indices=rows, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def kimi(q, k, v, g, beta, state, rows):
    heads = v.shape[2]
    return cula_delta_decode.delta_rule_decode(
        q, k, v, state=state, g=g, beta=beta, A_log=decay(heads), state_indices=rows,
        dt_bias=decay(heads * D), use_qk_l2norm_in_kernel=True, state_v_first=True,
    )  # fmt: skip


def convolved(q, k, v, g, beta, state, rows):
    """With a short convolution whose rings hold what has the number of a slot, and a gated norm."""
    heads = v.shape[2]
    source = torch.Generator().manual_seed(0)
    rings, weight = (normal(source, count, 4, 3 * heads * D) for count in (1, 1))
    slots = torch.arange(len(state), device="cuda", dtype=BF16).view(-1, 1, 1)
    convolution = ShortConvolution(
        rings * (slots % 7),
        torch.full((len(q),), 5, dtype=torch.int32, device="cuda"),
        weight[0].T.contiguous(),
    )
    norm = GatedNorm(v, torch.ones(D, device="cuda"))
    return cula_delta_decode.delta_rule_decode(
        q, k, v, state=state, g=g[..., 0].contiguous(), beta=beta, A_log=decay(heads), dt_bias=decay(heads),
        state_indices=rows, use_qk_l2norm_in_kernel=True, convolution=convolution, norm=norm,
    )  # fmt: skip


STEPS = {
    "Lightning": Step(linear),
    "Lightning, 4 tokens": Step(linear, 4),
    "gated delta rule": Step(delta),
    "gated delta rule, bf16 states": Step(delta, state_dtype=BF16),
    "gated delta rule, 3 tokens": Step(delta, 3),
    "gated delta rule, convolution and norm": Step(convolved),
    "KDA": Step(kimi),
    "KDA, 2 tokens": Step(kimi, 2),
    "KDA, fp16 states": Step(kimi, state_dtype=torch.float16),
}


@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.parametrize("name", STEPS)
def test_decode(name, heads):
    """Batches of 1 to 300 rows, which tiles are chosen by, in any order, with padding between them."""
    step, most = STEPS[name], 300
    source = torch.Generator().manual_seed(0)
    x = {one: normal(source, most, step.tokens, heads, D) for one in ("q", "k", "v", "g")}
    x["beta"] = normal(source, most, step.tokens, heads).sigmoid()
    pool = normal(source, most, heads, D, D, dtype=torch.float32).to(step.state_dtype)

    def run(batch: list[int]) -> tuple[Tensor, Tensor]:
        """The rows of a batch, -1 is padding, each with the slot of its number."""
        rows = torch.tensor(batch, dtype=torch.int32, device="cuda")
        chosen = {one: t[rows.clamp(min=0).long()] for one, t in x.items()}
        state = pool.clone()
        return step.call(**chosen, state=state, rows=rows), state

    whole, states = run(list(range(most)))
    order = torch.randperm(most, generator=source).tolist()
    for batch in ([0], [7], [299], order[:3], [-1, 11, -1, -1, 5], order[:17], order[:100], order):
        out, state = run(batch)
        for place, row in enumerate(batch):
            if row >= 0:
                assert same(out[place], whole[row]), (batch[:20], row)
                assert same(state[row], states[row]), (batch[:20], row)


# ---- skip-list attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_attention(listed, int8):
    source = torch.Generator().manual_seed(0)
    q, k, v = (normal(source, 7, 1000, heads, D) for heads in (8, 2, 2))
    tiles = -(-q.shape[1] // 128), -(-k.shape[1] // 64)
    mask = (torch.rand(7, 8, *tiles, generator=source) < 0.6).cuda()
    more = {"use_int8": int8, "threshold": -4.0 if listed else None}

    def run(batch: list[int]) -> list[Tensor]:
        lists = {"read_mask": mask[batch]} if listed else {}
        found = liteattention_sm89.lite_attention(q[batch], k[batch], v[batch], **lists, **more)
        return [t for t in found if isinstance(t, Tensor)]

    whole = run(list(range(7)))
    assert len(whole) == 2 + listed
    for batch in ([3], [6, 0], [5, 4, 3, 2, 1, 0, 6]):
        for found, expected in zip(run(batch), whole, strict=True):
            assert same(found, expected[batch])


@pytest.mark.parametrize("int8", [False, True])
def test_packed_attention(int8):
    source = torch.Generator().manual_seed(0)
    lengths = (300, 1, 1000, 64, 129, 700)
    sequences = [[normal(source, 1, n, heads, D) for heads in (4, 2, 2)] for n in lengths]

    def run(batch: list[int]) -> list[Tensor]:
        taken = [lengths[i] for i in batch]
        q, k, v = (torch.cat([sequences[i][t] for i in batch], 1) for t in range(3))
        starts = torch.tensor([0, *taken]).cumsum(0).to("cuda", torch.int32)
        out = liteattention_sm89.lite_attention(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=max(taken),
            max_seqlen_k=max(taken), use_int8=int8, threshold=None,
        )[0]  # fmt: skip
        return list(out.split(taken, 1))

    expected = [run([number])[0] for number in range(len(lengths))]
    for batch in ([5, 4, 3, 2, 1, 0], [2, 0], [0, 1, 2, 3, 4, 5]):
        for number, found in zip(batch, run(batch), strict=True):
            assert same(found, expected[number])
