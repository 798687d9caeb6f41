"""Runs an op: for each setting it checks every provider, and then times all of them in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.harness import results, sustained, timers
from benchmarks.harness.registry import CannotRun, Op, Provider, Setting
from benchmarks.harness.timers import Backend, Stats, Timing

DEFAULT_METHODS = ("graph", "eager-host", "eager-event")


@dataclasses.dataclass
class Run:
    """What one invocation measures, and on which device. `floor_tbs` is None where a card's bandwidth is not known."""

    op: Op
    providers: tuple[Provider, ...]
    timing: Timing
    backend: Backend
    device: Any
    l2_bytes: int
    floor_tbs: float | None
    methods: Sequence[str] = DEFAULT_METHODS
    load: sustained.Load = sustained.Load()
    meter: sustained.Meter | None = None
    release: Callable[[], None] = lambda: None
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    skipped: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def measure(self, settings: Iterable[Setting]) -> None:
        """Appends the rows of every setting. Where CheckFailed is raised, the rows of earlier settings stay."""
        for setting in settings:
            self.rows += self._setting(setting)
            self.release()

    def result(self, provenance: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
        """The content of a result file."""
        results.add_ratios(self.rows)
        method = {
            "timing": dataclasses.asdict(self.timing),
            "l2_bytes": self.l2_bytes,
            "l2_factor": timers.L2_FACTOR,
            "floor_tbs": self.floor_tbs,
        }
        title, notes = self.op.title, list(self.op.notes)
        if results.SUSTAINED in self.methods:
            method["load"] = dataclasses.asdict(self.load)
            title += ", sustained load"
            notes.append(sustained.NOTE)
        return {
            "schema": results.SCHEMA,
            "op": self.op.name,
            "title": title,
            "provenance": provenance,
            "place": place,
            "method": method,
            "notes": notes,
            "checks": self.checks,
            "skipped": self.skipped,
            "rows": self.rows,
        }

    def _setting(self, setting: Setting) -> list[dict[str, Any]]:
        active = self._checked(setting)
        if not active:
            return []
        cold = setting.l2 == "cold"
        count = timers.buffer_sets(self.op.set_bytes(setting), self.l2_bytes, resident=not cold)
        inputs = [self.op.make_inputs(setting, self.device, seed) for seed in range(count)]
        calls = {p.name: [p.bind(setting, x) for x in inputs] for p in active}
        rows = []
        peaks = {}
        if self.op.peaks:
            peaks = {p.name: {"peak_mib": self.backend.peak_mib(calls[p.name][0])} for p in active}
        for method in self.methods:
            if method == results.SUSTAINED:
                rows += self._sustained(setting, active, calls, keep=cold)
                continue
            name, stats = self._time(method, calls, keep=cold)
            rows += [self._row(setting, p, name, stats[p.name]) for p in active]
        return [row | peaks.get(row["provider"], {}) for row in rows]

    def _sustained(
        self, setting: Setting, active: Sequence[Provider], calls: timers.Calls, keep: bool
    ) -> list[dict[str, Any]]:
        loads = sustained.time_sustained(
            self.backend, calls, self.timing, keep, self.load, self.meter
        )
        return [
            self._row(setting, p, results.SUSTAINED, loads[p.name].stats) | loads[p.name].fields()
            for p in active
        ]

    def _checked(self, setting: Setting) -> list[Provider]:
        active = []
        for provider in self.providers:
            where = {"setting": setting.name, "provider": provider.name}
            if reason := provider.supports(setting):
                self.skipped.append({**where, "reason": reason})
                continue
            try:
                provider.prepare(setting)
                errors = self.op.check(provider, setting, self.device)
            except CannotRun as error:
                self.skipped.append({**where, "reason": str(error)})
                self.release()
                continue
            self.checks.append({**where, "errors": errors})
            self.release()
            active.append(provider)
        return active

    def _time(self, method: str, calls: timers.Calls, keep: bool) -> tuple[str, dict[str, Stats]]:
        if method == "graph" and self.backend.graphs:
            return method, timers.time_graphs(self.backend, calls, self.timing, keep)
        if method in ("graph", "queued-event"):
            return "queued-event", timers.time_queued(self.backend, calls, self.timing, keep)
        if method == "eager-host":
            return method, timers.time_eager_host(self.backend, calls, self.timing)
        if method == "eager-event":
            return method, timers.time_eager_event(self.backend, calls, self.timing)
        raise ValueError(f"method: expected one of {results.METHODS}, got {method!r}")

    def _row(
        self, setting: Setting, provider: Provider, method: str, stats: Stats
    ) -> dict[str, Any]:
        moved, floor_us = provider.moved(setting), None
        if self.floor_tbs is not None and setting.l2 == "cold":
            floor_us = round(self.op.floor_bytes(setting) / self.floor_tbs / 1e6, 4)
        row = {
            "setting": setting.name,
            "params": dict(setting.params),
            "l2": setting.l2,
            "provider": provider.name,
            "role": provider.role,
            "method": method,
            "median_us": round(stats.median_us, 4),
            "p20_us": round(stats.p20_us, 4),
            "p80_us": round(stats.p80_us, 4),
            "samples": stats.samples,
            "calls_per_sample": stats.calls_per_sample,
            "bytes": moved,
            "gbps": round(moved / stats.median_us / 1e3, 1),
            "floor_us": floor_us,
        }
        if self.op.flops is not None:
            row["tflops"] = round(self.op.flops(setting) / stats.median_us / 1e6, 1)
        return row
