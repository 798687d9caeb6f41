// ldmatrix, stmatrix, movmatrix: 8x8 matrices of 16-bit elements between shared memory and the lanes of a warp.
#pragma once
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace emu {

// Lane 8q + r gives the address of row r of matrix q; `registers` of each lane: one per matrix.
void load_matrix(uint32_t count, bool transpose, uint32_t address, uint32_t* registers);
void store_matrix(uint32_t count, bool transpose, uint32_t address, uint32_t* registers);
uint32_t move_matrix_transposed(uint32_t value);

}  // namespace emu
#pragma GCC visibility pop
