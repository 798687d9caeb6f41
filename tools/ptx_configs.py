"""The kernel configs whose PTX `tools/compare_ptx.py` compares, and how a tree compiles them.

A spec is a dictionary of plain values: package, arch, kernel, and every static fact of the kernel. Specs are listed in
one tree and compiled in two, whose modules may lie elsewhere. So classes are looked up by name in the modules that a
layout may have, and the fields of nested configs are flattened. This file runs in a process of its own, whose path
holds the packages of one tree: `python -m tools.ptx_configs list PACKAGE...` writes specs to the standard output;
`python -m tools.ptx_configs compile` reads pairs of a spec and a path from the standard input and writes the PTX there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Spec = dict[str, Any]
BOTH = (False, True)
DTYPES = ("bfloat16", "float16")
FLOATS = ("float32", *DTYPES)
INDEX_DTYPES = (None, "int32", "int64")
KDA_TARGETS = {"cula-cp-sm90": ("sm_90a",), "cula-kda-sm100": ("sm_100a", "sm_103a")}
# What a kernel of the delta rule knows of the tokens of a chunk, for any gate.
TOKENS = {
    "dtype": DTYPES, "gate_dtype": FLOATS, "beta_dtype": FLOATS, "operand": DTYPES,
    **dict.fromkeys(("l2norm", "beta_sigmoid", "neg_eigval"), BOTH), "index_dtype": INDEX_DTYPES,
}  # fmt: skip
# What KDA's kernels know besides.
KDA_TOKENS = TOKENS | {
    "gate": ("log", "softplus", "safe"), **dict.fromkeys(("bounded", "rate", "bias"), BOTH)
}  # fmt: skip


def label(spec: Spec) -> str:
    """The kernel's name and the facts that are not False or None; the same in every layout."""
    facts = {k: v for k, v in sorted(spec.items()) if k not in ("package", "arch", "kernel")}
    words = [k if v is True else f"{k}={v}" for k, v in facts.items() if v not in (False, None)]
    return "-".join([spec["kernel"], *words])


def find(package: str, name: str) -> Any:
    """An attribute of the first module of a package, or of the base of the family, that has it."""
    folder = package.replace("-", "_")
    for parent in (folder, "cula_core.delta_rule" if package in KDA_TARGETS else folder):
        for module in ("config", "plan", "launch", "arch"):
            with contextlib.suppress(ModuleNotFoundError):
                found = importlib.import_module(f"{parent}.{module}")
                if hasattr(found, name):
                    return getattr(found, name)
    raise LookupError(f"no module of {package} has {name}")


def build(package: str, cls: type, spec: Spec) -> Any:
    """A config, whose fields the spec has."""
    values = {}
    for field in dataclasses.fields(cls):
        if field.name == "problem":
            values["problem"] = build(package, find(package, "Problem"), spec)
        elif field.name in spec:
            values[field.name] = spec[field.name]
    return cls(**values)


def flat(config: Any) -> Spec:
    """The fields of a config and of its problem."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    problem = values.pop("problem", None)
    return values if problem is None else flat(problem) | values


def cover(factors: dict[str, Any], possible: Callable[[dict], bool] = lambda _: True) -> list[dict]:
    from cula_emulator.covering import covering_cases

    return covering_cases(factors, possible)


def decode_specs(package: str) -> Iterator[Spec]:
    problem_of = find(package, "Problem")
    select, candidates = find(package, "select"), find(package, "candidates")
    factors = {
        "mode": ("decode", "verify", "commit"), "stochastic": BOTH,
        "dims": ((64, 64), (128, 128), (256, 256), (64, 256), (256, 64)),
        "arch": ("sm_80", "sm_89", "sm_90a", "sm_100a"),
        "state_dtype": FLOATS, "tokens": (1, 3, 4, 8), "dtype": DTYPES, "state_v_first": BOTH, "indexed": BOTH,
        "padded": BOTH,
    }  # fmt: skip

    def problem(case: dict) -> Any:
        dims = dict(zip(("head_dim_k", "head_dim_v"), case["dims"]))
        return problem_of(**dims, **{k: v for k, v in case.items() if k not in ("dims", "arch")})

    cases = cover(factors, lambda case: problem(case).illegal() is None)
    found = [(select(problem(case), case["arch"]), case["arch"]) for case in cases]
    for state in ("float32", "bfloat16"):
        for v_first in BOTH:
            heavy = problem_of("bfloat16", state, 64, 256, 8, v_first, True)
            found.append((select(heavy, "sm_90a"), "sm_90a"))
            for tokens in (1, 4):
                tuned = problem_of("bfloat16", state, 128, 128, tokens, v_first, False)
                found += [(config, "sm_90a") for config in candidates(tuned)]
    for config, arch in found:
        yield {"arch": arch, "kernel": "LightningDecode", **flat(config)}


def decode_unit(package: str, spec: Spec) -> Any:
    config = build(package, find(package, "Config"), spec)
    return find(package, "unit")(config, spec["arch"])


# Nested parts of a problem of delta decode, whose names begin those of their facts in a spec.
DELTA_PARTS = {"gate": "Gate", "fused": "Fused"}
# What a kernel of delta decode does beside or instead of storing the last state in the slot where it was.
DELTA_MODES = {
    "decode": {},
    "nowhere": {"slots": 0},
    "verify": {"ends": False},
    "redirected": {"redirected": True},
    "every_token": {"ends": False, "every_token": True, "slots": 2, "counted": True},
    "replay": {"ends": False, "replay": True, "counted": True},
    "commit": {"commits": True, "counted": True},
    "flush": {"replay": True, "flushes": True},
    "unaligned": {"aligned": False},
    "long": {"slots": 0, "long": True},
    "long_from_zero": {"begins": False, "slots": 0, "long": True},
    "convolution": {"fused": {"convolution": "float32"}},
    "norm": {"fused": {"norm": "sigmoid", "weight": "bfloat16"}},
    "both": {
        "ends": False,
        "replay": True,
        "counted": True,
        "fused": {"convolution": "bfloat16", "bias": True, "norm": "silu"},
    },
}


def delta_specs(package: str) -> Iterator[Spec]:
    problem_of, gate_of = find(package, "Problem"), find(package, "Gate")
    select, candidates = find(package, "select"), find(package, "candidates")
    gates = (
        gate_of("softplus", False, "bfloat16", True, "float32", "logits", "bfloat16"),
        gate_of("safe", True, "bfloat16", True, "bfloat16", "logits", "bfloat16", True),
        gate_of("log", True, "float16", strength="given"),
        gate_of("none"),
    )
    factors = {
        "mode": tuple(DELTA_MODES), "gate": gates, "dims": ((64, 64), (128, 128), (64, 128), (128, 64)),
        "arch": ("sm_80", "sm_89", "sm_90a", "sm_100a"), "state_dtype": FLOATS, "tokens": (1, 3, 4, 8),
        "dtype": DTYPES, "state_v_first": BOTH, "l2norm": BOTH, "packed": BOTH,
    }  # fmt: skip

    def problem(case: dict) -> Any:
        dims = dict(zip(("head_dim_k", "head_dim_v"), case["dims"]))
        facts = {k: v for k, v in case.items() if k not in ("mode", "dims", "arch")}
        facts |= DELTA_MODES[case["mode"]]
        facts["fused"] = find(package, "Fused")(**facts.get("fused", {}))
        return problem_of(**dims, **facts)

    # Rows of any length are cut into pieces of as many tokens as a call has at most.
    cases = cover(factors, lambda case: case["tokens"] == 8 or "long" not in case["mode"])
    found = [(select(problem(case), case["arch"]), case["arch"]) for case in cases]
    for v_first in BOTH:
        for gate in gates[:2]:
            for tokens in (1, 4):
                tuned = problem_of("bfloat16", "float32", 128, 128, tokens, v_first, gate)
                found.append((select(tuned, "sm_90a"), "sm_90a"))
                found += [(config, "sm_90a") for config in candidates(tuned)[::4]]
    for config, arch in found:
        facts = flat(config)
        parts = {
            f"{part}_{name}": value
            for part in DELTA_PARTS
            for name, value in flat(facts.pop(part)).items()
        }
        yield {"arch": arch, "kernel": "DeltaDecode", **facts, **parts}


def delta_unit(package: str, spec: Spec) -> Any:
    for part, cls in DELTA_PARTS.items():
        names = [name for name in spec if name.startswith(f"{part}_")]
        facts = {name.removeprefix(f"{part}_"): spec[name] for name in names}
        with contextlib.suppress(
            LookupError
        ):  # an older tree lacks the part, as it may lack a field
            spec = spec | {part: find(package, cls)(**facts)}
    return decode_unit(package, spec)


def lightning_specs(package: str) -> Iterator[Spec]:
    config_of, problem_of = find(package, "Config"), find(package, "Problem")
    candidates = find(package, "candidates")
    full = problem_of("bfloat16", 128, 128, "float32")
    states = ("initial_state", "indexed", "in_place", "final_state")
    flags = ("packed", "state_v_first", "l2norm", "exact_state", "fresh")
    known = {field.name for field in dataclasses.fields(problem_of)}
    work = [field.name for field in dataclasses.fields(config_of) if field.name != "problem"]
    factors = {
        "dims": ((64, 64), (64, 128), (128, 64), (128, 128)),
        "gate": ((None, False), (None, True), ("float32", False), ("bfloat16", True), ("float16", False)),
        "states": ((0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 1)),
        **dict.fromkeys(flags, BOTH),
        "kept": ((None, False), ("every", False), ("every", True), ("once", False), ("once", True)),
        "state_dtype": FLOATS,
        "dtype": DTYPES,
        "work": tuple(tuple(getattr(c, name) for name in work) for c in candidates(full)),
    }  # fmt: skip

    def config(case: dict) -> Any:
        given = {name: bool(value) for name, value in zip(states, case["states"])}
        given |= {name: case[name] for name in (*flags, "state_dtype")}
        given |= dict(zip(("checkpoints", "placed"), case["kept"]))
        given = {name: value for name, value in given.items() if name in known}
        problem = problem_of(case["dtype"], *case["dims"], *case["gate"], **given)
        return config_of(problem, *case["work"])

    found = [config(c) for c in cover(factors, lambda case: config(case).illegal() is None)]
    most = dict.fromkeys((*states, "l2norm", "exact_state", "fresh"), True)
    most["checkpoints"] = "every"
    for packed in BOTH:
        found += candidates(dataclasses.replace(full, packed=packed, **most))
    if "reverse" in known:
        against = dataclasses.replace(full, initial_state=True, reverse=True)
        for dots in BOTH:
            found += candidates(dataclasses.replace(against, dots=dots))
    yield from ({"arch": "sm_90a", "kernel": "LightningPrefill", **flat(c)} for c in found)
    for index_dtype in INDEX_DTYPES[1:]:
        yield {"arch": "sm_90a", "kernel": "SegmentTable", "index_dtype": index_dtype}
    kernels = {"BackwardPrepare": TOKENS, "BackwardGradients": TOKENS | {"grouped": BOTH}}
    yield from backward_specs(package, kernels, known_strengths)


def lightning_unit(package: str, spec: Spec) -> Any:
    if spec["kernel"].startswith("Backward"):
        return find(BACKWARD[package], "unit")(backward_config(package, spec))
    unit = find(package, "unit")
    if spec["kernel"] == "SegmentTable":
        return unit(find(package, "TableConfig")(spec["index_dtype"]))
    return unit(build(package, find(package, "Config"), spec))


# Where a package has the backward pass of a delta rule.
BACKWARD = {
    "cula-cp-sm90": "cula-cp-sm90.backward",
    "cula-lightning-sm90": "cula-lightning-sm90.gated.backward",
}


def backward_specs(
    package: str, kernels: dict[str, dict[str, Any]], possible: Callable[[dict], bool]
) -> Iterator[Spec]:
    """Kernels of a backward pass, whose configs may have more fields than these tables, with one value each."""
    for kernel, table in kernels.items():
        for case in cover(table, possible):
            spec = {"arch": "sm_90a", "kernel": kernel, **case}
            yield flat(backward_config(package, spec)) | spec


def backward_config(package: str, spec: Spec) -> Any:
    place = BACKWARD[package]
    return build(place, find(place, f"{spec['kernel'].removeprefix('Backward')}Config"), spec)


def known_strengths(case: dict) -> bool:
    """Whether strengths above one come from logits."""
    return case["beta_sigmoid"] or not case["neg_eigval"]


def known_walk(case: dict) -> bool:
    """Whether a scan begins where nothing was merged, and writes maps alone, in CTAs with both tiles; and whether a
    walk that keeps nothing goes back and tells where it ends."""
    of_end = case["kept"] or (case["back"] and case["end"] and not case["scan"])
    return of_end and not (case["scan"] and (case["split"] or case["end"] or case["tiles"] == 1))


def known_gates(case: dict) -> bool:
    """Whether a gate of KDA has what it is computed from."""
    log, softplus = case["gate"] == "log", case["gate"] == "softplus"
    return (
        not (log and (case["rate"] or case["bias"]))
        and not (softplus and (case["bounded"] or not case["rate"]))
        and known_strengths(case)
    )


def kda_specs(package: str) -> Iterator[Spec]:
    targets = KDA_TARGETS[package]
    # (tiles, split, scan); a CTA of the scan has all columns of v.
    tiles = (1, 2) if package == "cula-cp-sm90" else (1,)
    works = [(n, split, False) for n in tiles for split in BOTH] + [(tiles[-1], True, True)]

    def prepare(case: dict) -> bool:
        """A backward pass wants nothing written for a caller, and the largest gradients are for it alone."""
        rooted = case.get("rooted", False)
        return (
            known_gates(case)
            and not (case["intra"] and rooted)
            and rooted >= case.get("peaks", False)
        )

    def recurrence(case: dict) -> bool:
        initial, final, scan = case["initial_state"], case["final_state"], case["work"][2]
        keeps = case["checkpoints"] is not None
        return not (
            ((case["indexed"] or case["fresh"]) and not initial)
            or (case["in_place"] and not (initial and final))
            or (scan and (final or keeps))
            or (case["redirected"] and not case["in_place"])
            or (case["placed"] and not keeps)
        )

    walks = (
        "packed",
        "state_v_first",
        "initial_state",
        "final_state",
        "indexed",
        "in_place",
        "redirected",
        "fresh",
    )
    prepares = {"arch": targets, **KDA_TOKENS, "intra": BOTH}
    if package in BACKWARD:
        prepares |= {"rooted": BOTH, "peaks": BOTH}
    recurrences = {
        "arch": targets, "dtype": DTYPES, "operand": DTYPES, "work": works, **dict.fromkeys(walks, BOTH),
        "checkpoints": (None, "every", "once"), "placed": BOTH, "state_dtype": FLOATS, "kept_dtype": FLOATS,
    }  # fmt: skip
    if package in BACKWARD:
        recurrences["rooted"] = BOTH
    factors = {"arch": targets, "dtype": DTYPES, "operand": DTYPES, "index_dtype": INDEX_DTYPES}
    merges = {
        "arch": targets, "index_dtype": INDEX_DTYPES, "state_dtype": FLOATS,
        **dict.fromkeys(("state_v_first", "initial_state", "indexed", "fresh"), BOTH),
    }  # fmt: skip
    tables = {"arch": targets, "index_dtype": INDEX_DTYPES[1:]}
    for kernel, table, possible in (
        ("Prepare", prepares, prepare),
        ("Factors", factors, lambda _: True),
        ("Recurrence", recurrences, recurrence),
        (
            "Merge",
            merges,
            lambda case: case["initial_state"] or not (case["indexed"] or case["fresh"]),
        ),
        ("Table", tables, lambda _: True),
        (
            "Fold",
            {"arch": targets, "back": BOTH, "whole": BOTH},
            lambda c: not (c["back"] and c["whole"]),
        ),
    ):
        for case in cover(table, possible):
            work = dict(zip(("tiles", "split", "scan"), case.pop("work", ())))
            yield {"kernel": kernel, **case, **work}
    if package in BACKWARD:
        gradients = {"BackwardGradients": KDA_TOKENS | {"grouped": BOTH}}
        flags = ("back", "packed", "start", "end", "state_v_first", "split", "scan", "kept")
        walk = {
            "dtype": DTYPES, "operand": DTYPES, "tiles": (1, 2), **dict.fromkeys(flags, BOTH), "state_dtype": FLOATS,
        }  # fmt: skip
        yield from backward_specs(package, gradients, known_gates)
        yield from backward_specs(package, {"BackwardWalk": walk}, known_walk)


def kda_unit(package: str, spec: Spec) -> Any:
    if spec["kernel"].startswith("Backward"):
        return find(BACKWARD[package], "unit")(backward_config(package, spec), spec["arch"])
    unit, target, arch = find(package, "unit"), find(package, "TARGET"), spec["arch"]
    cls = find(package, f"{spec['kernel']}Config")
    if spec["kernel"] == "Recurrence":
        names = {field.name for field in dataclasses.fields(cls)}
        facts = {name: value for name, value in spec.items() if name in names}
        return unit(target, target.recurrence_config(**facts), arch)
    return unit(target, build(package, cls, spec), arch)


def lite_specs(package: str) -> Iterator[Spec]:
    problem_of, candidates = find(package, "Problem"), find(package, "candidates")
    select, roles = find(package, "select_backward"), find(package, "ROLES")
    facts = {
        "arch": ("sm_80", "sm_89", "sm_90a", "sm_120a"), "dtype": DTYPES,
        "head_dim": (8, 64, 72, 96, 128, 192, 200, 256), "causal": BOTH, "skip": BOTH, "block_n": (64, 128),
        "packed": BOTH, "index_dtype": INDEX_DTYPES[1:],
    }  # fmt: skip
    forwards = facts | dict.fromkeys(("must_do", "on_device", "int8"), BOTH) | {"choice": (0, 1, 2)}
    ends = {k: v for k, v in facts.items() if k in ("arch", "dtype", "head_dim", "packed")}

    def problem(case: dict) -> Any:
        names = {field.name for field in dataclasses.fields(problem_of)}
        return problem_of(**{k: v for k, v in case.items() if k in names})

    def chosen(case: dict) -> list:
        legal = problem(case).illegal() is None
        return candidates(problem(case), case["arch"])[case["choice"] :] if legal else []

    for case in cover(forwards, lambda case: bool(chosen(case))):
        yield {"arch": case["arch"], "kernel": "LiteForward", **flat(chosen(case)[0])}
    for case in cover(facts | {"role": roles}):
        config = select(problem(case), case["role"], case["arch"])
        yield {"arch": case["arch"], "kernel": "LiteBackward", **flat(config)}
    for case in cover(ends | {"with_dlse": BOTH, "role": roles[:2]}):
        given = flat(select(problem(case), case["role"], case["arch"]))
        yield {"kernel": "RowSums", **given, **case}
        if case["role"] == roles[0]:
            yield {"arch": case["arch"], "kernel": "GatherDq", **given}
    yield from ({"kernel": "KeyMeans", **case} for case in cover(ends))
    yield from ({"kernel": "Quantize", **case} for case in cover(ends | {"of_keys": BOTH}))


def lite_unit(package: str, spec: Spec) -> Any:
    kernel, arch = spec["kernel"], spec["arch"]
    if kernel in ("KeyMeans", "Quantize"):
        problem = build(package, find(package, "Problem"), spec)
        if kernel == "KeyMeans":
            return find(package, "means_unit")(problem, arch)
        return find(package, "quantize_unit")(problem, spec["of_keys"], arch)
    forward = kernel == "LiteForward"
    config = build(package, find(package, "ForwardConfig" if forward else "BackwardConfig"), spec)
    if kernel == "RowSums":
        return find(package, "sums_unit")(config, spec["with_dlse"], arch)
    names = {"LiteForward": "forward", "LiteBackward": "backward", "GatherDq": "gather"}
    return find(package, f"{names[kernel]}_unit")(config, arch)


def lite_hopper_specs(package: str) -> Iterator[Spec]:
    facts = {
        "dtype": DTYPES, "head_dim": (8, 64, 72, 96, 128), "causal": BOTH, "skip": BOTH, "block_n": (64, 128),
        "packed": INDEX_DTYPES,
    }  # fmt: skip
    forwards = facts | dict.fromkeys(("must_do", "on_device", "ordered"), BOTH)
    arch, config = find(package, "ARCH"), find(package, "ForwardConfig")
    for case in cover(forwards, lambda case: config(**case).illegal() is None):
        yield {"arch": arch, "kernel": "LiteForward", **case}
    listed = facts | {"ordered": BOTH}
    for case in cover(listed | {"keys_only": BOTH}, _only_lists_are_ordered):
        yield {"arch": arch, "kernel": "LiteBackward", **case}
    for case in cover(listed, _only_lists_are_ordered):
        yield {"arch": arch, "kernel": "LiteQueries", **case}
    orders = {k: v for k, v in facts.items() if k in ("causal", "block_n", "packed")}
    for case in cover(orders | {"of_keys": BOTH}):
        yield {"arch": arch, "kernel": "LiteOrder", **case}
    ends = {k: v for k, v in facts.items() if k in ("dtype", "head_dim", "packed")}
    for case in cover(ends | {"with_dlse": BOTH, "with_acc": BOTH}):
        yield {"arch": arch, "kernel": "LiteSums", **case}
    for case in cover(ends):
        yield {"arch": arch, "kernel": "LiteConvert", **case}


def _only_lists_are_ordered(case: Spec) -> bool:
    return case["skip"] or not case["ordered"]


def lite_hopper_unit(package: str, spec: Spec) -> Any:
    name = spec["kernel"].removeprefix("Lite") + "Config"
    return find(package, "unit")(build(package, find(package, name), spec))


PACKAGES: dict[str, tuple[Callable[[str], Iterator[Spec]], Callable[[str, Spec], Any]]] = {
    "cula-lightning-decode": (decode_specs, decode_unit),
    "cula-delta-decode": (delta_specs, delta_unit),
    "cula-lightning-sm90": (lightning_specs, lightning_unit),
    "cula-cp-sm90": (kda_specs, kda_unit),
    "cula-kda-sm100": (kda_specs, kda_unit),
    "liteattention-sm89": (lite_specs, lite_unit),
    "liteattention-sm90": (lite_hopper_specs, lite_hopper_unit),
}


def specs(package: str) -> list[Spec]:
    """Every spec of a package once, in a stable order."""
    found = [{"package": package, **spec} for spec in PACKAGES[package][0](package)]
    return list({(spec["arch"], label(spec)): spec for spec in found}.values())


def write_ptx(spec: Spec, target: Path) -> None:
    """Compiles a spec; where that fails, `target` with the suffix .error holds the reason."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        written = Path(folder, "text")
        try:
            unit = PACKAGES[spec["package"]][1](spec["package"], spec)
            written.write_text(_artifacts()(unit).ptx)
        except Exception:
            written.write_text(traceback.format_exc())
            target = target.with_suffix(".error")
        written.rename(target)


def _artifacts() -> Callable[[Any], Any]:
    """What compiles a unit, wherever the tree has it."""
    for module in ("cula_core.compiled.artifacts", "cula_core.cute.artifacts"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module).artifacts
    raise LookupError("this tree keeps no artifacts of kernels")


def main(arguments: list[str]) -> None:
    command, *rest = arguments
    if command == "list":
        print(json.dumps([spec for package in rest for spec in specs(package)]))
        return
    for spec, target in json.load(sys.stdin):
        write_ptx(spec, Path(target))


if __name__ == "__main__":
    main(sys.argv[1:])
