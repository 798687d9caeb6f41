"""The gradients of chunks on the CPU, against autograd through the recurrence of every chunk in fp64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from cula_core.compiled.artifacts import Unit
from cula_core.delta_rule.config import CHUNK, HEAD_DIM
from cula_cp_sm90.backward.config import GradientsConfig
from cula_emulator import mutation, resources
from cula_emulator.pytest_plugin import BoundKernel
from cula_testing.comparing import relative_rmse
from cula_testing.compiled import emulated_kernel, report
from cula_testing.machine_code import assert_ctas_fit, label
from cula_testing.repeating import Repeated

SCALE, LOWER = 0.25, -5.0
NAMES = ("q", "k", "g", "beta", "rate", "bias")


@dataclass(frozen=True)
class Problem:
    """lengths: of the rows of a dense batch, or of packed sequences. decays: what log decays are like. size: of do."""

    config: GradientsConfig
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)
    decays: str = "moderate"
    size: float = 1.0
    seed: int = 0
    given: dict[str, Tensor] = field(default_factory=dict, compare=False)

    @property
    def packed(self) -> bool:
        return self.config.index_dtype is not None

    def chunks(self) -> list[tuple[int, int, int, int, int]]:
        """Returns (slot, sequence, row of the batch, first token, tokens) of every chunk that has tokens."""
        found, start = [], 0
        for n, length in enumerate(self.lengths):
            first = start // CHUNK + n if self.packed else n * -(-length // CHUNK)
            row, begin = (0, start) if self.packed else (n, 0)
            for i in range(-(-length // CHUNK)):
                size = min(CHUNK, length - CHUNK * i)
                found.append((first + i, n, row, begin + CHUNK * i, size))
            start += length
        return found

    @property
    def slots(self) -> int:
        if self.packed:
            return sum(self.lengths) // CHUNK + len(self.lengths)
        return sum(-(-length // CHUNK) for length in self.lengths)


def make(config: GradientsConfig, lengths: tuple[int, ...], **more) -> Problem:
    """Returns a problem with its inputs in fp64, rounded as the kernel is given them."""
    problem = Problem(config, lengths, **more)
    torch.manual_seed(problem.seed)
    batch, tokens = (1, sum(lengths)) if problem.packed else (len(lengths), lengths[0])
    h, hv = problem.heads
    dtype, gate = getattr(torch, config.dtype), getattr(torch, config.gate_dtype)
    x = problem.given
    size = 1.0 if config.l2norm else HEAD_DIM**-0.5
    for name, heads in (("q", h), ("k", h), ("do", hv), ("v", hv)):
        x[name] = torch.randn(batch, tokens, heads, HEAD_DIM).to(dtype)
    x["q"], x["k"], x["do"] = size * x["q"], size * x["k"], problem.size * x["do"]
    g = torch.randn(batch, tokens, hv, HEAD_DIM)
    if config.gate == "log":
        mixed = torch.where(g > 0, -1e-4, -4.95 - 0.04 * torch.rand_like(g))
        g = {"mixed": mixed, "moderate": -0.2 * g.abs()}[problem.decays]
    elif problem.decays == "mixed":
        g = torch.where(g > 0, *((-12.0, 5.0) if config.bounded else (-6.0, 20.0)))
    x["g"] = g.to(gate)
    beta = torch.randn(batch, tokens, hv)
    x["beta"] = (beta if config.beta_sigmoid else beta.sigmoid()).to(
        getattr(torch, config.beta_dtype)
    )
    x["rate"], x["bias"] = 0.3 * torch.randn(hv), torch.randn(hv, HEAD_DIM)
    for name in ("states", "d_states"):
        state = torch.randn(problem.slots, hv, HEAD_DIM, HEAD_DIM)  # [K, V]
        x[name] = (0.3 * state).half() if name == "states" else 0.1 * problem.size * state
    return problem


def inputs(problem: Problem, q, k, g, beta, rate, bias):
    """Returns what the recurrence reads: q~, k~, log decays, r."""
    config = problem.config
    if config.l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if config.gate != "log":
        g, speed = g + bias if config.bias else g, rate.exp() if config.rate else 1.0
        g = (
            LOWER * (speed * g).sigmoid()
            if config.gate == "safe"
            else -speed * torch.nn.functional.softplus(g)
        )
    if config.beta_sigmoid:
        beta = beta.sigmoid()
    r = (2.0 * beta if config.neg_eigval else beta).sqrt()
    return SCALE * q, r[:, None] * k, g, r


def expected(problem: Problem) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Returns by slot and head the gradients of NAMES, z and y, in fp64."""
    x, found = problem.given, {}
    group = problem.heads[1] // problem.heads[0]
    for slot, _, row, token, size in problem.chunks():
        rows = slice(token, token + size)
        for head in range(problem.heads[1]):
            own = [x[name][row, rows, head // group] for name in ("q", "k")]
            own += [x[name][row, rows, head] for name in ("g", "beta")] + [
                x["rate"][head],
                x["bias"][head],
            ]
            leaves = [leaf.double().requires_grad_() for leaf in own]
            q, k, g, r = inputs(problem, *leaves)
            v = r[:, None] * x["v"][row, rows, head].double()
            v.retain_grad()
            do = x["do"][row, rows, head].double()
            state, loss, zs = x["states"][slot, head].double(), 0.0, []
            for t in range(size):
                state = g[t].exp()[:, None] * state
                z = v[t] - state.T @ k[t]
                state = state + k[t][:, None] * z
                loss = loss + do[t] @ (state.T @ q[t])
                zs.append(z.detach())
            (loss + (state * x["d_states"][slot, head].double()).sum()).backward()
            grads = {
                name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for name, leaf in zip(NAMES, leaves)
            }
            found[slot, head] = grads | {
                "z": torch.stack(zs), "y": v.grad, "v": r.detach()[:, None] * v.grad,
            }  # fmt: skip
    return found


def image(x: Tensor) -> Tensor:
    """Returns [64, columns] as panels of 64 columns with the 128-byte swizzle."""
    rows = torch.arange(64)[:, None]
    panels = x.unflatten(1, (-1, 8, 8)).movedim(1, 0)
    return torch.stack([panel[rows, torch.arange(8) ^ rows % 8] for panel in panels]).flatten()


def compiled(emulated, config: GradientsConfig) -> BoundKernel:
    return emulated_kernel(emulated, Unit("cula_cp_sm90.backward.build", config, "sm_90a"))


def run(
    emulated, problem: Problem, exact, ctas: int = 1, kernel: Callable[..., None] | None = None
) -> dict[str, Tensor]:
    """Returns what the kernel writes. kernel: the one to call, if it is not `compiled`."""
    config, x = problem.config, dict(problem.given)
    hv, slots = problem.heads[1], problem.slots
    operand = getattr(torch, config.operand)
    starts = [sum(problem.lengths[:n]) for n in range(len(problem.lengths) + 1)]
    peaks = torch.zeros(len(problem.lengths), hv)
    for _, sequence, row, token, size in problem.chunks():
        most = x["do"][row, token : token + size].float().abs().amax((0, 2))
        peaks[sequence] = torch.maximum(peaks[sequence], most)
    grown = torch.where(peaks > 0, 2.0 ** (1 - peaks.log2().floor()), 1.0)
    factors = torch.full((slots, hv, 4, CHUNK), float("nan"))
    images = {
        name: torch.full((slots, hv, 2, size), float("nan"), dtype=operand)
        for name, size in (("states", 8192), ("d_states", 8192), ("z", 4096), ("minus_y", 4096))
    }
    group = hv // problem.heads[0]
    for slot, sequence, row, token, size in problem.chunks():
        rows = slice(token, token + size)
        for head in range(hv):
            own = exact[slot, head]
            norms = [
                (x[name][row, rows, head // group].double().square().sum(-1) + 1e-6).rsqrt()
                if config.l2norm else torch.ones(size) for name in ("q", "k")
            ]  # fmt: skip
            beta = x["beta"][row, rows, head].double()
            beta = beta.sigmoid() if config.beta_sigmoid else beta
            root = (2 * beta if config.neg_eigval else beta).sqrt()
            factors[slot, head] = 1.0
            factors[slot, head, :, :size] = torch.stack([root, *norms, root]).float()
            power = grown[sequence, head].double()
            padded = torch.zeros(2, 64, HEAD_DIM, dtype=torch.float64)
            padded[0, :size], padded[1, :size] = own["z"], -power * own["y"]
            matrices = {
                "states": x["states"][slot, head].double().T, "d_states": power * x["d_states"][slot, head].double().T,
                "z": padded[0].T, "minus_y": padded[1].T,
            }  # fmt: skip
            for name, matrix in matrices.items():
                for tile in range(2):
                    half = matrix[64 * tile : 64 * tile + 64]
                    half = half if name.endswith("states") else half.T
                    images[name][slot, head, tile] = image(half).to(operand)
    shape = x["do"].shape
    dtype = x["q"].dtype
    out = {
        "q": emulated.empty(shape, dtype), "k": emulated.empty(shape, dtype),
        "v": emulated.empty(shape, dtype), "g": emulated.empty(shape, x["g"].dtype),
        "beta": emulated.empty(shape[:3], x["beta"].dtype),
        "rate": emulated.empty((slots, hv), torch.float32) if config.rate else None,
        "bias": emulated.empty((slots, hv, HEAD_DIM), torch.float32) if config.bias else None,
    }  # fmt: skip
    if config.index_dtype:
        cu_seqlens = torch.tensor(starts, dtype=getattr(torch, config.index_dtype))
    (kernel or compiled(emulated, config))(
        x["q"], x["k"], x["g"], x["do"], x["rate"] if config.rate else None,
        x["bias"].flatten() if config.bias else None, factors, peaks.view(torch.int32), *images.values(),
        cu_seqlens if config.index_dtype else None, *out.values(), SCALE, LOWER, 0, slots, ctas,
    )  # fmt: skip
    return out


# Dtypes of results round by up to 1.7e-3.
BOUNDS = {"q": 2e-3, "k": 2e-3, "v": 2e-3, "g": 2.1e-3, "beta": 2.2e-3, "rate": 5e-3, "bias": 3e-3}


def check(problem: Problem, exact, out: dict[str, Tensor], more: float = 1.0) -> None:
    """Every head is right, and the sums of slots without a chunk are zero. more: of the errors allowed."""
    chunks, heads = problem.chunks(), range(problem.heads[1])

    def error(name: str, of: range | list[int]) -> float:
        found = []
        for slot, _, row, token, size in chunks:
            for head in of:
                rows = (
                    (slot, head)
                    if name in ("rate", "bias")
                    else (row, slice(token, token + size), head)
                )
                found.append(
                    (out[name][rows].double().flatten(), exact[slot, head][name].flatten())
                )
        return relative_rmse(*(torch.cat(side) for side in zip(*found)))

    for name, bound in BOUNDS.items():
        if out[name] is not None:
            for of in [heads] if name == "rate" else [[head] for head in heads]:
                assert error(name, of) <= more * bound, (name, of, error(name, of))
    for name in ("rate", "bias"):
        if out[name] is not None:
            for slot in set(range(problem.slots)) - {slot for slot, *_ in chunks}:
                assert not out[name][slot].any()


LOG = GradientsConfig(
    "bfloat16", "float32", "float32", gate="log", l2norm=False, rate=False, bias=False
)
SAFE = GradientsConfig("bfloat16", "bfloat16", "bfloat16", beta_sigmoid=True)
PACKED = GradientsConfig(
    "float16", "float32", "float32", neg_eigval=True, rate=False, index_dtype="int32"
)
UNBOUNDED = GradientsConfig("bfloat16", "float32", "float32", gate="softplus", bounded=False)
WIDE_RANGE = GradientsConfig(
    "bfloat16", "float16", "float32", "bfloat16", beta_sigmoid=True, neg_eigval=True, index_dtype="int64"
)  # fmt: skip


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("decays", ["moderate", "mixed"])
def test_log_decays(emulated, decays):
    problem = make(LOG, (64,), decays=decays)
    exact = expected(problem)
    check(problem, exact, run(emulated, problem, exact))


@pytest.mark.parametrize("ctas", [1, 3])
def test_gates_and_norms(emulated, ctas):
    """Tokens past the end of a row, several chunks per CTA, and two value heads per key head."""
    problem = make(SAFE, (100, 100), heads=(1, 2), size=1e-5)
    exact = expected(problem)
    check(problem, exact, run(emulated, problem, exact, ctas))


@pytest.mark.emulated(seeds=1)
def test_packed(emulated):
    problem = make(PACKED, (70, 0, 1, 65), decays="mixed")
    exact = expected(problem)
    check(problem, exact, run(emulated, problem, exact, 2))


@pytest.mark.emulated(seeds=1)
def test_other_sequences_change_nothing(emulated):
    problem = make(PACKED, (70, 0, 1, 65))
    exact = expected(problem)
    clean = run(emulated, problem, exact)
    for name in ("q", "k", "g", "do"):
        problem.given[name][:, 70:71] = float("nan")
    poisoned = run(emulated, problem, exact)
    for name in ("q", "k", "g", "beta"):
        assert torch.equal(clean[name][:, :70], poisoned[name][:, :70])
        assert torch.equal(clean[name][:, 71:], poisoned[name][:, 71:])


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("decays", ["moderate", "mixed"])
def test_decays_without_a_bound(emulated, decays):
    problem = make(UNBOUNDED, (80,), heads=(1, 2), decays=decays)
    exact = expected(problem)
    check(problem, exact, run(emulated, problem, exact))


@pytest.mark.emulated(schedules="immediate")
def test_operands_of_wide_range(emulated):
    """Operands in bfloat16 have three bits less, and room for any size."""
    problem = make(WIDE_RANGE, (64, 3), size=1e4)
    exact = expected(problem)
    check(problem, exact, run(emulated, problem, exact), 8)


# What goes unnoticed, and why:
# - Of inputs that are given back together, one alone need be waited for before they are overwritten.
# - Products of S with do and y are waited for together, as are both tiles of V of a product.
# - The emulator asks for no fence between ordinary accesses and copies that overwrite the same memory.
# - Warps meet where they load rows for the sake of the compiler.
UNNOTICED = Counter(
    {
        "mbarrier.try_wait.parity.shared.b64": 2,
        "wgmma.commit_group.sync.aligned": 5,
        "fence.proxy.async.shared::cta": 4,
        "bar.warp.sync": 4,
    }
)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("config", [LOG, SAFE], ids=label)
def test_every_wait_of_the_gradients_matters(emulated, config):
    """One CTA with a full chunk and one of few tokens. Only where there are sums for a bias a barrier ends a chunk."""
    problem = make(config, (70,))
    kernel = Repeated(compiled(emulated, config))
    run(emulated, problem, expected(problem), kernel=kernel)
    report = mutation.run(kernel.check, kernel, schedules=mutation.SCHEDULES[:3])
    assert mutation.opcodes(report.unnoticed) == UNNOTICED, str(report)
    assert not report.not_reached, str(report)


@pytest.mark.parametrize("config", [LOG, SAFE, PACKED, UNBOUNDED, WIDE_RANGE], ids=label)
def test_machine_code(config):
    """Nothing is spilled, products are not serialized, and each of them is there once."""
    kernel = report(Unit("cula_cp_sm90.backward.build", config, "sm_90a")).kernel
    resources.check(kernel, expect=("HGMMA", "UTMALDG", "UBLKCP", "LDSM", "USETMAXREG"))
    assert not kernel.warnings
    assert (kernel.count("LDL"), kernel.count("STL")) == (0, 0)
    assert kernel.count("HGMMA") == 8 * 4  # do z^T or y z^T, S with do and y, D with z
    assert_ctas_fit(kernel, 1)
