#include "race.h"

namespace emu {

const AsyncReader* async_reader = nullptr;

namespace {
constexpr int kClockBits = 24, kLineBits = 23;
constexpr uint64_t kClockMask = (1ull << kClockBits) - 1, kLineMask = (1ull << kLineBits) - 1;
constexpr size_t kSetsBeforeCollection = 200000;

uint32_t agent_of(uint64_t epoch) { return (uint32_t)(epoch >> 48); }
uint32_t clock_of(uint64_t epoch) { return (uint32_t)(epoch >> 24 & kClockMask); }
int line_of(uint64_t epoch) { return (int)(epoch >> 1 & kLineMask); }
bool ordered(uint64_t before, uint64_t now, const Clock& known) {
  return known.of(agent_of(before)) >= clock_of(before) || (before & now & 1);
}
}  // namespace

RaceDetector::RaceDetector(const Cluster& cluster)
    : threads_(cluster.ctas[0]->thread_count),
      threads_state_(threads_ * cluster.ctas.size()),
      cells_(cluster.ctas.size(), std::vector<Cell>(kSharedEnd, Cell{0, 0})) {
  for (size_t i = 0; i < threads_state_.size(); i++) threads_state_[i].known.advance(i, 1);
}

RaceDetector::Epoch RaceDetector::pack(uint32_t agent, uint32_t clock, int line, bool strong) {
  if (agent > 0xffff || clock > kClockMask) fail(Fault::kLaunch, "too long a run for the race detector's clocks");
  return (uint64_t)agent << 48 | (uint64_t)clock << 24 | ((uint64_t)line & kLineMask) << 1 | strong;
}

uint32_t RaceDetector::agent_number(Agent kind, uint32_t number) {
  const uint64_t key = (uint64_t)kind << 32 | number;
  auto [at, fresh] = agents_.try_emplace(key, (uint32_t)(threads_state_.size() + agent_keys_.size()));
  if (fresh) agent_keys_.push_back(key);
  return at->second;
}

// ---- accesses

void RaceDetector::access(const Thread& t, const Cta& cta, uint32_t offset, uint32_t bytes, int how) {
  const uint64_t location = sync_key(Sync::kLocation, cta.rank << kRankShift | offset);
  const bool strong = how & kStrong;
  if (strong && (how & kRead)) acquire(location, t, !(how & kAcquire));
  check(pack(thread_number(t), state(t).clock, t.line, strong), state(t).known, cta, offset, bytes, how & kWrite);
  if (strong && (how & kWrite)) {
    release(location, t, !(how & kRelease));
    complete(location);
  }
}

void RaceDetector::access(Agent kind, uint32_t number, uint32_t ordinal, const Clock& known, const Cta& cta,
                          uint32_t offset, uint32_t bytes, int how, int line) {
  check(pack(agent_number(kind, number), ordinal, line, false), known, cta, offset, bytes, how & kWrite);
}

void RaceDetector::check(Epoch epoch, const Clock& known, const Cta& cta, uint32_t offset, uint32_t bytes, bool write) {
  std::vector<Cell>& cells = cells_[cta.rank];
  // Neighbouring bytes mostly have the same past, so what was found for one is used for the next.
  Epoch last_write = 0;
  uint32_t last_readers = ~0u, next_readers = 0;
  for (uint32_t i = offset; i < offset + bytes; i++) {
    Cell& c = cells[i];
    if (c.write != last_write) {
      if (c.write && !ordered(c.write, epoch, known) && !(write && one_instruction(c.write, epoch)))
        report(c.write, true, epoch, write, cta, i);
      last_write = c.write;
    }
    if (c.readers != last_readers) {
      last_readers = c.readers;
      if (write)
        for (Epoch reader : sets_[c.readers])
          if (!ordered(reader, epoch, known)) report(reader, false, epoch, true, cta, i);
      if (!write) next_readers = add_reader(c.readers, epoch, known);
    }
    if (write)
      c = {epoch, 0};
    else
      c.readers = next_readers;
  }
  if (sets_.size() > kSetsBeforeCollection) collect_sets();
}

// Lanes of a warp may write one place with one instruction: one of them does, and the manual leaves open which.
bool RaceDetector::one_instruction(Epoch a, Epoch b) const {
  const uint32_t x = agent_of(a), y = agent_of(b);
  return line_of(a) == line_of(b) && std::max(x, y) < threads_state_.size() && x / threads_ == y / threads_ &&
         x % threads_ / kWarpSize == y % threads_ / kWarpSize;
}

uint32_t RaceDetector::add_reader(uint32_t set, Epoch reader, const Clock& known) {
  auto [at, fresh] = steps_.try_emplace(Step{set, reader}, (uint32_t)sets_.size());
  if (!fresh) return at->second;
  std::vector<Epoch> grown;
  for (Epoch r : sets_[set])
    if (known.of(agent_of(r)) < clock_of(r)) grown.push_back(r);  // an ordered reader is covered by this one
  grown.push_back(reader);
  sets_.push_back(std::move(grown));
  return at->second;
}

void RaceDetector::collect_sets() {
  std::unordered_map<uint32_t, uint32_t> moved{{0, 0}};
  std::vector<std::vector<Epoch>> kept{{}};
  for (auto& cells : cells_)
    for (Cell& c : cells) {
      auto [at, fresh] = moved.try_emplace(c.readers, (uint32_t)kept.size());
      if (fresh) kept.push_back(std::move(sets_[c.readers]));
      c.readers = at->second;
    }
  sets_ = std::move(kept);
  steps_.clear();
}

// ---- order

void RaceDetector::tick(const Thread& t) {
  ThreadState& s = state(t);
  s.known.advance(thread_number(t), ++s.clock);
}

void RaceDetector::release(uint64_t sync, const Thread& t, bool relaxed) {
  objects_[sync].arriving.join(relaxed ? state(t).at_fence : state(t).known);
  tick(t);
}

void RaceDetector::complete(uint64_t sync) {
  SyncObject& o = objects_[sync];
  o.done = std::move(o.arriving);
  o.arriving.clear();
  o.phase++;
}

void RaceDetector::acquire(uint64_t sync, const Thread& t, bool relaxed) {
  auto found = objects_.find(sync);
  if (found == objects_.end()) return;
  (relaxed ? state(t).at_next_fence : state(t).known).join(found->second.done);
  tick(t);
}

void RaceDetector::fence(const Thread& t) {
  ThreadState& s = state(t);
  s.known.join(s.at_next_fence);
  s.at_fence = s.known;
  tick(t);
}

void RaceDetector::synchronise(const Warp& warp, uint32_t lanes) {
  Clock all;
  for (const Thread* t = warp.begin; t < warp.end; t++)
    if (lanes >> t->lane & 1) all.join(state(*t).known);
  for (const Thread* t = warp.begin; t < warp.end; t++)
    if (lanes >> t->lane & 1) {
      state(*t).known = all;
      tick(*t);
    }
}

// ---- asynchronous work

std::shared_ptr<const Clock> RaceDetector::past_of(const Thread& t) {
  auto past = std::make_shared<Clock>(state(t).known);
  tick(t);
  return past;
}

std::shared_ptr<const Clock> RaceDetector::past_of(const Warp& warp) {
  auto all = std::make_shared<Clock>();
  for (const Thread* t = warp.begin; t < warp.end; t++) {
    all->join(state(*t).known);
    tick(*t);
  }
  return all;
}

void RaceDetector::arrive(uint64_t sync, const Clock& past, Agent kind, uint32_t number, uint32_t ordinal) {
  Clock& arriving = objects_[sync].arriving;
  arriving.join(past);
  arriving.advance(agent_number(kind, number), ordinal);
}

void RaceDetector::learn(const Thread& t, Agent kind, uint32_t number, uint32_t ordinal) {
  state(t).known.advance(agent_number(kind, number), ordinal);
  tick(t);
}

// ---- reports

std::string RaceDetector::name(uint32_t agent) const {
  char text[80];
  if (agent < threads_state_.size()) {
    snprintf(text, sizeof text, "thread %u of CTA rank %u", agent % threads_, agent / threads_);
    return text;
  }
  const uint64_t key = agent_keys_[agent - threads_state_.size()];
  const uint32_t n = (uint32_t)key;
  switch ((Agent)(key >> 32)) {
    case Agent::kMbarrier: snprintf(text, sizeof text, "a copy that completes on mbarrier 0x%x", n); break;
    case Agent::kCopies: snprintf(text, sizeof text, "cp.async of thread %u", n % threads_); break;
    case Agent::kBulkCopies: snprintf(text, sizeof text, "a bulk copy of thread %u", n % threads_); break;
    case Agent::kWarp: snprintf(text, sizeof text, "warp %u", n % 32); break;
    case Agent::kWarpMma: snprintf(text, sizeof text, "wgmma of warp %u", n % 32); break;
    case Agent::kTensorCore: snprintf(text, sizeof text, "the tensor core"); break;
  }
  return text;
}

void RaceDetector::report(Epoch before, bool before_writes, Epoch now, bool now_writes, const Cta& cta,
                          uint32_t offset) {
  fail(Fault::kDataRace,
       "shared byte 0x%x of CTA %u,%u,%u: this %s by %s is not ordered after the %s by %s at {line:%d}", offset,
       cta.index[0], cta.index[1], cta.index[2], now_writes ? "write" : "read", name(agent_of(now)).c_str(),
       before_writes ? "write" : "read", name(agent_of(before)).c_str(), line_of(before));
}

}  // namespace emu
