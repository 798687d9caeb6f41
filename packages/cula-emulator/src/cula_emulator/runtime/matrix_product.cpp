#include "matrix_product.h"

#include "matrix_formats.h"

namespace emu {

void decode_units(Format format, const uint8_t* raw, uint32_t units, float* out) {
  with_format(format, [&](auto f) {
    const uint32_t per_unit = kUnitBytes / format_bytes(decltype(f)::value);
    for (uint32_t u = 0; u < units; u++) decode_unit<decltype(f)::value>(raw + kUnitBytes * u, out + per_unit * u);
  });
}

void fill_left(LeftPanel& left, const float* values, uint32_t depth, bool m_major, bool negative, RowOrder order) {
  const float sign = negative ? -1.f : 1.f;
  const uint32_t per_row = m_major ? 1 : depth, per_k = m_major ? kPanelRows : 1;
  float* out = (float*)left.column;
  for (uint32_t i = 0; i < kPanelRows; i++) {
    const float* row = values + (order == RowOrder::kNatural ? i : i / 2 + 8 * (i % 2)) * per_row;
    for (uint32_t k = 0; k < depth; k++) out[kPanelRows * k + i] = sign * row[k * per_k];
  }
}

namespace {

#ifdef __AVX512F__
constexpr uint32_t kColumns = 8;  // accumulators that stay in registers
#else
constexpr uint32_t kColumns = 4;
#endif

}  // namespace

void multiply(const LeftPanel& left, const RightOperand& right, uint32_t width, uint32_t depth, Rows* product) {
  const size_t per_n = right.per_n, per_k = right.per_k;
  for (uint32_t n = 0; n < width; n += kColumns) {
    const float* b = right.value + n * per_n;
    Rows sum[kColumns] = {};
    for (uint32_t k = 0; k < depth; k++, b += per_k)
      for (uint32_t j = 0; j < kColumns; j++) sum[j] += left.column[k] * b[j * per_n];
    for (uint32_t j = 0; j < kColumns; j++) product[n + j] = sum[j];
  }
}

}  // namespace emu
