#include "warpgroup.h"

namespace emu {

// ---- .aligned instructions

void warpgroup_step(Warp& warp) {
  Cta& cta = *warp.cta;
  Warpgroup& group = cta.warpgroups[warp.id / kWarpgroupWarps];
  const int line = self()->line;
  const uint64_t at = warp.aligned_steps++ - group.first;
  if (at == group.steps.size()) {
    group.steps.push_back({line, warp.id});
  } else if (group.steps[at].line != line) {
    fail(Fault::kInvalid,
         "the warps of a warpgroup execute different instructions: warp %u is at {line:%d}, warp %u at {line:%d}; "
         "setmaxnreg and wgmma are .aligned, so all four must execute the same",
         group.steps[at].warp, group.steps[at].line, warp.id, line);
  }
  if (at) return;
  const size_t begin = warp.id / kWarpgroupWarps * kWarpgroupWarps;
  const size_t end = std::min<size_t>(begin + kWarpgroupWarps, cta.warps.size());
  for (size_t w = begin; w < end; w++)
    if (cta.warps[w].aligned_steps == group.first) return;
  group.steps.pop_front();
  group.first++;
}

void wgmma_step(Warp& warp) {
  const uint32_t last = (warp.id / kWarpgroupWarps + 1) * kWarpgroupWarps;
  if (last * kWarpSize > warp.cta->thread_count)
    fail(Fault::kInvalid, "wgmma in a warpgroup of fewer than four warps: the CTA has %u threads",
         warp.cta->thread_count);
  warpgroup_step(warp);
}

void warpgroups_end(Cta& cta) {
  for (const Warp& warp : cta.warps) {
    const Warpgroup& group = cta.warpgroups[warp.id / kWarpgroupWarps];
    if (group.steps.empty() || warp.aligned_steps != group.first) continue;
    fail(Fault::kInvalid,
         "warp %u ends without {line:%d}, which warp %u of its warpgroup executes; setmaxnreg and wgmma are .aligned, "
         "so all four must execute the same",
         warp.id, group.steps.front().line, group.steps.front().warp);
  }
}

// ---- setmaxnreg

namespace {

constexpr uint32_t kPartitionsOfSm = 4, kMostRegisters = 255;
constexpr uint32_t kRegisterUnit = 8, kFewestAsked = 24, kMostAsked = 256;

constexpr uint32_t up_to(uint32_t unit, uint32_t n) { return (n + unit - 1) / unit * unit; }

// Takes what the warp waits for from the pool, if it is there.
bool granted(Warp& warp) {
  if (warp.registers_wanted <= warp.registers) return true;
  const uint32_t more = (warp.registers_wanted - warp.registers) * kWarpSize;
  if (warp.cta->free_registers < more) return false;
  warp.cta->free_registers -= more;
  warp.registers = warp.registers_wanted;
  made_progress();
  return true;
}

}  // namespace

uint32_t registers_at_launch(const RegisterFacts& facts, uint32_t block_threads) {
  if (!facts.most_asked || facts.at_launch < 0) return 0;
  if (facts.at_launch > 0) return up_to(kRegisterUnit, facts.at_launch);
  // What ptxas gives a kernel that has setmaxnreg: all that so many CTAs find on an SM, but no more than it asks for.
  // Each warp has its registers in one of the SM's partitions.
  const uint32_t threads = facts.threads ? facts.threads : block_threads;
  const uint32_t warps = up_to(kWarpSize, threads) / kWarpSize * facts.ctas;
  const uint32_t warps_of_partition = (warps + kPartitionsOfSm - 1) / kPartitionsOfSm;
  const uint32_t most = kRegistersOfSm / kPartitionsOfSm / kWarpSize / warps_of_partition / kRegisterUnit;
  return up_to(kRegisterUnit, std::min({most * kRegisterUnit, facts.most_asked, kMostRegisters}));
}

void set_max_registers(uint32_t count, bool increase) {
  if (count % kRegisterUnit || count < kFewestAsked || count > kMostAsked)
    fail(Fault::kInvalid, "setmaxnreg: %u registers; expected a multiple of %u from %u to %u", count, kRegisterUnit,
         kFewestAsked, kMostAsked);
  Warp& warp = *self()->warp;
  rendezvous(~0u, nullptr, [&](void**, uint32_t) {
    warpgroup_step(warp);
    if (!machine.registers) return;
    warp.registers_wanted = count;
    if (increase) return;
    if (count > warp.registers)
      fail(Fault::kInvalid, "setmaxnreg.dec to %u registers in a warp that has %u", count, warp.registers);
    warp.cta->free_registers += (warp.registers - count) * kWarpSize;
    warp.registers = count;
  });
  if (increase && machine.registers) block_until([&warp] { return granted(warp); });
}

}  // namespace emu
