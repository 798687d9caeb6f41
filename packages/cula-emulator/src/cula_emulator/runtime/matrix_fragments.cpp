#include "matrix_fragments.h"

namespace emu {

void read_left(const LaneInputs& lanes, Format format, uint32_t depth, bool negative, LeftPanel& left) {
  const uint32_t words = depth * format_bytes(format) / 4;
  uint32_t raw[kPanelRows * 8];
  alignas(64) float values[kPanelRows * kMaxDepth];
  for (uint32_t l = 0; l < kWarpSize; l++)
    for (uint32_t i = 0; i < words / 2; i++) raw[(l / 4 + 8 * (i & 1)) * words + l % 4 + 4 * (i >> 1)] = lanes[l][i];
  decode_units(format, (const uint8_t*)raw, kPanelRows * words / 4, values);
  fill_left(left, values, depth, false, negative, RowOrder::kFragments);
}

void read_right(const LaneInputs& lanes, Format format, uint32_t depth, RightOperand& right) {
  const uint32_t words = depth * format_bytes(format) / 4;
  uint32_t raw[8 * 8];
  for (uint32_t l = 0; l < kWarpSize; l++)
    for (uint32_t i = 0; i < words / 4; i++) raw[l / 4 * words + l % 4 + 4 * i] = lanes[l][i];
  decode_units(format, (const uint8_t*)raw, 8 * words / 4, right.value);
  right.per_n = depth;
  right.per_k = 1;
}

namespace {

typedef uint32_t Words __attribute__((vector_size(16)));

template <class T>
T load_as(const void* p) {
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Adds elements 4j to 4j + 3 of one lane.
struct AddF32 {
  static void run(Quad v, const uint32_t* c, uint32_t* d, uint32_t j) {
    if (c) v += load_as<Quad>(c + 4 * j);
    const Words raw = (Words)v, nan = (Words)(v != v);
    const Words result = (raw & ~nan) | (nan & 0x7fffffffu);
    memcpy(d + 4 * j, &result, sizeof result);
  }
};
struct AddF16 {
  static void run(Quad v, const uint32_t* c, uint32_t* d, uint32_t j) {
    uint16_t base[4] = {}, result[4];
    if (c) memcpy(base, c + 2 * j, sizeof base);
    for (int i = 0; i < 4; i++) result[i] = f32_to_f16(c ? v[i] + f16_to_f32(base[i]) : v[i]);
    memcpy(d + 2 * j, result, sizeof result);
  }
};
struct AddS32 {
  static void run(Quad v, const uint32_t* c, uint32_t* d, uint32_t j) {
    Words result;
    for (int i = 0; i < 4; i++) result[i] = (uint32_t)(int32_t)v[i];
    if (c) result += load_as<Words>(c + 4 * j);
    memcpy(d + 4 * j, &result, sizeof result);
  }
};
struct AddSaturatedS32 {
  static void run(Quad v, const uint32_t* c, uint32_t* d, uint32_t j) {
    for (int i = 0; i < 4; i++) {
      const int64_t base = c ? (int32_t)c[4 * j + i] : 0;
      d[4 * j + i] = (uint32_t)int_saturate<int32_t>(base + (int32_t)v[i]);
    }
  }
};

template <class Add>
void write_lanes(const Rows* product, uint32_t width, const LaneInputs* c, const LaneOutputs& d) {
  for (uint32_t j = 0; j < width / 8; j++)
    for (uint32_t t = 0; t < 4; t++) {
      const Quad* first = (const Quad*)(product + 8 * j + 2 * t);
      const Quad* second = (const Quad*)(product + 8 * j + 2 * t + 1);
      for (uint32_t q = 0; q < 4; q++) {
        const uint32_t lane = 8 * q + t;
        Add::run(interleave_low(first[q], second[q]), c ? (*c)[lane] : nullptr, d[lane], j);
        Add::run(interleave_high(first[q], second[q]), c ? (*c)[lane + 4] : nullptr, d[lane + 4], j);
      }
    }
}

}  // namespace

void write_result(const Rows* product, uint32_t width, Accumulator kind, bool saturate, const LaneInputs* c,
                  const LaneOutputs& d) {
  switch (kind) {
    case Accumulator::kF32: return write_lanes<AddF32>(product, width, c, d);
    case Accumulator::kF16: return write_lanes<AddF16>(product, width, c, d);
    case Accumulator::kS32:
      return saturate ? write_lanes<AddSaturatedS32>(product, width, c, d) : write_lanes<AddS32>(product, width, c, d);
  }
}

}  // namespace emu
