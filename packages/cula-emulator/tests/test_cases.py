"""The cases that the GPU runs too, on the emulator alone, against what the manual says."""

import pytest
import torch
from cases import atomics, barriers, clusters, control, copies, memory, tma
from cases.case import aligned, module_text
from cases.tensor_map import TensorMap

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


@pytest.mark.parametrize(
    "case, complaint",
    [
        (
            tma.load("inside", TensorMap("in", "f16", (64, 8), (128,), (16, 8)), (4, 0)),
            "not a multiple of 16 bytes",
        ),
        (
            tma.load("left", TensorMap("in", "f32", (64, 8), (256,), (16, 8)), (-1, 0)),
            "not a multiple of 16 bytes",
        ),
        (
            tma.load("narrow", TensorMap("in", "f16", (32, 8), (128,), (32, 8), 128), (0, 0)),
            "narrower than its swizzle",
        ),
        (
            tma.store("above", TensorMap("out", "f32", (64, 8), (256,), (16, 8)), (16, -1)),
            "negative coordinate",
        ),
        (tma.reduction("add", "u32", (-16, 0), "_left"), "negative coordinate"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_the_gpu_refuses(case, complaint):
    """An H200 answers a narrow box with an illegal address, the others with an illegal instruction."""
    module = emulator.EmulatedModule(module_text([case]))
    source, out = aligned(case.source), case.output()
    address = {"in": source.data_ptr(), "out": out.data_ptr()}[case.maps[0].of]
    encoded = aligned(torch.frombuffer(bytearray(case.maps[0].encode(address)), dtype=torch.uint8))
    with pytest.raises(emulator.InvalidOperation, match=complaint):
        module.launch(case.name, (1,), (32,), (source, out, 0, encoded))


def test_a_copy_between_ctas_is_counted_where_it_arrives():
    """PTX wants the mbarrier in the CTA of the destination."""
    case = copies.between_ctas(2, barrier="%r20")
    module = emulator.EmulatedModule(module_text([case]))
    complaint = "must lie in that of the destination"
    with pytest.raises(emulator.InvalidOperation, match=complaint):
        module.launch(
            case.name, (2,), (32,), (aligned(case.source), case.output(), 0, 0), cluster=(2,)
        )


def test_a_line_that_is_given_up_holds_no_numbers(schedule):
    """A GPU may leave there what was there, so that this is no case of both."""
    case = memory.discarded()
    module, out = emulator.EmulatedModule(module_text([case])), case.output()
    module.launch(case.name, (1,), (32,), (aligned(case.source), out, 0, 0), options=schedule)
    assert torch.equal(out, case.expected)
    assert out[32:96].view(torch.float32).isnan().all()
    assert out[32:96].view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize(
    "at, complaint", [(64, "not aligned to 128 bytes"), (1 << 30, "global access of 128 bytes")]
)
def test_a_line_that_nobody_may_give_up(at, complaint):
    case = memory.discarded(at=at)
    module = emulator.EmulatedModule(module_text([case]))
    with pytest.raises(emulator.OutOfBounds, match=complaint):
        module.launch(case.name, (1,), (32,), (aligned(case.source), case.output(), 0, 0))


def test_no_other_size_is_given_up():
    text = module_text([memory.discarded()]).replace("], 128;", "], 64;")
    with pytest.raises(emulator.UnsupportedInstruction, match="discard.*a size that is not 128"):
        emulator.EmulatedModule(text)
