"""Warp collectives: an oracle takes the inputs of 32 lanes and gives the results of 32 lanes."""

from __future__ import annotations

import functools
import operator

from scalar_rows import Case
from tables_integer import M32, number

CASES: list[Case] = []
LANES = range(32)


def case(name: str, ptx: str, outputs: str, inputs: str, oracle) -> None:
    CASES.append(Case(name, ptx, tuple(outputs.split()), tuple(inputs.split()), oracle, warp=True))


def shuffled(mode: str, values: list[int], b: list[int], c: int) -> list[tuple[int, int]]:
    out = []
    for lane in LANES:
        segment, clamp = c >> 8 & 31, c & 31
        low, last = lane & segment, (lane & segment) | (clamp & ~segment & 31)
        source = {
            "up": lane - (b[lane] & 31),
            "down": lane + (b[lane] & 31),
            "bfly": lane ^ (b[lane] & 31),
            "idx": low | (b[lane] & 31 & ~segment),
        }[mode]
        inside = source >= last if mode == "up" else source <= last
        out.append((values[source] if inside else values[lane], int(inside)))
    return out


# width w: the segment mask is 32 - w; the clamp is 0 for up, 31 otherwise.
for _mode in ("up", "down", "bfly", "idx"):
    for _width in (32, 16, 8, 4, 2, 1):
        _c = (32 - _width) << 8 | (0 if _mode == "up" else 31)
        case(f"shfl_{_mode}_{_width}", f"shfl.sync.{_mode}.b32 d|e, a, b, {_c}, -1;", "b32 pred", "b32 u32:32",
             lambda lanes, m=_mode, c=_c: shuffled(m, [x[0] for x in lanes], [x[1] for x in lanes], c))  # fmt: skip
    for _c in (0x0005, 0x0013, 0x1803, 0x100B):
        case(f"shfl_{_mode}_clamp_{_c:x}", f"shfl.sync.{_mode}.b32 d|e, a, b, {_c:#x}, -1;", "b32 pred", "b32 u32:64",
             lambda lanes, m=_mode, c=_c: shuffled(m, [x[0] for x in lanes], [x[1] for x in lanes], c))  # fmt: skip
case("shfl_plain", "shfl.sync.bfly.b32 d, a, 1, 31, 0xffffffff;", "b32", "b32",
     lambda lanes: [lanes[i ^ 1][0] for i in LANES])  # fmt: skip

# Half of the lanes in each of two masks: the two groups do not see each other.
_HALVES = "mov.u32 w, %laneid; and.b32 w, w, 1; setp.eq.u32 z, w, 0; selp.b32 w, 0x55555555, 0xaaaaaaaa, z;"


def _group(lane: int) -> list[int]:
    return [m for m in LANES if m % 2 == lane % 2]


case("shfl_halves", f"{_HALVES} shfl.sync.down.b32 d|e, a, 2, 31, w;", "b32 pred", "b32",
     lambda lanes: [(lanes[i + 2][0], 1) if i + 2 < 32 else (lanes[i][0], 0) for i in LANES])  # fmt: skip

_VOTES = {
    "any": lambda votes: int(any(votes)),
    "all": lambda votes: int(all(votes)),
    "uni": lambda votes: int(len(set(votes)) == 1),
}
for _op, _f in _VOTES.items():
    for _limit in (2, 9, 1):  # mixed votes, mostly false, all false
        _input = "u32:1" if _limit == 1 else f"u32:{_limit}"
        _start = "setp.eq.u32 z, a, 0;"
        case(f"vote_{_op}_{_limit}", f"{_start} vote.sync.{_op}.pred d, z, -1;", "pred", _input,
             lambda lanes, f=_f: [f([x[0] == 0 for x in lanes])] * 32)  # fmt: skip
        case(f"vote_{_op}_not_{_limit}", f"{_start} vote.sync.{_op}.pred d, !z, -1;", "pred", _input,
             lambda lanes, f=_f: [f([x[0] != 0 for x in lanes])] * 32)  # fmt: skip
    case(f"vote_{_op}_halves", f"{_HALVES} setp.eq.u32 z, a, 0; vote.sync.{_op}.pred d, z, w;", "pred", "u32:2",
         lambda lanes, f=_f: [f([lanes[m][0] == 0 for m in _group(i)]) for i in LANES])  # fmt: skip


def _mask(lanes) -> int:
    return sum(1 << i for i in lanes)


case("ballot", "setp.lt.s32 z, a, 0; vote.sync.ballot.b32 d, z, -1;", "b32", "s32",
     lambda lanes: [_mask(i for i in LANES if lanes[i][0] >> 31)] * 32)  # fmt: skip
case("ballot_not", "setp.lt.s32 z, a, 0; vote.sync.ballot.b32 d, !z, -1;", "b32", "s32",
     lambda lanes: [_mask(i for i in LANES if not lanes[i][0] >> 31)] * 32)  # fmt: skip
case("ballot_halves", f"{_HALVES} setp.lt.s32 z, a, 0; vote.sync.ballot.b32 d, z, w;", "b32", "s32",
     lambda lanes: [_mask(m for m in _group(i) if lanes[m][0] >> 31) for i in LANES])  # fmt: skip

for _t in ("b32", "b64"):
    for _limit in (3, 1):
        _k = f"u{_t[1:]}:{_limit}"
        case(f"match_any_{_t}_{_limit}", f"match.any.sync.{_t} d, a, -1;", "b32", _k,
             lambda lanes: [_mask(m for m in LANES if lanes[m] == lanes[i]) for i in LANES])  # fmt: skip
        case(f"match_all_{_t}_{_limit}", f"match.all.sync.{_t} d|e, a, -1;", "b32 pred", _k,
             lambda lanes: [(M32, 1) if len(set(lanes)) == 1 else (0, 0)] * 32)  # fmt: skip
case("match_any_high_word", "match.any.sync.b64 d, a, -1;", "b32", "b64",
     lambda lanes: [_mask(m for m in LANES if lanes[m] == lanes[i]) for i in LANES])  # fmt: skip
case("match_halves", f"{_HALVES} match.any.sync.b32 d, a, w;", "b32", "u32:3",
     lambda lanes: [_mask(m for m in _group(i) if lanes[m] == lanes[i]) for i in LANES])  # fmt: skip
case("match_all_halves", f"{_HALVES} and.b32 a, a, w; match.all.sync.b32 d|e, a, w;", "b32 pred", "u32:4",
     lambda lanes: [_all_halves(lanes, i) for i in LANES])  # fmt: skip


def _all_halves(lanes, i: int) -> tuple[int, int]:
    group = _group(i)
    same = len({lanes[m][0] & (1 + i % 2) for m in group}) == 1
    return (_mask(group), 1) if same else (0, 0)


_REDUCTIONS = {"add": operator.add, "min": min, "max": max}
for _t in ("u32", "s32"):
    for _op, _f in _REDUCTIONS.items():
        case(f"redux_{_op}_{_t}", f"redux.sync.{_op}.{_t} d, a, -1;", _t, _t,
             lambda lanes, f=_f, t=_t: [functools.reduce(f, (number(x[0], t) for x in lanes)) & M32] * 32)  # fmt: skip
        case(f"redux_{_op}_{_t}_halves", f"{_HALVES} redux.sync.{_op}.{_t} d, a, w;", _t, _t,
             lambda lanes, f=_f, t=_t: [
                 functools.reduce(f, (number(lanes[m][0], t) for m in _group(i))) & M32 for i in LANES])  # fmt: skip
for _op, _f in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
    case(f"redux_{_op}", f"redux.sync.{_op}.b32 d, a, -1;", "b32", "b32",
         lambda lanes, f=_f: [functools.reduce(f, (x[0] for x in lanes))] * 32)  # fmt: skip

# The leader is any lane of the mask by the manual; hardware and emulator take the lowest.
case(
    "elect",
    "elect.sync d|e, -1;",
    "b32 pred",
    "b32",
    lambda lanes: [(0, int(i == 0)) for i in LANES],
)
case("elect_sink", "elect.sync _|d, -1;", "pred", "b32", lambda lanes: [int(i == 0) for i in LANES])
case("elect_halves", f"{_HALVES} elect.sync d|e, w;", "b32 pred", "b32",
     lambda lanes: [(i % 2, int(i < 2)) for i in LANES])  # fmt: skip
case("activemask", "activemask.b32 d;", "b32", "b32", lambda lanes: [M32] * 32)
case(
    "bar_warp", "bar.warp.sync -1; mov.b32 d, a;", "b32", "b32", lambda lanes: [x[0] for x in lanes]
)

for _name, _value in {
    "laneid": lambda i: i,
    "lanemask_eq": lambda i: 1 << i,
    "lanemask_lt": lambda i: (1 << i) - 1,
    "lanemask_le": lambda i: (2 << i) - 1,
    "lanemask_gt": lambda i: M32 & ~((2 << i) - 1),
    "lanemask_ge": lambda i: M32 & ~((1 << i) - 1),
}.items():
    case(
        f"special_{_name}",
        f"mov.u32 d, %{_name};",
        "u32",
        "b32",
        lambda lanes, f=_value: [f(i) for i in LANES],
    )
for _name, _value in {
    "WARP_SZ": 32, "%nctaid.y": 1, "%ctaid.y": 0, "%ctaid.z": 0, "%tid.y": 0, "%tid.z": 0, "%ntid.y": 1,
    "%ntid.z": 1, "%dynamic_smem_size": 0, "%cluster_ctarank": 0, "%cluster_nctarank": 1, "%cluster_ctaid.x": 0,
    "%cluster_nctaid.x": 1, "%clusterid.y": 0, "%nclusterid.z": 1,
}.items():  # fmt: skip
    case("special_" + _name.strip("%").replace(".", "_"), f"mov.u32 d, {_name};", "u32", "b32",
         lambda lanes, v=_value: [v] * 32)  # fmt: skip
