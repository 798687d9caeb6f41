"""Where a result comes from, without a GPU."""

import subprocess

import pytest

from benchmarks.harness import provenance


def test_commit_from_the_environment(monkeypatch):
    monkeypatch.setenv("CULA_COMMIT", "abc123-dirty")
    assert provenance.commit() == {"commit": "abc123", "dirty": True}
    monkeypatch.setenv("CULA_COMMIT", "abc123")
    assert provenance.commit() == {"commit": "abc123", "dirty": False}


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True
    )


def test_commit_and_dirty_flag_from_git(monkeypatch, tmp_path):
    monkeypatch.delenv("CULA_COMMIT", raising=False)
    assert provenance.commit(tmp_path) == {"commit": None, "dirty": None}
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "file").write_text("1")
    for step in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        git(tmp_path, *step)
    clean = provenance.commit(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "benchmarks" / "results" / "new.json").write_text("{}")
    (tmp_path / "README.md").write_text("tables")
    assert provenance.commit(tmp_path)["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert provenance.commit(tmp_path)["dirty"] is True


def test_smi_values_are_numbers_where_they_can_be():
    assert provenance.parse_smi("580.159.03, 345, 3201, 1980, 3201, 75.31, 31\n") == {
        "driver": "580.159.03",
        "sm_mhz": 345,
        "memory_mhz": 3201,
        "sm_max_mhz": 1980,
        "memory_max_mhz": 3201,
        "power_w": 75.31,
        "temperature_c": 31,
    }
    assert provenance.parse_smi("1.2, [N/A], 1, 1, 1, [N/A], 3")["power_w"] == "[N/A]"


def test_provenance_works_without_a_gpu():
    found = provenance.provenance()
    assert {"date", "gpu", "driver", "cuda", "versions", "commit", "dirty"} <= set(found)
    assert found["versions"]["torch"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
    ],
)
def test_gpu_slug(name, slug):
    assert provenance.gpu_slug(name) == slug
