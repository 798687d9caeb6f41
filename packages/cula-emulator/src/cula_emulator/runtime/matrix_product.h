// The matrix product that every engine uses: operands decoded to fp32, sixteen rows of A at a time.
//
// Products are exact in fp32; only those of bf16 can leave its range. The products of one instruction are summed in
// fp32 from zero, in the order of k; the sum is then added to the accumulator. Hardware aligns the products to the
// largest of them and cuts, so results agree to rounding, and bit for bit where every sum is exact. Integer sums stay
// below 2^24 and are exact.
#pragma once
#include "numeric.h"

#pragma GCC visibility push(hidden)
namespace emu {

enum class Accumulator : int { kF32, kF16, kS32 };

constexpr uint32_t kPanelRows = 16, kMaxDepth = 32, kMaxWidth = 256;
constexpr uint32_t kUnitBytes = 16;  // operands are decoded 16 bytes at a time

// One column of sixteen rows. GCC and clang lower the type to what the processor has.
typedef float Rows __attribute__((vector_size(64)));
typedef float Quad __attribute__((vector_size(16)));

typedef int32_t Indices __attribute__((vector_size(16)));
// (a0, b0, a1, b1) and (a2, b2, a3, b3)
static inline Quad interleave_low(Quad a, Quad b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#else
  return __builtin_shuffle(a, b, (Indices){0, 4, 1, 5});
#endif
}
static inline Quad interleave_high(Quad a, Quad b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#else
  return __builtin_shuffle(a, b, (Indices){2, 6, 3, 7});
#endif
}

struct LeftPanel {
  Rows column[kMaxDepth];
};

// B(k, n) = value[n * per_n + k * per_k], in whatever order memory had it.
struct RightOperand {
  alignas(64) float value[kMaxDepth * kMaxWidth];
  uint32_t per_n, per_k;
};

// How the sixteen rows of a panel are ordered.
enum class RowOrder {
  kNatural,    // 0, 1, 2 ...
  kFragments,  // 0, 8, 1, 9 ...: the two rows of a lane of an mma fragment lie side by side
};

// Decodes `units` consecutive 16-byte units.
void decode_units(Format format, const uint8_t* raw, uint32_t units, float* out);

// `values` are 16 rows of `depth` elements (K-major) or `depth` lines of 16 rows (M-major).
void fill_left(LeftPanel& left, const float* values, uint32_t depth, bool m_major, bool negative, RowOrder order);

// product[n] = column n of A B.
void multiply(const LeftPanel& left, const RightOperand& right, uint32_t width, uint32_t depth, Rows* product);

static inline float canonical_nan(float value) { return value == value ? value : as_f32(0x7fffffffu); }

}  // namespace emu
#pragma GCC visibility pop
