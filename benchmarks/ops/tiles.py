"""What the ops share that time every tile of a kernel: names of tiles, and the architecture to compile for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def tile_name(config: Any) -> str:
    """A name of what distinguishes a configuration of a problem, such as tile_v=32,threads=128."""
    tile = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "problem"
    }
    return ",".join(f"{key}={value}" for key, value in tile.items())


def arch_here() -> str:
    """The architecture of the GPU of this machine as kernel packages name it, such as sm_90a."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + "a" * (major >= 9)
