"""What a package's own operator and public functions are, and what importing the package costs."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch

from cula_core.delta_rule import launch
from cula_core.delta_rule.call import SCHEMA, Call

from ..comparing import relative_rmse
from ..interpreters import python
from .inputs import expected, flags, inputs, int32
from .subject import Subject

# One interpreter for all that a first import decides: what it brings, how long it takes beyond torch, and that calls on
# the CPU, and what a dispatcher reads, do without a kernel language.
FRESH = """
import importlib.abc, json, sys, time
import torch
before = set(sys.modules)
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "triton", "tvm_ffi", "cuda", "cula", "fla"):
            raise ImportError(f"{{name}} must not be imported")
sys.meta_path.insert(0, Block())
start = time.perf_counter()
import {package} as c
seconds = time.perf_counter() - start
x = torch.zeros(1, 3, 1, 128)
c.chunk_kda(x, x, x, x, x[..., 0])
c.chunk_kda(x, x, x, x, x[..., 0], cu_seqlens=torch.tensor([0, 3]), state_pool=torch.zeros(1, 1, 128, 128))
c.kda_workspace_bytes(1, 3, 1)
new = set(sys.modules) - before
heavy = {{m.partition(".")[0] for m in new}} & {{"cutlass", "triton", "tvm_ffi"}}
launches = [m for m in new if m.endswith(".launch") or ".kernels" in m]
del sys.meta_path[0]
from {package} import _spec
refusal = _spec.supports()
later = sorted({{"cutlass", "triton", "tvm_ffi"}} & set(sys.modules))
print(json.dumps([seconds, sorted(heavy), launches, refusal, later]))
"""


class Operator:
    """What is registered and shown under a package's name; `cula-core` tests what it does."""

    subject: Subject

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes with what depends on the subject."""
        if "capability" in metafunc.fixturenames:
            known = self.subject.target.compiles_for
            every = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
            metafunc.parametrize("capability", [c for c in every if c not in known], ids=str)

    def test_importing_the_package_is_quick_and_needs_no_kernel_language(self):
        """Under 0.2 s beyond torch, the best of three: a busy machine only ever adds."""
        code = FRESH.format(package=self.subject.package.__name__)
        quickest = float("inf")
        for _ in range(3):
            seconds, *rest = json.loads(python(code, self.subject.package))
            assert rest == [[], [], None, []]
            quickest = min(quickest, seconds)
            if quickest < 0.2:
                break
        assert quickest < 0.2

    def test_the_operator_has_the_shared_schema(self):
        package = self.subject.target.package
        schema = getattr(torch.ops, package).prefill.default._schema
        assert schema == torch._C.parse_schema(f"{package}::prefill{SCHEMA}")

    def test_a_call_is_the_reference_on_a_cpu(self):
        a = inputs(1, 9, 1, 2, lengths=(5, 0, 4), states=4, initial=True, dtype=torch.float32)
        before, slots = a.pop("initial_state"), int32(3, -1, 0)
        pool = before.clone()
        o, state = self.subject.package.chunk_kda(
            **a, **flags("safe"), use_qk_l2norm_in_kernel=True, state_pool=pool, initial_state_indices=slots
        )  # fmt: skip
        given = a | {"initial_state": before}
        wanted, finals = expected(given, "safe", l2norm=True, state_indices=slots)
        assert state is pool and relative_rmse(o, wanted) < 1e-6
        assert relative_rmse(pool[[3, 0]], finals[[0, 2]]) < 1e-6
        assert torch.equal(pool[[1, 2]], before[[1, 2]])

    def test_a_cuda_call_is_launched_for_the_target(self, monkeypatch):
        """Here from the CPU, to a launcher that only records."""
        launched: list[tuple] = []
        prefill = import_module("cula_core.delta_rule.prefill")
        monkeypatch.setattr(prefill, "is_plain_cuda_call", lambda q: type(q) is torch.Tensor)
        capability = next(iter(self.subject.target.compiles_for))
        monkeypatch.setattr(prefill, "_capability", lambda device: capability)
        monkeypatch.setattr(launch, "run", lambda *what: launched.append(what))
        a = inputs(1, 5, 1, 2)
        o, _ = self.subject.package.chunk_kda(**a, **flags("safe"))
        ((target, call),) = launched
        assert target is self.subject.target and isinstance(call, Call)
        assert call.q is a["q"] and call.out is o

    def test_other_gpus_are_refused_before_anything(self, monkeypatch, capability):
        prefill = import_module("cula_core.delta_rule.prefill")
        monkeypatch.setattr(prefill, "is_plain_cuda_call", lambda q: True)
        monkeypatch.setattr(prefill, "_capability", lambda device: capability)
        target = self.subject.target
        known = " or ".join(f"{major}.{minor}" for major, minor in target.compiles_for)
        message = f"^{target.distribution} needs compute capability {known}, cpu has {'{}.{}'.format(*capability)}$"
        with pytest.raises(RuntimeError, match=message):
            self.subject.package.chunk_kda(torch.zeros(1), None, None, None, None)

    def test_the_spec_is_that_of_the_target(self):
        spec, target = import_module(f"{self.subject.package.__name__}._spec"), self.subject.target
        assert (spec.NAME, spec.OP, spec.ARCHS) == (
            target.distribution,
            "kda.prefill",
            target.archs,
        )
        assert spec.supports(requires_grad=True) == (None if target.backward else "no backward")

    def test_the_spec_loads_every_public_function(self):
        package = self.subject.package
        spec = import_module(f"{package.__name__}._spec")
        assert set(package.__all__) == {"chunk_kda", "kda_workspace_bytes"}
        for name in package.__all__:
            assert spec.load(name) is getattr(package, name)

    def test_the_recurrence_is_found(self):
        config = self.subject.target.recurrence_config("bfloat16")
        kernel, *_ = launch.unit(self.subject.target, config, "sm_90a").make()
        assert type(kernel).__module__.startswith(f"{self.subject.package.__name__}.")
