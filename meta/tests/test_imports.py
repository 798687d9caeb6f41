"""What importing cula costs and pulls in, seen from fresh processes."""

from __future__ import annotations

import forks
import pytest

import cula

# Code of the tests below, by their names. The first runs where torch has not been imported.
ALONE = """
import sys, time
start = time.process_time()
import cula
print(time.process_time() - start)
assert 'torch' not in sys.modules
"""
LIGHT = """
import sys, time
import torch, cula
before = set(sys.modules)
start = time.process_time()
import cula.kda, cula.lightning, cula.lite, cula.varlen
assert 'torch._dynamo' not in sys.modules
cula.explain('lightning.decode', arch='sm90')
print(time.process_time() - start)
import cula.compat
assert 'torch._dynamo' not in sys.modules
new = {name.partition('.')[0] for name in set(sys.modules) - before}
assert not new & {'cutlass', 'triton', 'fla', 'tvm_ffi', 'rich', 'matplotlib'}, new
"""
BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "triton", "fla", "rich", "matplotlib", "einops"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import torch, cula
q = torch.randn(1, 3, 2, 16); g = -torch.rand(1, 3, 2, 16); beta = torch.rand(1, 3, 2)
state = torch.zeros(1, 2, 16, 16); decay = torch.rand(2)
cula.kda.chunk_kda(q, q, q, g, beta)
cula.kda.fused_recurrent_kda(q, q, q, g, beta)
cula.lightning.fused_recurrent_gated_delta_rule(q, q, q, beta=beta)
cula.lightning.lightning_attn_fwd(q, q, q, decay)
cula.lightning.linear_attention_decode(q, q, q, state, decay)
cula.lite.lite_attention(q, q, q)
print(cula.explain('chunk_kda', arch='sm90').chosen)
"""
LAZY = "import cula, sys; cula.varlen.capacity(3, 1, 2); print('cula.kda' in sys.modules)"
UNKNOWN = "import cula\ntry: cula.nothing\nexcept AttributeError as error: print(error)"
SILENT = """
import torch, cula
q = torch.ones(1, 2, 1, 4)
cula.lightning.lightning_attn_fwd(q, q, q, torch.ones(1))
"""


TIMED = [f"{LIGHT}# {number}\n" for number in range(8)]


@pytest.fixture(scope="module")
def done() -> dict[str, forks.Done]:
    """What the code left, each in a process of its own."""
    codes = (ALONE, *TIMED, BLOCKED, LAZY, UNKNOWN, SILENT)
    return dict(zip(codes, forks.run(*codes[1:], without_torch=codes[:1]), strict=True))


def output(done: forks.Done) -> str:
    assert done.status == 0, done.err
    return done.out


def test_import_is_light(done) -> None:
    """`import cula` and its dispatching modules, beyond torch, stay under 0.2 s and load no compiler."""
    # Two tests at once share a core's caches, so the least of eight is what the code takes.
    light = min(float(output(done[code])) for code in TIMED)
    assert float(output(done[ALONE])) + light < 0.2


def test_everything_runs_with_compilers_blocked(done) -> None:
    assert output(done[BLOCKED]).split() == ["reference"]


def test_names_are_lazy_and_complete(done) -> None:
    assert {*cula.__all__, "__version__"} <= set(dir(cula))
    for name in cula.__all__:
        assert getattr(cula, name) is not None
    assert output(done[LAZY]).strip() == "False"
    assert output(done[UNKNOWN]).strip() == "module 'cula' has no attribute 'nothing'"


def test_library_is_silent(done) -> None:
    assert done[SILENT][:2] == (0, "")
    assert "cula" not in done[SILENT].err
