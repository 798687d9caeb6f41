// Operands of wgmma and tcgen05.mma in shared memory.
#include "matrix_descriptor.h"

#include "matrix_formats.h"

namespace emu {

namespace {

uint32_t units_per_row(Swizzle s) {
  return s == Swizzle::kNone ? 1 : s == Swizzle::k32 ? 2 : s == Swizzle::k64 ? 4 : 8;
}

// The operand as lines of 16-byte units: a line is one row (K-major) or one k (MN-major). Before swizzling, unit u of
// line i lies at start + i % rows * row_bytes + i / rows * group_bytes + unit[u].
struct Lines {
  uint32_t count, units, start, rows, row_bytes, group_bytes;
  uint32_t unit[kMaxWidth * 4 / kUnitBytes];

  uint32_t line(uint32_t i) const { return start + i % rows * row_bytes + i / rows * group_bytes; }
};

Lines lines_of(const MatrixDescriptor& d, const OperandPart& part) {
  const uint32_t per_unit = kUnitBytes / format_bytes(part.format), row_units = units_per_row(d.swizzle);
  const bool plain = d.swizzle == Swizzle::kNone;
  Lines l;
  l.rows = 8;
  l.row_bytes = row_units * kUnitBytes;
  if (!part.mn_major) {
    l.count = part.count;
    l.units = part.depth / per_unit;
    l.start = d.start + part.first / 8 * d.stride;
    l.group_bytes = d.stride;
    for (uint32_t u = 0; u < l.units; u++) l.unit[u] = u * (plain ? d.leading : kUnitBytes);
    return l;
  }
  l.count = part.depth;
  l.units = part.count / per_unit;
  l.start = d.start;
  if (d.swizzle == Swizzle::k128Atom32) l.rows = 4;
  l.group_bytes = plain ? d.leading : d.stride;
  for (uint32_t u = 0; u < l.units; u++) {
    const uint32_t at = part.first / per_unit + u;
    l.unit[u] = plain ? at * d.stride : at % row_units * kUnitBytes + at / row_units * d.leading;
  }
  return l;
}

// The unswizzled units must lie in the window. Swizzling stays inside 128 bytes, of which the window is a multiple.
void check_bounds(const Lines& l, const char* reader) {
  static_assert(kSharedBase % 128 == 0 && kSharedEnd % 128 == 0, "swizzling could leave the window");
  uint64_t last = l.start + (uint64_t)std::min(l.rows, l.count) * l.row_bytes - l.row_bytes +
                  (uint64_t)((l.count - 1) / l.rows) * l.group_bytes;
  last += *std::max_element(l.unit, l.unit + l.units);
  if (l.start < kSharedBase || last + kUnitBytes > kSharedEnd)
    fail(Fault::kOutOfBounds, "%s reads its operand at shared addresses 0x%x to 0x%llx", reader, l.start,
         (unsigned long long)(last + kUnitBytes));
}

// The one place that is told which bytes of shared memory a matrix engine reads.
void operand_read(Cta* cta, uint32_t offset, uint32_t bytes, const char* reader) {
  proxy_read(cta, offset, bytes, reader);
  race_engine_read(cta, offset, bytes);
}
bool operand_reads_are_watched(const Cta* cta) {
  return races() || (machine.track_proxy && !cta->dirty_ranges.empty());
}

// Tells operand_read about every unit, neighbours together.
void announce(Cta* cta, const Lines& l, SwizzleBits swizzle, const char* reader) {
  uint32_t begin = 0, end = 0;
  for (uint32_t i = 0; i < l.count; i++)
    for (uint32_t u = 0; u < l.units; u++) {
      const uint32_t at = swizzle(l.line(i) + l.unit[u]);
      if (at == end) {
        end += kUnitBytes;
      } else if (at + kUnitBytes == begin) {
        begin = at;
      } else {
        if (end) operand_read(cta, begin, end - begin, reader);
        begin = at, end = at + kUnitBytes;
      }
    }
  operand_read(cta, begin, end - begin, reader);
}

template <Format F>
void decode_lines(const uint8_t* shared, const Lines& l, SwizzleBits swizzle, float* out) {
  const uint32_t per_unit = kUnitBytes / format_bytes(F);
  for (uint32_t i = 0; i < l.count; i++) {
    const uint32_t line = l.line(i);
    for (uint32_t u = 0; u < l.units; u++, out += per_unit) decode_unit<F>(shared + swizzle(line + l.unit[u]), out);
  }
}

}  // namespace

void read_operand(Cta* cta, const MatrixDescriptor& descriptor, const OperandPart& part, float* out) {
  const uint32_t along = part.mn_major ? part.count : part.depth;
  if (along * format_bytes(part.format) % kUnitBytes)
    fail(Fault::kInvalid, "%s: %u elements along the contiguous dimension of an operand are not supported", part.reader,
         along);
  const Lines lines = lines_of(descriptor, part);
  const SwizzleBits swizzle = swizzle_bits(descriptor.swizzle);
  check_bounds(lines, part.reader);
  if (operand_reads_are_watched(cta)) announce(cta, lines, swizzle, part.reader);
  with_format(part.format, [&](auto f) { decode_lines<decltype(f)::value>(cta->shared, lines, swizzle, out); });
}

void read_left(Cta* cta, const MatrixDescriptor& descriptor, const OperandPart& part, bool negative, RowOrder order,
               LeftPanel& left) {
  alignas(64) float values[kPanelRows * kMaxDepth];
  read_operand(cta, descriptor, part, values);
  fill_left(left, values, part.depth, part.mn_major, negative, order);
}

void read_right(Cta* cta, const MatrixDescriptor& descriptor, const OperandPart& part, RightOperand& right) {
  read_operand(cta, descriptor, part, right.value);
  right.per_n = part.mn_major ? 1 : part.depth;
  right.per_k = part.mn_major ? part.count : 1;
}

}  // namespace emu
