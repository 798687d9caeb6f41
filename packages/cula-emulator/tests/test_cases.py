"""The cases that the GPU runs too, on the emulator alone, against what the manual says."""

import pytest
import torch
from cases import atomics, barriers, clusters, control, copies, memory, tma
from cases.case import aligned, module_text

import cula_emulator as emulator

_MODULES = {m.FAMILY: m for m in (memory, atomics, barriers, clusters, copies, tma, control)}


@pytest.mark.parametrize("family", _MODULES)
def test_family(family, schedule):
    cases = _MODULES[family].CASES
    module = emulator.EmulatedModule(module_text(cases))
    wrong = []
    for case in cases:
        source, out = aligned(case.source), case.output()
        addresses = {"in": source.data_ptr(), "out": out.data_ptr()}
        maps = b"".join(m.encode(addresses[m.of] + m.offset) for m in case.maps).ljust(128, b"\0")
        arguments = (
            source,
            out,
            case.n,
            aligned(torch.frombuffer(bytearray(maps), dtype=torch.uint8)),
        )
        launch = {"cluster": (case.cluster,), "options": schedule}
        module.launch(case.name, (case.grid,), (case.block,), arguments, **launch)
        if not torch.equal(out, case.expected):
            where = (out != case.expected).nonzero().flatten().tolist()
            wrong.append(f"{case.name}: {len(where)} words, first {where[0]}")
    assert not wrong, "\n".join(wrong)
