#include "barriers.h"

namespace emu {

// ---- bar.sync and its relatives

static uint64_t named_key(const Cta& cta, uint32_t id) { return sync_key(Sync::kNamedBarrier, cta.rank << 8 | id); }

void named_barrier_complete(Cta& cta, uint32_t id) {
  NamedBarrier& b = cta.barriers[id];
  b.last_count = b.count;
  b.last_population = b.population;
  b.count = b.population = 0;
  b.generation++;
  if (cta.cluster->races) cta.cluster->races->complete(named_key(cta, id));
  made_progress();
}

BarrierResult named_barrier(uint32_t id, uint32_t expected, bool wait, bool predicate) {
  if (ignored_here()) return {0, 0};
  Cta* cta = self()->cta;
  if (id >= 16) fail(Fault::kBarrier, "barrier %u does not exist", id);
  if (expected % kWarpSize)
    fail(Fault::kBarrier, "barrier %u: %u threads, which is not a multiple of a warp", id, expected);
  expected = std::min(expected, cta->thread_count);
  NamedBarrier& b = cta->barriers[id];
  if (b.count == 0) b.expected = expected;
  if (b.expected != expected)
    fail(Fault::kBarrier, "barrier %u: this thread expects %u threads, an earlier one %u (0 is the whole CTA)", id,
         expected, b.expected);
  const uint64_t generation = b.generation;
  b.count++;
  b.population += predicate;
  made_progress();
  new_epoch();
  if (RaceDetector* r = races()) r->release(named_key(*cta, id), *self());
  if (b.count >= (expected ? expected : cta->live_threads)) named_barrier_complete(*cta, id);
  if (wait) {
    block_while(b.generation, generation);
    synchronised();
    if (RaceDetector* r = races()) r->acquire(named_key(*cta, id), *self());
  }
  return {b.last_population, b.last_count};
}

// ---- barrier.cluster

static constexpr uint64_t kClusterKey = sync_key(Sync::kCluster, 0);

void cluster_complete_if_full(Cluster* c) {
  if (!c->arrived || c->arrived != c->live_threads) return;
  c->arrived = 0;
  c->generation++;
  if (c->races) c->races->complete(kClusterKey);
  made_progress();
}

void cluster_arrive(bool relaxed) {
  if (ignored_here()) return;
  Cluster* c = self()->cta->cluster;
  self()->cluster_generation = c->generation + 1;
  c->arrived++;
  new_epoch();
  made_progress();
  if (c->races) c->races->release(kClusterKey, *self(), relaxed);
  cluster_complete_if_full(c);
}

void cluster_wait() {
  if (ignored_here()) return;
  Cluster* c = self()->cta->cluster;
  const uint64_t target = self()->cluster_generation;
  if (!target) fail(Fault::kBarrier, "barrier.cluster.wait without an arrive");
  wait_until([c, target] { return c->generation >= target; });
  if (c->races) c->races->acquire(kClusterKey, *self());
}

// ---- mbarrier

static uint64_t mbarrier_encode(const Mbarrier& m) {
  return (uint64_t)m.pending | (uint64_t)m.expected << 20 | ((uint64_t)(m.bytes & 0x3fffff)) << 40 |
         (uint64_t)m.phase << 63;
}

static constexpr uint64_t kInvalidated = ~0ull;

// The object's bytes, after its use by this thread has been booked.
static uint8_t* mbarrier_used(uint32_t address, const char* how) {
  uint8_t* p = shared(address, 8, 8);
  const uint64_t raw = load<uint64_t>(p);
  if (mbarrier_decode(raw).expected == 0 || raw == kInvalidated)
    fail(Fault::kBarrier, "mbarrier 0x%x is %s before mbarrier.init", address, how);
  race_access(cta_of(address), address & kOffsetMask, 8, kRead | kStrong);
  return p;
}

void mbarrier_init(uint32_t address, uint32_t count) {
  if (count == 0 || count > 0xfffff) fail(Fault::kBarrier, "mbarrier 0x%x: count %u", address, count);
  store(shared(address, 8, 8), mbarrier_encode({count, count, 0, 0}));
  race_access(cta_of(address), address & kOffsetMask, 8, kWrite);
  made_progress();
}

void mbarrier_invalidate(uint32_t address) {
  store(shared(address, 8, 8), kInvalidated);
  race_access(cta_of(address), address & kOffsetMask, 8, kWrite);
}

uint64_t mbarrier_update(uint32_t address, uint32_t arrivals, int32_t bytes, uint32_t dropped) {
  uint8_t* p = shared(address, 8, 8);
  const uint64_t before = load<uint64_t>(p);
  Mbarrier m = mbarrier_decode(before);
  if (m.expected == 0 || before == kInvalidated)
    fail(Fault::kBarrier, "mbarrier 0x%x is used before mbarrier.init", address);
  if (arrivals > m.pending)
    fail(Fault::kBarrier, "mbarrier 0x%x: arrival count %u exceeds the %u of %u still pending", address, arrivals,
         m.pending, m.expected);
  m.pending -= arrivals;
  m.expected -= dropped;
  m.bytes += bytes;
  if (m.pending == 0 && m.bytes == 0) {
    m.phase ^= 1;
    m.pending = m.expected;
    if (races()) races()->complete(sync_key(Sync::kMbarrier, address));
  }
  store(p, mbarrier_encode(m));
  new_epoch();
  made_progress();
  return before;
}

void mbarrier_raise(uint32_t address) {
  uint8_t* p = mbarrier_used(address, "used");
  Mbarrier m = mbarrier_decode(load<uint64_t>(p));
  m.pending++;
  store(p, mbarrier_encode(m));
}

uint64_t mbarrier_arrive(uint32_t address, uint32_t arrivals, int32_t expected_bytes, bool drop, bool relaxed) {
  const uint64_t before = load<uint64_t>(mbarrier_used(address, "used"));
  if (ignored_here()) return before;
  if (races()) races()->release(sync_key(Sync::kMbarrier, address), *self(), relaxed);
  if (expected_bytes) mbarrier_update(address, 0, expected_bytes);
  mbarrier_update(address, arrivals, 0, drop ? arrivals : 0);
  return before;
}

void mbarrier_expect(uint32_t address, int32_t bytes) {
  mbarrier_used(address, "used");
  if (!ignored_here()) mbarrier_update(address, 0, bytes);
}

bool mbarrier_try_wait(uint32_t address, uint32_t parity, bool relaxed) {
  if (ignored_here()) return true;
  const uint8_t* p = mbarrier_used(address, "waited for");
  const auto done = [p, parity] { return mbarrier_decode(load<uint64_t>(p)).phase != (parity & 1); };
  if (!done()) {
    if (machine.impatient || (mode_is(AsyncMode::kRandom) && next_random() % 4 == 0))
      step_aside();  // its time limit runs out
    else
      block_until([&done] { return done() || machine.impatient; });
  }
  if (!done()) return false;
  synchronised();
  if (races()) races()->acquire(sync_key(Sync::kMbarrier, address), *self(), relaxed);
  return true;
}

}  // namespace emu
