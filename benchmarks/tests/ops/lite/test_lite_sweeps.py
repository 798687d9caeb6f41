"""Settings and peers of the sweeps over lengths and head dimensions."""

import pytest

from benchmarks.harness import registry, results
from benchmarks.ops.lite import lite_attention, lite_sweeps
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.tests.ops.common import assert_every_setting_is_measured, assert_fits_the_h200
from liteattention_sm89.config import HEAD_DIMS

ALL = lite_sweeps.settings(False)
PROVIDERS = {p.name: p for p in lite_sweeps.OP.providers}


def test_every_head_dimension_and_every_length_is_there_once():
    assert registry.get("lite_sweeps") is lite_sweeps.OP
    assert lite_sweeps.DIMS == HEAD_DIMS
    names = [s.name for s in ALL]
    assert len(names) == len(set(names)) == 30
    assert names[:3] == [f"{kind}-B1-S8192-H16-D64" for kind in ("dense", "full", "list12.5")]
    for kind in ("dense", "full", "list"):
        found = [(s.params["S"], s.params["D"]) for s in ALL if s.params["kind"] == kind]
        at_one_length = [dim for tokens, dim in found if tokens == 8192]
        assert at_one_length == [64, 96, 128, 192, 256]
        of_one_dim = sorted(tokens for tokens, dim in found if dim == 128)
        assert of_one_dim == [1024, 2048, 4096, 8192, 16384, 32768]
    assert [s.name for s in lite_sweeps.settings(True)] == [
        f"{kind}-B1-S1024-H16-D128" for kind in ("dense", "full", "list12.5")
    ]


def test_all_but_the_peers_of_torch_are_those_of_lite_attention():
    assert PROVIDERS["lite"] is lite_providers.LITE
    assert PROVIDERS["lite_dense"] is lite_providers.LITE_DENSE
    assert lite_sweeps.OP.check is lite_attention.OP.check
    assert list(PROVIDERS) == ["lite", "lite_dense", "torch_flash", "torch_cudnn"]


def test_torch_is_asked_about_the_head_dimension(monkeypatch):
    asked = []

    def refusal(backend, dim, training):
        asked.append((backend, dim, training))
        return "too wide" if dim > 128 and backend == "CUDNN_ATTENTION" else None

    monkeypatch.setattr(lite_providers, "torch_refusal", refusal)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    wide = next(s for s in ALL if s.name == "dense-B1-S8192-H16-D256")
    assert PROVIDERS["torch_cudnn"].supports(wide) == "too wide"
    assert PROVIDERS["torch_flash"].supports(wide) is None
    assert PROVIDERS["torch_cudnn"].supports(ALL[1]) == "takes no lists of tiles"
    assert asked == [("CUDNN_ATTENTION", 256, False), ("FLASH_ATTENTION", 256, False)]


@pytest.mark.parametrize("problem", ALL, ids=lambda s: s.name)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    assert_fits_the_h200(lite.read(problem), 4 * 2 * lite.moved(problem))


def test_measured_results_hold_every_setting():
    assert_every_setting_is_measured("lite_sweeps", [s.name for s in ALL], ("lite",))
    for path in results.RESULTS.glob("*/lite_sweeps.json"):
        found = results.rows_of(results.load(path), provider="lite_dense", method="graph")
        assert len(found) == 20
