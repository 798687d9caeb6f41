"""Barriers, mbarriers and fences."""

from __future__ import annotations

from ..ptx import ir
from .function import FunctionEmitter, boolean
from .registry import Order, emits

_SCOPE = "?cta|cluster|gpu|sys"
_SHARED = "?shared|shared::cta|shared::cluster"


# ---- fences. Fibers see memory in program order, so only the proxy check and the race detector learn of them.


@emits("membar", forms=["cta|gl|sys"], order=Order.FENCE)
@emits("fence", forms=["sc|acq_rel|acquire|release cta|cluster|gpu|sys"], order=Order.FENCE)
@emits("fence.mbarrier_init", forms=["release cluster"], order=Order.ABSENT)
def fence(e: FunctionEmitter, i: ir.Instruction) -> str:
    return "if (!ignored_here()) race_fence();"


@emits("fence.proxy.async", forms=["?shared::cta|shared::cluster"], order=Order.MODELLED)
def proxy_fence(e: FunctionEmitter, i: ir.Instruction) -> str:
    return "proxy_fence();"


@emits("fence.proxy.async.global", "fence.proxy.alias", forms=[""], order=Order.ABSENT)
@emits(
    "fence.proxy.tensormap::generic",
    forms=["release|acquire cta|cluster|gpu|sys"],
    order=Order.ABSENT,
)
def other_proxy_fence(e: FunctionEmitter, i: ir.Instruction) -> str:
    """Proxies are told apart in shared memory only."""
    return ";"


# ---- barriers


@emits("bar.warp", forms=["sync"], order=Order.MODELLED)
def warp_barrier(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"warp_sync({e.value(i.operands[0])});"


@emits(
    "barrier.cluster",
    forms=["arrive ?release|relaxed ?aligned", "wait ?acquire ?aligned"],
    order=Order.MODELLED,
)
def cluster_barrier(e: FunctionEmitter, i: ir.Instruction) -> str:
    return "cluster_wait();" if i.has("wait") else f"cluster_arrive({boolean(i.has('relaxed'))});"


@emits("bar", "barrier", forms=["?cta sync|arrive ?aligned"], order=Order.MODELLED)
def cta_barrier(e: FunctionEmitter, i: ir.Instruction) -> str:
    o = i.operands
    count = e.value(o[1]) if len(o) > 1 else "0"
    return f"named_barrier({e.value(o[0])}, {count}, {boolean(i.has('sync'))});"


_RESULTS = {"popc": "b_.population", "and": "b_.population == b_.count", "or": "b_.population != 0"}


@emits("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red",
       forms=["?aligned popc u32", "?aligned and|or pred"], order=Order.MODELLED)  # fmt: skip
def barrier_reduction(e: FunctionEmitter, i: ir.Instruction) -> str:
    destination, identifier, *count, predicate = i.operands
    call = f"{e.value(identifier)}, {e.value(count[0]) if count else '0'}, true, {e.value(predicate, 'pred')}"
    write = e.write(destination, i.type, _RESULTS[i.first_of(_RESULTS)])
    return f"{{ const BarrierResult b_ = named_barrier({call}); {write} }}"


# ---- mbarrier


@emits("mbarrier.init", forms=["?shared|shared::cta b64"])
def mbarrier_init(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"mbarrier_init({e.shared_address(i, i.operands[0])}, {e.value(i.operands[1])});"


@emits("mbarrier.inval", forms=["?shared|shared::cta b64"])
def mbarrier_invalidate(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"mbarrier_invalidate({e.shared_address(i, i.operands[0])});"


@emits(
    "mbarrier.test_wait",
    "mbarrier.try_wait",
    forms=[f"?parity ?acquire|relaxed {_SCOPE} {_SHARED} b64"],
    order=Order.MODELLED,
)
def mbarrier_wait(e: FunctionEmitter, i: ir.Instruction) -> str:
    done, address, phase = i.operands[:3]  # a time hint may follow
    function, bits = (
        ("mbarrier_try_wait", "b32") if i.has("parity") else ("mbarrier_try_wait_state", "b64")
    )
    call = f"{function}({e.shared_address(i, address)}, {e.value(phase, bits)}, {boolean(i.has('relaxed'))})"
    return e.write(done, "pred", call)


@emits(
    "mbarrier.arrive",
    "mbarrier.arrive_drop",
    forms=[
        f"?expect_tx ?release|relaxed {_SCOPE} {_SHARED} b64",
        f"noComplete ?release {_SCOPE} {_SHARED} b64",
    ],
    order=Order.MODELLED,
)
def mbarrier_arrive(e: FunctionEmitter, i: ir.Instruction) -> str:
    state, address, *rest = i.operands
    count, expected = e.value(rest[0]) if rest else "1", "0"
    if i.has("expect_tx"):
        count, expected = "1", f"(int32_t){count}"
    flags = f"{boolean(i.parts[1] == 'arrive_drop')}, {boolean(i.has('relaxed'))}"
    return e.write(
        state,
        "b64",
        f"mbarrier_arrive({e.shared_address(i, address)}, {count}, {expected}, {flags})",
    )


@emits("mbarrier.expect_tx", forms=[f"?relaxed {_SCOPE} {_SHARED} b64"], order=Order.MODELLED)
def mbarrier_expect(e: FunctionEmitter, i: ir.Instruction) -> str:
    return (
        f"mbarrier_expect({e.shared_address(i, i.operands[0])}, (int32_t){e.value(i.operands[1])});"
    )


# Skipping it is not implemented.
@emits("mbarrier.complete_tx", forms=[f"?relaxed {_SCOPE} {_SHARED} b64"], order=Order.ABSENT)
def mbarrier_complete(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"mbarrier_update({e.shared_address(i, i.operands[0])}, 0, -(int32_t){e.value(i.operands[1])});"


@emits("mbarrier.pending_count", forms=["b64"])
def mbarrier_pending(e: FunctionEmitter, i: ir.Instruction) -> str:
    return e.write(
        i.operands[0], "b32", f"mbarrier_decode({e.value(i.operands[1], 'b64')}).pending"
    )
