// What the four warps of a warpgroup do alike: .aligned instructions, and setmaxnreg, which moves registers between a
// warp and its CTA.
#pragma once
#include "warp.h"

#pragma GCC visibility push(hidden)
namespace emu {

// Books that a warp executes the .aligned instruction at its line: the n-th of each warp of a warpgroup must be the
// same place in the program. Once for all lanes.
void warpgroup_step(Warp& warp);
// The same for wgmma, which needs all four warps.
void wgmma_step(Warp& warp);
// For the last thread of a CTA: no warp may have ended without what the others of its warpgroup executed.
void warpgroups_end(Cta& cta);

// Registers of each thread at launch as they are allotted, 0 where setmaxnreg does nothing.
uint32_t registers_at_launch(const RegisterFacts& facts, uint32_t block_threads);
void set_max_registers(uint32_t count, bool increase);

}  // namespace emu
#pragma GCC visibility pop
