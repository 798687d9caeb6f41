// Tiled TMA. The tensor map is the 128-byte object that the DSL's host code or cuTensorMapEncodeTiled writes.
#pragma once
#include "copies.h"
#include "matrix_descriptor.h"

#pragma GCC visibility push(hidden)
namespace emu {

void tma_load(uint64_t tensor_map, const int32_t* coordinates, int rank, uint32_t destination, uint32_t mbarrier,
              uint32_t multicast_mask);
void tma_store(uint64_t tensor_map, const int32_t* coordinates, int rank, uint32_t source, Reduce reduce);

// tensormap.replace on a map in memory.
enum class MapField { kAddress, kSize, kStride, kBox };
void tensor_map_replace(uint8_t* map, MapField field, uint32_t index, uint64_t value);

}  // namespace emu
#pragma GCC visibility pop
