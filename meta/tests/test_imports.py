"""What importing cula costs and pulls in, seen from fresh processes."""

from __future__ import annotations

import subprocess
import sys

import cula

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "triton", "fla", "rich", "matplotlib", "einops"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
"""


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    """`import cula` and its dispatching modules, beyond torch, stay under 0.2 s and load no compiler."""
    out = fresh(
        "import sys, time\n"
        "start = time.process_time()\n"
        "import cula\n"
        "assert 'torch' not in sys.modules\n"
        "own = time.process_time() - start\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "start = time.process_time()\n"
        "import cula.kda, cula.lightning, cula.lite, cula.varlen\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "cula.explain('lightning.decode', arch='sm90')\n"
        "print(own + time.process_time() - start)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'cutlass', 'triton', 'fla', 'tvm_ffi', 'rich', 'matplotlib'}, new\n"
    )
    assert float(out) < 0.2


def test_everything_runs_with_compilers_blocked() -> None:
    out = fresh(
        BLOCK + "import torch, cula\n"
        "q = torch.randn(1, 3, 2, 16); g = -torch.rand(1, 3, 2, 16); beta = torch.rand(1, 3, 2)\n"
        "state = torch.zeros(1, 2, 16, 16); decay = torch.rand(2)\n"
        "cula.kda.chunk_kda(q, q, q, g, beta)\n"
        "cula.kda.fused_recurrent_kda(q, q, q, g, beta)\n"
        "cula.lightning.lightning_attn_fwd(q, q, q, decay)\n"
        "cula.lightning.linear_attention_decode(q, q, q, state, decay)\n"
        "cula.lite.lite_attention(q, q, q)\n"
        "print(cula.explain('chunk_kda', arch='sm90').chosen)\n"
    )
    assert out.split() == ["reference"]


def test_names_are_lazy_and_complete() -> None:
    assert {*cula.__all__, "__version__"} <= set(dir(cula))
    for name in cula.__all__:
        assert getattr(cula, name) is not None
    out = fresh("import cula, sys; cula.varlen.capacity(3, 1, 2); print('cula.kda' in sys.modules)")
    assert out.strip() == "False"
    out = fresh("import cula\ntry: cula.nothing\nexcept AttributeError as error: print(error)")
    assert out.strip() == "module 'cula' has no attribute 'nothing'"


def test_library_is_silent() -> None:
    code = "import torch, cula; q = torch.ones(1, 2, 1, 4); cula.lightning.lightning_attn_fwd(q, q, q, torch.ones(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "cula" not in done.stderr
