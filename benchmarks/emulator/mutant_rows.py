"""What `mutants.json` holds: a row per kernel of a mutation test, and its sums by package and target.

A row counts instructions of synchronisation that were skipped one at a time. `mutants` of them were there;
`noticed_every`, `noticed_first` and `noticed_none` were noticed with races detected in every schedule, in the first and
in none; `not_modelled` of them change nothing in the emulator; `unnoticed` lists the others, how many and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OP = "mutants"
COUNTS = ("mutants", "noticed_every", "noticed_first", "noticed_none", "not_modelled")
HEADER = (
    "package",
    "target",
    "kernels",
    "instructions",
    "noticed, races detected in every schedule",
    "in the first",
    "in none",
    "not modelled",
    "not noticed",
)
FIELDS = {"package", "test", "target", *COUNTS, "unnoticed"}

_TRY_WAIT = "mbarrier.try_wait.parity.shared.b64"
_STORES = {
    "cp.async.bulk.wait_group 0": "the emulator keeps shared memory longer than its CTA; TMA may still read it"
}
_COMMIT = {"wgmma.commit_group.sync.aligned": "one wait is for this group and the next"}
_LOADS = "the wait for weights implies it, whose makers have waited for the same loads"
_CLUSTER = (
    "the producer's last waits and the last barrier of the cluster both keep a CTA alive while another signals its "
    "slots; without a cluster there is no other"
)
_SETUP = "each of the barriers of the set-up stands in for the others"
_OVERWRITES = (
    "the emulator asks for no fence before copies overwrite what threads have read or written"
)
_LATER = "the emulator takes a later fence of another thread for that of the writer"
_IN_TURN = (
    "the emulator runs CTAs and kernels in turn, so that what a flag or a launch announces is there"
)
# File and function of a test -> instruction -> why nobody notices that it is missing.
REASONS = {
    "test_kda.py::TestEmulated::test_every_wait_of_the_chain_matters": {**_STORES, **_COMMIT},
    "test_backward.py::test_every_wait_of_a_walk_matters": {
        **_STORES,
        **_COMMIT,
        "cp.async.bulk.commit_group": "the group of the next item may hold an item's last rows; behind the last item, "
        "nobody need wait for these",
        "fence.proxy.async.shared::cta": _LATER,
    },
    "test_backward.py::test_every_wait_of_a_scan_matters": _COMMIT,
    "test_gradients.py::test_every_wait_of_the_gradients_matters": {
        **_COMMIT,
        _TRY_WAIT: "inputs that are given back together need one wait",
        "bar.warp.sync": "it is for the compiler, which would load more rows than there are registers for",
        "fence.proxy.async.shared::cta": _OVERWRITES,
    },
    "test_gated_backward.py::test_every_wait_of_the_gradients_matters": {
        **_COMMIT,
        "bar.sync 2": "in the emulator a warp of a product reads its own 16 rows of the first operand alone, which its "
        "results overwrite",
        "fence.proxy.async.shared::cta": f"inputs: {_OVERWRITES}; dA and dM: {_LATER}",
    },
    "test_gated_emulated.py::test_every_wait_matters": {
        **_COMMIT,
        "bar.sync": _IN_TURN,
        "bar.sync 1": "the barrier of all tiles comes behind that of the tile that clears keys",
        "bar.sync 4": _IN_TURN,
        "bar.warp.sync": f"behind flags: {_IN_TURN}; where a slot is given back: a barrier comes between it and the "
        "warp's last reads",
        "cp.async.bulk.wait_group 0": f"of blocks: {_IN_TURN}; of outputs: "
        + _STORES["cp.async.bulk.wait_group 0"],
        "fence.acq_rel.gpu": _IN_TURN,
        "fence.proxy.async.shared::cta": f"q and k: {_OVERWRITES}; zeros: {_LATER}",
        "wgmma.wait_group.sync.aligned 0": "nothing runs there; it is for the compiler",
    },
    "test_emulated.py::test_every_wait_matters": {
        **_STORES,
        _TRY_WAIT: _LOADS,
        "cp.async.wait_group 0": "nobody reads what the last copy brings; no CTA should end before its copies",
    },
    "test_emulated.py::test_every_wait_of_paired_ctas_matters": {
        **_STORES,
        _TRY_WAIT: f"{_LOADS}; slots of a pair are freed in order, so that the last one to be free says it of all",
    },
    "test_emulated.py::test_every_wait_of_ctas_that_share_a_head_matters": {
        **_STORES,
        _TRY_WAIT: _LOADS,
        "bar.warp.sync": "the thread that sends half of P is the one that the emulator elects to arrive for its warp",
    },
    "test_fused.py::test_every_barrier_matters": {
        "barrier.cluster.wait": "the emulator starts all CTAs of a cluster at once",
    },
    "test_mutation.py::test_hopper_gemm": {
        _TRY_WAIT: _CLUSTER,
        "barrier.cluster.arrive": _CLUSTER,
        "barrier.cluster.wait": _CLUSTER,
    },
    "test_mutation.py::test_blackwell_gemm": {
        "bar.sync 0": _SETUP,
        "bar.sync 1": _SETUP,
        _TRY_WAIT: "the only accumulator is free from the start",
        "mbarrier.arrive.shared.b64": "nobody waits for the release of the only accumulator",
    },
}


def key(test: str) -> str:
    """A test's file and function, as REASONS has them."""
    return test.partition("[")[0].rpartition("/")[2]


def reasons(test: str, unnoticed: Mapping[str, int]) -> list[dict[str, Any]]:
    """What nobody notices in a test, with the reasons; ValueError for an instruction that has none."""
    known = REASONS.get(key(test), {})
    if missing := [name for name in unnoticed if name not in known]:
        raise ValueError(f"{test}: REASONS has none for {', '.join(missing)}")
    return [
        {"instruction": name, "count": count, "reason": known[name]}
        for name, count in sorted(unnoticed.items())
    ]


def validate(content: Mapping[str, Any]) -> None:
    """Raises ValueError where a row has other fields, or its counts do not add up."""
    for row in content["rows"]:
        if set(row) != FIELDS:
            raise ValueError(f"rows: expected {sorted(FIELDS)}, got {sorted(row)}")
        if row["mutants"] != row["noticed_every"] + row["not_modelled"] + _unnoticed(row):
            raise ValueError(f"{row['test']}: the counts do not add up to mutants")
        if not row["noticed_none"] <= row["noticed_first"] <= row["noticed_every"]:
            raise ValueError(f"{row['test']}: expected none <= first <= every of noticed mutants")


def table(content: Mapping[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Sums by package and target, and of all."""
    rows = content["rows"]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["package"], row["target"]), []).append(row)
    lines = [[package, target, *_sums(of)] for (package, target), of in sorted(groups.items())]
    return HEADER, [*lines, ["all", "", *_sums(rows)]]


def kernel_table(content: Mapping[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """A line per kernel."""
    rows = content["rows"]
    lines = [
        [r["test"].rpartition("/")[2], r["package"], r["target"], *_sums([r])[1:]] for r in rows
    ]
    return ("test", *HEADER[:2], *HEADER[3:]), lines


def reason_table(content: Mapping[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """A line per instruction that nobody notices."""
    lines = [
        [r["test"].rpartition("/")[2], r["package"], u["instruction"], str(u["count"]), u["reason"]]
        for r in content["rows"]
        for u in r["unnoticed"]
    ]
    return ("test", "package", "instruction", "how many", "why nobody notices"), lines


def _unnoticed(row: Mapping[str, Any]) -> int:
    return sum(u["count"] for u in row["unnoticed"])


def _sums(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = [sum(row[name] for row in rows) for name in COUNTS]
    return [str(n) for n in (len(rows), *counts, sum(map(_unnoticed, rows)))]
