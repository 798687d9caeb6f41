"""A kernel of one store, a compiler that writes down what it is asked for, and processes that build with both."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import cula_core
import cula_emulator
from cula_emulator import build, cache, toolchain

PTX = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry seven(.param .u64 out)
{
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [out];
st.global.b32 [%rd1], 7;
ret;
}
"""
RUN = """
import sys, time, warnings
import torch
begin = time.perf_counter()
import cula_emulator
module = cula_emulator.EmulatedModule(sys.argv[1])
out = torch.zeros(1, dtype=torch.int32)
module.launch("seven", (1,), (1,), (out,))
print(out.item(), time.perf_counter() - begin, module.path)
"""


# What is asked for is written down first. Objects of the runtime and headers are those of an earlier call with the same
# sources, compiler and arguments, whose folders and file names do not count: these tests are about who asks for what.
_COMPILER = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  *kernel.cpp*) while [ -e {hold} ]; do sleep 0.05; done; exec g++ "$@" ;;
  *"-c {runtime}/"* | *"-x c++-header "*) ;;
  *) exec g++ "$@" ;;
esac
name=$(echo "{key} $*" | sed 's/ -o [^ ]*//; s/ c++-header [^ ]*//' | sha256sum | cut -c-32)
for argument; do
  [ "$previous" = -o ] && result=$argument
  previous=$argument
done
if [ ! -e {kept}/$name ]; then
  g++ "$@" || exit 1
  cp "$result" {kept}/$name.$$ && mv {kept}/$name.$$ {kept}/$name
else
  cp {kept}/$name "$result"
fi
"""


def logging_compiler(folder: Path) -> Path:
    """g++ that appends its arguments to `folder`/log, one call a line, and waits while `folder`/hold exists.

    It keeps objects of the runtime and precompiled headers in the folder of the emulator's cache.
    """
    kept = cache.folder() / "of-build-tests"
    kept.mkdir(exist_ok=True)
    script = folder / "logging-g++"
    script.write_text(
        _COMPILER.format(
            log=folder / "log",
            hold=folder / "hold",
            runtime=build.RUNTIME,
            key=build._digest(toolchain.find().key, build._runtime_key()),
            kept=kept,
        )
    )
    script.chmod(0o755)
    return script


def compiled(folder: Path) -> list[str]:
    """Names of the sources that were compiled, "header" and "link", in order; the log is emptied."""
    log = folder / "log"
    calls = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    done = []
    for call in calls:
        if "-c" in call and os.devnull not in call:
            done.append(Path(call[call.index("-c") + 1]).name)
        elif "c++-header" in call:
            done.append("header")
        elif "-shared" in call:
            done.append("link")
    return done


def start(code: str = RUN, ptx: str = PTX, **environment: str) -> subprocess.Popen:
    """A fresh Python that runs `code` on a PTX text; a variable set to "" is removed."""
    sources = [str(Path(m.__file__).parents[1]) for m in (cula_emulator, cula_core)]
    paths = [*sources, sysconfig.get_paths()["purelib"]]
    kept = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in {**kept, **environment}.items() if value}
    return subprocess.Popen(
        [sys.executable, "-c", code, ptx],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """(stdout, stderr) of a process that must succeed."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err
