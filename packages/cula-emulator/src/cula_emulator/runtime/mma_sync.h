// mma.sync.m16n8k*: the fragments of the lanes are multiplied once for the whole warp.
#pragma once
#include "matrix_product.h"

#pragma GCC visibility push(hidden)
namespace emu {

struct MmaShape {
  uint32_t depth;
  Format a, b;
  Accumulator accumulator;
  bool saturate;
};

// Registers of the calling lane: a[depth * size / 8], b[depth * size / 16], c and d[4], or [2] for f16.
void mma_sync(const MmaShape& shape, uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c);

}  // namespace emu
#pragma GCC visibility pop
