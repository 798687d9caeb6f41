"""TMA: copies through a tensor map, and changes of the map itself."""

from __future__ import annotations

from ..ptx import ir
from .copies import reduction
from .function import WRITE, FunctionEmitter
from .registry import Unsupported, emits


@emits("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(e: FunctionEmitter, i: ir.Instruction) -> str:
    if any(word in i.opcode for word in ("im2col", "gather4", "scatter4", "cta_group::2")):
        raise Unsupported("TMA mode")
    to_shared = ".shared::cluster.global" in i.opcode or ".shared::cta.global" in i.opcode
    tensor, shared = (i.operands[1], i.operands[0]) if to_shared else (i.operands[0], i.operands[1])
    coordinates = ", ".join(f"(int32_t)({e.value(c)})" for c in tensor.coordinates)
    start = f"int32_t c_[] = {{{coordinates}}};"
    common = f"{e.value(tensor.map, 'b64')}, c_, {len(tensor.coordinates)}, {e.address32(shared)}"
    if to_shared:
        mask = e.value(i.operands[3], "b16") if i.has("multicast::cluster") else "0"
        return f"{{ {start} tma_load({common}, {e.address32(i.operands[2])}, {mask}); }}"
    return f"{{ {start} tma_store({common}, {reduction(i)}); }}"


_MAP_FIELDS = {
    "global_address": "kAddress",
    "global_dim": "kSize",
    "global_stride": "kStride",
    "box_dim": "kBox",
}


@emits("tensormap")
def tensor_map(e: FunctionEmitter, i: ir.Instruction) -> str:
    o, space = i.operands, i.first_of(("global", "shared::cta"), "generic").split("::")[0]
    if i.parts[1] == "cp_fenceproxy":
        return f"memcpy(global_for_write({e.address64(o[0])}, 128, 128), shared({e.address32(o[1])}, 128, 128), 128);"
    field = i.first_of(_MAP_FIELDS)
    if i.parts[1] != "replace" or field is None:
        raise Unsupported("field")
    index, value = ("0", o[1]) if len(o) == 2 else (e.value(o[1]), o[2])
    pointer = e.pointer(o[0], space, 128, WRITE)
    return f"tensor_map_replace({pointer}, MapField::{_MAP_FIELDS[field]}, {index}, {e.value(value, i.type)});"
