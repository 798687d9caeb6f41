"""One group of kernels on the GPU and in the emulator: a process that `hardware.py` starts.

    python tests/hardware_worker.py GROUP ROWS SKIP [--stand-in]

It adds a JSON line per case to the file ROWS. SKIP is a JSON file with the names of cases to leave out. With --stand-in
another schedule of the emulator plays the GPU.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parent))

import torch
from cases import dsl, tma
from cases.case import aligned
from cases.compare import Difference, of_values, of_words
from cases.subjects import SCHEDULES, Subject, groups
from cases.tensor_map import SWIZZLES, TYPES, TensorMap, decode

import cula_emulator as emulator

DSL_CHUNK = 6
_MAP_BYTES = 128


# ---- where the kernels run
class Gpu:
    """The GPU of this machine, through the driver."""

    def __init__(self) -> None:
        from driver import Driver

        self.driver = Driver()

    def module(self, text: str):
        from driver import DriverModule

        return DriverModule(text, driver=self.driver)

    def put(self, values: torch.Tensor) -> torch.Tensor:
        return values.cuda()

    def encode(self, m: TensorMap, address: int) -> bytes:
        return self.driver.encode_tiled(
            TYPES[m.dtype][0],
            address,
            m.sizes,
            m.strides,
            m.box,
            SWIZZLES[m.swizzle],
            int(m.nan_fill),
        )

    def call_dsl(self, compiled, tensors: list[torch.Tensor]) -> None:
        compiled(*tensors)
        torch.cuda.synchronize()


class StandIn:
    """The emulator under another schedule, in the GPU's place."""

    _options = emulator.Options(async_mode="lazy", seed=7)

    def module(self, text: str):
        return emulator.EmulatedModule(text, self._options)

    def put(self, values: torch.Tensor) -> torch.Tensor:
        return aligned(values)

    def encode(self, m: TensorMap, address: int) -> bytes:
        return m.encode(address)

    def call_dsl(self, compiled, tensors: list[torch.Tensor]) -> None:
        emulator.emulate(compiled, self._options)(*tensors)


# ---- one launch
def _launch(
    module, put, encode, subject: Subject, options: emulator.Options | None = None
) -> torch.Tensor:
    """The output words."""
    source, out = put(subject.source), put(subject.out)
    arguments: list[Any] = [source, out, *subject.extra]
    if len(module.parameters[subject.kernel]) > len(arguments):
        arguments.append(put(_maps(subject, encode, source.data_ptr(), out.data_ptr())))
    launch = {"cluster": (subject.cluster,), "options": options}
    module.launch(subject.kernel, (subject.grid,), (subject.block,), arguments, **launch)
    return out.cpu()


def _maps(subject: Subject, encode, source: int, out: int) -> torch.Tensor:
    data = b"".join(encode(m, (source if m.of == "in" else out) + m.offset) for m in subject.maps)
    return torch.frombuffer(bytearray(data.ljust(_MAP_BYTES, b"\0")), dtype=torch.uint8)


def _status(difference: Difference, limit: float | None, complaints: list[str]) -> str:
    if complaints:
        return "wrong"
    if difference.identical:
        return "identical"
    return "within" if limit is None or difference.relative <= limit else "differs"


def row(
    family: str, name: str, difference: Difference, limit: float | None, complaints: list[str]
) -> dict[str, Any]:
    return {
        "family": family,
        "name": name,
        "status": _status(difference, limit, complaints),
        "elements": difference.elements,
        "different": difference.different,
        "nan_bits": difference.nan_bits,
        "max_ulp": difference.ulp,
        "max_relative": difference.relative if math.isfinite(difference.relative) else None,
        "complaints": complaints,
    }


def _compare(device, device_module, module, subject: Subject) -> dict[str, Any]:
    complaints, encoded = [], {}

    def encode_there(m: TensorMap, address: int) -> bytes:
        encoded[m] = device.encode(m, address)
        return encoded[m]

    def encode_here(m: TensorMap, address: int) -> bytes:
        """The GPU driver's own bytes, with the address replaced."""
        return address.to_bytes(8, "little") + encoded[m][8:]

    on_device = _launch(device_module, device.put, encode_there, subject)
    if error := subject.judge(on_device):
        complaints.append(f"GPU: {error}")
    total = Difference()
    for mode, seed in subject.schedules:
        options = emulator.Options(async_mode=mode, seed=seed)
        try:
            emulated = _launch(module, aligned, encode_here, subject, options)
        except emulator.EmulatorError as error:
            complaints.append(f"emulator, {mode}: {type(error).__name__}: {error}")
            continue
        if error := subject.judge(emulated):
            complaints.append(f"emulator, {mode}: {error}")
        total += subject.difference(on_device, emulated)
    return row(subject.family, subject.name, total, subject.limit, complaints)


# ---- a worker: one group
def _say(stream: TextIO, **row: Any) -> None:
    stream.write(json.dumps(row) + "\n")
    stream.flush()


def _supported(
    text: str, subjects: list[Subject], stream: TextIO
) -> tuple[Any, str, list[Subject]]:
    """The emulated module, its text and what it runs; kernels that it refuses are reported one by one."""
    try:
        return emulator.EmulatedModule(text), text, subjects
    except emulator.UnsupportedInstruction as error:
        lines, refused = text.splitlines(), {}
        starts = [
            (n, line.split("(")[0].split()[-1])
            for n, line in enumerate(lines, 1)
            if ".entry" in line
        ]
        for number, instruction in error.instructions:
            kernel = [name for start, name in starts if start <= number][-1]
            refused.setdefault(kernel, instruction)
    kept = [s for s in subjects if s.kernel not in refused]
    for s in subjects:
        if s.kernel in refused:
            empty = row(s.family, s.name, Difference(), 0.0, [])
            _say(stream, **empty | {"status": "refused", "complaints": [refused[s.kernel]]})
    text = _without(text, set(refused))
    return emulator.EmulatedModule(text), text, kept


def _without(text: str, kernels: set[str]) -> str:
    """The module without some of its entries."""
    head, *entries = text.split(".visible .entry ")
    return head + "".join(
        f".visible .entry {e}" for e in entries if e.split("(")[0].strip() not in kernels
    )


def work(name: str, skip: set[str], device, stream: TextIO) -> None:
    """Runs a group, one JSON line per case; a line with "begin" comes before each, so that a crash names its case."""
    if name.startswith("dsl "):
        return _work_dsl(int(name.split()[1]), skip, device, stream)
    if name == "tensor maps":
        return _work_maps(device, stream)
    group = groups()[name]
    text, subjects = group.text(), [s for s in group.subjects() if s.name not in skip]
    _say(stream, building=name)
    module, text, subjects = _supported(text, subjects, stream)
    device_module = device.module(text)
    for subject in subjects:
        _say(stream, begin=subject.name, family=subject.family)
        _say(stream, **_compare(device, device_module, module, subject))
    return None


def _work_dsl(chunk: int, skip: set[str], device, stream: TextIO) -> None:
    for case in dsl.CASES[chunk * DSL_CHUNK : (chunk + 1) * DSL_CHUNK]:
        if case.name in skip:
            continue
        _say(stream, begin=case.name, family=dsl.FAMILY)
        complaints, total, limit = [], Difference(), 0.0
        with case.compiled() as compiled:
            emulated = emulator.emulate(compiled)
            for kind in ("exact", "random"):
                tensors = case.tensors(kind)
                expected, size = case.expected(tensors)
                there = [
                    device.put(t) if t.is_contiguous() else device.put(t.t()).t() for t in tensors
                ]
                device.call_dsl(compiled, there)
                result = there[-1].cpu()
                limit = max(limit, case.limit(kind))
                if not ((result.double() - expected).abs() <= case.limit(kind) * size).all():
                    if case.kernel != "vector_add":
                        complaints.append(f"GPU, {kind}: beyond {case.limit(kind):.1e} of |A| |B|")
                for mode, seed in SCHEDULES:
                    here = [t.clone() for t in tensors]
                    try:
                        emulated(*here, options=emulator.Options(async_mode=mode, seed=seed))
                    except emulator.EmulatorError as error:
                        complaints.append(
                            f"emulator, {kind}, {mode}: {type(error).__name__}: {error}"
                        )
                        continue
                    if case.limit(kind) == 0:
                        words = (x.contiguous().view(torch.int32) for x in (result, here[-1]))
                        total += of_words(*words)
                    else:
                        total += of_values(result, here[-1], size)
        _say(stream, **row(dsl.FAMILY, case.name, total, limit, complaints))


def _work_maps(device, stream: TextIO) -> None:
    """The GPU driver's encoding of every map of the TMA cases, read as the emulator reads it."""
    address = device.put(torch.zeros(1 << 16, dtype=torch.int32)).data_ptr()
    for number, m in enumerate(dict.fromkeys(m for c in tma.CASES for m in c.maps)):
        theirs = decode(device.encode(m, address))
        ours = decode(m.encode(address))
        wrong = [
            f"{key}: the driver has {theirs[key]}, expected {ours[key]}"
            for key in ours
            if theirs[key] != ours[key]
        ]
        name = f"map {number}: {m.dtype} rank {len(m.sizes)} swizzle {m.swizzle}"
        _say(stream, **row("tensor maps", name, Difference(len(ours), len(wrong)), 0.0, wrong))


def main() -> None:
    name, rows, skip, *stand_in = sys.argv[1:]
    device = StandIn() if stand_in else Gpu()
    with Path(rows).open("a") as stream:
        work(name, set(json.loads(Path(skip).read_text())), device, stream)


if __name__ == "__main__":
    main()
