"""Every kind of kernel cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cutlass.cute.runtime import make_fake_stream

from cula_cp_sm90 import launch
from cula_cp_sm90.config import MergeConfig, PrepareConfig, RecurrenceConfig
from cula_emulator import resources

PREPARE = PrepareConfig("bfloat16", "bfloat16", "bfloat16")
PREPARES = [
    PREPARE,
    replace(
        PREPARE, gate_dtype="float32", beta_dtype="float32", beta_sigmoid=True, neg_eigval=True
    ),
    replace(PREPARE, dtype="float16", gate_dtype="float16", index_dtype="int32", rate=False),
    replace(PREPARE, operand="bfloat16", l2norm=False, index_dtype="int64", bias=False),
    replace(PREPARE, gate="log", gate_dtype="float32", rate=False, bias=False),
    replace(PREPARE, gate="softplus", bounded=False),
    replace(PREPARE, gate="log", gate_dtype="float32", rate=False, bias=False, bounded=False),
]
WALK = RecurrenceConfig("bfloat16")
WALKS = [
    replace(config, tiles=tiles, operand=operand)
    for tiles, operand in ((1, "float16"), (2, "float16"), (2, "bfloat16"))
    for config in (
        WALK,
        replace(
            WALK, dtype="float16", packed=True, initial_state=True, indexed=True, in_place=True
        ),
        replace(WALK, split=True, packed=True, state_v_first=True),
    )
]
SCANS = [
    replace(WALK, split=True, scan=True, tiles=2, final_state=False, initial_state=initial, packed=packed)
    for initial, packed in ((False, False), (True, True))
]  # fmt: skip
SM_SHARED_MEMORY, RESERVED = 233_472, 1024
# 80 registers are a tight fit: some combinations of dtypes and flags spill a little (docs/kda-prefill.md).
SOME_SPILLS = 64


def compiled(config):
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return resources.compile(*launch.kernel(config), stream, arch="sm_90a").kernel


@pytest.mark.parametrize("config", PREPARES, ids=str)
def test_as_many_prepare_as_are_meant_to(config):
    kernel = compiled(config)
    if config in (PREPARE, PREPARES[1]) or not config.bounded:
        resources.check(kernel)
    assert max(kernel.spill_stores, kernel.spill_loads) <= SOME_SPILLS
    assert kernel.count("HMMA") > 0
    assert kernel.count("LDGSTS.128") >= 8
    ctas = 3 if config.bounded else 2
    assert kernel.registers * 256 * ctas <= 65_536
    assert ctas * (kernel.dynamic_shared_bytes + RESERVED) <= SM_SHARED_MEMORY


@pytest.mark.parametrize("config", WALKS + SCANS, ids=str)
def test_nothing_waits_for_wgmma_but_what_is_written(config):
    """The compiler waits, or serialises everything, where an accumulator is touched in the wrong place."""
    kernel = compiled(config)
    resources.check(kernel)
    assert kernel.count("WARPGROUP.DEPBAR") == 3
    # K blocks of 16: two products over 128 channels (one in a scan), three over 64 tokens (two).
    assert kernel.count("HGMMA") == (8 + 4 + 4 if config.scan else 2 * 8 + 3 * 4)
    assert kernel.count("UBLKCP") == 1
    assert kernel.count("UTMALDG") == config.tiles
    assert kernel.count("UTMASTG") == (0 if config.scan else 2)  # in the loop and after it


@pytest.mark.parametrize("index_dtype", [None, "int32", "int64"])
def test_the_merge_uses_tensor_cores(index_dtype):
    kernel = compiled(MergeConfig(True, True, index_dtype is not None, index_dtype))
    resources.check(kernel)
    assert kernel.count("HMMA") == 3 * 16
