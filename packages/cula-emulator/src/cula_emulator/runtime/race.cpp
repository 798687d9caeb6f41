#include "race.h"

namespace emu {

const AsyncReader* async_reader = nullptr;

namespace {
constexpr int kClockBits = 24, kLineBits = 23, kAgentShift = 48;
constexpr uint64_t kClockMask = (1ull << kClockBits) - 1, kLineMask = (1ull << kLineBits) - 1;
constexpr uint32_t kCellBytes = 4, kClockGrain = 64, kJoinedClocks = 256;

uint32_t agent_of(uint64_t epoch) { return (uint32_t)(epoch >> kAgentShift); }
uint32_t clock_of(uint64_t epoch) { return (uint32_t)(epoch >> 24 & kClockMask); }
int line_of(uint64_t epoch) { return (int)(epoch >> 1 & kLineMask); }
bool both_strong(uint64_t a, uint64_t b) { return a & b & 1; }
bool same_agent(uint64_t a, uint64_t b) { return a >> kAgentShift == b >> kAgentShift; }

uint64_t moment(uint32_t agent, uint32_t clock) {
  if (agent > 0xffff || clock > kClockMask) fail(Fault::kLaunch, "too long a run for the race detector's clocks");
  return (uint64_t)agent << kAgentShift | (uint64_t)clock << 24;
}
uint64_t instruction(int line, bool strong) { return ((uint64_t)line & kLineMask) << 1 | strong; }

// ---- clocks

uint64_t clocks_made = 0;
Clock* idle_clocks[(1 << 16) / kClockGrain + 2] = {};  // by size; never freed, for the next launch takes them again

Clock* new_clock(uint32_t size) {
  size = (size + kClockGrain - 1) / kClockGrain * kClockGrain;
  Clock*& idle = idle_clocks[size / kClockGrain];
  Clock* c = idle;
  if (c)
    idle = c->next_idle;
  else
    c = (Clock*)malloc(sizeof(Clock) + size * sizeof(uint32_t));
  c->id = ++clocks_made;
  c->users = 1;
  c->size = size;
  return c;
}
Clock* copy_of(const Clock* old, uint32_t size) {
  const uint32_t known = old ? old->size : 0;
  Clock* c = new_clock(std::max(size, known));
  if (known) memcpy(c->at, old->at, known * sizeof(uint32_t));
  memset(c->at + known, 0, (c->size - known) * sizeof(uint32_t));
  return c;
}
void raise(Clock* c, const Clock* to) {
  for (uint32_t i = 0; i < to->size; i++) c->at[i] = std::max(c->at[i], to->at[i]);
}
// Whether some entry of `a` is younger than that of `b`.
bool knows_more(const Clock* a, const Clock* b) {
  const uint32_t common = std::min(a->size, b->size);
  uint32_t more = 0;
  for (uint32_t i = 0; i < common; i++) more |= a->at[i] > b->at[i];
  for (uint32_t i = common; i < a->size; i++) more |= a->at[i];
  return more;
}

// The lanes of a reader whose access is not ordered before what is known.
uint32_t unordered_lanes(uint64_t epoch, uint32_t lanes, const Known& known) {
  const uint32_t first = agent_of(epoch), clock = clock_of(epoch);
  const Clock* c = known.shared.get();
  uint32_t younger = 0;
  if (c && first + kWarpSize <= c->size && (lanes & (lanes - 1))) {
    for (uint32_t l = 0; l < kWarpSize; l++) younger |= (uint32_t)(c->at[first + l] < clock) << l;
    younger &= lanes;
  } else {
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
      const uint32_t lane = rest & -rest;
      if (known.shared.of(first + __builtin_ctz(rest)) < clock) younger |= lane;
    }
  }
  if (younger)
    for (const Known::Time& t : known.own)
      if (t.agent - first < kWarpSize && t.clock >= clock) younger &= ~(1u << (t.agent - first));
  return younger;
}
}  // namespace

void SharedClock::retire(Clock* clock) {
  Clock*& idle = idle_clocks[clock->size / kClockGrain];
  clock->next_idle = idle;
  idle = clock;
}

void Gathering::add(const SharedClock& known) {
  if (!known || known.id() == last_) return;
  last_ = known.id();
  if (!clock_ || known->size > clock_->size) {
    Clock* larger = copy_of(known.get(), 0);
    if (clock_) raise(larger, clock_.get());
    clock_ = SharedClock(larger);
  } else {
    raise(clock_.get(), known.get());
  }
}
void Gathering::add(uint32_t agent, uint32_t clock) {
  if (!clock_ || agent >= clock_->size) clock_ = SharedClock(copy_of(clock_.get(), agent + 1));
  clock_->at[agent] = std::max(clock_->at[agent], clock);
}
void Gathering::add(const Known& known) {
  add(known.shared);
  for (const Known::Time& t : known.own)
    if (t.clock) add(t.agent, t.clock);
}
SharedClock Gathering::take() {
  last_ = 0;
  return std::move(clock_);
}

// ---- cells

struct RaceDetector::Window {
  static constexpr uint32_t kCells = kSharedEnd / kCellBytes, kBlock = 1024;
  Cell* cells = (Cell*)calloc(kCells, sizeof(Cell));
  uint8_t touched[kCells / kBlock + 1] = {};

  void clear() {
    for (uint32_t b = 0; b < sizeof touched; b++)
      if (touched[b]) memset(cells + b * kBlock, 0, std::min(kBlock, kCells - b * kBlock) * sizeof(Cell));
    memset(touched, 0, sizeof touched);
  }
  // Windows of retired CTAs are reused.
  static std::vector<Window*>& idle() {
    static std::vector<Window*> windows;
    return windows;
  }
};

RaceDetector::RaceDetector(const Cluster& cluster)
    : threads_(cluster.ctas[0]->thread_count),
      threads_state_(threads_ * cluster.ctas.size()),
      joined_(kJoinedClocks) {
  for (size_t i = 0; i < threads_state_.size(); i++) {
    ThreadState& s = threads_state_[i];
    s.known.own[Known::kItself] = {(uint32_t)i, 1};
    s.now = moment(i, 1);
  }
  auto& idle = Window::idle();
  for (size_t i = 0; i < cluster.ctas.size(); i++) {
    if (idle.empty()) idle.push_back(new Window);
    windows_.push_back(idle.back());
    idle.pop_back();
  }
}
RaceDetector::~RaceDetector() {
  for (Window* w : windows_) {
    w->clear();
    Window::idle().push_back(w);
  }
}

uint32_t RaceDetector::agent_number(Agent kind, uint32_t number) {
  if (kind != Agent::kMbarrier && number >= agents_[(int)kind].size()) agents_[(int)kind].resize(number + 1);
  uint32_t& agent = kind == Agent::kMbarrier ? mbarriers_[number] : agents_[(int)kind][number];
  if (!agent) {
    agent = (uint32_t)(threads_state_.size() + agent_keys_.size());
    agent_keys_.push_back((uint64_t)kind << 32 | number);
  }
  return agent;
}

uint32_t RaceDetector::fresh_list() {
  if (!idle_lists_.empty()) {
    const uint32_t list = idle_lists_.back();
    idle_lists_.pop_back();
    return list;
  }
  lists_.emplace_back();
  return (uint32_t)lists_.size() - 1;
}
void RaceDetector::use_list(uint32_t list) {
  if (list) lists_[list].users++;
}
void RaceDetector::leave_list(uint32_t list) {
  if (!list || --lists_[list].users) return;
  lists_[list].readers.clear();
  idle_lists_.push_back(list);
}

std::array<RaceDetector::Cell, 4>& RaceDetector::split(Cell& c) {
  if (!(c.others & kSplit)) {
    if (idle_splits_.empty()) {
      idle_splits_.push_back((uint32_t)splits_.size());
      splits_.emplace_back();
    }
    const uint32_t number = idle_splits_.back();
    idle_splits_.pop_back();
    if (c.others) lists_[c.others].users += 3;
    splits_[number].fill(c);
    c = {0, 0, 0, kSplit | number};
  }
  return splits_[c.others & ~kSplit];
}

// ---- accesses

void RaceDetector::access(const Thread& t, const Cta& cta, uint32_t offset, uint32_t bytes, int how) {
  ThreadState& s = state(t);
  const bool strong = how & kStrong;
  const uint64_t location = sync_key(Sync::kLocation, cta.rank << kRankShift | offset);
  if (strong && (how & kRead) && locations_) acquire(location, t, !(how & kAcquire));
  const Epoch now = s.now | instruction(t.line, strong);
  check({now, now - ((Epoch)t.lane << kAgentShift), 1u << t.lane, s.known, cta}, offset, bytes, how & kWrite);
  if (strong && (how & kWrite)) {
    locations_ = true;
    release(location, t, !(how & kRelease));
    complete(location);
  }
}

void RaceDetector::access(Agent kind, uint32_t number, uint32_t ordinal, const Known& known, const Cta& cta,
                          uint32_t offset, uint32_t bytes, int how, int line) {
  const Epoch epoch = moment(agent_number(kind, number), ordinal) | instruction(line, false);
  check({epoch, epoch, 1, known, cta}, offset, bytes, how & kWrite);
}

void RaceDetector::check(Accessor a, uint32_t offset, uint32_t bytes, bool writes) {
  Window& window = *windows_[a.cta.rank];
  const uint32_t end = offset + bytes;
  for (uint32_t b = offset / kCellBytes / Window::kBlock; b <= (end - 1) / kCellBytes / Window::kBlock; b++)
    window.touched[b] = 1;
  while (offset < end) {
    Cell& c = window.cells[offset / kCellBytes];
    const uint32_t next = std::min((offset / kCellBytes + 1) * kCellBytes, end);
    if (next - offset == kCellBytes && !(c.others & kSplit)) {
      writes ? write(c, a, offset) : read(c, a, offset);
    } else {
      std::array<Cell, 4>& parts = split(c);
      for (uint32_t i = offset; i < next; i++)
        writes ? write(parts[i % kCellBytes], a, i) : read(parts[i % kCellBytes], a, i);
      if (writes && next - offset == kCellBytes) {
        idle_splits_.push_back(c.others & ~kSplit);
        c = parts[0];
      }
    }
    offset = next;
  }
}

inline void RaceDetector::write(Cell& c, Accessor& a, uint32_t offset) {
  if (c.write != a.seen_write) check_write(c.write, a, offset, true);
  if (c.lanes) check_readers(c, a, offset);
  leave_list(c.others);
  c = {a.write, 0, 0, 0};
}

inline void RaceDetector::read(Cell& c, Accessor& a, uint32_t offset) {
  if (c.write != a.seen_write) check_write(c.write, a, offset, false);
  if (c.read == a.read) {
    c.lanes |= a.lane;
  } else if (!c.lanes) {
    c.read = a.read;
    c.lanes = a.lane;
  } else {
    add_reader(c, a);
  }
}

inline void RaceDetector::check_write(Epoch before, Accessor& a, uint32_t offset, bool writes) {
  a.seen_write = before;
  if (!before) return;
  // The two commonest cases first: its own write, and one that all know of.
  const uint32_t agent = agent_of(before), clock = clock_of(before);
  if (same_agent(before, a.write) && clock <= clock_of(a.write) && a.known.own[Known::kItself].agent == agent) return;
  if (a.known.shared.of(agent) >= clock || a.known.of(agent) >= clock) return;
  if (both_strong(before, a.write) || (writes && one_instruction(before, a.write))) return;
  report(before, true, a.write, writes, a.cta, offset);
}

void RaceDetector::check_readers(const Cell& c, Accessor& a, uint32_t offset) {
  if (c.read == a.seen.epoch && c.lanes == a.seen.lanes && c.others == a.seen_others) return;
  a.seen = {c.read, c.lanes};
  a.seen_others = c.others;
  const auto one = [&](Epoch epoch, uint32_t lanes) {
    if (both_strong(epoch, a.write)) return;
    if (const uint32_t bad = unordered_lanes(epoch, lanes, a.known))
      report(epoch + ((uint64_t)__builtin_ctz(bad) << kAgentShift), false, a.write, true, a.cta, offset);
  };
  if (c.others)
    for (const Reader& r : lists_[c.others].readers) one(r.epoch, r.lanes);
  one(c.read, c.lanes);
}

// Lanes of a warp may write one place with one instruction: one of them does, and the manual leaves open which.
bool RaceDetector::one_instruction(Epoch a, Epoch b) const {
  const uint32_t x = agent_of(a), y = agent_of(b);
  return line_of(a) == line_of(b) && std::max(x, y) < threads_state_.size() && x / threads_ == y / threads_ &&
         x % threads_ / kWarpSize == y % threads_ / kWarpSize;
}

// A reader that is ordered before another, or is the same at an earlier time, is covered by it: what conflicts with the
// earlier conflicts with the later. A strong reader covers no ordinary one, for strong writes conflict with that alone.
void RaceDetector::add_reader(Cell& c, const Accessor& a) {
  Transition& l = last_;
  if (l.before.epoch != c.read || l.before.lanes != c.lanes || l.others_before != c.others || l.reader != a.read ||
      l.lane != a.lane) {
    leave_list(l.others_before);
    leave_list(l.others);
    l = {{c.read, c.lanes}, c.others, a.read, a.lane, a.lane, fresh_list()};
    use_list(l.others_before);
    std::vector<Reader>& kept = lists_[l.others].readers;
    lists_[l.others].users = 1;
    const auto keep = [&](Epoch epoch, uint32_t lanes) {
      if (epoch == a.read) {
        l.lanes |= lanes;
        return;
      }
      if (!(a.read & 1) || (epoch & 1)) lanes = unordered_lanes(epoch, lanes, a.known);
      if (lanes) kept.push_back({epoch, lanes});
    };
    keep(c.read, c.lanes);
    if (c.others)
      for (const Reader& r : lists_[c.others].readers) keep(r.epoch, r.lanes);
    const auto covered = [](const Reader& r, Epoch by, uint32_t lanes) {
      return same_agent(r.epoch, by) && by > r.epoch && (!(by & 1) || (r.epoch & 1)) ? lanes : 0;
    };
    for (Reader& r : kept) {
      if (!same_agent(r.epoch, a.read)) continue;
      r.lanes &= ~covered(r, a.read, l.lanes);
      for (const Reader& other : kept) r.lanes &= ~covered(r, other.epoch, other.lanes);
    }
    kept.erase(std::remove_if(kept.begin(), kept.end(), [](const Reader& r) { return !r.lanes; }), kept.end());
    if (kept.empty()) {
      leave_list(l.others);
      l.others = 0;
    }
  }
  use_list(l.others);
  leave_list(c.others);
  c.read = l.reader;
  c.lanes = l.lanes;
  c.others = l.others;
}

// ---- order

void RaceDetector::tick(const Thread& t) {
  ThreadState& s = state(t);
  Known::Time& now = s.known.own[Known::kItself];
  s.now = moment(now.agent, ++now.clock);
}

// Threads that knew the same and learn the same share the clock that comes out.
void RaceDetector::join(SharedClock& known, const SharedClock& other) {
  if (!other || other.get() == known.get()) return;
  if (!known) {
    known = other;
    return;
  }
  Joined& j = joined_[(known.id() * 31 + other.id()) % kJoinedClocks];
  if (j.one != known.id() || j.other != other.id()) {
    j.one = known.id();
    j.other = other.id();
    if (!knows_more(known.get(), other.get())) {
      j.both = other;
    } else if (!knows_more(other.get(), known.get())) {
      j.both = known;
    } else {
      j.both = SharedClock(copy_of(known.get(), other->size));
      raise(j.both.get(), other.get());
    }
  }
  known = j.both;
}

void RaceDetector::release(uint64_t sync, const Thread& t, bool relaxed) {
  objects_[sync].arriving.add(relaxed ? state(t).at_fence : state(t).known);
  tick(t);
}

void RaceDetector::complete(uint64_t sync) {
  SyncObject& o = objects_[sync];
  o.done = o.arriving.take();
  o.phase++;
}

void RaceDetector::acquire(uint64_t sync, const Thread& t, bool relaxed) {
  const auto found = objects_.find(sync);
  if (found == objects_.end()) return;
  join(relaxed ? state(t).at_next_fence : state(t).known.shared, found->second.done);
}

void RaceDetector::fence(const Thread& t) {
  ThreadState& s = state(t);
  join(s.known.shared, s.at_next_fence);
  s.at_fence = s.known;
  tick(t);
}

void RaceDetector::synchronise(const Warp& warp, uint32_t lanes) {
  Gathering all;
  for (const Thread* t = warp.begin; t < warp.end; t++)
    if (lanes >> t->lane & 1) all.add(state(*t).known);
  const SharedClock known = all.take();
  for (const Thread* t = warp.begin; t < warp.end; t++)
    if (lanes >> t->lane & 1) {
      state(*t).known.shared = known;
      tick(*t);
    }
}

// ---- asynchronous work

Known RaceDetector::past_of(const Thread& t) {
  Known past = state(t).known;
  tick(t);
  return past;
}

Known RaceDetector::past_of(const Warp& warp) {
  Gathering all;
  for (const Thread* t = warp.begin; t < warp.end; t++) {
    all.add(state(*t).known);
    tick(*t);
  }
  Known past;
  past.shared = all.take();
  return past;
}

void RaceDetector::arrive(uint64_t sync, const Known& past, Agent kind, uint32_t number, uint32_t ordinal) {
  Gathering& arriving = objects_[sync].arriving;
  arriving.add(past);
  arriving.add(agent_number(kind, number), ordinal);
}

void RaceDetector::learn(const Thread& t, Agent kind, uint32_t number, uint32_t ordinal) {
  Known::Time& own = state(t).known.own[(int)kind];
  own = {agent_number(kind, number), std::max(own.clock, ordinal)};
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
