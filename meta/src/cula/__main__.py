"""`python -m cula`: what this machine can run, the demo, the benchmarks, and kernels compiled ahead of time."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cula import __version__, _compiled

USAGE = 2
_COLUMNS = 80
_TREE = " source tree"
_DISTRIBUTIONS = ("triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "fla-core")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code: 0 done, 1 failed, 2 could not start."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m cula", description=__doc__)
    parser.add_argument("--version", action="version", version=f"cula {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    info = commands.add_parser(
        "info", help="GPU, versions, and which implementation serves each function (default)"
    )
    info.add_argument("--all", action="store_true", help="also why the others do not serve")
    info.add_argument("--json", action="store_true", help="machine-readable")
    info.add_argument(
        "--arch", help="architecture to answer for, such as cpu or sm90 (default: this machine's)"
    )
    # The options of these two belong to others, who also print the help.
    commands.add_parser("demo", help="linear attention at work on real text", add_help=False)
    commands.add_parser("bench", help="benchmarks/run.py of a source checkout", add_help=False)
    _compiled.add_commands(commands)
    if arguments[:1] == ["demo"]:
        from cula import demo

        return demo.main(arguments[1:])
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    options = parser.parse_args(arguments or ["info"])
    if options.command is None:
        parser.print_help()
        return USAGE
    if options.command in ("compile", "cache"):
        return {"compile": _compiled.compile, "cache": _compiled.cache}[options.command](options)
    try:
        facts = collect(options.arch)
    except ValueError as error:
        print(f"python -m cula info: {error}", file=sys.stderr)
        return USAGE
    text = render_all(facts) if options.all else render(facts)
    print(json.dumps(facts, indent=2) if options.json else text)
    return 0


def collect(arch: str | None = None) -> dict[str, Any]:
    """Returns what `info` shows, as plain data.

    Raises:
        ValueError: the architecture, or a name in the environment, is unknown.
    """
    import torch

    from cula import _facts, _registry

    problem: dict[str, Any] = {"arch": arch} if arch else {}
    ops = []
    kernels: dict[str, str] = {}
    for op, functions in _facts.OPS.items():
        for found in _registry.implementations(op):
            if found.kernel:
                kernels[found.name] = _version(found.name) or _TREE.strip()
        for function in functions:
            explanation = _registry.explain(op, function=function, **problem)
            rows = [
                {"name": row.name, "verdict": row.verdict, "reason": row.reason}
                for row in explanation.rows
            ]
            ops.append(
                {"op": op, "function": function, "arch": explanation.arch, "implementations": rows}
            )
    gpus = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            gpus.append(
                {
                    "name": properties.name,
                    "arch": _registry.arch_of(torch.device("cuda", i)),
                    "multiprocessors": properties.multi_processor_count,
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                }
            )
    return {
        "cula": __version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "gpus": gpus,
        "versions": {
            "torch": torch.__version__,
            **{name: _version(name) for name in _DISTRIBUTIONS},
            **kernels,
        },
        "functions": _functions(ops),
        "ops": ops,
    }


def _functions(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every public function with the implementation that serves it, or None and the architectures it needs."""
    from cula import _facts, delta, kda, lightning, lite

    told = {op["function"]: op for op in ops}
    found = []
    for module in (lightning, kda, delta, lite):
        for name in module.__all__:
            function, archs = _facts.SERVED_AS.get(name, (name, None))
            if function not in told:  # nobody's: it is the same for all implementations
                continue
            arch, rows = told[function]["arch"], told[function]["implementations"]
            served = next((row["name"] for row in rows if row["verdict"] == "chosen"), None)
            needs = None if archs is None or arch in archs else ", ".join(archs)
            if needs or (archs is not None and served in ("fla", "reference")):
                served = None
            name = f"{module.__name__}.{name}"
            found.append({"function": name, "arch": arch, "by": served, "needs": needs})
    return found


def render(facts: dict[str, Any]) -> str:
    """Returns the facts of `collect` as text that fits a screen."""
    torch = facts["versions"]["torch"]
    lines = [f"cula {facts['cula']}, Python {facts['python']}, torch {torch}"]
    lines[0] += f", CUDA {facts['cuda'] or 'none in this torch'}"
    for gpu, count in Counter(map(_gpu, facts["gpus"])).items():
        lines.append(f"{count} x {gpu}, driver {facts['driver']}")
    if not facts["gpus"]:
        lines.append("no GPU: everything runs on the CPU")
    others = {name: found for name, found in facts["versions"].items() if name != "torch"}
    present = {name: found for name, found in others.items() if found}
    # A package of cula's own version needs no number beside its name.
    lines += _wrapped(
        "installed: ",
        [n if v in (facts["cula"], _TREE.strip()) else f"{n} {v}" for n, v in present.items()],
    )
    missing = [name for name, found in others.items() if not found]
    missing += dict.fromkeys(
        row["name"]
        for op in facts["ops"]
        for row in op["implementations"]
        if row["verdict"] == "missing" and "pip install" in row["reason"]
    )
    lines += _wrapped("not installed: ", missing)
    functions = facts["functions"]
    width = max(len(told["function"]) for told in functions)
    lines.append(f"{'function on ' + functions[0]['arch']:<{width}}  served by")
    for told in functions:
        nobody = f"nothing: needs {told['needs']}" if told["needs"] else "nothing"
        lines.append(f"{told['function']:<{width}}  {told['by'] or nobody}")
    lines.append("why, and how to install what is missing: python -m cula info --all")
    return "\n".join(lines)


def render_all(facts: dict[str, Any]) -> str:
    """The facts of `collect` as text: every version, and of every implementation why it does not serve."""
    lines = [
        f"cula {facts['cula']}, Python {facts['python']}, CUDA {facts['cuda'] or 'none in this torch'}"
    ]
    lines.append(f"driver {facts['driver'] or 'none found'}")
    lines += [f"GPU {i}: {_gpu(gpu)}" for i, gpu in enumerate(facts["gpus"])]
    if not facts["gpus"]:
        lines.append("no GPU: everything runs on the CPU")
    lines += [
        f"  {name:<22} {found or 'not installed'}" for name, found in facts["versions"].items()
    ]
    for op in facts["ops"]:
        lines += ["", f"{op['op']}.{op['function']} on {op['arch']}"]
        width = max(len(row["name"]) for row in op["implementations"])
        for row in op["implementations"]:
            lines.append(
                f"  {row['name']:<{width}}  {row['verdict']:<9}  {row['reason'] or ''}".rstrip()
            )
    return "\n".join(lines)


def _gpu(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, {gpu['arch']}, {gpu['multiprocessors']} SMs, {gpu['memory_gib']} GiB"


def _wrapped(title: str, items: list[str]) -> list[str]:
    """A list in lines of the screen's width, which break between items."""
    whole = [item.replace(" ", "\0") for item in items]
    lines = (
        textwrap.wrap(
            title + ", ".join(whole), _COLUMNS, subsequent_indent="  ", break_on_hyphens=False
        )
        if items
        else []
    )
    return [line.replace("\0", " ") for line in lines]


def _bench(arguments: list[str]) -> int:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "run.py"
    if not script.is_file():
        print(
            "the benchmarks are not part of the installed package: "
            "clone the repository and run benchmarks/run.py, or nox -s bench",
            file=sys.stderr,
        )
        return USAGE
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


if __name__ == "__main__":
    sys.exit(main())
