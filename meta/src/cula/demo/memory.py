"""The delta-rule state as an associative memory of a text: which byte followed each context.

The key of a context is the entrywise product of one random sign vector per byte, so two contexts that differ in any
byte get nearly orthogonal keys. After each byte the memory is asked for the key of the next context, before that
context's own byte is written: with causal attention, the query at t is the key of t + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import cula.kda
import cula.lightning
from cula.demo.data import Corpus, Projections
from cula.demo.results import Check, Outcome, RecallCurve, Row, relative_rmse
from cula.demo.runtime import Advance, Machine, oracle, served_by
from cula.reference import recurrent_gated_delta_rule, recurrent_simple_gla

HEADS, DIM = 2, 128
CONTEXT = 3
WRITE_STRENGTH = 0.5
# Per token; of .003, .01 and .03 the one that serves the memory without the delta rule best on prose and code.
FORGETTING = 0.003
ENOUGH = 100
TICKS = 5

# Every function here returns its outputs first.
Work = Callable[[], Any]


@dataclass(frozen=True)
class Task:
    """What was stored, and what a perfect memory would answer; all of length T - 1, for the bytes 1..T-1."""

    truth: torch.Tensor
    stored: torch.Tensor

    @property
    def seen(self) -> torch.Tensor:
        """Positions whose context came before: only those have an answer to recall."""
        return self.stored >= 0

    def score(self, answers: torch.Tensor) -> tuple[float, float]:
        """Share of seen contexts answered with the byte last stored, and with the byte that then really came."""
        if not bool(self.seen.any()):
            return float("nan"), float("nan")
        hits = (answers == self.stored)[self.seen], (answers == self.truth)[self.seen]
        return hits[0].double().mean().item(), hits[1].double().mean().item()

    def curve(self, label: str, kind: str, answers: torch.Tensor) -> RecallCurve:
        """Recall in a sliding window of an eighth of the seen contexts."""
        places = self.seen.nonzero().flatten()
        hits = (answers == self.stored)[places].double()
        window = max(1, len(hits) // 8)
        if len(hits) == 0:
            return RecallCurve(label, kind, [], [])
        means = hits.unfold(0, window, 1).mean(-1)
        centres = places[window // 2 : window // 2 + len(means)] + 1
        return RecallCurve(label, kind, centres.tolist(), means.tolist())


def task_of(text: torch.Tensor) -> Task:
    """For each byte but the first: the byte, and the byte that followed the same context the last time, or -1."""
    data = bytes(text.tolist())
    last: dict[bytes, int] = {}
    stored = torch.full((len(data),), -1)
    for t in range(CONTEXT, len(data)):
        context = data[t - CONTEXT : t]
        stored[t] = last.get(context, -1)
        last[context] = data[t]
    return Task(text[1:], stored[1:])


def context_keys(text: torch.Tensor, projections: Projections) -> torch.Tensor:
    """Unit keys `[T, HEADS, DIM]` of the `CONTEXT` bytes before each position; zero bytes stand before the text."""
    keys = torch.full((len(text), HEADS, DIM), DIM**-0.5)
    padded = torch.cat([text.new_zeros(CONTEXT), text])
    for back in range(1, CONTEXT + 1):
        signs = projections.table(f"memory-context{back}", 256, HEADS, DIM).sign()
        keys *= signs[padded[CONTEXT - back : CONTEXT - back + len(text)]]
    return keys


def run(
    machine: Machine, corpus: Corpus, projections: Projections, tokens: int, advance: Advance
) -> Outcome:
    """Store the text with and without the delta rule, and count what each memory recalls."""
    text = corpus.stream(tokens)
    steps = len(text) - 1
    task = task_of(text)
    keys = context_keys(text, projections)
    values = machine.put(projections.embed(torch.arange(256), "memory-v", HEADS, DIM))
    k, q = machine.put(keys[None, :-1]), machine.put(keys[None, 1:])
    v = values[text[:-1].to(machine.device)][None]
    beta = torch.full((1, steps, HEADS), WRITE_STRENGTH, device=machine.device, dtype=machine.dtype)
    gates = torch.zeros_like(beta)
    channel_gates = gates[..., None].expand(-1, -1, -1, DIM).contiguous()
    kept = torch.zeros(HEADS, device=machine.device)
    forgets = kept - FORGETTING
    q64, k64, v64 = oracle(q), oracle(k), oracle(v)
    want, _ = recurrent_gated_delta_rule(q64, k64, v64, oracle(gates), oracle(beta), scale=1.0)
    want_kept, _ = recurrent_simple_gla(q64, k64, v64, g_gamma=oracle(kept), scale=1.0)
    want_forgets, _ = recurrent_simple_gla(q64, k64, v64, g_gamma=oracle(forgets), scale=1.0)
    advance(1)

    rows: list[Row] = []
    curves: list[RecallCurve] = []
    recalls: dict[str, float] = {}

    def add(op: str, function: str, label: str, kind: str, work: Work, want: torch.Tensor) -> None:
        outputs, rate = machine.timed(work, steps)
        answers = read_out(outputs[0], values)
        recall, follow = task.score(answers)
        impl = served_by(
            op,
            machine,
            function=function,
            dtype=q.dtype,
            head_dim_k=DIM,
            head_dim_v=DIM,
            tokens=steps,
        )
        error = Check("error", relative_rmse(outputs[0], want), machine.bound)
        # On a handful of contexts chance decides, so a comparison of the two memories would say nothing.
        compare = kind == "delta" and int(task.seen.sum()) >= ENOUGH
        checks = (Check("recall", recall, recalls["plain"], at_least=True),) if compare else ()
        rows.append(Row(op, f"memory: {label}", impl, rate, error, checks, _note(recall, follow)))
        curves.append(task.curve(label, kind, answers))
        recalls[kind] = recall
        advance(1)

    gla = partial(cula.lightning.chunk_simple_gla, q, k, v, scale=1.0)
    forgetful = f"no delta rule, forgets {FORGETTING:.1%} a token"
    gdn = partial(cula.lightning.chunk_gated_delta_rule, q, k, v, gates, beta, scale=1.0)
    kda = partial(cula.kda.chunk_kda, q, k, v, channel_gates, beta, scale=1.0, safe_gate=True)
    add(
        "lightning.prefill",
        "chunk_simple_gla",
        "no delta rule",
        "plain",
        partial(gla, g_gamma=kept),
        want_kept,
    )
    add(
        "lightning.prefill",
        "chunk_simple_gla",
        forgetful,
        "forgetful",
        partial(gla, g_gamma=forgets),
        want_forgets,
    )
    add(
        "lightning.gated_delta_rule",
        "chunk_gated_delta_rule",
        "delta rule (gate per head)",
        "delta",
        gdn,
        want,
    )
    add("kda.prefill", "chunk_kda", "delta rule (KDA)", "delta", kda, want)

    common = torch.bincount(text, minlength=256).argmax().expand(steps)
    what = f"memory: the most frequent byte; {int(task.seen.sum())} of {steps} contexts came before"
    rows.insert(0, Row("", what, "counting", note=_note(*task.score(common))))
    curves.append(task.curve("most frequent byte", "baseline", common))
    return Outcome(rows, recall=curves)


def read_out(outputs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The byte whose value vectors are nearest to each output, heads added up: `[T]` int64 on the CPU."""
    return torch.einsum("thv,chv->tc", outputs[0].float(), values.float()).argmax(-1).cpu()


def _note(recall: float, follow: float) -> str:
    if recall != recall:
        return "no context came twice"
    return f"recalls {recall:.1%}, next byte {follow:.1%}"
