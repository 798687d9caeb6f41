// What scalar instructions call where a C++ expression does not do.
#pragma once
#include "core.h"
#include "numeric.h"
#ifndef __SSE2__
#include <cfenv>
#endif

namespace emu {

// ---- results of floating-point instructions
static inline float flush(float f) { return fabsf(f) < 1.17549435e-38f ? copysignf(0.f, f) : f; }
static inline uint16_t flush_f16(uint16_t h) { return h & 0x7c00 ? h : h & 0x8000; }
// .ftz of a product, quotient or fma: the result is subnormal if it would be with an unlimited exponent. Next to the
// smallest normal number that is seen by the same operation on operands 2^64 larger.
template <class Scaled>
static inline float flush_result(float f, Scaled scaled) {
  constexpr float kSmallest = 1.17549435e-38f, kScale = 18446744073709551616.f;
  if (fabsf(f) > kSmallest || std::isnan(f)) return f;
  return fabsf(f) < kSmallest || fabsf(scaled(kScale)) < kSmallest * kScale ? copysignf(0.f, f) : f;
}
// The same for f16, from the value before its last rounding.
static inline uint16_t narrow_and_flush_f16(float f) {
  uint16_t h = f32_to_f16(f);
  bool smallest = (h & 0x7fff) == 0x0400 && fabsf(f16_to_f32(f32_to_f16(f * 1024))) < 0.0625f;
  return smallest ? h & 0x8000 : flush_f16(h);
}
template <class T>
static inline T saturate(T v) {
  return v > 0 ? (v < 1 ? v : (T)1) : (T)0;  // NaN and -0 become +0
}
template <class T>
static inline T relu(T v) {
  return v <= 0 ? (T)0 : v;  // NaN stays
}

// min and max: a number wins over NaN, or NaN wins; -0 is less than +0. Numbers that differ take the first two lines.
template <class T>
static inline T min_number(T a, T b) {
  if (a < b) return a;
  if (b < a) return b;
  if (a == b) return std::signbit(a) ? a : b;
  return std::isnan(a) ? b : a;
}
template <class T>
static inline T max_number(T a, T b) {
  if (a > b) return a;
  if (b > a) return b;
  if (a == b) return std::signbit(a) ? b : a;
  return std::isnan(a) ? b : a;
}
template <class T>
static inline T min_nan(T a, T b) {
  return std::isunordered(a, b) ? std::numeric_limits<T>::quiet_NaN() : min_number(a, b);
}
template <class T>
static inline T max_nan(T a, T b) {
  return std::isunordered(a, b) ? std::numeric_limits<T>::quiet_NaN() : max_number(a, b);
}
template <class T>
static inline T xorsign(T a, T b, T magnitude) {
  return std::isnan(magnitude) ? magnitude : std::signbit(a) != std::signbit(b) ? -magnitude : magnitude;
}

// ---- one rounding of sums and products that are exact in no machine format
// Rounded to odd: an inexact result has its last bit set, so that a later rounding to a format that is two bits shorter
// gives what rounding once gives.
static inline float odd_float(double v) {
  float f = (float)v;
  uint32_t u = from_f32(f);
  if ((double)f == v || v != v || (u & 1)) return f;
  return as_f32(fabs(v) > fabs((double)f) ? u + 1 : u - 1);
}
static inline float fma_small(float a, float b, float c) {  // f16 and bf16 factors: their product is exact
  double p = (double)a * b, s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
  uint64_t u = from_f64(s);
  if ((error > 0 || error < 0) && !(u & 1)) s = as_f64((error > 0) == (s > 0) ? u + 1 : u - 1);
  return odd_float(s);
}
template <class Int>
static inline double odd_double(Int v) {
  bool negative = v < 0;
  uint64_t magnitude = negative ? 0 - (uint64_t)v : (uint64_t)v;
  int excess = magnitude ? 11 - __builtin_clzll(magnitude) : 0;
  if (excess > 0) {
    uint64_t lost = magnitude & ((1ull << excess) - 1);
    magnitude = (magnitude >> excess | (lost != 0)) << excess;
  }
  return negative ? -(double)magnitude : (double)magnitude;
}

// ---- directed rounding. The volatile operands keep the operation between the two changes of the mode.
static inline void set_rounding(Rounding mode) {
#ifdef __SSE2__
  __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0x6000u) | (uint32_t)mode << 13);
#else
  static const int modes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
  std::fesetround(modes[(int)mode]);
#endif
}
namespace Op {
struct Add {
  template <class T>
  static T run(T a, T b, T) {
    return a + b;
  }
};
struct Sub {
  template <class T>
  static T run(T a, T b, T) {
    return a - b;
  }
};
struct Mul {
  template <class T>
  static T run(T a, T b, T) {
    return a * b;
  }
};
struct Div {
  template <class T>
  static T run(T a, T b, T) {
    return a / b;
  }
};
struct Fma {
  template <class T>
  static T run(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
struct Rcp {
  template <class T>
  static T run(T a, T, T) {
    return 1 / a;
  }
};
struct Sqrt {
  template <class T>
  static T run(T a, T, T) {
    return std::sqrt(a);
  }
};
}  // namespace Op
template <Rounding mode, class Operation, class T>
static inline T directed(T a, T b = 0, T c = 0) {
  volatile T x = a, y = b, z = c;
  set_rounding(mode);
  volatile T result = Operation::run((T)x, (T)y, (T)z);
  set_rounding(Rounding::kNearest);
  return result;
}
template <Rounding mode, class Int>
static inline double directed_double(Int v) {
  volatile Int x = v;
  set_rounding(mode);
  volatile double result = (double)x;
  set_rounding(Rounding::kNearest);
  return result;
}

// v is integral already; clamps, and NaN becomes `nan`.
template <class Int>
static inline Int float_to_int(double v, Int nan) {
  if (v != v) return nan;
  if (v <= (double)std::numeric_limits<Int>::min()) return std::numeric_limits<Int>::min();
  if (v >= (double)std::numeric_limits<Int>::max()) return std::numeric_limits<Int>::max();
  return (Int)v;
}

// ---- integers
// Division by zero is no error on a GPU (all ones, the dividend), and compilers hoist divisions above the test that
// guards them.
template <class Int>
static inline Int quotient(Int a, Int b) {
  if (b == 0) return (Int) ~(Int)0;
  if (std::numeric_limits<Int>::is_signed && b == (Int)-1) return (Int)(0 - (uint64_t)a);
  return a / b;
}
template <class Int>
static inline Int remainder(Int a, Int b) {
  if (b == 0) return a;
  if (std::numeric_limits<Int>::is_signed && b == (Int)-1) return 0;
  return a % b;
}

static inline uint64_t field_mask(uint32_t length) { return length >= 64 ? ~0ull : (1ull << length) - 1; }
// The manual leaves numbers above 255 open. Hardware uses their low byte for 32-bit operands, all of them for 64-bit.
static inline void narrow_field_operands(uint32_t* position, uint32_t* length, uint32_t width) {
  if (width == 32) *position &= 255, *length &= 255;
}
static inline uint64_t extract_field(uint64_t value, uint32_t position, uint32_t length, uint32_t width,
                                     bool is_signed) {
  narrow_field_operands(&position, &length, width);
  uint64_t field = position < 64 ? (value >> position) & field_mask(length) : 0;
  // The sign is the top bit of the field, or of the value when the field reaches beyond it.
  const uint64_t top = std::min<uint64_t>((uint64_t)position + length - 1, width - 1);
  bool negative = is_signed && length && (value >> top & 1);
  uint32_t present = position < width ? std::min(length, width - position) : 0;
  return negative ? field | ~field_mask(present) : field;
}
static inline uint64_t insert_field(uint64_t field, uint64_t base, uint32_t position, uint32_t length, uint32_t width) {
  narrow_field_operands(&position, &length, width);
  if (position >= 64) return base;
  uint64_t mask = field_mask(length) << position;
  return (base & ~mask) | (field << position & mask);
}
static inline uint32_t extend_field(uint32_t value, uint32_t length, bool is_signed) {
  if (length == 0) return 0;
  if (length >= 32) return value;
  uint32_t unused = 32 - length;
  return is_signed ? (uint32_t)((int32_t)(value << unused) >> unused) : value << unused >> unused;
}
static inline uint32_t leading_bit(uint64_t value, uint32_t width, bool is_signed, bool from_top) {
  if (is_signed && value >> (width - 1) & 1) value = ~value & field_mask(width);
  if (!value) return ~0u;
  uint32_t position = 63 - (uint32_t)__builtin_clzll(value);
  return from_top ? width - 1 - position : position;
}
static inline uint64_t reverse_bits(uint64_t v) {
  v = (v >> 1 & 0x5555555555555555ull) | (v & 0x5555555555555555ull) << 1;
  v = (v >> 2 & 0x3333333333333333ull) | (v & 0x3333333333333333ull) << 2;
  v = (v >> 4 & 0x0f0f0f0f0f0f0f0full) | (v & 0x0f0f0f0f0f0f0f0full) << 4;
  return __builtin_bswap64(v);
}
// The position of the offset-th set bit counted from `base`, up or down; all ones if there is none.
static inline uint32_t nth_set_bit(uint32_t mask, uint32_t base, int32_t offset) {
  if (offset == 0) return base < 32 && mask >> base & 1 ? base : ~0u;
  int64_t left = offset > 0 ? offset : -(int64_t)offset;
  for (int64_t p = base; p >= 0 && p < 32; p += offset > 0 ? 1 : -1)
    if ((mask >> p & 1) && --left == 0) return (uint32_t)p;
  return ~0u;
}

// prmt: each nibble of the selector names a byte of the eight; its top bit asks for the sign of that byte.
static inline uint32_t permuted_byte(uint64_t bytes, uint32_t nibble) {
  uint32_t b = bytes >> (8 * (nibble & 7)) & 255;
  return nibble & 8 ? (b & 128 ? 255 : 0) : b;
}
static inline uint32_t permute_bytes(uint64_t bytes, uint32_t selector) {
  return permuted_byte(bytes, selector) | permuted_byte(bytes, selector >> 4) << 8 |
         permuted_byte(bytes, selector >> 8) << 16 | permuted_byte(bytes, selector >> 12) << 24;
}
// The selectors of the named modes, for n = the low two bits of c.
static inline uint32_t permutation_f4e(uint32_t n) { return 0x3210 + n * 0x1111; }
static inline uint32_t permutation_b4e(uint32_t n) {
  return n | ((n - 1) & 7) << 4 | ((n - 2) & 7) << 8 | ((n - 3) & 7) << 12;
}
static inline uint32_t permutation_rc8(uint32_t n) { return n * 0x1111; }
static inline uint32_t permutation_ecl(uint32_t n) {
  return n | std::max(n, 1u) << 4 | std::max(n, 2u) << 8 | 3u << 12;
}
static inline uint32_t permutation_ecr(uint32_t n) { return std::min(n, 1u) << 4 | std::min(n, 2u) << 8 | n << 12; }
static inline uint32_t permutation_rc16(uint32_t n) { return n & 1 ? 0x3232 : 0x1010; }

// ---- warps
static inline uint32_t existing_lanes() {  // the last warp of a CTA may have fewer than 32
  return self()->warp->whole.mask;
}

}  // namespace emu
