"""Every row of the scalar tables on the emulator: one module and one g++ run per family."""

import pytest
import torch
from tables_scalar import FAMILIES, HEADER, entry, mismatches, pack, samples

import cula_emulator as emulator


def words(values: list[int]) -> torch.Tensor:
    return torch.tensor([v - (1 << 32) if v >> 31 else v for v in values], dtype=torch.int32)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    cases = FAMILIES[family]
    module = emulator.emulate(HEADER + "\n".join(entry(case) for case in cases))
    wrong = []
    for case in cases:
        inputs = samples(case)
        source = words(pack(case, inputs))
        out = torch.zeros(len(inputs) * case.words_out, dtype=torch.int32)
        module.launch(case.name, (len(inputs) // 32,), (32,), (source, out))
        wrong += mismatches(case, inputs, out.tolist())[:2]
    assert not wrong, "\n".join([f"{len(wrong)} wrong:", *wrong[:60]])
