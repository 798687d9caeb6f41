#include "wgmma.h"

#include "matrix_descriptor.h"
#include "matrix_fragments.h"
#include "warpgroup.h"

namespace emu {

namespace {

constexpr uint32_t kMaxRegisters = 128;

// What the lanes of a warp must agree on.
struct Operands {
  uint64_t a, b;
  bool accumulate, a_in_registers;

  bool operator==(const Operands& o) const {
    return a == o.a && b == o.b && accumulate == o.accumulate && a_in_registers == o.a_in_registers;
  }
};
struct Lane {
  Operands operands;
  uint32_t* d;
  const uint32_t* a;
};

uint32_t register_count(const WgmmaShape& s) { return s.accumulator == Accumulator::kF16 ? s.width / 4 : s.width / 2; }

AsyncReader reader_of(const Warp& warp) {
  RaceDetector* r = races();
  if (!r) return {};
  return {Agent::kWarpMma, r->warp_number(warp), (uint32_t)warp.wgmma_issued, r->past_of(warp), self()->line};
}

// d = A B + c for the 16 rows of one warp; c is null when the accumulator is overwritten.
void compute(Warp& warp, const WgmmaShape& s, const Operands& o, const LaneInputs& a, const LaneInputs* c,
             const LaneOutputs& d, const AsyncReader& reader) {
  async_reader = &reader;
  static LeftPanel left;
  static RightOperand right;
  static Rows product[kMaxWidth];
  if (o.a_in_registers) {
    read_left(a, s.a, s.depth, s.negative, left);
  } else {
    const OperandPart part{16 * (warp.id % 4), kPanelRows, s.depth, s.a_mn_major, s.a, "wgmma"};
    read_left(warp.cta, decode_wgmma_descriptor(o.a), part, s.negative, RowOrder::kFragments, left);
  }
  const OperandPart part{0, s.width, s.depth, s.b_mn_major, s.b, "wgmma"};
  read_right(warp.cta, decode_wgmma_descriptor(o.b), part, right);
  multiply(left, right, s.width, s.depth, product);
  write_result(product, s.width, s.accumulator, s.saturate, c, d);
}

// A deferred operation: the registers of its lanes as they were at issue. Reused, because 17 KB are slow to allocate.
struct Deferred {
  WgmmaShape shape;
  Operands operands;
  Warp* warp;
  AsyncReader reader;
  uint32_t first_tag;  // results go to wgmma_values[first_tag + register] of each lane
  uint32_t a[kWarpSize][4];
  bool chained;  // the accumulators are the results of one operation before, named by tags from `source_tag`
  uint32_t source_tag;
  uint32_t c[kWarpSize][kMaxRegisters];  // values or tags, where not chained
};
std::vector<std::unique_ptr<Deferred>> idle;

std::shared_ptr<Deferred> take_deferred() {
  if (idle.empty()) idle.push_back(std::make_unique<Deferred>());
  Deferred* w = idle.back().release();
  idle.pop_back();
  return {w, [](Deferred* done) { idle.emplace_back(done); }};
}

// Whether the registers of all lanes are the tags of one operation, as they mostly are.
bool are_chained(const LaneInputs& c, uint32_t count) {
  const uint32_t first = c[0][0];
  uint32_t differences = 0;
  for (uint32_t l = 0; l < kWarpSize; l++)
    for (uint32_t r = 0; r < count; r++) differences |= c[l][r] ^ (first + r);
  return is_pending(first) && !differences;
}

// Replaces tags by the results of the operations before, which are done.
void resolve(const Thread& thread, uint32_t* values, uint32_t count) {
  for (uint32_t r = 0; r < count; r++)
    if (is_pending(values[r])) values[r] = thread.wgmma_values[values[r] & ~kTagMask];
}

void run_deferred(Deferred& w) {
  Thread* threads = w.warp->begin;
  const uint32_t registers = register_count(w.shape);
  LaneInputs a, c;
  LaneOutputs d;
  for (uint32_t l = 0; l < kWarpSize; l++) {
    uint32_t* results = threads[l].wgmma_values.data();
    if (w.operands.accumulate && !w.chained) resolve(threads[l], w.c[l], registers);
    a[l] = w.a[l], c[l] = w.chained ? results + w.source_tag : w.c[l], d[l] = results + w.first_tag;
  }
  compute(*w.warp, w.shape, w.operands, a, w.operands.accumulate ? &c : nullptr, d, w.reader);
  w.warp->wgmma_done_tags = w.first_tag + registers;
}

void run_oldest(Warp& warp) {
  auto run = std::move(warp.wgmma_queue.front());
  warp.wgmma_queue.pop_front();
  run();
  warp.wgmma_done++;
}

void defer(Warp& warp, const WgmmaShape& shape, const Operands& operands, void** lanes, const LaneInputs& c) {
  const uint32_t registers = register_count(shape);
  const std::shared_ptr<Deferred> w = take_deferred();
  w->shape = shape;
  w->operands = operands;
  w->warp = &warp;
  w->reader = reader_of(warp);
  if (warp.wgmma_waited == warp.wgmma_issued - 1)
    warp.wgmma_tags = warp.wgmma_done_tags = warp.wgmma_valid_tags = 0;  // no tag is alive
  w->first_tag = warp.wgmma_tags;
  warp.wgmma_tags += registers;
  if (warp.wgmma_tags > ~kTagMask) fail(Fault::kLaunch, "too many wgmma instructions without a wait_group 0");
  w->chained = operands.accumulate && are_chained(c, registers);
  w->source_tag = w->chained ? c[0][0] & ~kTagMask : 0;
  Thread* threads = warp.begin;
  for (uint32_t l = 0; l < kWarpSize; l++) {
    const Lane& lane = *(Lane*)lanes[l];
    if (lane.a) memcpy(w->a[l], lane.a, sizeof w->a[l]);
    if (operands.accumulate && !w->chained) memcpy(w->c[l], lane.d, 4 * registers);
    if (threads[l].wgmma_values.size() < warp.wgmma_tags) threads[l].wgmma_values.resize(2 * warp.wgmma_tags);
    for (uint32_t r = 0; r < registers; r++) lane.d[r] = kTagPattern | (w->first_tag + r);
  }
  warp.wgmma_queue.push_back([w] { run_deferred(*w); });
  if (mode_is(AsyncMode::kRandom))
    while (!warp.wgmma_queue.empty() && next_random() % 2) run_oldest(warp);
}

}  // namespace

void wgmma(const WgmmaShape& shape, uint32_t* d, const uint32_t* a_registers, uint64_t a_descriptor,
           uint64_t b_descriptor, bool accumulate) {
  Lane mine{{a_descriptor, b_descriptor, accumulate, a_registers != nullptr}, d, a_registers};
  whole_warp(&mine, [&shape](void** lanes) {
    Warp& warp = *self()->warp;
    wgmma_step(warp);
    const Operands operands = ((Lane*)lanes[0])->operands;
    LaneInputs a, c;
    LaneOutputs d;
    for (uint32_t l = 0; l < kWarpSize; l++) {
      const Lane& lane = *(Lane*)lanes[l];
      if (!(lane.operands == operands))
        fail(Fault::kInvalid, "wgmma: descriptors or scale-d differ between the lanes of a warp");
      a[l] = lane.a, c[l] = d[l] = lane.d;
    }
    warp.wgmma_issued++;
    if (deferred()) return defer(warp, shape, operands, lanes, c);
    compute(warp, shape, operands, a, operands.accumulate ? &c : nullptr, d, reader_of(warp));
    warp.wgmma_done++;
  });
}

uint32_t wgmma_complete(uint32_t tag) {
  Warp& warp = *self()->warp;
  while (tag >= warp.wgmma_done_tags && !warp.wgmma_queue.empty()) run_oldest(warp);
  return self()->wgmma_values[tag];
}

void wgmma_fence() {
  whole_warp(nullptr, [](void**) { wgmma_step(*self()->warp); });
}

void wgmma_commit() {
  if (ignored_here()) return;
  whole_warp(nullptr, [](void**) {
    Warp* w = self()->warp;
    wgmma_step(*w);
    w->wgmma_groups.push_back({w->wgmma_issued, w->wgmma_tags});
  });
}

void wgmma_wait(uint32_t groups_left_in_flight) {
  if (ignored_here()) return;
  Warp& warp = *self()->warp;
  whole_warp(nullptr, [&](void**) {
    wgmma_step(warp);
    while (warp.wgmma_groups.size() > groups_left_in_flight) {
      const Warp::WgmmaGroup group = warp.wgmma_groups.front();
      while (warp.wgmma_done < group.operations) run_oldest(warp);
      warp.wgmma_waited = group.operations;
      warp.wgmma_valid_tags = std::max(warp.wgmma_valid_tags, group.values);
      warp.wgmma_groups.pop_front();
    }
    if (RaceDetector* r = races())
      for (const Thread* t = warp.begin; t < warp.end; t++)
        r->learn(*t, Agent::kWarpMma, r->warp_number(warp), warp.wgmma_waited);
  });
}

}  // namespace emu
