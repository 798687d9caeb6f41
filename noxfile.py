"""Sessions of the repository; `nox -l` lists them. Arguments after `--` reach the program that a session runs.

With `--no-venv` nothing is installed: the packages go on PYTHONPATH of a Python that already has torch and pytest,
which suits a GPU machine without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import pictures  # noqa: E402
from tools import gpu  # noqa: E402
from tools.layout import BASE, DEVELOPMENT_TOOLS, is_host, sources  # noqa: E402

# The one table: kernel package -> architectures. Test sessions follow from it, and so must the extras of `cula`.
# Of tools/layout.py, BASE is what they are built on, and DEVELOPMENT_TOOLS are for tests: nothing that runs a kernel
# needs them.
PACKAGES = {
    "cula-lightning-decode": ("sm89", "sm90", "sm100"),
    "cula-delta-decode": ("sm89", "sm90", "sm100"),
    "cula-lightning-sm90": ("sm90",),
    "cula-cp-sm90": ("sm90",),
    "cula-kda-sm100": ("sm100",),
    "liteattention-sm89": ("sm89",),
    "liteattention-sm90": ("sm90",),
}
ARCHITECTURES = tuple(gpu.ARCHITECTURES)
# What the distributions declare that they run with; their classifiers name the same Pythons.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13")
# The Python and the PyTorch of CI, which constraints-ci.txt is made for.
CI_PAIR = "3.11/2.13"
DISTRIBUTIONS = ("cula", *BASE, *PACKAGES, *DEVELOPMENT_TOOLS)
KEPT = Path(".nox", "kept")  # what tests compiled
# What the tests of a package need beside the dependency group `test`.
TEST_EXTRAS = {"liteattention-sm89": "diffusers"}
# What serving engines pin: CI tests the oldest versions that cula-core declares, with an emulated test of each kernel.
PINNED_BY_ENGINES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
OLDEST_SAMPLE = (
    "packages/cula-core/tests/compiled/test_libraries.py::test_a_second_process_neither_compiles_nor_imports_the_dsl",
    "packages/cula-core/tests/compiled/test_libraries.py::test_a_bundle_with_the_runtime_needs_no_dsl",
    "packages/cula-lightning-decode/tests/test_emulated.py::test_odd_token_counts",
    "packages/cula-delta-decode/tests/test_emulated.py::test_slots_of_tokens",
    "packages/cula-lightning-sm90/tests/test_emulated.py::test_packed_lengths",
    "packages/cula-lightning-sm90/tests/test_gated_emulated.py::test_bfloat16_operands",
    "packages/cula-cp-sm90/tests/test_kda.py::TestEmulated::test_segments",
    "packages/cula-kda-sm100/tests/test_kda.py::TestEmulated::test_segments",
    "packages/liteattention-sm89/tests/test_emulated.py::test_lists_settle",
    "packages/liteattention-sm89/tests/test_backward_emulated.py::test_sums_wait_for_nobody",
    "packages/liteattention-sm90/tests/test_emulated.py::test_kernels_may_change_between_calls",
)
SHARED_TESTS = ("meta/tests", "tests-integration", "benchmarks/tests")
TESTED = (*BASE, *PACKAGES, *DEVELOPMENT_TOOLS)
# Seconds on two idle cores that the tests of a folder may take: from a fresh clone, and in a second run. `nox -s tests`
# prints which went over. A slow test must find what no quick one finds.
BUDGETS = {
    "packages/cula-core/tests": (95, 40),
    "packages/cula-lightning-decode/tests": (75, 20),
    "packages/cula-delta-decode/tests": (110, 30),
    "packages/cula-lightning-sm90/tests": (130, 40),
    "packages/cula-cp-sm90/tests": (60, 20),
    "packages/cula-kda-sm100/tests": (60, 20),
    "packages/liteattention-sm89/tests": (130, 45),
    "packages/liteattention-sm90/tests": (130, 45),
    "packages/cula-emulator/tests": (85, 50),
    "packages/cula-testing/tests": (8, 8),
    "meta/tests": (35, 30),
    "tests-integration": (25, 25),
    "benchmarks/tests": (40, 35),
}
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]
GROUPS["evidence"] = [*GROUPS["test"], *GROUPS["bench"]]

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "oldest", "lint", "docs"]


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU."""
    _install(session, "cula[demo]", *map(_tested, TESTED), group="test")
    workers = () if _bare(session) else ("--numprocesses=2",)
    warm = (ROOT / KEPT / "emulator").is_dir()
    budgets = {folder: seconds[warm] for folder, seconds in BUDGETS.items()}
    session.env["CULA_TEST_BUDGETS"] = json.dumps(budgets)
    folders = (*SHARED_TESTS, *map(_tests, TESTED))
    # A fresh clone compiles every kernel first, and may be thrown away: it runs fewer schedules, and does not compile
    # slow kernels again for later runs.
    rebuild = () if warm else ("--emulator-no-rebuild", "--emulator-in-turn")
    marked = "not gpu and not browser"
    _pytest(session, *folders, options=("-p", "tools.budgets", "-m", marked, *workers, *rebuild))


@nox.session
def oldest(session: nox.Session) -> None:
    """A sample of the tests with the oldest CuTe DSL and tvm-ffi that kernels are declared to work with."""
    _needs_venv(session)
    pins = Path(session.virtualenv.location).resolve() / "constraints.txt"
    pins.write_text(oldest_pins((ROOT / "constraints-ci.txt").read_text()))
    session.env["PIP_CONSTRAINT"] = str(pins)
    _install(session, *PACKAGES, "cula-emulator", "cula-testing", group="test")
    options = ("-m", "not gpu", "--numprocesses=2", "--emulator-no-rebuild")
    _pytest(session, options=(*options, *OLDEST_SAMPLE))


def oldest_pins(pins: str) -> str:
    """Returns a file of exact versions, with the oldest of what engines pin that cula-core declares."""
    extras = nox.project.load_toml(ROOT / "packages/cula-core/pyproject.toml")["project"]
    declared = "\n".join(extras["optional-dependencies"]["cute"])
    for name in PINNED_BY_ENGINES:
        least = re.search(rf"^{name}>=([\d.]+),", declared, re.MULTILINE)[1]
        pins = re.sub(rf"^({name}(?:-libs-\w+)?)==.*$", rf"\1=={least}", pins, flags=re.MULTILINE)
    return pins


def _add_gpu_session(arch: str) -> None:
    packages = [name for name, archs in PACKAGES.items() if arch in archs]
    packages += DEVELOPMENT_TOOLS

    @nox.session(name=f"tests-{arch}", tags=["gpu"])
    def gpu_tests(session: nox.Session) -> None:
        refusal = gpu.refusal(arch, gpu.capabilities())
        if refusal:
            session.error(refusal)
        _install(session, "cula[demo,fla]", *map(_tested, packages), group="test")
        _pytest(session, *SHARED_TESTS, *map(_tests, packages), options=("-m", "gpu"))

    gpu_tests.__doc__ = f"The tests that need a GPU, on {arch}; fails without one."


for _arch in ARCHITECTURES:
    _add_gpu_session(_arch)


@nox.session(reuse_venv=False)
@nox.parametrize("package", [nox.param(name, id=name) for name in DISTRIBUTIONS])
def standalone(session: nox.Session, package: str) -> None:
    """One distribution: its wheel in a clean environment, where only those that it declares can be imported."""
    _needs_venv(session)
    wheels = Path(session.virtualenv.location).resolve() / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    declared = _closure(package, "test")
    for name in declared:
        source = f"./{_folder(name)}"  # pip takes a bare "meta" for a name on the index
        pip = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={wheels}")
        session.run(*pip, source)
    (wheel,) = wheels.glob(f"{_import_name(package)}-*.whl")
    extras = "demo,test" if package == "cula" else "test"
    session.install(f"--find-links={wheels}", f"{wheel}[{extras}]")
    others = [_import_name(name) for name in DISTRIBUTIONS if name not in declared]
    session.run("python", "-I", "tools/standalone.py", _import_name(package), *others)
    _pytest(session, _tests(package), options=("-m", "not gpu"))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, versions, import rules, file sizes, lines about installing, wording, the licence, tables of figures."""
    _install(session, group="lint")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")
    for script in ("version", "import_rules", "file_sizes", "install_lines", "wording"):
        session.run("python", f"tools/{script}.py")
    session.run("python", "tools/vendor.py", "--check")
    session.run("python", "benchmarks/tables.py", "--check")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site in site/, with every link checked; `-- serve` shows it at a local address."""
    _install(session, group="docs")
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    command, *options = session.posargs or ["build"]
    session.run("mkdocs", command, "--strict", *options)


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the host files, without kernels, which have the DSL's types; then over programs as users write them."""
    _install(session, "cula[demo]", *PACKAGES, *DEVELOPMENT_TOOLS, group="types")
    session.env["MYPYPATH"] = os.pathsep.join(f"{_folder(name)}/src" for name in DISTRIBUTIONS)
    modules = [
        str(path.relative_to(ROOT))
        for name in (*BASE, *PACKAGES)
        for path in sources(ROOT / _folder(name) / "src")
        if is_host(path)
    ]
    tools = [f"{_folder(name)}/src" for name in DEVELOPMENT_TOOLS]
    session.run("mypy", *session.posargs, "meta/src", *tools, *modules)
    if _bare(session):
        session.log("the programs of tests-integration/downstream need installed distributions")
    else:
        session.run("python", "tools/downstream.py")


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and sdists in dist/: built twice, checked, installed into clean environments, and the SBOM of one."""
    _needs_venv(session)
    _install(session, group="build")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.env["SOURCE_DATE_EPOCH"] = _epoch(session)
    for name in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--no-isolation", f"--outdir={dist}", _folder(name))
    session.run("python", "tools/reproducible.py", str(dist))
    archives = sorted(str(path) for path in dist.iterdir())
    session.run("twine", "--no-color", "check", "--strict", *archives)
    python = _clean_python(session, "clean")
    _pip_install(session, python, "cula[sm90]")
    session.run("python", "tools/sbom.py", python, str(dist / "sbom" / "cula-sm90.cdx.json"))
    for arch in ARCHITECTURES:
        _pip_install(session, python, f"cula[{arch}]")
    # A kernel package alone brings what it is built on, and nothing else of ours.
    alone = _clean_python(session, "alone")
    _pip_install(session, alone, "cula-cp-sm90")
    session.chdir(session.virtualenv.location)
    session.run(python, "-m", "cula", "info", external=True)
    session.run(alone, "-c", "import cula_cp_sm90", external=True)


@nox.session
def licences(session: nox.Session) -> None:
    """The licences of all that cula and the kernel packages bring; with --write, writes docs/licences.md."""
    _needs_venv(session)
    if session.posargs not in ([], ["--write"]):
        session.error(f"expected nothing or --write, got {' '.join(session.posargs)}")
    _install(session, *map(_whole, ("cula", *BASE, *PACKAGES)), group="licences")
    session.run("python", "tools/licences.py", *([] if session.posargs else ["--check"]))


@nox.session(venv_backend="none")
def compatibility(session: nox.Session) -> None:
    """The tests of cula with other Pythons and PyTorches: -- PYTHON/TORCH ..., such as 3.12/2.10; 3.12/none compiles.

    Every pair has an environment of its own. A Python that is not on this machine is a failure.
    """
    pairs = [pair.partition("/")[::2] for pair in session.posargs or (CI_PAIR,)]
    for python, torch in pairs:
        if python not in PYTHONS or torch not in (*TORCHES, "none"):
            known = f"{' '.join(PYTHONS)}, and TORCH of {' '.join(TORCHES)} none"
            session.error(f"{python}/{torch}: expected PYTHON/TORCH, with PYTHON of {known}")
    for python, torch in pairs:
        folder = ROOT / ".nox" / f"compatibility-{python}-{torch}"
        virtualenv = (sys.executable, "-m", "virtualenv", "--quiet", f"--python={python}")
        session.run(*virtualenv, str(folder))
        interpreter = str(folder / "bin" / "python")
        prefix = {"PYTHONPYCACHEPREFIX": str(folder / "pycache")}
        compiled = [f"{_folder(name)}/src" for name in DISTRIBUTIONS]
        session.run(interpreter, "-m", "compileall", "-q", "-f", *compiled, env=prefix)
        if torch == "none":
            session.log(f"Python {python} compiles every source; nothing was run")
            continue
        # The pins are those of CI's pair; any other gets what goes with its Python and its PyTorch.
        default = str(ROOT / "constraints-ci.txt") if f"{python}/{torch}" == CI_PAIR else ""
        pins = {"PIP_CONSTRAINT": os.environ.get("PIP_CONSTRAINT", default)}
        sources = ("--editable", "./packages/cula-core", "--editable", "./meta[demo,test]")
        pip = (interpreter, "-m", "pip", "install", "--quiet")
        session.run(*pip, f"torch=={torch}.*", *sources, env=pins)
        session.run(interpreter, "-m", "pytest", "-m", "not gpu", _tests("cula"))


@nox.session
def demo(session: nox.Session) -> None:
    """Linear attention on real text: python -m cula demo [FILE ...]."""
    # Without a GPU no kernel can serve, so none is downloaded.
    _install(session, "cula[demo]", *(PACKAGES if gpu.capabilities() else ()))
    session.run("python", "-m", "cula", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks beside their peers: python benchmarks/run.py OP [--against fla] [--json]."""
    _install(session, "cula", *PACKAGES, group="bench")
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def evidence(session: nox.Session) -> None:
    """Everything that a card can prove, for its owner: bash .ci/run evidence -- h20 [--dry-run]."""
    # Wrong arguments and another GPU are refused before anything is installed, and a dry run installs nothing.
    first = ("tools/evidence.py", *session.posargs)
    if "--dry-run" in first:
        session.run(sys.executable, *first, external=True)
        return
    session.run(sys.executable, *first, "--check", external=True)
    tested = map(_tested, (*PACKAGES, *DEVELOPMENT_TOOLS))
    _install(session, "cula[demo,fla]", *tested, group="evidence")
    _test_environment(session)
    session.run("python", *first)


@nox.session
def report(session: nox.Session) -> None:
    """Every result file on one page, report.html, checked in a Chromium: -- [--out PATH] [--pictures FOLDER]."""
    _install(session, group="report")
    session.run("python", "-m", "benchmarks.report", *session.posargs)
    if pictures.browser() is None:
        session.error(f"the page is written, but not checked: {pictures.MISSING}")
    # The fixtures of the repository need torch, and the page does not.
    pytest = ("python", "-m", "pytest", "--noconftest", "-q", "-m", "browser")
    session.run(*pytest, "benchmarks/tests/report")


@nox.session(venv_backend="none")
def vendor(session: nox.Session) -> None:
    """Copies shared files into the packages that need them; with --check, fails on a stale copy."""
    session.run(sys.executable, "tools/vendor.py", *session.posargs)


def _epoch(session: nox.Session) -> str:
    """The time that archives say they are of: SOURCE_DATE_EPOCH, or else that of the last commit."""
    named = os.environ.get("SOURCE_DATE_EPOCH")
    git = ("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    return named or session.run(*git, external=True, silent=True).strip()


def _clean_python(session: nox.Session, name: str) -> str:
    """Makes an environment beside the session's own that is empty, even of pip, and returns its Python."""
    folder = Path(session.virtualenv.location).resolve() / name
    session.run("python", "-m", "venv", "--clear", "--without-pip", str(folder))
    return str(folder / "bin" / "python")


def _pip_install(session: nox.Session, python: str, name: str) -> None:
    """Installs one distribution from dist/ into another environment."""
    pip = ("python", "-m", "pip", f"--python={python}", "install", "--quiet")
    session.run(*pip, f"--find-links={ROOT / 'dist'}", name)


def _install(session: nox.Session, *distributions: str, group: str | None = None) -> None:
    """Installs our distributions from the tree and one dependency group, at the versions of constraints-ci.txt.

    What a distribution declares of ours comes with it. Where an earlier run installed the same, nothing is done. A
    PIP_CONSTRAINT of the caller's own, even an empty one, replaces that file. Without an environment of its own the
    session gets the distributions on PYTHONPATH and takes the rest from the Python at hand.
    """
    listed = {name.partition("[")[0] for name in distributions}
    declared = dict.fromkeys(d for name in distributions for d in _closure(name))
    distributions = (*(name for name in declared if name not in listed), *distributions)
    if _bare(session):
        paths = [str(ROOT / _folder(name) / "src") for name in distributions]
        inherited = os.environ.get("PYTHONPATH")
        session.env["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])
        return
    _constrain(session)
    wanted = list(GROUPS[group]) if group else []
    for name in distributions:
        bracket = name[name.index("[") :] if "[" in name else ""
        wanted += ["--editable", f"./{_folder(name)}{bracket}"]
    stamp = Path(session.virtualenv.location, "installed.sha256")
    state = _state(session, wanted)
    if stamp.is_file() and stamp.read_text() == state:
        session.log("everything is installed, as an earlier run left it")
        return
    stamp.unlink(missing_ok=True)
    session.install(*wanted)
    stamp.write_text(state)


def _state(session: nox.Session, wanted: list[str]) -> str:
    """A digest of what decides what `pip install wanted` does: the requirements, our metadata and the pins."""
    digest = hashlib.sha256(repr(wanted).encode())
    for folder, module in ((ROOT / _folder(name), _import_name(name)) for name in DISTRIBUTIONS):
        digest.update((folder / "pyproject.toml").read_bytes())
        digest.update((folder / "src" / module / "__init__.py").read_bytes())  # holds the version
    for pins in session.env["PIP_CONSTRAINT"].split():
        digest.update(Path(pins).read_bytes() if Path(pins).is_file() else pins.encode())
    return digest.hexdigest()


def _pytest(session: nox.Session, *folders: str, options: tuple[str, ...]) -> None:
    """Runs pytest over `folders`, or over the paths among the session's arguments if there are any."""
    chosen = any(Path(argument.partition("::")[0]).exists() for argument in session.posargs)
    targets = () if chosen else folders
    for folder in targets:
        if not (ROOT / folder).is_dir():
            session.error(f"{folder} does not exist; every part of the repository has tests")
    _test_environment(session)
    session.run("python", "-m", "pytest", *options, *targets, *session.posargs)


def _test_environment(session: nox.Session) -> None:
    """What tests find in the environment: one thread each, and folders that outlive the session's environment."""
    session.env.setdefault("OMP_NUM_THREADS", "1")
    # Without byte code each worker and child would compile all sources anew.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    # What is compiled outlives the session's environment, so that the next run is fast.
    for variable, folder in (("CULA_CACHE_DIR", "kernels"), ("CULA_EMULATOR_CACHE", "emulator")):
        session.env[variable] = os.environ.get(variable, str(ROOT / KEPT / folder))


def _constrain(session: nox.Session) -> None:
    """Sets the versions that pip takes, where the session has not done so itself."""
    default = os.environ.get("PIP_CONSTRAINT", str(ROOT / "constraints-ci.txt"))
    pins = session.env.get("PIP_CONSTRAINT") or default
    session.env["PIP_CONSTRAINT"] = pins
    session.env["PIP_BUILD_CONSTRAINT"] = pins


def _needs_venv(session: nox.Session) -> None:
    if _bare(session):
        session.error("needs an environment of its own; run it without --no-venv")
    _constrain(session)


def _bare(session: nox.Session) -> bool:
    return session.venv_backend == "none"


def _closure(name: str, *extras: str) -> list[str]:
    """A distribution, and what it declares of ours, itself or through others; extras: further ones of its own."""
    name, _, own = name.rstrip("]").partition("[")
    project = nox.project.load_toml(ROOT / _folder(name) / "pyproject.toml")["project"]
    lines = list(project.get("dependencies", ()))
    for extra in (*filter(None, own.split(",")), *extras):
        lines += project.get("optional-dependencies", {})[extra]
    wanted = {re.match(r"[\w.-]+", line)[0] for line in lines} - {name}
    found = {d: None for other in DISTRIBUTIONS if other in wanted for d in _closure(other)}
    return [name, *(d for d in found if d != name)]


def _whole(name: str) -> str:
    """A distribution with every extra that users may want: all but that of its tests."""
    project = nox.project.load_toml(ROOT / _folder(name) / "pyproject.toml")["project"]
    extras = [extra for extra in project["optional-dependencies"] if extra != "test"]
    return f"{name}[{','.join(extras)}]"


def _folder(name: str) -> str:
    """Folder of a distribution, extras in brackets ignored."""
    name = name.partition("[")[0]
    return "meta" if name == "cula" else f"packages/{name}"


def _tested(name: str) -> str:
    """A distribution with the extra that its tests need."""
    return f"{name}[{TEST_EXTRAS[name]}]" if name in TEST_EXTRAS else name


def _tests(name: str) -> str:
    return f"{_folder(name)}/tests"


def _import_name(name: str) -> str:
    return name.replace("-", "_")
