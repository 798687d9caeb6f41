"""A fake device with a clock of its own, a toy op, synthetic results, and stand-ins for GPUs and for peers."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from benchmarks.harness import results
from benchmarks.harness.measure import Run
from benchmarks.harness.registry import Op, Provider, Setting
from benchmarks.harness.timers import Timing
from benchmarks.ops.decode import problem as decode


class FakeBackend:
    """Every call advances a virtual clock by its own cost; host and device share that clock."""

    def __init__(self, graphs: bool = True) -> None:
        self.graphs = graphs
        self.now_us = 0.0
        self.log: list[str] = []
        self.captured: list[tuple[int, bool]] = []
        self.sleeps: list[tuple[float, int]] = []
        self.launch_gap_us = 2.0

    def call(self, name: str, cost_us: float) -> Callable[[], str]:
        def run() -> str:
            self.now_us += cost_us
            self.log.append(name)
            return name

        return run

    def synchronize(self) -> None:
        pass

    def clock(self) -> float:
        return self.now_us * 1e-6

    def capture(self, calls: Sequence[Callable[[], Any]], keep: bool) -> Callable[[], None]:
        self.captured.append((len(calls), keep))

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def time_each(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        times = []
        for call in calls:
            start = self.now_us
            call()
            times.append(self.now_us - start)
        return times

    def time_queued(self, calls: Sequence[Callable[[], Any]], keep: bool) -> float:
        return sum(self.time_each(calls))

    def mark(self) -> float:
        return self.now_us

    def wait(self, mark: float) -> None:
        assert mark <= self.now_us

    def between_us(self, start: float, end: float) -> float:
        return end - start

    def sleep(self, seconds: float) -> None:
        self.sleeps.append((seconds, len(self.log)))
        self.now_us += seconds * 1e6


class FakeMeter:
    """A card of 500 W, whose counter moves in steps of 20 ms, and whose clock falls by 1 MHz per reading."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend, self.clock = backend, 1600

    def sm_clock_mhz(self) -> int:
        self.clock -= 1
        return self.clock

    def joules(self) -> float:
        return 1000.0 + self.backend.now_us // 20_000 * 20_000 * 500e-6


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def meter(backend: FakeBackend) -> FakeMeter:
    return FakeMeter(backend)


COSTS = {"ours": 10.0, "other": 15.0, "limit": 8.0}


@pytest.fixture
def toy(backend: FakeBackend) -> Op:
    """Costs 10, 15 and 8 us per call, moves 40, 60 and 40 bytes; `other` does not know the setting called small."""

    def provider(name: str, role: str, moved: int, **more: Any) -> Provider:
        return Provider(
            name,
            role,
            lambda s, x: backend.call(f"{name}{x}", COSTS[name]),
            lambda s: moved,
            **more,
        )

    def settings(quick: bool) -> list[Setting]:
        large = Setting("large", {"B": 8})
        return [large] if quick else [Setting("small", {"B": 1}, l2="resident"), large]

    return Op(
        name="toy",
        title="Toy",
        settings=settings,
        providers=(
            provider("ours", "ours", 40_000_000),
            provider(
                "other",
                "peer",
                60_000_000,
                supports=lambda s: "too small" if s.name == "small" else None,
            ),
            provider("limit", "ceiling", 40_000_000),
        ),
        make_inputs=lambda setting, device, seed: seed,
        set_bytes=lambda setting: 100,
        check=lambda provider, setting, device: {"output": 0.0},
    )


@pytest.fixture
def toy_run(toy: Op, backend: FakeBackend) -> Run:
    timing = Timing(rounds=3, block=4, graph_us=100.0, eager_calls=8)
    return Run(toy, toy.providers, timing, backend, "cpu", l2_bytes=150, floor_tbs=4.0)


ORIGIN = {
    "date": "2026-01-02T03:04:05Z",
    "gpu": "NVIDIA Toy 100",
    "sms": 132,
    "l2_bytes": 150,
    "driver": "1.2",
    "cuda": "13.0",
    "python": "3.12",
    "versions": {"torch": "2.11.0", "triton": None, "cula": "0.1.0"},
    "commit": "0123456789abcdef",
    "dirty": False,
}
PLACE = {"sms": 80, "sms_seen": 80, "strategy": "green context, stream", "graphs": True}


@pytest.fixture
def toy_result(toy_run: Run) -> dict[str, Any]:
    toy_run.measure(toy_run.op.settings(False))
    return toy_run.result(copy.deepcopy(ORIGIN), dict(PLACE))


@pytest.fixture
def loaded_result(toy: Op, backend: FakeBackend, meter: FakeMeter) -> dict[str, Any]:
    """The toy op under a sustained load."""
    timing = Timing(graph_us=100.0)
    methods = (results.SUSTAINED,)
    run = Run(toy, toy.providers, timing, backend, "cpu", 150, 4.0, methods, meter=meter)
    run.measure(toy.settings(True))
    return run.result(copy.deepcopy(ORIGIN), dict(PLACE))


@pytest.fixture
def measured(backend: FakeBackend, toy_result: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Runs an op from settings to a result on the fake device.

    `cost_us(provider, setting)` is the time of a call; `changes` replace fields of the op.
    """

    def measure(
        op: Op,
        cost_us: Callable[[str, Setting], float],
        settings: Iterable[Setting],
        **changes: Any,
    ) -> dict[str, Any]:
        providers = tuple(
            dataclasses.replace(p, bind=lambda s, x, n=p.name: backend.call(n, cost_us(n, s)))
            for p in changes.pop("providers", op.providers)
        )
        run = Run(
            op=dataclasses.replace(op, providers=providers, **changes),
            providers=providers,
            timing=Timing(rounds=2, block=2, graph_us=50.0),
            backend=backend,
            device="cpu",
            l2_bytes=1000,
            floor_tbs=4.3,
            methods=("graph",),
        )
        run.measure(settings)
        return run.result(toy_result["provenance"], toy_result["place"])

    return measure


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch claim a GPU of a compute capability."""

    def claim(*capability: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    return claim


class Tuner:
    """The parts of Triton's autotuner that the benchmarks use; `log` holds what was compiled and what was run."""

    def __init__(self) -> None:
        self.configs, self.cache, self.cache_results = ["a", "b"], {"key": "a"}, True
        self.log: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]] = []

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        self.log.append(("compile", args, kwargs))

    def run(self, *args: Any, **kwargs: Any) -> str:
        self.cache.setdefault("key", "a")
        self.log.append(("run", args, kwargs))
        return "result"


class Peers:
    """Modules under the names of FLA's and Triton's, which hold what a test puts into them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.tuners: list[Tuner] = []
        self.calls: list[dict[str, Any]] = []
        for name in ("fla", "fla.modules", "fla.ops"):
            self.module(name)
        testing = self.module("triton.testing", do_bench=lambda call, **options: options)
        self.module("triton", AsyncCompileMode=CompileMode, testing=testing)

    def module(self, name: str, **content: Any) -> types.ModuleType:
        """A module that can be imported by that name."""
        made = types.ModuleType(name)
        made.__dict__.update(content)
        self.monkeypatch.setitem(sys.modules, name, made)
        return made

    def kernels(self, *names: str) -> types.SimpleNamespace:
        """Kernels by name, each of which has a tuner inside."""
        made = {name: Tuner() for name in names}
        self.tuners += made.values()
        return types.SimpleNamespace(
            **{name: types.SimpleNamespace(fn=tuner) for name, tuner in made.items()}
        )

    def call(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """Notes its options, and returns v and the initial state."""
        self.calls.append(options)
        return v, options["initial_state"]


class CompileMode:
    """Stands in for Triton's context in which kernels are compiled in a pool of threads."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __enter__(self) -> CompileMode:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    return Peers(monkeypatch)


def _decode_result(
    op: str, batches: Sequence[int], slowdown: float = 1.0, providers: Any = None
) -> dict[str, Any]:
    """A result of single-token decode whose `cula` runs at 4.0 TB/s / slowdown, its ceiling at 4.2 and FLA at 3.5."""
    rates = providers or {
        "cula": ("ours", 4.0 / slowdown),
        "inplace_ceiling": ("ceiling", 4.2),
        "fla": ("peer", 3.5),
    }
    rows = []
    for batch in batches:
        setting = decode.setting(batch)
        moved = decode.moved(setting)
        for name, (role, tbs) in rates.items():
            time = moved / tbs / 1e6
            rows.append(
                {
                    "setting": setting.name,
                    "params": dict(setting.params),
                    "l2": setting.l2,
                    "provider": name,
                    "role": role,
                    "method": "graph",
                    "median_us": time,
                    "p20_us": time * 0.99,
                    "p80_us": time * 1.01,
                    "samples": 10,
                    "calls_per_sample": 4,
                    "bytes": moved,
                    "gbps": tbs * 1e3,
                    "floor_us": moved / 4.3 / 1e6,
                }
            )
    results.add_ratios(rows)
    head = {"schema": 1, "op": op, "title": "Decode", "provenance": copy.deepcopy(ORIGIN)}
    head["place"] = dict(PLACE)
    return {**head, "method": {}, "notes": [], "checks": [], "skipped": [], "rows": rows}


@pytest.fixture
def decode_result() -> Callable[..., dict[str, Any]]:
    return _decode_result


@pytest.fixture
def first_call_result() -> dict[str, Any]:
    """First calls of one function on the toy GPU."""
    row = {
        "function": "linear_attention_decode",
        "module": "cula_lightning_decode",
        "op": "lightning_decode",
        "setting": "B64-T1-fp32-kv-cold",
        "provider": "cula",
        "import_torch_s": [4.0, 1.5, 2.0],
        "import_s": [0.2],
        "empty_cache_s": [6.0],
        "filled_cache_s": [0.02],
        "second_call_s": [0.0001],
        "host_s": [0.0000123],
    }
    head = {"title": "First calls in new processes", "provenance": copy.deepcopy(ORIGIN)}
    return {**head, "notes": ["new"], "skipped": [], "rows": [row]}
