"""Problems, inputs, oracle, check and byte counts of decode with the gated delta rule (GDN) and with KDA.

    S' = diag(exp(d)) S        u = b (v - S'^T k)        S = S' + k u^T        o = scale * S^T q

d is the softplus gate of raw inputs, one per head (GDN) or per channel of K (KDA), b the sigmoid of logits, and q and k
are normalised; kernels do all of that. Every row has a slot of a pool of states, in an order drawn at random unless a
setting is `ordered`.

A setting has one of four modes:
    write     T tokens, and the state after the last one is stored where it was
    verify    T tokens, and no state is stored
    slots     the state after every token is stored in a slot of its own; a row begins at that of its last accepted one
    step      a step of speculative decoding (T drafts, of which the step before accepted 1 to T), or with T=1 a step of
              ordinary decoding, in the steady state of a serving loop

Timing repeats a call thousands of times on the same tokens. Normalised keys, strengths below 1 and decays in (0, 1)
keep the states bounded, and because each call adds its tokens again they do not fade into denormals. In a step the
number of accepted tokens is drawn for every row, and each ring of a replay begins in a phase of its own; so in every
call some rows store their state and others do not, as many as in the mean over time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Setting
from benchmarks.ops import checks
from benchmarks.ops.delta.internals import Gates, Replay, reference

DIM = 128
HEADS_V = 32
HEADS = 16  # q and k heads of GDN; KDA has as many as value heads
GATES = ("gdn", "kda")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODES = ("write", "verify", "slots", "step")
# Records of a ring in a step.
RECORDS = 32
# Slots of a pool that no row has, in checks.
SPARE = 2
OUTPUT_LIMIT = 5e-3
STATE_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Of implementations with other approximations and other places of rounding.
PEER_OUTPUT_LIMIT = 1e-2
PEER_STATE_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class Inputs:
    """One buffer set.

    q, k [B,T,HQ,K], v [B,T,HV,V], g [B,T,HV] or [B,T,HV,K] and beta [B,T,HV] are bf16, A_log [HV] and dt_bias [HV] or
    [HV*K] fp32. state [slots,HV,V,K] or [slots,HV,K,V], slots int32 [B]. accepted int32 [B] and token_pool, which has
    the slots table int32 [B,T], are there in the modes slots and step, rings in the mode step alone.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    slots: Tensor
    accepted: Tensor | None = None
    token_pool: Tensor | None = None
    table: Tensor | None = None
    rings: Replay | None = None


def setting(
    gate: str,
    batch: int,
    tokens: int = 1,
    state: str = "fp32",
    layout: str = "vk",
    mode: str = "write",
    heads: int | None = None,
    heads_v: int = HEADS_V,
    records: int = RECORDS,
    ordered: bool = False,
) -> Setting:
    """A problem, named like gdn-B64-T4-fp32-vk-verify; layout "vk" is [B,HV,V,K], and "kv" is [B,HV,K,V].

    ordered: row n has slot n.
    """
    usual = HEADS if gate == "gdn" else heads_v
    heads = usual if heads is None else heads
    name = f"{gate}-B{batch}-T{tokens}-{state}-{layout}"
    name += "" if mode == "write" else f"-{mode}"
    name += f"-H{heads}" if heads != usual else ""
    name += f"-HV{heads_v}" if heads_v != HEADS_V else ""
    params = {"gate": gate, "B": batch, "T": tokens, "state": state, "layout": layout}
    params |= {"mode": mode, "H": heads, "HV": heads_v}
    if mode == "step":
        params["L"] = records
        name += f"-L{records}" if records != RECORDS else ""
    if ordered:
        params["ordered"] = True
        name += "-ordered"
    return Setting(name, params)


def v_first(problem: Setting) -> bool:
    """Whether states are stored as [B,HV,V,K]."""
    return problem.params["layout"] == "vk"


def has_channels(problem: Setting) -> bool:
    """Whether there is a gate for every channel of K."""
    return problem.params["gate"] == "kda"


# ---- inputs ----------------------------------------------------------------------------------------------------------


def make_inputs(problem: Setting, device: Any, seed: int, spare: int = 0) -> Inputs:
    """Fresh random data of one buffer set; `spare` slots of every pool belong to no row."""
    p = problem.params
    generator = torch.Generator(device).manual_seed(seed)
    batch, tokens, heads, heads_v = p["B"], p["T"], p["H"], p["HV"]
    width = DIM if has_channels(problem) else 1

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def order(count: int) -> Tensor:
        if p.get("ordered"):
            return torch.arange(count, device=device, dtype=torch.int32)
        return torch.randperm(count, generator=generator, device=device).to(torch.int32)

    def pool(slots: int) -> Tensor:
        return randn(slots + spare, heads_v, DIM, DIM, dtype=DTYPES[p["state"]])

    # Time steps from .001 to .1 and rates from 1 to 16, as these models begin with.
    steps = torch.exp(math.log(1e-3) + math.log(100) * rand(heads_v * width))
    made = Inputs(
        q=randn(batch, tokens, heads, DIM),
        k=randn(batch, tokens, heads, DIM),
        v=randn(batch, tokens, heads_v, DIM),
        g=randn(batch, tokens, heads_v, *((DIM,) if width > 1 else ())),
        beta=randn(batch, tokens, heads_v),
        A_log=torch.log(1 + 15 * rand(heads_v)),
        dt_bias=torch.log(torch.expm1(steps)),
        state=pool(0 if p["mode"] == "slots" else batch),
        slots=order(batch),
    )
    if p["mode"] in ("slots", "step"):
        made.accepted = 1 + (rand(batch) * tokens).to(torch.int32).clamp(max=tokens - 1)
        made.token_pool = pool(batch * tokens)
        made.table = order(batch * tokens).view(batch, tokens)
    if p["mode"] == "step":
        made.rings = _rings(problem, made, rand, randn)
    return made


def _rings(
    problem: Setting, x: Inputs, rand: Callable[..., Tensor], randn: Callable[..., Tensor]
) -> Replay:
    """Rings that are in use, each in a phase of its own: some records are certain, and those of a call are pending."""
    p = problem.params
    made = reference.empty_replay(
        x.state, p["H"], max_tokens=p["T"], channels=has_channels(problem), records=p["L"],
        state_v_first=v_first(problem),
    )  # fmt: skip
    made.k.copy_(randn(*made.k.shape))
    made.u.copy_(0.1 * randn(*made.u.shape, dtype=torch.float32))
    made.decay.copy_(1 - 0.1 * rand(*made.decay.shape))
    slots = (len(x.state), 1, 1)
    begin = (rand(*slots) * p["L"]).to(torch.int32).clamp(max=p["L"] - 1)
    most = p["L"] // 2 - p["T"]
    certain = (rand(*slots) * (most + 1)).to(torch.int32).clamp(max=most)
    made.cursor.copy_(begin | certain << 8 | p["T"] << 16)
    return made


# ---- bytes -----------------------------------------------------------------------------------------------------------


def state_bytes(problem: Setting, dtype: str | None = None) -> int:
    """Bytes of one state of every row in a storage type of DTYPES, or in the problem's own."""
    p = problem.params
    return p["B"] * p["HV"] * DIM * DIM * DTYPES[dtype or p["state"]].itemsize


def set_bytes(problem: Setting) -> int:
    """Bytes of the part of a buffer set that every call touches."""
    return state_bytes(problem) * (problem.params["T"] if problem.params["mode"] == "slots" else 1)


def token_bytes(problem: Setting) -> int:
    """Bytes of k, v, gates and logits, of the constants of the gates, and of a slot per row."""
    p = problem.params
    width = DIM if has_channels(problem) else 1
    per_token = 2 * (p["H"] * DIM + p["HV"] * (DIM + width + 1))
    return p["B"] * p["T"] * per_token + 4 * p["HV"] * (1 + width) + 4 * p["B"]


def query_bytes(problem: Setting) -> int:
    """Bytes of q and of the output."""
    p = problem.params
    return p["B"] * p["T"] * 2 * DIM * (p["H"] + p["HV"])


def moved(task: str, problem: Setting, written_state: str | None = None) -> int:
    """Bytes of a task: every input read once, every output written once; `written_state` names the storage type of the
    states that are written where it is another than that of those that are read."""
    p, state = problem.params, state_bytes(problem)
    written = state_bytes(problem, written_state)
    tokens = token_bytes(problem)
    if task == "write":
        return tokens + query_bytes(problem) + state + written
    if task == "verify":
        return tokens + query_bytes(problem) + state
    if task == "slots":
        return tokens + query_bytes(problem) + state + p["T"] * written + 4 * p["B"] * p["T"]
    if task == "commit":
        return 2 * tokens + query_bytes(problem) + 2 * state + written
    stored, replayed = ring_means(p["T"], p["L"])
    width = DIM if has_channels(problem) else 1
    record = p["B"] * (2 * DIM * p["H"] + 4 * p["HV"] * (DIM + width))
    cursors = 2 * 4 * p["B"] * p["HV"] * DIM // 8
    rings = round(record * (replayed + p["T"])) + cursors
    return tokens + query_bytes(problem) + state + round(stored * state) + rings


def ring_means(tokens: int, records: int) -> tuple[float, float]:
    """The share of calls that store the state, and the records that a call replays, in the mean.

    With a accepted tokens in every call the certain records are a, 2 a, ..., until they and those of a call are more
    than half of the ring; then the state is stored. a is 1 to `tokens`, each as often.
    """
    periods = [(records // 2 - tokens) // a + 1 for a in range(1, tokens + 1)]
    replayed = (a * (n + 1) / 2 for a, n in enumerate(periods, 1))
    return sum(1 / n for n in periods) / tokens, sum(replayed) / tokens


# ---- oracle and check ------------------------------------------------------------------------------------------------

# (outputs [B,T,HV,V], states [B,HV,K,V] after the call, in the layout of the problem); slots: [B*T,HV,K,V].
Result = tuple[Tensor, Tensor | None]


def options(problem: Setting, x: Inputs) -> dict[str, Any]:
    """What all functions of ours are called with besides tokens and states."""
    return {"A_log": x.A_log, "dt_bias": x.dt_bias, "state_v_first": v_first(problem)}


def oracle(task: str, problem: Setting, x: Inputs, rows: list[int]) -> Result:
    """The fp64 outputs and states of some rows, whose states are what they were before the call."""
    at = torch.tensor(rows, device=x.q.device)
    q, k, v, g, beta = (t[at].double() for t in (x.q, x.k, x.v, x.g, x.beta))
    given: dict[str, Any] = options(problem, x) | {"gates": Gates()}
    given |= {"A_log": x.A_log.double(), "dt_bias": x.dt_bias.double()}
    slots = x.slots[at].long()
    if task == "slots":
        assert x.table is not None and x.accepted is not None and x.token_pool is not None
        state = x.token_pool[x.table[at, x.accepted[at].long() - 1].long()].double()
        states = state.new_zeros(len(rows) * q.shape[1], *state.shape[1:])
        targets = torch.arange(len(states), device=at.device).view(len(rows), -1)
        given |= {"token_states": states, "token_state_indices": targets}
        return reference.delta_rule_decode(q, k, v, g, beta, state, **given), states
    state = x.state[slots].double()
    if task == "replay":
        assert x.rings is not None and x.accepted is not None
        k_ring, u, decay, cursor = (t[slots] for t in x.rings)
        rings = Replay(k_ring.double(), u.double(), decay.double(), cursor)
        accepted = {"num_accepted": x.accepted[at]}
        out = reference.delta_rule_decode(
            q, k, v, g, beta, state, replay=rings, **accepted, **given
        )
        reference.delta_rule_flush(state, rings, state_v_first=v_first(problem))
        return out, state
    target = {"next_state": state} if task == "write" else {}
    out = reference.delta_rule_decode(q, k, v, g, beta, state, **target, **given)
    if task == "commit":
        assert x.accepted is not None
        reference.delta_rule_commit(k, v, g, beta, state, x.accepted[at], **given)
    return out, None if task == "verify" else state


def check_task(
    task: str,
    run: Callable[[Setting, Inputs], Result],
    problem: Setting,
    device: Any,
    limits: tuple[float, Mapping[torch.dtype, float]] = (OUTPUT_LIMIT, STATE_LIMIT),
) -> dict[str, float]:
    """Compares `run(setting, inputs) -> Result` with the recurrence in fp64, on fresh data and for some rows.

    `run` fills outputs that it allocates itself with NaN first.
    """
    x = make_inputs(problem, device, checks.SEED, SPARE)
    rows = checks.checked_rows(problem.params["B"])
    want_output, want_states = oracle(task, problem, x, rows)
    before = x.state.clone() if task == "verify" else None
    pool, owned = (x.token_pool, x.table) if task == "slots" else (x.state, x.slots)
    spare = checks.SpareRows(pool, None if owned is None else owned.flatten())
    output, states = run(problem, x)
    checks.require_finite(problem, output=output)
    found = {"output": checks.worst_head(output[rows], want_output, 2)}
    within = {"output": limits[0]}
    spare.require_unchanged(problem)
    if before is not None and not torch.equal(x.state, before):
        raise CheckFailed(f"{problem.name}: a call that only verifies changed the states")
    if want_states is not None and states is not None:
        per_row = len(want_states) // len(rows)
        states = states.unflatten(0, (-1, per_row))[rows].flatten(0, 1)
        found["state"] = checks.worst_head(states, want_states, 1)
        within["state"] = limits[1][DTYPES[problem.params["state"]]]
    elif want_states is not None:
        raise CheckFailed(f"{problem.name}: no states came back")
    checks.require_within(problem, found, within)
    return found
