// Happens-before check on shared memory. Every thread, and every engine that works for one, has a logical clock; a
// vector clock per thread says how far it knows the others to be. Two accesses to one byte, at least one of them a
// write, must be ordered by what barriers, mbarriers, waits and fences made known, whatever the schedule did.
#pragma once
#include <unordered_map>

#include "core.h"

#pragma GCC visibility push(hidden)
namespace emu {

// How an instruction touches memory. Numbers shared with emit/operands.py.
enum Access : int { kRead = 1, kWrite = 2, kStrong = 4, kAcquire = 8, kRelease = 16 };

// What one agent knows of all agents. Missing entries are zero.
class Clock {
 public:
  uint32_t of(uint32_t agent) const { return agent < at_.size() ? at_[agent] : 0; }
  void advance(uint32_t agent, uint32_t to) {
    if (agent >= at_.size()) at_.resize(agent + 1);
    at_[agent] = std::max(at_[agent], to);
  }
  void join(const Clock& other) {
    if (other.at_.size() > at_.size()) at_.resize(other.at_.size());
    for (size_t i = 0; i < other.at_.size(); i++) at_[i] = std::max(at_[i], other.at_[i]);
  }
  void clear() { at_.clear(); }

 private:
  std::vector<uint32_t> at_;
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

// An object through which threads order their work.
enum class Sync : uint64_t { kMbarrier, kNamedBarrier, kCluster, kLocation };
constexpr uint64_t sync_key(Sync kind, uint32_t number) { return (uint64_t)kind << 32 | number; }

class RaceDetector {
 public:
  explicit RaceDetector(const Cluster& cluster);

  // ---- accesses
  void access(const Thread& t, const Cta& cta, uint32_t offset, uint32_t bytes, int how);
  void access(Agent kind, uint32_t number, uint32_t ordinal, const Clock& known, const Cta& cta, uint32_t offset,
              uint32_t bytes, int how, int line);

  // ---- order
  void release(uint64_t sync, const Thread& t, bool relaxed = false);  // t's past becomes part of the present phase
  void complete(uint64_t sync);                                        // the phase is over: its pasts can be acquired
  void acquire(uint64_t sync, const Thread& t, bool relaxed = false);
  void fence(const Thread& t);
  void synchronise(const Warp& warp, uint32_t lanes);

  // ---- asynchronous work
  // What is ordered before work that is issued now. What the thread does from now on is not.
  std::shared_ptr<const Clock> past_of(const Thread& t);
  std::shared_ptr<const Clock> past_of(const Warp& warp);  // of all its lanes
  uint32_t phase_of(uint64_t sync) { return objects_[sync].phase + 1; }
  void arrive(uint64_t sync, const Clock& past, Agent kind, uint32_t number, uint32_t ordinal);
  void learn(const Thread& t, Agent kind, uint32_t number, uint32_t ordinal);

  uint32_t thread_number(const Thread& t) const { return t.cta->rank * threads_ + t.linear; }
  uint32_t warp_number(const Warp& w) const { return w.cta->rank * 32 + w.id; }

 private:
  using Epoch = uint64_t;  // agent 16 bits, clock 24, PTX line 23, strong 1; 0 is none
  struct Cell {
    Epoch write;
    uint32_t readers;  // index into sets_
  };
  struct SyncObject {
    Clock arriving, done;
    uint32_t phase = 0;
  };
  struct ThreadState {
    Clock known, at_fence, at_next_fence;
    uint32_t clock = 1;
  };

  static Epoch pack(uint32_t agent, uint32_t clock, int line, bool strong);
  uint32_t agent_number(Agent kind, uint32_t number);
  ThreadState& state(const Thread& t) { return threads_state_[thread_number(t)]; }
  void tick(const Thread& t);
  void check(Epoch epoch, const Clock& known, const Cta& cta, uint32_t offset, uint32_t bytes, bool write);
  bool one_instruction(Epoch a, Epoch b) const;
  uint32_t add_reader(uint32_t set, Epoch reader, const Clock& known);
  void collect_sets();
  void report(Epoch before, bool before_writes, Epoch now, bool now_writes, const Cta& cta, uint32_t offset);
  std::string name(uint32_t agent) const;

  uint32_t threads_;  // per CTA
  std::vector<ThreadState> threads_state_;
  std::unordered_map<uint64_t, uint32_t> agents_;  // asynchronous agents, numbered after the threads
  std::vector<uint64_t> agent_keys_;
  std::unordered_map<uint64_t, SyncObject> objects_;
  std::vector<std::vector<Cell>> cells_;  // per CTA and byte of shared memory
  // Sets of readers are shared by the bytes that the same threads have read; each is made once from a smaller one.
  std::vector<std::vector<Epoch>> sets_{{}};
  struct Step {
    uint32_t set;
    Epoch reader;
    bool operator==(const Step& o) const { return set == o.set && reader == o.reader; }
  };
  struct StepHash {
    size_t operator()(const Step& s) const { return (s.reader ^ (uint64_t)s.set << 40) * 0x9E3779B97F4A7C15ull; }
  };
  std::unordered_map<Step, uint32_t, StepHash> steps_;
};

// ---- what instructions call
static inline RaceDetector* races() {
  return machine.settings.detect_races ? self()->cta->cluster->races.get() : nullptr;
}
using Past = std::shared_ptr<const Clock>;  // null when races are not looked for
static inline Past race_past() { return races() ? races()->past_of(*self()) : nullptr; }
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
    r->access(async_reader->kind, async_reader->number, async_reader->ordinal, *async_reader->past, *cta, offset, bytes,
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
