"""Fresh interpreters, for what depends on which modules were imported before."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import cula_core

# Importing torch takes longer than all that is asked of a fresh interpreter, so one does it for all, and forks. It
# reads requests, a line each, and answers with exit statuses. A fork leaves the loop, runs its code, and ends without
# tidying up, which in a copy of all that torch brings takes longer than the code.
FORKING = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    code, paths, folder, streams = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, stream in enumerate(streams, 1):
    os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
os.chdir(folder)
sys.path[:0] = paths
status = 1
try:
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    status = 0
except SystemExit as end:
    status = end.code or 0
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


@functools.cache
def _forking() -> subprocess.Popen[str]:
    """The interpreter that forks; it ends with the end of its input, which is that of this process."""
    command = [sys.executable, "-c", FORKING]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(
    code: str, *modules: ModuleType, cwd: str | os.PathLike[str] = "."
) -> subprocess.CompletedProcess[str]:
    """Runs code where only torch is imported, and the sources of these packages, and of their base, are found first."""
    files = [module.__file__ for module in (*modules, cula_core)]
    paths = [os.path.dirname(os.path.dirname(file)) for file in files if file]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        request = (code, paths, os.path.abspath(cwd), [str(stream) for stream in streams])
        server = _forking()
        assert server.stdin and server.stdout
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out, err = (stream.read_text() for stream in streams)
    return subprocess.CompletedProcess([sys.executable, "-c", code], status, out, err)


def python(code: str, *modules: ModuleType) -> str:
    """Returns the output of `run`, which must succeed."""
    result = run(code, *modules)
    assert result.returncode == 0, result.stderr
    return result.stdout
