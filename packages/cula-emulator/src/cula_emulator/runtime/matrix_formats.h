// Decoding of 16-byte units, one function per format; loops of fixed length, which compilers turn into vector code.
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#endif
#include "matrix_product.h"

#pragma GCC visibility push(hidden)
namespace emu {

template <Format>
static inline void decode_unit(const uint8_t* raw, float* out);

template <>
inline void decode_unit<Format::kBf16>(const uint8_t* raw, float* out) {
  uint16_t in[8];
  memcpy(in, raw, sizeof in);
  for (int i = 0; i < 8; i++) out[i] = as_f32((uint32_t)in[i] << 16);
}

template <>
inline void decode_unit<Format::kF16>(const uint8_t* raw, float* out) {
#if defined(__F16C__)
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)raw)));
#else
  uint16_t in[8];
  memcpy(in, raw, sizeof in);
  for (int i = 0; i < 8; i++) out[i] = f16_to_f32(in[i]);
#endif
}

template <>
inline void decode_unit<Format::kTf32>(const uint8_t* raw, float* out) {
  uint32_t in[4];
  memcpy(in, raw, sizeof in);
  for (int i = 0; i < 4; i++) out[i] = as_f32(in[i] & 0xffffe000u);  // the tensor core ignores the low 13 bits
}

// All magnitudes of e4m3 are multiples of 2^-9 below 2^18; integers spare the arithmetic on denormal numbers.
template <>
inline void decode_unit<Format::kE4m3>(const uint8_t* raw, float* out) {
  for (int i = 0; i < 16; i++) {
    const uint32_t v = raw[i], exponent = v >> 3 & 15, mantissa = v & 7;
    const int32_t magnitude = exponent ? (8 + mantissa) << (exponent - 1) : mantissa;
    const uint32_t value = from_f32((float)magnitude * (1.0f / 512.0f));
    out[i] = as_f32(((v & 0x7f) == 0x7f ? 0x7fc00000u : value) | (v & 0x80) << 24);
  }
}

template <>
inline void decode_unit<Format::kE5m2>(const uint8_t* raw, float* out) {  // the upper half of an f16
  uint8_t wide[32] = {};
  for (int i = 0; i < 16; i++) wide[2 * i + 1] = raw[i];
  decode_unit<Format::kF16>(wide, out);
  decode_unit<Format::kF16>(wide + 16, out + 8);
}

template <>
inline void decode_unit<Format::kS8>(const uint8_t* raw, float* out) {
  for (int i = 0; i < 16; i++) out[i] = (float)(int8_t)raw[i];
}

template <>
inline void decode_unit<Format::kU8>(const uint8_t* raw, float* out) {
  for (int i = 0; i < 16; i++) out[i] = (float)raw[i];
}

// Calls use(constant) with the format as a compile-time constant.
template <class Use>
static inline void with_format(Format format, Use use) {
  switch (format) {
    case Format::kF16: return use(std::integral_constant<Format, Format::kF16>());
    case Format::kBf16: return use(std::integral_constant<Format, Format::kBf16>());
    case Format::kTf32: return use(std::integral_constant<Format, Format::kTf32>());
    case Format::kE4m3: return use(std::integral_constant<Format, Format::kE4m3>());
    case Format::kE5m2: return use(std::integral_constant<Format, Format::kE5m2>());
    case Format::kS8: return use(std::integral_constant<Format, Format::kS8>());
    case Format::kU8: return use(std::integral_constant<Format, Format::kU8>());
  }
}

}  // namespace emu
#pragma GCC visibility pop
