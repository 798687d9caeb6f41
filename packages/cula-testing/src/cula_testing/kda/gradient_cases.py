"""The inputs that the gradients of KDA are judged by, whatever computes them, and how near they must come.

case = gradient_case("mixed", (100, 0, 200), heads=(1, 2), initial=True, dht=True)
o, final = chunk_kda(**case.leaves, **case.flags)                 the public function
run(BackwardCall(**case.fields), found)                           the kernels behind it
check(found, case)                                                against the chunked backward in fp64
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from cula_core.reference.kda_backward import Gradients, chunk_kda_backward

from ..comparing import relative_rmse
from .inputs import LOWER_BOUNDS, raw_gate

# Where what cancels must cancel comes first: channels that keep everything beside tokens that lose it.
CLASSES = (
    "mixed",  # log decays of -4.95 or -1e-4, at random
    "moderate",  # -0.02 .. -0.32
    "strong",  # -2 .. -4.9
    "near_zero",  # -1e-4
    "correlated_keys",  # keys that have a part in common, strong writes, decays near zero
    "equal_keys",  # every key 8 times in a row, the same
    "weak_strengths",  # sigmoid(-14 .. 0)
)
# "resets": moderate, but -1000 in every twentieth token or so; no bounded gate has it.
UNBOUNDED = "resets"
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# Relative RMSE of the worst head, results in 16 bits, by the operands of the tensor cores: of most inputs, and of keys
# that are alike.
BARS = {
    "float16": {"dq": 2.0e-3, "dk": 2.0e-3, "dv": 2.0e-3, "dg": 2.1e-3, "dbeta": 2.2e-3},
    "bfloat16": dict.fromkeys(("dq", "dk", "dv", "dg", "dbeta"), 6e-3),
}
ALIKE_BARS = {"float16": 2.5e-3, "bfloat16": 1.3e-2}
SUM_BARS = {
    "float16": {"dA_log": 3e-3, "ddt_bias": 3e-3, "dh0": 1e-3},
    "bfloat16": {"dA_log": 1e-2, "ddt_bias": 1e-2, "dh0": 5e-3},
}
# Of independent errors: what a sum may be off, as a part of the norm of its terms; and by how many bars one number may.
OF_TERMS = {"float16": 2e-3, "bfloat16": 1e-2}
FEW = 4


@dataclass(frozen=True, eq=False)
class GradientCase:
    """A call, gradients of its results and what is to come out.

    given: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens by name. do like v. dht like the final states, or
    None. rules: as the oracle takes them.
    """

    kind: str
    given: dict[str, Tensor | None]
    do: Tensor
    dht: Tensor | None
    rules: dict[str, Any]
    operand: str = "float16"

    @functools.cached_property
    def expected(self) -> Gradients:
        """In fp64, from the very numbers that the kernels get, where these are."""
        return chunk_kda_backward(
            **self.given, do=self.do, dht=self.dht, **self.rules, dtype=torch.float64
        )

    @property
    def bounded(self) -> bool:
        """Whether the call promises log decays in [-5, 0)."""
        return self.kind != UNBOUNDED and self.rules["gate"] != "softplus"

    @property
    def flags(self) -> dict[str, Any]:
        """Options of the public function."""
        rules, inside = self.rules, self.rules["gate"] != "log"
        safe = rules["gate"] == "safe"
        return {
            "scale": rules["scale"], "use_qk_l2norm_in_kernel": rules["l2norm"], "use_gate_in_kernel": inside,
            "use_beta_sigmoid_in_kernel": rules["beta_sigmoid"], "allow_neg_eigval": rules["neg_eigval"],
            "safe_gate": self.bounded, "lower_bound": rules["lower_bound"] if safe else None,
            "state_v_first": rules["state_v_first"], "operand_dtype": getattr(torch, self.operand),
        }  # fmt: skip

    @property
    def fields(self) -> dict[str, Any]:
        """Arguments of the backward operator by name."""
        more = {"do": self.do, "dht": self.dht, "bounded": self.bounded, "operand": self.operand}
        return self.given | self.rules | more | {"cu_seqlens_cpu": None}

    def with_gradients(self, do: Tensor, dht: Tensor | None = None) -> GradientCase:
        """The same call with other gradients of its results."""
        return replace(self, do=do, dht=dht)

    def places(self) -> list[tuple[int, slice]]:
        """Row and tokens of every sequence."""
        rows, tokens = self.do.shape[:2]
        offsets = self.given["cu_seqlens"]
        if offsets is None:
            return [(row, slice(0, tokens)) for row in range(rows)]
        bounds = offsets.tolist()
        return [(0, slice(*pair)) for pair in zip(bounds[:-1], bounds[1:])]


def gradient_case(
    kind: str,
    size: Sequence[int] | tuple[int, int],
    heads: tuple[int, int] = (2, 2),
    *,
    packed: bool = True,
    gate: str = "safe",
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype = torch.float32,
    initial: bool = False,
    dht: bool = False,
    parameters: bool = True,
    device: torch.device | str = "cpu",
    operand: str = "float16",
    seed: int = 7,
    dim: int = 128,
    **rules: Any,
) -> GradientCase:
    """Returns a case of one of the `CLASSES`, or `UNBOUNDED`.

    size: lengths of packed sequences, or B and T without `packed`. heads: of q and k, and of v. parameters: whether a
    gate inside has A_log and dt_bias. rules: those of the oracle, where others are wanted.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    batch, tokens = (1, sum(size)) if packed else size
    count = len(size) if packed else batch
    shape, shape_v = (batch, tokens, heads[0], dim), (batch, tokens, heads[1], dim)
    q, k, v, do, u = (
        normal(*shape),
        normal(*shape),
        normal(*shape_v),
        normal(*shape_v),
        uniform(*shape_v),
    )
    logits = normal(*shape_v[:3])
    decays = -1e-4 * (0.2 + u)
    if kind in ("moderate", UNBOUNDED):
        decays = -0.02 - 0.3 * u
    elif kind == "strong":
        decays = -2.0 - 2.9 * u
    elif kind == "mixed":
        decays = torch.where(u > 0.5, -4.95, -1e-4)
    elif kind == "correlated_keys":
        k, logits = normal(batch, 1, heads[0], dim) + 0.3 * k, logits + 2
    elif kind == "equal_keys":
        k, logits = k[:, torch.arange(tokens) // 8], logits + 3
    elif kind == "weak_strengths":
        logits = -14 * uniform(*shape_v[:3])
    if kind == UNBOUNDED:
        decays = torch.where(uniform(*shape_v[:3], 1) < 0.05, -1000.0, decays)
    options = {
        "scale": dim**-0.5, "gate": gate, "lower_bound": LOWER_BOUNDS[gate], "l2norm": True, "beta_sigmoid": True,
        "neg_eigval": False, "state_v_first": False,
    } | rules  # fmt: skip
    if not options["l2norm"]:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    parameters = parameters and gate != "log"
    rate, bias = 1 + uniform(heads[1]), 0.5 * normal(heads[1], dim)
    if not parameters:
        rate, bias = torch.ones_like(rate), torch.zeros_like(bias)
    states, d_states = (normal(count, heads[1], dim, dim) for _ in range(2))
    given: dict[str, Tensor | None] = {
        "q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype),
        "g": raw_gate(decays, rate, bias, gate).to(gate_dtype),
        "beta": (logits if options["beta_sigmoid"] else logits.sigmoid()).to(beta_dtype),
        "A_log": rate.log().float() if parameters else None,
        "dt_bias": bias.flatten().float() if parameters else None,
        "initial_state": states.float() if initial else None,
        "cu_seqlens": torch.tensor([0, *size]).cumsum(0).to(torch.int32) if packed else None,
    }  # fmt: skip
    given = {name: x if x is None else x.contiguous().to(device) for name, x in given.items()}
    do, d_states = do.to(dtype).to(device), d_states.float().to(device)
    return GradientCase(kind, given, do, d_states if dht else None, options, operand)


def check(found: Gradients, case: GradientCase) -> dict[str, float]:
    """Holds the relative RMSE of the worst head of every gradient to its bar; returns them.

    dA_log, a number per head, is taken as a whole. A bar gives way to what the rounding of few numbers alone loses:
    each is a sum of products that may cancel, and so may those of dA_log.
    """
    __tracebackhide__ = True
    bars = BARS[case.operand]
    if case.kind in ("correlated_keys", "equal_keys"):
        bars = dict.fromkeys(bars, ALIKE_BARS[case.operand])
    bars = bars | SUM_BARS[case.operand]
    errors, beyond = {}, []
    for name, actual, exact in zip(Gradients._fields, found, case.expected, strict=True):
        assert (actual is None) == (exact is None), name
        if actual is None or exact is None:
            continue
        assert actual.shape == exact.shape, name
        for one, other in zip(_by_head(name, actual, case), _by_head(name, exact, case)):
            error = relative_rmse(one, other)
            limit = bars[name] * (1 + FEW / one.numel())
            limit = max(limit, 1.2 * relative_rmse(other.to(one.dtype), other))
            if name == "dA_log":
                limit = max(
                    limit, OF_TERMS[case.operand] * float(_terms(case).norm() / other.norm())
                )
            errors[name] = max(error, errors.get(name, 0.0))
            if not error <= limit:
                beyond.append(f"{name} {error:.2e}, limit {limit:.2e}")
    assert not beyond, f"{case.kind}: relative RMSE of a head: {'; '.join(beyond)}"
    return errors


def _terms(case: GradientCase) -> Tensor:
    """Returns the terms that dA_log is the sum of, in fp64."""
    g, A_log, dt_bias = (case.given[name] for name in ("g", "A_log", "dt_bias"))
    assert g is not None and A_log is not None and dt_bias is not None
    shifted = g.double() + dt_bias.double().view(g.shape[2:])
    if case.rules["gate"] == "softplus":
        shifted = softplus(shifted) / shifted.sigmoid()
    return case.expected.dg * shifted


def _by_head(name: str, x: Tensor, case: GradientCase) -> Tensor:
    if name == "dA_log":
        return x[None]
    if name == "ddt_bias":
        return x.reshape(case.do.shape[2], -1)
    return x.transpose(0, 1 if name == "dh0" else 2)


def through_autograd(
    chunk_kda: Callable[..., tuple], case: GradientCase, **options: Any
) -> Gradients:
    """Returns the gradients that autograd finds through a package's function; None for an input that is None.

    options: those of the function beside the flags of the case.
    """
    given = dict(case.given)
    leaves = {n: x.detach().clone().requires_grad_() for n in NAMES if (x := given[n]) is not None}
    o, final = chunk_kda(
        **given | leaves, **case.flags, **options, output_final_state=case.dht is not None
    )
    pairs = [(o, case.do), *([] if case.dht is None else [(final, case.dht)])]
    results, grads = zip(*((y, d.to(y.dtype)) for y, d in pairs))
    found = iter(torch.autograd.grad(results, list(leaves.values()), grads))
    return Gradients(*(next(found) if name in leaves else None for name in NAMES))  # type: ignore[arg-type]
