"""Decode with the gated delta rule and with KDA on the whole card: HV=32, K=V=128, bf16 activations."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops import in_place
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.problem import GATES, setting
from benchmarks.ops.delta.providers import PROVIDERS, check

BATCHES = (1, 8, 64, 256)
SEVERAL_BATCHES = (1, 8, 64)
TOKENS = (2, 4, 8)
LAYOUTS = ("vk", "kv")
# Records of the rings of a replay besides those that every step has, by the tokens of a step.
MORE_RECORDS = {1: (8, 64), 4: (8, 16, 64), 8: (16, 64)}


def settings(quick: bool) -> list[Setting]:
    """One token, several tokens written or verified, a slot per token, steps; what is asked most comes first."""
    main = [
        setting(gate, batch, state=state, layout=layout)
        for batch in (64, 8, 1, 256)
        for state in ("fp32", "bf16")
        for gate in GATES
        for layout in LAYOUTS
    ]
    steps = [setting(g, b, t, mode="step") for b in (64, 8) for t in (4, 1, 8) for g in GATES]
    if quick:
        some = [setting("gdn", 64, 4, mode=mode) for mode in ("write", "verify", "slots")]
        return [s for s in main if s.params["B"] == 64] + some + steps[:4]
    several = [
        setting(gate, batch, tokens, mode=mode)
        for tokens in (4, 8, 2)
        for batch in (64, 8, 1)
        for mode in ("write", "verify")
        for gate in GATES
    ]
    slots = [setting(g, 64, 4, state, mode="slots") for state in ("fp32", "bf16") for g in GATES]
    other_layout = [
        setting(gate, batch, 4, layout="kv", mode=mode)
        for batch in (64, 8, 1)
        for mode in ("write", "verify")
        for gate in GATES
    ]
    other_heads = [setting(gate, 64, heads_v=64) for gate in GATES] + [setting("gdn", 64, heads=32)]
    other_states = [setting(gate, 64, state="fp16") for gate in GATES]
    other_states += [setting(gate, 64, 4, "bf16") for gate in GATES]
    other_states += [setting("gdn", b, t, "bf16", mode="step") for b in (64, 8) for t in (4, 8)]
    rings = [
        setting("gdn", 64, tokens, mode="step", records=records)
        for tokens, several_records in MORE_RECORDS.items()
        for records in several_records
    ]
    return [
        *main,
        *[s for s in several if s.params["T"] > 2],
        *steps,
        *slots,
        *other_heads,
        *other_states,
        *rings,
        *[s for s in several if s.params["T"] == 2],
        *other_layout,
    ]


NOTES = (
    "gdn: one gate per head, 16 q and k heads; kda: a gate per channel of K, 32 q and k heads. Every provider gets raw "
    "gates and logits of beta in bf16, and normalises q and k, all inside its kernel.",
    "cula updates states in place at the slots that state_indices names. fla returns new states, always fp32, without "
    "slots, from fused_recurrent_gated_delta_rule and fused_recurrent_kda. fla_inplace is fused_recurrent_kda_fwd, the "
    "function below: it takes slots, and writes a state for every token.",
    "flashinfer: gated_delta_rule_decode_pretranspose (one token, [V, K]), gated_delta_rule_decode (one token, [K, V], "
    "without slots), gated_delta_rule_mtp (several tokens; it also allocates and clears a number), recurrent_kda (bf16 "
    "states [V, K]). flashinfer_replay is gated_delta_rule_mtp_ucache_flush (GDN, bf16 states and records, windows of "
    "up to 16 records, in all phases); moving the windows on is the caller's and not timed. Where a kernel of it fails "
    "or is wrong it is skipped, with the reason.",
    "verify: no state is stored. slots: the state after every token goes to a slot of its own, and a row begins at "
    "that of its last accepted token; flashinfer gets these first slots ready for GDN.",
    "step: what a step of a serving loop costs, in its steady state, where the step before accepted 1 to T of its T "
    "tokens, drawn for every row. cula replays: it reads the states and a ring of records (L of them for a slot, "
    f"{delta.RECORDS} unless the name says otherwise), and stores a state when its ring is more than half full. The "
    "rings begin in phases of their own, so that in every call some rows store and others do not, as many as in the "
    "mean over time. cula_commit verifies and then commits, in two calls; cula_slots and the peers store a state per "
    "token. With T=1 there is nothing to reject, and the others store the state in every call.",
    f"{in_place.NOTE} In a step that is every state, which a replay does not store in every call: of ceiling may "
    "exceed 1.",
    "cold: buffer sets rotate over more than 3x the L2.",
)

OP = Op(
    name="delta_decode",
    title="GDN and KDA decode, HV=32, K=V=128, bf16 activations",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=delta.make_inputs,
    set_bytes=delta.set_bytes,
    check=check,
    notes=NOTES,
)
