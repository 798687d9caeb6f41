"""The inputs that the tests of KDA share, and what the recurrence makes of them.

given = inputs(1, 300, 2, 4, "mixed", gate="safe", lengths=(100, 0, 200), initial=True)
o, final = expected(given, "safe", l2norm=True)                        fp64
chunk_kda(**given, **flags("safe"), use_qk_l2norm_in_kernel=True)      what is to be compared
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cula_core.reference import kda as reference

from ..tensors import int32

LOWER_BOUNDS = {"log": 0.0, "softplus": 0.0, "safe": -5.0}
GATES = tuple(LOWER_BOUNDS)
# All log decays lie in [-5, 0).
BOUNDED_KINDS = (
    "typical",  # strong gates of every size
    "moderate",  # around -0.05: a memory of 20 to 100 tokens
    "mixed",  # -5 in one channel, -1e-4 in its neighbour; they change roles in every tenth token or so
    "near_zero",  # at most 1e-5
    "strong",  # -5 everywhere
    "correlated_weak",  # keys 10 % apart, strengths near 1, gates of at most 1e-5
    "correlated_moderate",  # the same with moderate gates
    "equal_keys",  # every key 8 times in a row, strengths near 1, gates of at most 1e-3
    "one_key",  # one key per head for all tokens, strength 1, gates of 1e-6
)
# "resets": moderate, but -1000 in all channels of every twentieth token or so, and now and then in a single one.
KINDS = (*BOUNDED_KINDS, "resets")


def inputs(
    batch: int,
    tokens: int,
    heads: int,
    heads_v: int,
    kind: str = "typical",
    dtype: torch.dtype = torch.bfloat16,
    gate: str = "safe",
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    initial: bool = False,
    device: torch.device | str = "cpu",
    *,
    dim_k: int = 128,
    dim_v: int = 128,
    gate_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    logits: bool = False,
    normalized: bool = False,
    states: int | None = None,
    state_v_first: bool = False,
) -> dict[str, Tensor | None]:
    """q, k, v, g, beta, A_log, dt_bias, initial_state and cu_seqlens by name, as the public function takes them.

    The same numbers, up to rounding, on every device and for every dtype, gate and layout. q and k have normal entries:
    they are meant for the L2 norm inside, or come `normalized`. g is what `gate` turns into the decays of `kind`.
    lengths: of packed sequences, which sum to `tokens`. initial: whether states are given, `states` of them (None: one
    per sequence). logits: beta goes through a sigmoid. Dtypes that are None: fp64 if `dtype` is, else fp32.
    """
    if kind not in KINDS or gate not in GATES or (kind == "resets" and gate == "safe"):
        raise ValueError(f"no {kind} decays from a {gate} gate")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    sequences = batch if lengths is None else len(lengths)
    q, k = normal(batch, tokens, heads, dim_k), normal(batch, tokens, heads, dim_k)
    v = normal(batch, tokens, heads_v, dim_v)
    beta = normal(batch, tokens, heads_v).sigmoid()
    state = normal(sequences if states is None else states, heads_v, dim_k, dim_v)
    rate, bias = 1 + 3 * uniform(heads_v), 0.5 * normal(heads_v, dim_k)
    if normalized:
        q = q / q.norm(dim=-1, keepdim=True)
    if kind.startswith("correlated"):
        k = k[:, :1] + 0.1 * normal(*k.shape)
    elif kind == "equal_keys":
        k = k[:, torch.arange(tokens) // 8]
    elif kind == "one_key":
        k, beta = k[:, :1].expand_as(k), torch.ones_like(beta)
    if kind.startswith("correlated") or kind == "equal_keys":
        beta = 1 - 0.01 * uniform(*beta.shape)
    if normalized:
        k = k / k.norm(dim=-1, keepdim=True)
    decays = _log_decays(kind, normal(batch, tokens, heads_v, dim_k), uniform)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    raw = gate != "log"
    given = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "g": raw_gate(decays, rate, bias, gate).to(gate_dtype or exact),
        "beta": (_logit(beta) if logits else beta).to(beta_dtype or exact),
        "A_log": rate.log().float() if raw else None,
        "dt_bias": bias.flatten().float() if raw else None,
        "initial_state": state.to(exact) if initial else None,
        "cu_seqlens": None if lengths is None else int32(0, *lengths).cumsum(0, dtype=torch.int32),
    }
    if initial and state_v_first:
        given["initial_state"] = given["initial_state"].mT.contiguous()
    return {name: x if x is None else x.contiguous().to(device) for name, x in given.items()}


def flags(gate: str, kind: str = "typical") -> dict:
    """What the public function is told about g."""
    if gate == "log":
        return {"safe_gate": kind in BOUNDED_KINDS}
    if gate == "softplus":
        return {"use_gate_in_kernel": True}
    return {"use_gate_in_kernel": True, "lower_bound": LOWER_BOUNDS[gate], "safe_gate": True}


def expected(
    given: dict, gate: str = "safe", dtype: torch.dtype = torch.float64, **options
) -> tuple[Tensor, Tensor]:
    """Outputs and final states of the recurrence; options are those of `reference.recurrent_prefill`."""
    bound = LOWER_BOUNDS[gate]
    return reference.recurrent_prefill(
        **given, gate=gate, lower_bound=bound, dtype=dtype, **options
    )


def _log_decays(kind: str, x: Tensor, uniform: Callable[..., Tensor]) -> Tensor:
    """From normal x, and more numbers where the kind needs them."""
    moderate = -5 * (x - 5).sigmoid()
    if kind == "typical":
        return -5 * (torch.e * x).sigmoid()
    if kind in ("moderate", "correlated_moderate"):
        return moderate
    if kind == "resets":
        hit = (uniform(*x.shape[:3], 1) < 0.05) | (uniform(*x.shape) < 0.005)
        return torch.where(hit, -1000.0, moderate)
    if kind == "mixed":
        odd = torch.arange(x.shape[-1]) % 2 == 1
        return torch.where(odd ^ (uniform(*x.shape[:3], 1) < 0.1), -1e-4, -5.0).to(x.dtype)
    if kind in ("strong", "one_key"):
        return torch.full_like(x, -5.0 if kind == "strong" else -1e-6)
    # Never quite zero, in fp16 either.
    return (-1e-3 if kind == "equal_keys" else -1e-5) * (0.1 + 0.9 * uniform(*x.shape))


def raw_gate(decays: Tensor, rate: Tensor, bias: Tensor, gate: str) -> Tensor:
    """What `gate` turns into these decays: the inverse of its function."""
    if gate == "log":
        return decays
    if gate == "safe":
        return _logit(decays / LOWER_BOUNDS["safe"]) / rate[:, None] - bias
    size = -decays / rate[:, None]
    return size + (-torch.expm1(-size)).log() - bias


def _logit(share: Tensor) -> Tensor:
    """Finite for 1 too, where the sigmoid in fp32 is 1 again."""
    return share.clamp(1e-12, 1 - 1e-12).logit()
