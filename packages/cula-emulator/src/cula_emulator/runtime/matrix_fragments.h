// How the lanes of a warp hold A, B, C and D of mma.m16n8k* and wgmma (PTX ISA, "Matrix fragments"); g = lane / 4,
// t = lane % 4. The order of elements depends only on their width: a 32-bit register holds consecutive k.
#pragma once
#include "matrix_product.h"
#include "warp.h"

#pragma GCC visibility push(hidden)
namespace emu {

// Every lane of the warp arrives; the last one computes for all.
template <class Compute>
static inline void whole_warp(void* arguments, Compute compute) {
  rendezvous(~0u, arguments, [&](void** lanes, uint32_t mask) {
    if (mask != ~0u) fail(Fault::kInvalid, "a matrix instruction in a warp of fewer than 32 threads");
    compute(lanes);
  });
}

using LaneInputs = const uint32_t* [kWarpSize];
using LaneOutputs = uint32_t* [kWarpSize];

// Sixteen rows of A, K-major: register i of a lane is word t + 4 (i / 2) of row g + 8 (i % 2).
void read_left(const LaneInputs& lanes, Format format, uint32_t depth, bool negative, LeftPanel& left);

// Eight columns of B, K-major: register i of a lane is word t + 4 i of column g.
void read_right(const LaneInputs& lanes, Format format, uint32_t depth, RightOperand& right);

// d = product + c, or d = product where `c` is null. A lane's elements 4j to 4j + 3 are columns 8j + 2t and the next of
// row g, then of row g + 8; f16 elements lie two to a register. `product` is in RowOrder::kFragments.
void write_result(const Rows* product, uint32_t width, Accumulator kind, bool saturate, const LaneInputs* c,
                  const LaneOutputs& d);

}  // namespace emu
#pragma GCC visibility pop
