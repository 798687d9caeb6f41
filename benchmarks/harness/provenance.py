"""Where a result comes from: GPU, driver, versions, commit, clocks, date. Nothing here changes a setting of the GPU."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMIT_VARIABLE = "CULA_COMMIT"
# What measuring writes and no measurement depends on, as git leaves it out.
WRITTEN = (":!benchmarks/results", ":!*.md")

# Distribution name -> import name, for trees that are on the path without metadata.
DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "nvidia-cutlass-dsl": "cutlass",
    "fla-core": "fla",
    "flash-kda": "flash_kda",
    "flashinfer-python": "flashinfer",
    "vllm-decode": "vllm_decode",
    "cula": "cula",
    "cula-core": "cula_core",
    "cula-lightning-decode": "cula_lightning_decode",
    "cula-delta-decode": "cula_delta_decode",
    "cula-lightning-sm90": "cula_lightning_sm90",
    "cula-cp-sm90": "cula_cp_sm90",
    "cula-kda-sm100": "cula_kda_sm100",
    "liteattention-sm89": "liteattention_sm89",
    "liteattention-sm90": "liteattention_sm90",
}
SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.max.mem": "memory_max_mhz",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}


def provenance() -> dict[str, Any]:
    """Everything that does not change during a run."""
    import torch

    smi = read_smi()
    properties = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": properties.name if properties else "cpu",
        "sms": properties.multi_processor_count if properties else None,
        "l2_bytes": properties.L2_cache_size if properties else None,
        "driver": smi.get("driver"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name, module) for name, module in DISTRIBUTIONS.items()},
        **commit(),
    }


def version(distribution: str, module: str) -> str | None:
    """The installed version from metadata, or else the module's `__version__`, or None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return getattr(importlib.import_module(module), "__version__", "unknown")
    except ImportError:
        return None


def commit(root: Path = ROOT) -> dict[str, Any]:
    """The commit, and whether files differ from it: from CULA_COMMIT (`<sha>[-dirty]`), or else from git."""
    named = os.environ.get(COMMIT_VARIABLE, "")
    if named:
        return {"commit": named.removesuffix("-dirty"), "dirty": named.endswith("-dirty")}
    sha = _run(["git", "-C", str(root), "rev-parse", "--verify", "HEAD"])
    if sha is None:
        return {"commit": None, "dirty": None}
    status = _run(["git", "-C", str(root), "status", "--porcelain", "--", ".", *WRITTEN])
    return {"commit": sha.strip(), "dirty": None if status is None else bool(status.strip())}


def read_smi() -> dict[str, Any]:
    """Driver, clocks, power and temperature of the first GPU as nvidia-smi reads them; nothing without nvidia-smi."""
    out = _run(
        [
            "nvidia-smi",
            "-i",
            "0",
            f"--query-gpu={','.join(SMI_FIELDS)}",
            "--format=csv,noheader,nounits",
        ]
    )
    return parse_smi(out) if out else {}


def parse_smi(line: str) -> dict[str, Any]:
    """The values of SMI_FIELDS in a line of nvidia-smi, as numbers where they are numbers."""
    values = [value.strip() for value in line.strip().splitlines()[0].split(",")]
    return dict(zip(SMI_FIELDS.values(), map(_number, values), strict=True))


def gpu_slug(name: str) -> str:
    """The name of a GPU's folder of results: 'NVIDIA H200' -> 'h200', 'NVIDIA GeForce RTX 4090' -> 'rtx-4090'."""
    words = [
        w
        for w in re.findall(r"[a-z0-9]+", name.lower())
        if w not in ("nvidia", "geforce", "graphics")
    ]
    return "-".join(words) or "unknown"


def _number(text: str) -> Any:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d+", text) else text


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
