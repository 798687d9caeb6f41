#include "matrix_moves.h"

#include "matrix_fragments.h"

namespace emu {

namespace {

// Lane l holds elements 2 (l % 4) and the next of row l / 4, or of column l / 4 when transposed.
struct Matrix {
  uint16_t element[8][8];

  void transpose() {
    for (int i = 0; i < 8; i++)
      for (int j = 0; j < i; j++) std::swap(element[i][j], element[j][i]);
  }
  uint32_t of_lane(uint32_t lane) const {
    uint32_t pair;
    memcpy(&pair, &element[lane / 4][2 * (lane % 4)], sizeof pair);
    return pair;
  }
  void set_lane(uint32_t lane, uint32_t pair) { memcpy(&element[lane / 4][2 * (lane % 4)], &pair, sizeof pair); }
};

struct Lane {
  uint32_t address;
  uint32_t* registers;
};

// Each row is stored by the lane that named it. Any fence of the warp's lanes counts for the whole matrix.
uint8_t* row_to_store(void** lanes, uint32_t lane) {
  Thread* last = machine.current;
  machine.current = last->warp->begin + lane;
  uint8_t* row = shared_access(((Lane*)lanes[lane])->address, 16, kWrite);
  machine.current = last;
  return row;
}

// Each row is read by the warp, after what the lane knows that named it. All lanes go on when all rows are read.
const uint8_t* row_to_load(void** lanes, uint32_t lane) {
  const uint32_t address = ((Lane*)lanes[lane])->address;
  if (RaceDetector* r = races()) {
    Warp& warp = *self()->warp;
    r->access(Agent::kWarp, r->warp_number(warp), warp.collectives, r->known_to(warp.begin[lane]), *cta_of(address),
              address & kOffsetMask, 16, kRead, self()->line);
  }
  return shared(address, 16, 16);
}

}  // namespace

void load_matrix(uint32_t count, bool transpose, uint32_t address, uint32_t* registers) {
  Lane mine{address, registers};
  whole_warp(&mine, [=](void** lanes) {
    Warp& warp = *self()->warp;
    warp.collectives++;
    for (uint32_t q = 0; q < count; q++) {
      Matrix m;
      for (uint32_t r = 0; r < 8; r++) memcpy(m.element[r], row_to_load(lanes, 8 * q + r), sizeof m.element[r]);
      if (transpose) m.transpose();
      for (uint32_t l = 0; l < kWarpSize; l++) ((Lane*)lanes[l])->registers[q] = m.of_lane(l);
    }
    if (RaceDetector* r = races())
      for (const Thread* t = warp.begin; t < warp.end; t++)
        r->learn(*t, Agent::kWarp, r->warp_number(warp), warp.collectives);
  });
}

void store_matrix(uint32_t count, bool transpose, uint32_t address, uint32_t* registers) {
  Lane mine{address, registers};
  whole_warp(&mine, [=](void** lanes) {
    for (uint32_t q = 0; q < count; q++) {
      Matrix m;
      for (uint32_t l = 0; l < kWarpSize; l++) m.set_lane(l, ((Lane*)lanes[l])->registers[q]);
      if (transpose) m.transpose();
      for (uint32_t r = 0; r < 8; r++) memcpy(row_to_store(lanes, 8 * q + r), m.element[r], sizeof m.element[r]);
    }
  });
}

uint32_t move_matrix_transposed(uint32_t value) {
  struct Exchange {
    uint32_t value, result;
  } mine{value, 0};
  whole_warp(&mine, [](void** lanes) {
    Matrix m;
    for (uint32_t l = 0; l < kWarpSize; l++) m.set_lane(l, ((Exchange*)lanes[l])->value);
    m.transpose();
    for (uint32_t l = 0; l < kWarpSize; l++) ((Exchange*)lanes[l])->result = m.of_lane(l);
  });
  return mine.result;
}

}  // namespace emu
