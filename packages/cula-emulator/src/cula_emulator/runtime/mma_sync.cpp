#include "mma_sync.h"

#include "matrix_fragments.h"

namespace emu {

void mma_sync(const MmaShape& shape, uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  struct Lane {
    const uint32_t *a, *b, *c;
    uint32_t* d;
  } mine{a, b, c, d};
  whole_warp(&mine, [&shape](void** lanes) {
    static LeftPanel left;
    static RightOperand right;
    LaneInputs a, b, c;
    LaneOutputs d;
    for (uint32_t l = 0; l < kWarpSize; l++) {
      const Lane& lane = *(Lane*)lanes[l];
      a[l] = lane.a, b[l] = lane.b, c[l] = lane.c, d[l] = lane.d;
    }
    Rows product[8];
    read_left(a, shape.a, shape.depth, false, left);
    read_right(b, shape.b, shape.depth, right);
    multiply(left, right, 8, shape.depth, product);
    write_result(product, 8, shape.accumulator, shape.saturate, &c, d);
  });
}

}  // namespace emu
