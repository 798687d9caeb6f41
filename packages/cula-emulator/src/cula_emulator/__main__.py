"""python -m cula_emulator KERNEL.ptx ... : what would not run, and other questions about a kernel."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from . import __version__, cache
from .emit import translate
from .errors import EmulatorError, UnsupportedInstruction
from .ptx import PtxSyntaxError, ir, parse

_HELP = "file with PTX text; - reads standard input"


class _BadInput(Exception):
    """One line for the user; exit status 2."""


def _text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as error:
        raise _BadInput(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _BadInput(f"{name}: not text") from None


def _module(name: str) -> ir.Module:
    try:
        module = parse(_text(name))
    except PtxSyntaxError as error:
        raise _BadInput(f"{name}: {error}") from None
    if not module.kernels:
        raise _BadInput(f"{name}: no kernel (.entry) in it")
    return module


def check(arguments: argparse.Namespace) -> int:
    """Lists what has no translation, one line each: file:line: instruction   [reason]."""
    status = 0
    for name in arguments.files:
        module = _module(name)
        try:
            translate(module)
        except UnsupportedInstruction as error:
            status = 1
            for line, text in error.instructions:
                print(f"{name}:{line}: {text}")
            print(f"{name}: {len(error.instructions)} unsupported instructions")
            continue
        instructions = sum(isinstance(i, ir.Instruction) for k in module.kernels for i in k.body)
        kernels = ", ".join(k.name for k in module.kernels)
        print(f"{name}: runs; {module.target}, {instructions} instructions, kernels: {kernels}")
    return status


def show_translation(arguments: argparse.Namespace) -> int:
    """Prints the C++ of a PTX file."""
    try:
        print(translate(_module(arguments.file)), end="")
    except UnsupportedInstruction as error:
        raise _BadInput(f"{arguments.file}: {error}") from None
    return 0


def show_resources(arguments: argparse.Namespace) -> int:
    """Prints what the kernels of a PTX file or cubin ask of a GPU: registers, spills, shared memory, instructions."""
    from . import resources

    try:
        print(resources.report(Path(arguments.file), arch=arguments.arch))
    except OSError as error:
        raise _BadInput(f"{arguments.file}: {error.strerror}") from None
    except (EmulatorError, ValueError) as error:
        raise _BadInput(f"{arguments.file}: {error}") from None
    return 0


def manage_cache(arguments: argparse.Namespace) -> int:
    """Prints where compiled kernels are kept and how much that is; --clear deletes them."""
    if arguments.clear:
        print(f"removed {cache.clear()} files")
    found = cache.entries()
    size = sum(path.stat().st_size for path in found)
    libraries = sum(path.suffix == ".so" for path in found)
    print(cache.configured() or "no cache folder: there is no home folder")
    print(f"{libraries} kernels, {len(found)} files, {size / 2**20:.1f} MiB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cula_emulator",
        description="Without a command: list the instructions of PTX files that the emulator would not run.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    add("check", check, "the same as no command").add_argument(
        "files", nargs="+", metavar="KERNEL.ptx", help=_HELP
    )
    command = add("translate", show_translation, "print the C++ of a kernel")
    command.add_argument("file", metavar="KERNEL.ptx", help=_HELP)
    command = add(
        "resources", show_resources, "print registers, spills and instruction counts of a kernel"
    )
    command.add_argument("file", metavar="FILE", help="file with PTX text, or a cubin")
    command.add_argument(
        "--arch", help='assemble PTX for this architecture, "sm_90a", instead of its own'
    )
    command = add("cache", manage_cache, "show or clear the folder of compiled kernels")
    command.add_argument("--clear", action="store_true", help="delete what it holds")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    commands = ("check", "translate", "resources", "cache")
    if argv and argv[0] not in (*commands, "-h", "--help", "--version"):
        argv = ["check", *argv]
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except _BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head for example, has seen enough
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
