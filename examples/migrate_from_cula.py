"""A serving step of Lightning attention and KDA, written for cuLA of inclusionAI and for this library.

Run it with `python examples/migrate_from_cula.py`; without a GPU it takes a few seconds. One half of each step keeps
the calls of cuLA under other imports, the other half makes the same step with our functions, and both must agree.
"""

from __future__ import annotations

import torch

from cula import compat
from cula.delta import delta_rule_decode
from cula.lightning import lightning_attn_fwd_varlen, linear_attention_decode

HEADS, DIM, SLOTS = 4, 64, 8
LENGTHS = (70, 30)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    decay = torch.linspace(0.01, 0.5, HEADS, device=device)
    rows = torch.tensor([5, 2], dtype=torch.int32, device=device)  # the slot of each sequence
    cu_seqlens = torch.tensor([0, 70, 100], dtype=torch.int32, device=device)
    prompt = [rand(1, sum(LENGTHS), HEADS, DIM) for _ in "qkv"]
    token = [rand(2, HEADS, DIM) for _ in "qkv"]
    theirs = torch.zeros(SLOTS, HEADS, DIM, DIM, device=device)  # [slots, H, V, K]
    ours = theirs.clone()

    # Lightning attention: the prompts, then one more token for each of them.
    # cuLA: scale 1.0 by default, states [V, K], outputs of decode into a buffer, strides by hand.
    o, _ = compat.lightning.lightning_attn_fwd_varlen(
        *prompt, decay, cu_seqlens, state_pool=theirs, initial_state_indices=rows
    )
    out = torch.empty_like(token[0])
    compat.lightning.linear_attention_decode(
        *token, theirs, out, 1.0, 0, 0, 0, 0, 0, rows, decay, DIM, DIM, DIM
    )
    # Here: scale and layout are said, and decode takes 1 to 8 tokens per row.
    o2, _ = lightning_attn_fwd_varlen(
        *prompt, decay, cu_seqlens, 1.0, ours, rows, state_v_first=True
    )
    out2 = linear_attention_decode(
        *(x[:, None] for x in token),
        ours,
        decay,
        state_indices=rows,
        scale=1.0,
        state_v_first=True,
    )
    torch.testing.assert_close((o, out, theirs), (o2, out2[:, 0], ours), rtol=0, atol=0)
    print(f"Lightning attention: {sum(LENGTHS)} tokens, then one each: equal")

    # KDA: one token for each row, with raw gates, on a pool of its own.
    q, k, v = (rand(2, 1, HEADS, DIM) for _ in "qkv")
    a, b = rand(2, HEADS, DIM), rand(2, HEADS)
    A_log, dt_bias = torch.zeros(HEADS, device=device), torch.zeros(HEADS, DIM, device=device)
    theirs.zero_(), ours.zero_()
    o = compat.kda.kda_decode(A_log, dt_bias, q, k, v, a, b, theirs, rows)
    o2 = delta_rule_decode(
        q, k, v, a[:, None], b[:, None], ours, state_indices=rows, A_log=A_log, dt_bias=dt_bias
    )
    torch.testing.assert_close((o, theirs), (o2, ours), rtol=0, atol=0)
    print("KDA: one token each: equal")


if __name__ == "__main__":
    main()
