"""Code in fresh processes that share one import of torch, which takes longer than the code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

# What runs at exit runs in a fork too; the rest of the tidying up is slow in a copy of all that torch brings.
PROGRAM = """
import atexit, json, os, sys, tempfile, traceback

def fork(code):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 1
            try:
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        return os.waitstatus_to_exitcode(status), *texts

without, codes = json.loads(sys.argv[1])
results = [fork(code) for code in without]
import torch
print(json.dumps(results + [fork(code) for code in codes]))
"""


class Done(NamedTuple):
    """What a process left."""

    status: int
    out: str
    err: str


def run(
    *codes: str, without_torch: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> list[Done]:
    """What the codes leave, each in a process of its own: first those `without_torch`, then those after its import."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([without_torch, codes])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [Done(*each) for each in json.loads(done.stdout)]
