"""Problems of decode: random inputs, the oracle in fp64, and the static facts that belong to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cula_core.reference import delta_decode as reference
from cula_core.reference.delta_decode import Gates, Replay
from cula_delta_decode.config import Gate, Problem
from cula_testing.tensors import column, int32

SLOTS = (5, -1, 0, 3)
POOL = 7
PADDING = -1


@dataclass(frozen=True)
class Case:
    """What a problem is made of; `Problem` has the words. gate: (kind, channels). beta: of STRENGTHS."""

    gate: tuple[str, bool] = ("softplus", False)
    strength: str = "logits"
    doubled: bool = False
    tokens: int = 1
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (1, 2)
    state_v_first: bool = True
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    gate_dtype: str = "bfloat16"
    rate: bool = True
    bias: str | None = "float32"
    l2norm: bool = True
    begins: bool = True
    indexed: bool = True
    packed: bool = False
    null_slot: int = -1

    def static_gate(self) -> Gate:
        kind, channels = self.gate
        raw = kind in ("softplus", "safe")
        given = self.strength != "one"
        return Gate(
            kind,
            channels and kind != "none",
            self.gate_dtype if kind != "none" else "float32",
            raw and self.rate,
            self.bias if raw else None,
            self.strength,
            self.gate_dtype if given else "float32",
            self.doubled and self.strength == "logits",
        )

    def options(self) -> dict:
        """The options of the reference that say what g and beta are."""
        kind, _ = self.gate
        gates = Gates(
            in_kernel=kind in ("softplus", "safe"),
            lower_bound=-5.0 if kind == "safe" else None,
            beta_sigmoid=self.strength == "logits",
            neg_eigval=self.doubled,
        )
        return {"gates": gates, "l2norm": self.l2norm, "state_v_first": self.state_v_first}


@dataclass
class Inputs:
    """Tensors of a case, as a kernel gets them; `lengths` of the rows where they are packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state: Tensor
    slots: Tensor | None
    cu_seqlens: Tensor | None = None
    lengths: list[int] = field(default_factory=list)

    def to(self, device: torch.device | str) -> Inputs:
        """The same on a device."""
        moved = {n: x.to(device) for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def wide(self, *names: str) -> dict[str, Tensor | None]:
        """Copies in fp64 by name."""
        return {n: None if getattr(self, n) is None else getattr(self, n).double() for n in names}


def make_inputs(case: Case, rows: int = 4, seed: int = 0) -> Inputs:
    """Random inputs of `rows` rows: slots SLOTS where indexed, ragged lengths where packed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: str = "float32") -> Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    (heads, heads_v), (dim_k, dim_v) = case.heads, case.dims
    lengths = [case.tokens] * rows
    batch, tokens = rows, case.tokens
    if case.packed:
        lengths = [(case.tokens - n) % (case.tokens + 1) for n in range(rows)]
        batch, tokens = 1, sum(lengths) + 2  # two tokens that no row has
    kind, channels = case.gate
    width = (dim_k,) if channels else ()
    g = None
    if kind != "none":
        g = normal(batch, tokens, heads_v, *width, dtype=case.gate_dtype)
        g = -g.abs() / 4 if kind == "log" else g
    beta = None
    if case.strength != "one":
        beta = normal(batch, tokens, heads_v, dtype=case.gate_dtype)
        beta = beta.abs().clamp(max=1) if case.strength == "given" else beta
    matrix = (dim_v, dim_k) if case.state_v_first else (dim_k, dim_v)
    gate = case.static_gate()
    offsets = None
    if case.packed:
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    scale = 1.0 if case.l2norm else dim_k**-0.5
    return Inputs(
        q=normal(batch, tokens, heads, dim_k, dtype=case.dtype),
        k=(normal(batch, tokens, heads, dim_k) * scale).to(getattr(torch, case.dtype)),
        v=normal(batch, tokens, heads_v, dim_v, dtype=case.dtype),
        g=g,
        beta=beta,
        A_log=normal(heads_v) / 2 if gate.rate else None,
        dt_bias=normal(heads_v, *(width or (1,)), dtype=gate.bias) if gate.bias else None,
        state=normal(POOL, heads_v, *matrix, dtype=case.state_dtype),
        slots=column(int32(*SLOTS[:rows])) if case.indexed else None,
        cu_seqlens=offsets,
        lengths=lengths,
    )


def problem_of(case: Case, **changes) -> Problem:
    """The static facts of a case."""
    facts = Problem(
        case.dtype, case.state_dtype, *case.dims, case.tokens, case.state_v_first, case.static_gate(),
        l2norm=case.l2norm, begins=case.begins, slots=int(case.indexed), packed=case.packed,
    )  # fmt: skip
    return replace(facts, **changes)


def exact(case: Case, x: Inputs, **options) -> tuple[Tensor, Tensor]:
    """Outputs and the pool in fp64, updated in place unless other options are given."""
    wide = x.wide("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")
    state = wide.pop("state")
    given = {"next_state": state, "state_indices": x.slots, "cu_seqlens": x.cu_seqlens}
    if case.packed:
        given["max_tokens"] = case.tokens
    q, k, v, g, beta = (wide.pop(n) for n in ("q", "k", "v", "g", "beta"))
    out = reference.delta_rule_decode(
        q, k, v, g, beta, state if case.begins else None, **wide, **given | case.options() | options
    )  # fmt: skip
    return out, state


def public(case: Case, x: Inputs) -> dict:
    """The arguments of `delta_rule_decode` but q, k and v, which it is called with by position."""
    kind, _ = case.gate
    return {
        "g": x.g,
        "beta": x.beta,
        "state": x.state,
        "state_indices": x.slots,
        "A_log": x.A_log,
        "dt_bias": None if x.dt_bias is None else x.dt_bias.flatten(),
        "lower_bound": -5.0 if kind == "safe" else None,
        "use_gate_in_kernel": kind in ("softplus", "safe"),
        "use_beta_sigmoid_in_kernel": case.strength == "logits",
        "allow_neg_eigval": case.doubled and case.strength == "logits",
        "use_qk_l2norm_in_kernel": case.l2norm,
        "state_v_first": case.state_v_first,
        "cu_seqlens": x.cu_seqlens,
        "max_tokens": case.tokens if case.packed else None,
    }


def new_replay(case: Case, length: int) -> Replay:
    """Empty rings for the pool, with NaN where nothing has been recorded."""
    (heads, heads_v), (dim_k, dim_v) = case.heads, case.dims
    factors = (heads_v, dim_k) if case.static_gate().channels else (heads_v,)
    nan = float("nan")
    return Replay(
        torch.full((POOL, length, heads, dim_k), nan, dtype=getattr(torch, case.dtype)),
        torch.full((POOL, length, heads_v, dim_v), nan),
        torch.full((POOL, length, *factors), nan),
        torch.zeros(POOL, heads_v, dim_v // 8, dtype=torch.int32),
    )
