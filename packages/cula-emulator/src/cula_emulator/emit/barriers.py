"""Barriers, mbarriers and fences."""

from __future__ import annotations

from ..ptx import ir
from .function import FunctionEmitter, boolean
from .registry import Unsupported, emits


@emits("membar", "fence")
def fence(e: FunctionEmitter, i: ir.Instruction) -> str:
    """Fibers see memory in program order, so only the proxy check and the race detector learn of fences."""
    if i.opcode.startswith("fence.proxy"):
        return "proxy_fence();" if i.opcode.startswith("fence.proxy.async") else ";"
    return "if (!ignored_here()) race_fence();"


@emits("bar.warp")
def warp_barrier(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"warp_sync({e.value(i.operands[0])});"


@emits("barrier.cluster")
def cluster_barrier(e: FunctionEmitter, i: ir.Instruction) -> str:
    return "cluster_wait();" if i.has("wait") else f"cluster_arrive({boolean(i.has('relaxed'))});"


@emits("bar", "barrier")
def cta_barrier(e: FunctionEmitter, i: ir.Instruction) -> str:
    o = list(i.operands)
    if i.has("red"):
        destination, predicate = o[0], e.value(o[-1], "pred")
        count = e.value(o[2]) if len(o) == 4 else "0"
        operation = i.first_of(("popc", "and", "or"))
        result = {
            "popc": "b_.population",
            "and": "b_.population == b_.count",
            "or": "b_.population != 0",
        }[operation]
        target = "b32" if operation == "popc" else "pred"
        return (
            f"{{ const BarrierResult b_ = named_barrier({e.value(o[1])}, {count}, true, {predicate}); "
            f"{e.write(destination, target, result)} }}"
        )
    count = e.value(o[1]) if len(o) > 1 else "0"
    return f"named_barrier({e.value(o[0])}, {count}, {boolean(not i.has('arrive'))});"


@emits("mbarrier")
def mbarrier(e: FunctionEmitter, i: ir.Instruction) -> str:
    o, relaxed = i.operands, boolean(i.has("relaxed"))
    if i.has("init"):
        return f"mbarrier_init({e.address32(o[0])}, {e.value(o[1])});"
    if i.has("inval"):
        return f"mbarrier_invalidate({e.address32(o[0])});"
    if i.has("try_wait", "test_wait"):
        if i.has("parity"):
            call = f"mbarrier_try_wait({e.address32(o[1])}, {e.value(o[2])}, {relaxed})"
        else:
            call = (
                f"mbarrier_try_wait_state({e.address32(o[1])}, {e.value(o[2], 'b64')}, {relaxed})"
            )
        return e.write(o[0], "pred", call)
    if i.has("pending_count"):
        return e.write(o[0], "b32", f"mbarrier_decode({e.value(o[1], 'b64')}).pending")
    if i.has("arrive", "arrive_drop"):
        count, expected = "1", "0"
        if i.has("expect_tx"):
            expected = f"(int32_t){e.value(o[2])}"
        elif len(o) > 2:
            count = e.value(o[2])
        drop = boolean(i.has("arrive_drop"))
        call = f"mbarrier_arrive({e.address32(o[1])}, {count}, {expected}, {drop}, {relaxed})"
        return e.write(o[0], "b64", call)
    if i.has("expect_tx"):
        return f"mbarrier_expect({e.address32(o[0])}, (int32_t){e.value(o[1])});"
    if i.has("complete_tx"):
        return f"mbarrier_update({e.address32(o[0])}, 0, -(int32_t){e.value(o[1])});"
    raise Unsupported("variant")
