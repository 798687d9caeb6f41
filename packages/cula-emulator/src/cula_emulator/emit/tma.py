"""TMA: copies through a tensor map, and changes of the map itself."""

from __future__ import annotations

from ..ptx import ir
from .copies import COUNTED, reduction
from .function import READ, WRITE, FunctionEmitter, block
from .registry import Unsupported, emits

_RANK = "1d|2d|3d|4d|5d"


def _place(e: FunctionEmitter, tensor: ir.Operand, shared: ir.Operand) -> tuple[str, str]:
    """The declaration of the coordinates, and the arguments that loads and stores have in common."""
    if not isinstance(tensor, ir.TensorAddress):
        raise Unsupported("a tensor without coordinates")
    coordinates = ", ".join(f"(int32_t)({e.value(c)})" for c in tensor.coordinates)
    arguments = (
        f"{e.value(tensor.map, 'b64')}, c_, {len(tensor.coordinates)}, {e.address32(shared)}"
    )
    return f"const int32_t c_[] = {{{coordinates}}};", arguments


@emits(
    "cp.async.bulk.tensor",
    forms=[
        f"{_RANK} shared::cluster|shared::cta global ?tile {COUNTED} ?multicast::cluster ?cta_group::1 ?L2::cache_hint",
        f"{_RANK} global shared::cta ?tile bulk_group ?L2::cache_hint",
    ],
)
def tensor_copy(e: FunctionEmitter, i: ir.Instruction) -> str:
    if i.parts[5] == "global":
        tensor, shared = i.operands[:2]
        declaration, place = _place(e, tensor, shared)
        return block(declaration, f"tma_store({place}, Reduce::kNone);")
    shared, tensor, barrier, *rest = i.operands
    declaration, place = _place(e, tensor, shared)
    mask = e.value(rest[0], "b16") if i.has("multicast::cluster") else "0"
    return block(declaration, f"tma_load({place}, {e.address32(barrier)}, {mask});")


@emits(
    "cp.reduce.async.bulk.tensor",
    forms=[f"{_RANK} global shared::cta add|min|max|and|or|xor ?tile bulk_group ?L2::cache_hint"],
)
def tensor_reduce(e: FunctionEmitter, i: ir.Instruction) -> str:
    declaration, place = _place(e, i.operands[0], i.operands[1])
    return block(declaration, f"tma_store({place}, {reduction(i)});")


_FIELDS = {
    "global_address": "kAddress",
    "global_dim": "kSize",
    "global_stride": "kStride",
    "box_dim": "kBox",
}


@emits("tensormap.replace", forms=[f"tile {'|'.join(_FIELDS)} ?global|shared::cta b1024 b32|b64"])
def replace_field(e: FunctionEmitter, i: ir.Instruction) -> str:
    place, *index, value = i.operands
    pointer = e.pointer(place, e.space_of(i, place), 128, WRITE)
    field = f"MapField::{_FIELDS[i.first_of(_FIELDS)]}"
    return f"tensor_map_replace({pointer}, {field}, {e.value(index[0]) if index else '0'}, {e.value(value, i.type)});"


@emits(
    "tensormap.cp_fenceproxy",
    forms=["global shared::cta tensormap::generic release cta|cluster|gpu|sys sync aligned"],
)
def publish_map(e: FunctionEmitter, i: ir.Instruction) -> str:
    destination, source = (
        e.pointer(operand, space, 128, how)
        for operand, space, how in zip(i.operands, ("global", "shared"), (WRITE, READ))
    )
    return f"memcpy({destination}, {source}, 128);"
