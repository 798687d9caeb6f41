// tcgen05.mma and tcgen05.commit.
#include "tcgen05.h"

#include "copies.h"
#include "matrix_descriptor.h"

namespace emu {

namespace {

struct Instruction {
  uint32_t m, n, depth;
  Format a, b;
  bool integer, saturate, a_negative, b_negative, a_mn_major, b_mn_major;
};

Instruction decode_instruction(TmemKind kind, uint32_t raw) {
  const uint32_t a = raw >> 7 & 7, b = raw >> 10 & 7, d = raw >> 4 & 3;
  Instruction i{};
  i.m = (raw >> 24 & 31) * 16;
  i.n = (raw >> 17 & 63) * 8;
  i.integer = kind == TmemKind::kI8;
  i.saturate = raw >> 3 & 1;
  i.a_negative = raw >> 13 & 1, i.b_negative = raw >> 14 & 1;
  i.a_mn_major = raw >> 15 & 1, i.b_mn_major = raw >> 16 & 1;
  // Sparsity, reserved bits and the shift of .ws must be zero.
  bool known = !(raw & 0xe0800047u) && d == (i.integer ? 2 : 1);
  switch (kind) {
    case TmemKind::kF16:
      i.depth = 16, i.a = a ? Format::kBf16 : Format::kF16, i.b = b ? Format::kBf16 : Format::kF16;
      known &= a <= 1 && b <= 1 && !i.saturate;
      break;
    case TmemKind::kTf32:
      i.depth = 8, i.a = i.b = Format::kTf32;
      known &= a == 2 && b == 2 && !i.saturate;
      break;
    case TmemKind::kF8f6f4:
      i.depth = 32, i.a = a ? Format::kE5m2 : Format::kE4m3, i.b = b ? Format::kE5m2 : Format::kE4m3;
      known &= a <= 1 && b <= 1 && !i.saturate;
      break;
    case TmemKind::kI8:
      i.depth = 32, i.a = a ? Format::kS8 : Format::kU8, i.b = b ? Format::kS8 : Format::kU8;
      known &= a <= 1 && b <= 1 && !i.a_negative && !i.b_negative;
      break;
  }
  const bool width =
      i.n >= 8 && i.n <= 256 && (i.m != 128 || i.n % 16 == 0) && (!i.integer || i.n <= 32 || i.n % 16 == 0);
  if (!known || !width || (i.m != 64 && i.m != 128))
    fail(Fault::kInvalid, "tcgen05.mma: instruction descriptor 0x%x (M %u N %u) is not supported", raw, i.m, i.n);
  return i;
}

// First tensor memory lane of a panel of sixteen rows of D, and of A in tensor memory, for one CTA.
uint32_t lane_of_panel(uint32_t m, uint32_t panel) { return panel * (m == 64 ? 32 : 16); }

void check_cells(const Cta& cta, uint32_t address, uint32_t m, uint32_t columns, const char* what) {
  const uint32_t last_lane = (address >> 16) + lane_of_panel(m, m / 16 - 1) + 15;
  if (last_lane >= kTmemLanes || (address & 0xffff) + columns > kTmemColumns)
    fail(Fault::kOutOfBounds, "tcgen05.mma: %s at 0x%x exceeds tensor memory", what, address);
  tmem_check_allocated(cta, address & 0xffff, (address & 0xffff) + columns - 1, "tcgen05.mma");
}

// Sixteen rows of A in tensor memory: a row is `words` consecutive columns of one lane.
void read_left_from_tmem(const uint32_t* cells, const Instruction& i, bool negative, LeftPanel& left) {
  const uint32_t words = i.depth * format_bytes(i.a) / 4;
  uint32_t raw[kPanelRows * 8];
  alignas(64) float values[kPanelRows * kMaxDepth];
  for (uint32_t w = 0; w < words; w++)
    for (uint32_t row = 0; row < kPanelRows; row++) raw[row * words + w] = cells[w * kTmemLanes + row];
  decode_units(i.a, (const uint8_t*)raw, kPanelRows * words / 4, values);
  fill_left(left, values, i.depth, false, negative, RowOrder::kNatural);
}

// Adds one column of sixteen rows to the cells; `disabled` has one bit per row.
void add_column(const Rows& product, const Instruction& i, bool accumulate, uint32_t disabled, uint32_t* cells) {
  for (uint32_t row = 0; row < kPanelRows; row++) {
    if (disabled >> row & 1) continue;
    if (i.integer) {
      const int64_t sum = (accumulate ? (int32_t)cells[row] : 0) + (int64_t)product[row];
      cells[row] = i.saturate ? (uint32_t)int_saturate<int32_t>(sum) : (uint32_t)sum;
    } else {
      cells[row] = from_f32(canonical_nan(accumulate ? product[row] + as_f32(cells[row]) : product[row]));
    }
  }
}
void add_enabled_f32(Rows product, bool accumulate, uint32_t* cells) {
  typedef uint32_t Words __attribute__((vector_size(64)));
  if (accumulate) {
    Rows base;
    memcpy(&base, cells, sizeof base);
    product += base;
  }
  const Words nan = (Words)(product != product), result = ((Words)product & ~nan) | (nan & 0x7fffffffu);
  memcpy(cells, &result, sizeof result);
}

void execute(Cta* cta, TmemKind kind, const Tcgen05Operands& o) {
  static LeftPanel left;
  static RightOperand right;
  static Rows product[kMaxWidth];
  const Instruction i = decode_instruction(kind, o.instruction);
  const bool negative = i.a_negative != i.b_negative;
  check_cells(*cta, o.d, i.m, i.n, "D");
  if (o.a_in_tmem) check_cells(*cta, (uint32_t)o.a, i.m, i.depth * format_bytes(i.a) / 4, "A");
  read_right(cta, decode_tcgen05_descriptor(o.b), {0, i.n, i.depth, i.b_mn_major, i.b, "tcgen05.mma"}, right);
  for (uint32_t panel = 0; panel < i.m / kPanelRows; panel++) {
    const uint32_t first_lane = lane_of_panel(i.m, panel);
    if (o.a_in_tmem) {
      const uint32_t lane = ((uint32_t)o.a >> 16) + first_lane, column = (uint32_t)o.a & 0xffff;
      read_left_from_tmem(&cta->tmem[column * kTmemLanes + lane], i, negative, left);
    } else {
      const OperandPart part{panel * kPanelRows, kPanelRows, i.depth, i.a_mn_major, i.a, "tcgen05.mma"};
      read_left(cta, decode_tcgen05_descriptor(o.a), part, negative, RowOrder::kNatural, left);
    }
    multiply(left, right, i.n, i.depth, product);
    const uint32_t lane = (o.d >> 16) + first_lane;
    const uint64_t masks = o.disabled_lanes[lane / 32] | (uint64_t)o.disabled_lanes[(lane / 32 + 1) % 4] << 32;
    const uint32_t disabled = masks >> lane % 32 & 0xffff;
    uint32_t* cells = &cta->tmem[(o.d & 0xffff) * kTmemLanes + lane];
    for (uint32_t n = 0; n < i.n; n++, cells += kTmemLanes) {
      if (disabled || i.integer)
        add_column(product[n], i, o.accumulate, disabled, cells);
      else
        add_enabled_f32(product[n], o.accumulate, cells);
    }
  }
}

}  // namespace

void tcgen05_mma(TmemKind kind, const Tcgen05Operands& operands) {
  Cta* cta = self()->cta;
  AsyncReader reader{Agent::kTensorCore, cta->rank, ++cta->tensor_issued, race_past(), self()->line};
  push_async(Engine::kTensorCore, [=] {
    async_reader = &reader;
    execute(cta, kind, operands);
  });
}

void tcgen05_commit(uint32_t mbarrier, uint32_t multicast_mask) {
  if (ignored_here()) return;
  const Past past = race_past();
  const uint32_t issued = self()->cta->tensor_issued;
  push_async(Engine::kTensorCore, [=] {
    for (uint32_t to : multicast_destinations(mbarrier, multicast_mask)) {
      if (RaceDetector* r = races())
        r->arrive(sync_key(Sync::kMbarrier, to), past, Agent::kTensorCore, self()->cta->rank, issued);
      mbarrier_update(to, 1, 0);
    }
  });
}

}  // namespace emu
