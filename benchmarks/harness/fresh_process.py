"""What a new process waits for until a function has run twice, and for how long later calls keep it.

`python -m benchmarks.harness.fresh_process MODULE OP SETTING PROVIDER` prints seconds as a line of JSON, or why the
function cannot run here.

It must import nothing that imports torch before it has timed that.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from benchmarks.harness import registry

SKIPPED = "skipped"
# Calls that a queue takes without a wait, how often they are made, and as many before that do not count.
IN_A_ROW, TIMES, UNTIMED = 5, 40, 5


def seconds(act: Callable[[], Any]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def imports(module: str) -> dict[str, float]:
    """Seconds to import torch, and behind it the module of the function."""
    return {
        "import_torch_s": seconds(lambda: import_module("torch")),
        "import_s": seconds(lambda: import_module(module)),
    }


def calls(op_name: str, setting_name: str, provider_name: str, device: str) -> dict[str, Any]:
    """Seconds of the first two calls, each until the device has finished, with inputs and device ready before; and of
    a later one until it returns to the host."""
    import torch

    op = registry.get(op_name)
    (setting,) = (s for s in op.settings(False) if s.name == setting_name)
    (provider,) = (p for p in op.providers if p.name == provider_name)
    if reason := provider.supports(setting):
        return {SKIPPED: reason}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.inference_mode():
        call = provider.bind(setting, op.make_inputs(setting, device, 0))
        wait()
        first, second = (seconds(lambda: (call(), wait())) for _ in range(2))
        blocks = []
        for _ in range(UNTIMED + TIMES):
            blocks.append(seconds(lambda: [call() for _ in range(IN_A_ROW)]))
            wait()
    host = statistics.median(blocks[UNTIMED:]) / IN_A_ROW
    return {"first_call_s": first, "second_call_s": second, "host_s": host}


def main(argv: Sequence[str] | None = None, device: str = "cuda") -> int:
    module, op, setting, provider = sys.argv[1:] if argv is None else argv
    try:
        found: dict[str, Any] = imports(module)
    except ImportError as error:
        found = {SKIPPED: f"{module} cannot be imported: {error}"}
    else:
        found |= calls(op, setting, provider, device)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
