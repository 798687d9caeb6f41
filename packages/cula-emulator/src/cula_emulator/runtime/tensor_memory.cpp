// Tensor memory: allocation, and moves between registers and cells.
#include "matrix_fragments.h"
#include "memory.h"
#include "tcgen05.h"

namespace emu {

namespace {

constexpr uint32_t kBlockColumns = 32, kBlocks = kTmemColumns / kBlockColumns;

// First block of a free run, or kBlocks.
uint32_t find_free(const TensorMemoryMap& map, uint32_t blocks) {
  uint32_t run = 0;
  for (uint32_t b = 0; b < kBlocks; b++) {
    run = map.owner[b] ? 0 : run + 1;
    if (run == blocks) return b + 1 - blocks;
  }
  return kBlocks;
}

}  // namespace

void tmem_alloc(uint32_t destination, uint32_t columns) {
  if (columns < 32 || columns > 512 || (columns & (columns - 1)))
    fail(Fault::kInvalid, "tcgen05.alloc of %u columns; a power of two from 32 to 512 is needed", columns);
  const uint32_t blocks = columns / kBlockColumns;
  TensorMemoryMap& map = self()->cta->tmem_map;
  for (bool done = false; !done;) {  // another warp may be faster
    wait_until([&map, blocks] { return map.relinquished || find_free(map, blocks) < kBlocks; });
    whole_warp(&done, [&](void** lanes) {
      if (map.relinquished) fail(Fault::kInvalid, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
      const uint32_t first = find_free(map, blocks);
      if (first == kBlocks) return;
      for (uint32_t b = 0; b < blocks; b++) map.owner[first + b] = first + 1;
      // The async proxy never reads the address, so proxies need not know.
      store<uint32_t>(shared(destination, 4, 4), first * kBlockColumns);
      race_access(cta_of(destination), destination & kOffsetMask, 4, kWrite);
      for (uint32_t l = 0; l < kWarpSize; l++) *(bool*)lanes[l] = true;
    });
  }
}

void tmem_free(uint32_t address, uint32_t columns) {
  whole_warp(nullptr, [&](void**) {
    TensorMemoryMap& map = self()->cta->tmem_map;
    const uint32_t first = (address & 0xffff) / kBlockColumns;
    uint32_t owned = 0;
    for (uint32_t b = 0; b < kBlocks; b++) owned += map.owner[b] == first + 1;
    if (address >> 16 || address % kBlockColumns || !owned || owned * kBlockColumns != columns)
      fail(Fault::kInvalid, "tcgen05.dealloc of %u columns at 0x%x; %u are allocated there", columns, address,
           address >> 16 || address % kBlockColumns ? 0 : owned * kBlockColumns);
    for (uint8_t& owner : map.owner)
      if (owner == first + 1) owner = 0;
  });
}

void tmem_relinquish() {
  whole_warp(nullptr, [](void**) { self()->cta->tmem_map.relinquished = true; });
}

void tmem_check_allocated(const Cta& cta, uint32_t first_column, uint32_t last_column, const char* what) {
  for (uint32_t b = first_column / kBlockColumns; b <= last_column / kBlockColumns; b++)
    if (!cta.tmem_map.owner[b])
      fail(Fault::kOutOfBounds, "%s: tensor memory columns %u to %u are not allocated", what, first_column,
           last_column);
}

namespace {

struct Cells {
  uint32_t lane, column;
};
Cells of_thread(TmemShape shape, uint32_t l) {
  switch (shape) {
    case TmemShape::k32x32: return {l, 0};
    case TmemShape::k16x64: return {(l >> 2) + 8 * (l & 1), (l >> 1) & 1};
    case TmemShape::k16x128: return {l >> 2, l & 3};
    default: return {l >> 2, 2 * (l & 3)};
  }
}
Cells of_register(TmemShape shape, uint32_t i) {
  switch (shape) {
    case TmemShape::k32x32: return {0, i};
    case TmemShape::k16x64: return {0, 2 * i};
    case TmemShape::k16x128: return {8 * (i & 1), 4 * (i >> 1)};
    default: return {8 * ((i >> 1) & 1), 8 * (i >> 2) + (i & 1)};
  }
}

// The lanes of a warp give one address, inside the warp's quarter of tensor memory. Calls use(cell, register).
template <class Use>
void for_cells(TmemShape shape, uint32_t address, uint32_t count, Use use) {
  whole_warp(&address, [=](void** lanes) {
    for (uint32_t l = 1; l < kWarpSize; l++)
      if (*(uint32_t*)lanes[l] != address)
        fail(Fault::kInvalid, "tensor memory address differs between the lanes of a warp");
    const uint32_t lane = address >> 16, column = address & 0xffff, quarter = self()->warp->id % 4;
    const uint32_t last_lane = lane + (shape == TmemShape::k32x32 ? 31 : 15);
    const uint32_t last_column = column + of_register(shape, count - 1).column + of_thread(shape, 31).column;
    if (last_lane >= kTmemLanes || last_column >= kTmemColumns)
      fail(Fault::kOutOfBounds, "tensor memory lanes %u to %u, columns %u to %u", lane, last_lane, column, last_column);
    tmem_check_allocated(*self()->cta, column, last_column, "tcgen05.ld or st");
    if (lane / 32 != quarter || last_lane / 32 != quarter)
      fail(Fault::kInvalid, "warp %u reaches tensor memory lanes %u to %u, which belong to another warp of its group",
           self()->warp->id, lane, last_lane);
  });
  const Cells mine = of_thread(shape, self()->lane);
  uint32_t* cell = &self()->cta->tmem[((address & 0xffff) + mine.column) * kTmemLanes + (address >> 16) + mine.lane];
  for (uint32_t i = 0; i < count; i++) {
    const Cells step = of_register(shape, i);
    use(cell + step.column * kTmemLanes + step.lane, i);
  }
}

}  // namespace

void tmem_load(TmemShape shape, uint32_t address, uint32_t count, uint32_t* registers) {
  for_cells(shape, address, count, [&](const uint32_t* cell, uint32_t i) { registers[i] = *cell; });
}

// tcgen05.st becomes visible at tcgen05.wait::st.
void tmem_store(TmemShape shape, uint32_t address, uint32_t count, const uint32_t* registers) {
  for_cells(shape, address, count, [&](uint32_t* cell, uint32_t i) {
    if (deferred())
      self()->tmem_stores.push_back({cell, registers[i]});
    else
      *cell = registers[i];
  });
}

void tmem_wait_stores() {
  if (ignored_here()) return;
  for (auto& s : self()->tmem_stores) *s.first = s.second;
  self()->tmem_stores.clear();
  made_progress();
}

}  // namespace emu
