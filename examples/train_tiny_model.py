"""Trains two KDA layers to know one sequence by heart: on a CPU in seconds, on a GPU with the kernels.

python examples/train_tiny_model.py [--compile] [--device cuda] [--steps 30]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from cula.kda import chunk_kda


class KimiDeltaAttention(nn.Module):
    """`[B, T, width]` to the same: short convolutions, KDA with its gate inside, a gated norm and a projection."""

    def __init__(self, width: int, heads: int, dim: int, taps: int = 4) -> None:
        super().__init__()
        self.heads, self.taps, inner = heads, taps, heads * dim
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.convolution = nn.Conv1d(3 * inner, 3 * inner, taps, groups=3 * inner, bias=False)
        self.decay = nn.Sequential(
            nn.Linear(width, dim, bias=False), nn.Linear(dim, inner, bias=False)
        )
        self.beta = nn.Linear(width, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.gate = nn.Sequential(nn.Linear(width, dim, bias=False), nn.Linear(dim, inner))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(
            self.qkv(x).transpose(1, 2), (self.taps - 1, 0)
        )  # no token sees a later one
        mixed = nn.functional.silu(self.convolution(padded)).transpose(1, 2).contiguous()
        q, k, v = mixed.unflatten(-1, (3, self.heads, -1)).unbind(2)
        o, _ = chunk_kda(
            q, k, v, self.decay(x).unflatten(-1, (self.heads, -1)), self.beta(x), use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip
        gate = self.gate(x).unflatten(-1, (self.heads, -1)).sigmoid()
        return self.out((self.norm(o) * gate).flatten(2))


class TinyModel(nn.Module):
    """Token numbers `[B, T]` to logits `[B, T, vocabulary]`."""

    def __init__(self, vocabulary: int, width: int, heads: int, dim: int, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(KimiDeltaAttention(width, heads, dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(layers))
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x))
        return self.logits(x)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    torch.manual_seed(0)
    dim = 128 if options.device.startswith("cuda") else 16  # head dimension of the kernels
    model = TinyModel(vocabulary=32, width=64, heads=2, dim=dim).to(options.device)
    tokens = torch.randint(32, (1, 49), device=options.device)
    if options.compile:
        # Layers that are alike share one graph; "aot_eager" needs no C++ compiler.
        backend = "inductor" if options.device.startswith("cuda") else "aot_eager"
        for layer in model.layers:
            layer.compile(fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        with torch.autocast(options.device.split(":")[0], torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    print(f"last      loss {loss.item():.4f}")
    if loss.item() > 0.1:
        raise SystemExit("the sequence was not learnt")


if __name__ == "__main__":
    main()
