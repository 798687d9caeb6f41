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
_LOADS = "the wait for weights implies it, whose makers have waited for the same loads"
_CLUSTER = (
    "the producer's last waits and the last barrier of the cluster both keep a CTA alive while another signals its "
    "slots; without a cluster there is no other"
)
_SETUP = "each of the barriers of the set-up stands in for the others"
# Function of a test -> instruction -> why nobody notices that it is missing.
REASONS = {
    "test_every_wait_of_the_chain_matters": {
        **_STORES,
        "wgmma.commit_group.sync.aligned": "one wait is for this group and the next",
    },
    "test_every_wait_matters": {
        **_STORES,
        _TRY_WAIT: _LOADS,
        "cp.async.wait_group 0": "nobody reads what the last copy brings; no CTA should end before its copies",
    },
    "test_every_wait_of_paired_ctas_matters": {
        **_STORES,
        _TRY_WAIT: f"{_LOADS}; slots of a pair are freed in order, so that the last one to be free says it of all",
    },
    "test_hopper_gemm": {
        _TRY_WAIT: _CLUSTER,
        "barrier.cluster.arrive": _CLUSTER,
        "barrier.cluster.wait": _CLUSTER,
    },
    "test_blackwell_gemm": {
        "bar.sync 0": _SETUP,
        "bar.sync 1": _SETUP,
        _TRY_WAIT: "the only accumulator is free from the start",
        "mbarrier.arrive.shared.b64": "nobody waits for the release of the only accumulator",
    },
}


def reasons(test: str, unnoticed: Mapping[str, int]) -> list[dict[str, Any]]:
    """What nobody notices in a test, with the reasons; ValueError for an instruction that has none."""
    function = test.rpartition("::")[2].partition("[")[0]
    known = REASONS.get(function, {})
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
