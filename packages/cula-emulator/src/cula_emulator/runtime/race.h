// Happens-before check on shared memory. Every thread, and every engine that works for one, has a logical clock; a
// vector clock per thread says how far it knows the others to be. Two accesses to one byte, at least one of them a
// write, must be ordered by what barriers, mbarriers, waits and fences made known, whatever the schedule did.
//
// Three things keep it quick. Threads that learned the same share one vector clock, and know the youngest times of
// themselves in addition. Lanes of a warp that read a place at one time are one reader with a mask. The books hold four
// bytes of shared memory in one cell; a cell splits when its bytes have different pasts.
#pragma once
#include <array>
#include <unordered_map>

#include "core.h"

#pragma GCC visibility push(hidden)
namespace emu {

// How an instruction touches memory. Numbers shared with emit/operands.py.
enum Access : int { kRead = 1, kWrite = 2, kStrong = 4, kAcquire = 8, kRelease = 16 };

// A vector clock: for every agent, up to when its past is known. Missing entries are zero.
struct Clock {
  uint64_t id;  // no other clock ever has it
  uint32_t users, size;
  Clock* next_idle;
  uint32_t at[];
};

// A share of a clock, which nobody changes once two hold it. Everything runs on one CPU thread, so plain counts do.
class SharedClock {
 public:
  SharedClock() = default;
  explicit SharedClock(Clock* fresh) : clock_(fresh) {}
  SharedClock(const SharedClock& o) : clock_(o.clock_) {
    if (clock_) clock_->users++;
  }
  SharedClock(SharedClock&& o) noexcept : clock_(std::exchange(o.clock_, nullptr)) {}
  SharedClock& operator=(SharedClock o) noexcept {
    std::swap(clock_, o.clock_);
    return *this;
  }
  ~SharedClock() {
    if (clock_ && --clock_->users == 0) retire(clock_);
  }
  Clock* get() const { return clock_; }
  Clock* operator->() const { return clock_; }
  explicit operator bool() const { return clock_; }
  uint32_t of(uint32_t agent) const { return clock_ && agent < clock_->size ? clock_->at[agent] : 0; }
  uint64_t id() const { return clock_ ? clock_->id : 0; }

 private:
  static void retire(Clock* clock);
  Clock* clock_ = nullptr;
};

// Whose work an asynchronous access is; one agent per kind and number.
enum class Agent : uint64_t {
  kMbarrier,    // copies that complete on an mbarrier (its address); the clock counts its phases
  kCopies,      // cp.async of a thread; ordinals
  kBulkCopies,  // bulk copies out of shared memory of a thread; ordinals
  kWarp,        // ldmatrix and other collectives of a warp; ordinals
  kWarpMma,     // wgmma of a warp; ordinals
  kTensorCore,  // tcgen05 of a CTA; ordinals
};
constexpr int kAgentKinds = 6;

// What one thread knows of all agents: a shared clock, and younger times of itself and of those that work for it.
struct Known {
  struct Time {
    uint32_t agent = ~0u, clock = 0;
  };
  // The thread itself, then by Agent what works for it: its copies, its bulk copies, its warp, its warp's wgmma.
  static constexpr int kItself = 0, kOwn = 5;
  SharedClock shared;
  Time own[kOwn];

  uint32_t of(uint32_t agent) const {
    uint32_t clock = shared.of(agent);
    for (const Time& t : own)
      if (t.agent == agent) clock = std::max(clock, t.clock);
    return clock;
  }
};

// A clock in the making, to which threads add what they know.
class Gathering {
 public:
  void add(const Known& known);
  void add(uint32_t agent, uint32_t clock);
  SharedClock take();

 private:
  void add(const SharedClock& known);
  SharedClock clock_;
  uint64_t last_ = 0;  // the clock that was added last; neighbours mostly share one
};

// An object through which threads order their work.
enum class Sync : uint64_t { kMbarrier, kNamedBarrier, kCluster, kLocation };
constexpr uint64_t sync_key(Sync kind, uint32_t number) { return (uint64_t)kind << 32 | number; }

class RaceDetector {
 public:
  explicit RaceDetector(const Cluster& cluster);
  ~RaceDetector();

  // ---- accesses
  void access(const Thread& t, const Cta& cta, uint32_t offset, uint32_t bytes, int how);
  void access(Agent kind, uint32_t number, uint32_t ordinal, const Known& known, const Cta& cta, uint32_t offset,
              uint32_t bytes, int how, int line);

  // ---- order
  void release(uint64_t sync, const Thread& t, bool relaxed = false);  // t's past becomes part of the present phase
  void complete(uint64_t sync);                                        // the phase is over: its pasts can be acquired
  void acquire(uint64_t sync, const Thread& t, bool relaxed = false);
  void fence(const Thread& t);
  void synchronise(const Warp& warp, uint32_t lanes);

  // ---- asynchronous work
  // What is ordered before work that is issued now. What the thread does from now on is not.
  Known past_of(const Thread& t);
  Known past_of(const Warp& warp);  // of all its lanes
  // The same for work that reads or writes before the thread goes on.
  const Known& known_to(const Thread& t) { return state(t).known; }
  uint32_t phase_of(uint64_t sync) { return objects_[sync].phase + 1; }
  void arrive(uint64_t sync, const Known& past, Agent kind, uint32_t number, uint32_t ordinal);
  void learn(const Thread& t, Agent kind, uint32_t number, uint32_t ordinal);

  uint32_t thread_number(const Thread& t) const { return t.cta->rank * threads_ + t.linear; }
  uint32_t warp_number(const Warp& w) const { return w.cta->rank * 32 + w.id; }

 private:
  using Epoch = uint64_t;  // agent 16 bits, clock 24, PTX line 23, strong 1; 0 is none
  // Lanes of a warp that read at one time, the agent being the first lane; or another agent, with the mask 1.
  struct Reader {
    Epoch epoch;
    uint32_t lanes;
  };
  // The past of some bytes since their last write. All readers but one are in a list that cells share and nobody
  // changes: neighbouring bytes mostly have the same past.
  struct Cell {
    Epoch write, read;
    uint32_t lanes, others;  // `others` is a list of readers, 0 for none; or else kSplit and the number of four cells
  };
  static constexpr uint32_t kSplit = 1u << 31;
  struct ReaderList {
    uint32_t users = 0;
    std::vector<Reader> readers;
  };
  // The cells of one CTA, which are all zero where nothing was touched.
  struct Window;
  struct Accessor {
    Epoch write, read;  // how it is booked, as writer and as reader
    uint32_t lane;
    const Known& known;
    const Cta& cta;
    // What was found in order last: neighbouring cells mostly hold the same.
    Epoch seen_write = 0;
    Reader seen{0, 0};
    uint32_t seen_others = 0;
  };
  // The last change of the readers of a cell that was not trivial.
  struct Transition {
    Reader before;
    uint32_t others_before;
    Epoch reader;
    uint32_t lane, lanes, others;
  };
  struct SyncObject {
    Gathering arriving;
    SharedClock done;
    uint32_t phase = 0;
  };
  struct ThreadState {
    Known known, at_fence;
    SharedClock at_next_fence;
    Epoch now;  // the thread and its clock
  };
  struct Joined {
    uint64_t one = 0, other = 0;
    SharedClock both;
  };

  uint32_t agent_number(Agent kind, uint32_t number);
  ThreadState& state(const Thread& t) { return threads_state_[thread_number(t)]; }
  void tick(const Thread& t);
  void join(SharedClock& known, const SharedClock& other);

  void check(Accessor a, uint32_t offset, uint32_t bytes, bool write);
  void write(Cell& c, Accessor& a, uint32_t offset);
  void read(Cell& c, Accessor& a, uint32_t offset);
  void add_reader(Cell& c, const Accessor& a);
  void check_write(Epoch before, Accessor& a, uint32_t offset, bool write);
  void check_readers(const Cell& c, Accessor& a, uint32_t offset);
  bool one_instruction(Epoch a, Epoch b) const;
  std::array<Cell, 4>& split(Cell& c);
  uint32_t fresh_list();
  void use_list(uint32_t list);
  void leave_list(uint32_t list);
  [[noreturn]] void report(Epoch before, bool before_writes, Epoch now, bool now_writes, const Cta& cta,
                           uint32_t offset);
  std::string name(uint32_t agent) const;

  uint32_t threads_;  // per CTA
  std::vector<ThreadState> threads_state_;
  std::vector<uint32_t> agents_[kAgentKinds];          // by number; 0 where there is none yet
  std::unordered_map<uint32_t, uint32_t> mbarriers_;   // the same by address
  std::vector<uint64_t> agent_keys_;                   // of the asynchronous agents, numbered after the threads
  std::unordered_map<uint64_t, SyncObject> objects_;
  bool locations_ = false;  // whether some object is a location
  std::vector<Joined> joined_;
  std::vector<Window*> windows_;  // per CTA
  std::vector<ReaderList> lists_{1};
  std::vector<uint32_t> idle_lists_;
  std::vector<std::array<Cell, 4>> splits_;
  std::vector<uint32_t> idle_splits_;
  Transition last_{};
};

// ---- what instructions call
static inline RaceDetector* races() {
  return machine.settings.detect_races ? self()->cta->cluster->races.get() : nullptr;
}
using Past = Known;  // empty when races are not looked for
static inline Past race_past() { return races() ? races()->past_of(*self()) : Past(); }
// The engine whose operation runs now and reads its operands.
struct AsyncReader {
  Agent kind;
  uint32_t number, ordinal;
  Past past;
  int line;
};
extern const AsyncReader* async_reader;
static inline void race_engine_read(const Cta* cta, uint32_t offset, uint32_t bytes) {
  if (RaceDetector* r = races())
    r->access(async_reader->kind, async_reader->number, async_reader->ordinal, async_reader->past, *cta, offset, bytes,
              kRead, async_reader->line);
}
static inline void race_access(const Cta* cta, uint32_t offset, uint32_t bytes, int how) {
  if (RaceDetector* r = races()) r->access(*self(), *cta, offset, bytes, how);
}
static inline void race_fence() {
  if (RaceDetector* r = races()) r->fence(*self());
}

}  // namespace emu
#pragma GCC visibility pop
