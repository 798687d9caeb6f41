"""What dispatchers are told, and the public names of the host package."""

from __future__ import annotations

import inspect

import pytest
import torch

import liteattention_sm89.launch
import liteattention_sm90
from cula_testing.interpreters import run
from cula_testing.specs import assert_answer, assert_says_what_to_install
from liteattention_sm90 import _spec, launch

PROBLEM = {
    "capability": (9, 0), "dtype": torch.bfloat16, "head_dim_k": 128, "head_dim_v": 128, "block_m": 128, "block_n": 64,
    "tiles": 4096, "packed": False, "use_int8": False, "backward": False, "deterministic": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"dtype": "float16", "head_dim_k": 8, "head_dim_v": 8, "block_n": 128, "tiles": 1}, None),
        ({"capability": (10, 0)}, "needs compute capability 9.0, not 10.0"),
        ({"dtype": torch.float32}, "bfloat16 or float16, not float32"),
        ({"head_dim_k": 136}, "the head dimension must be a multiple of 8 up to 128, not 136"),
        ({"head_dim_v": 60}, "that of v must be a multiple of 8"),
        ({"block_m": 64}, "block_m must be 128, not 64"),
        ({"block_n": 32}, "block_n must be 64 or 128, not 32"),
        ({"packed": True}, None),
        ({"use_int8": True}, "no scores from 8-bit integers"),
        ({"tiles": 0}, "1 to 4096 key tiles, not 0"),
        ({"tiles": 8192}, "1 to 4096 key tiles, not 8192"),
        ({"deterministic": True}, None),
        ({"backward": True}, None),
        ({"backward": True, "deterministic": True}, None),
        ({"backward": True, "deterministic": True, "packed": True}, None),
        ({"backward": True, "packed": True}, None),
        ({"backward": True, "head_dim_k": 192}, "multiple of 8 up to 128, not 192"),
    ],
)
def test_what_is_served(changes, reason):
    assert_answer(_spec.supports, PROBLEM | changes, reason)


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_what_to_install(monkeypatch, missing):
    assert_says_what_to_install(monkeypatch, _spec.supports, missing, "liteattention-sm90")


@pytest.mark.parametrize("name, positional", [("forward", 18), ("backward", 19)])
def test_the_launcher_takes_what_that_of_the_host_package_takes(name, positional):
    theirs, ours = (
        {n: p.kind for n, p in inspect.signature(getattr(module, name)).parameters.items()}
        for module in (liteattention_sm89.launch, launch)
    )
    for_tests = {
        "kernel_for",
        "means_for",
        "quantize_for",
        "arch",
        "kernels",
        "multiprocessors",
        "ordered_from",
        "apart",
    }
    theirs, ours = ({n: k for n, k in x.items() if n not in for_tests} for x in (theirs, ours))
    assert [*theirs.items()] == [*ours.items()]


def test_public_names_are_those_of_the_host_package():
    assert liteattention_sm90.__all__ == liteattention_sm89.__all__
    for name in liteattention_sm89.__all__:
        assert getattr(liteattention_sm90, name) is getattr(liteattention_sm89, name)
    assert set(liteattention_sm89.__all__) <= set(dir(liteattention_sm90))
    assert _spec.load("lite_attention") is liteattention_sm89.lite_attention
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        liteattention_sm90.nothing  # noqa: B018


def test_an_import_needs_no_kernel_language(tmp_path):
    code = """
import sys
import liteattention_sm90
from liteattention_sm90 import _spec
assert "liteattention_sm89" not in sys.modules
from liteattention_sm90 import lite_attention
assert lite_attention.__module__ == "liteattention_sm89.ops"
assert not {"cutlass", "triton", "tvm_ffi", "cula"} & {m.partition(".")[0] for m in sys.modules}
"""
    result = run(code, liteattention_sm89, liteattention_sm90, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
