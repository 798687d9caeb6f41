#include "matrix_product.h"

#include "matrix_formats.h"

namespace emu {

void decode_units(Format format, const uint8_t* raw, uint32_t units, float* out) {
  with_format(format, [&](auto f) {
    const uint32_t per_unit = kUnitBytes / format_bytes(decltype(f)::value);
    for (uint32_t u = 0; u < units; u++) decode_unit<decltype(f)::value>(raw + kUnitBytes * u, out + per_unit * u);
  });
}

namespace {

// Writes the transpose of 4 x 4 floats to four columns of a panel.
void transpose_block(const float* const rows[4], Quad* out) {
  Quad r[4];
  for (int i = 0; i < 4; i++) memcpy(&r[i], rows[i], sizeof r[i]);
  const Quad a = interleave_low(r[0], r[2]), b = interleave_high(r[0], r[2]);
  const Quad c = interleave_low(r[1], r[3]), d = interleave_high(r[1], r[3]);
  out[0] = interleave_low(a, c), out[4] = interleave_high(a, c);
  out[8] = interleave_low(b, d), out[12] = interleave_high(b, d);
}

}  // namespace

void fill_left(LeftPanel& left, const float* values, uint32_t depth, bool m_major, bool negative, RowOrder order) {
  const auto source_row = [order](uint32_t i) { return order == RowOrder::kNatural ? i : i / 2 + 8 * (i % 2); };
  if (m_major) {
    float* out = (float*)left.column;
    for (uint32_t k = 0; k < depth; k++)
      for (uint32_t i = 0; i < kPanelRows; i++) out[kPanelRows * k + i] = values[kPanelRows * k + source_row(i)];
  } else {
    for (uint32_t i = 0; i < kPanelRows; i += 4) {
      const float* rows[4];
      for (uint32_t j = 0; j < 4; j++) rows[j] = values + source_row(i + j) * depth;
      for (uint32_t k = 0; k < depth; k += 4) {
        transpose_block(rows, (Quad*)&left.column[k] + i / 4);
        for (const float*& row : rows) row += 4;
      }
    }
  }
  if (!negative) return;
  for (uint32_t k = 0; k < depth; k++) left.column[k] = -left.column[k];
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
