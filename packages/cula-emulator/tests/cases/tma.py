"""Tiled tensor copies: ranks 1 to 5, element types, swizzles, edges, stores, reductions, multicast, edited maps.

The first coordinate is always a multiple of 16 bytes, and no coordinate of a store or reduction is negative: an H200
answers anything else with an illegal instruction.
"""

from __future__ import annotations

import itertools

import torch

from cases.case import Case, random_words
from cases.tensor_map import TensorMap

FAMILY = "tma"
_WORDS = random_words(8192, 70)
# Ties, subnormals, the largest number, infinities and NaN of fp32, for rounding to tf32.
_EDGES = [
    0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 1, 0x7FFFFF, 0x400000, 0x1000, 0x3000, 0x7FF000, 0x7FE000,
    0x7F800000, 0x7FC00000, 0x7F800001, 0x7FC12345, 0x7F7FFFFF, 0x7F7FF000, 0x3F805000, 0x3F807000, 0, 0x3F802000,
]  # fmt: skip
_SIGNED = [v for edge in _EDGES for v in (edge, edge - (1 << 31))]
_TF32_EDGES = torch.tensor(_SIGNED, dtype=torch.int32).repeat(8192 // len(_SIGNED) + 1)[:8192]
_BAR = ".shared .align 8 .b8 bar[16];\n"
_MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
_LEADER = "mov.u32 %r30, tile; mov.u32 %r20, bar; setp.ne.u32 %p9, %r2, 0;"
_INIT = "@%p9 bra I; mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster; I:"
_WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p1, [%r20], 0; @!%p1 bra W;"
# The maps lie in global memory, where an earlier launch may have had others.
_FRESH_MAP = "fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128;"
_DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"


def _tile(bytes_: int) -> str:
    return f".shared .align 1024 .b8 tile[{max(bytes_, 128)}];\n" + _BAR


def _box_bytes(m: TensorMap) -> int:
    total = m.element_bytes
    for n in m.box:
        total *= n
    return total


def _coordinates(m: TensorMap, start: tuple[int, ...], store: bool = False):
    """(index of the element in the box, its byte offset in the tensor or None when it lies outside).

    Loads stop at the last element of a row, stores and reductions at the end of its 16 bytes.
    """
    strides = (m.element_bytes, *m.strides)
    sizes = list(m.sizes)
    if store:
        per_unit = max(1, 16 // m.element_bytes)
        sizes[0] = -(-sizes[0] // per_unit) * per_unit
    for index, position in enumerate(itertools.product(*(range(n) for n in reversed(m.box)))):
        at = [s + p for s, p in zip(start, reversed(position))]
        inside = all(0 <= c < n for c, n in zip(at, sizes))
        offset = (m.offset + sum(c * s for c, s in zip(at, strides))) % (1 << 64)
        yield index, offset if inside else None


def _swizzled(m: TensorMap, offset: int) -> int:
    rows = {0: 0, 32: 1, 64: 3, 128: 7}[m.swizzle]
    return offset ^ (offset >> 7 & rows) << 4


def _bytes(values: torch.Tensor) -> bytearray:
    return bytearray(values.contiguous().view(torch.uint8).numpy().tobytes())


def _from_bytes(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.int32).clone()


def _loaded(m: TensorMap, start: tuple[int, ...], source: torch.Tensor) -> torch.Tensor:
    """Shared memory after a load: elements outside the tensor are zero."""
    data, size = _bytes(source), m.element_bytes
    tile = bytearray(_box_bytes(m))
    for index, offset in _coordinates(m, start):
        to = _swizzled(m, index * size)
        fill = (b"\xf7\x7f" if m.nan_fill else b"\0\0") * size  # an H200's NaN
        tile[to : to + size] = fill[:size] if offset is None else data[offset : offset + size]
    loaded = _from_bytes(tile)
    return (
        loaded
        if m.dtype != "tf32"
        else torch.tensor([*map(_to_tf32, loaded.tolist())], dtype=torch.int32)
    )


def _to_tf32(word: int) -> int:
    """To nearest even, subnormals kept, as an H200 does it."""
    bits = word & 0xFFFFFFFF
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFFE000
    lost, kept = bits & 0x1FFF, bits & ~0x1FFF
    up = lost > 0x1000 or (lost == 0x1000 and bits >> 13 & 1)
    rounded = kept + (up << 13)
    return rounded - (rounded >> 31 << 32)


def _vector(start: tuple[int, ...]) -> tuple[str, str]:
    """Code that puts coordinates into registers, and their list."""
    names = [f"%r{50 + i}" for i in range(len(start))]
    setup = _FRESH_MAP + "".join(f"mov.s32 {r}, {c};" for r, c in zip(names, start))
    return setup, "{" + ", ".join(names) + "}"


def _read(count: int) -> str:
    """All threads copy `count` words of the tile to their CTA's part of `out`."""
    return (
        f"mov.u32 %r40, %r2; mul.lo.u32 %r43, %r3, {count};"
        f"D: setp.ge.u32 %p2, %r40, {count}; @%p2 bra X; mad.lo.u32 %r41, %r40, 4, %r30; ld.shared.b32 %r42, [%r41];"
        "add.u32 %r44, %r40, %r43; mul.wide.u32 %rd8, %r44, 4; add.s64 %rd8, %rd8, %rd2; st.global.b32 [%rd8], %r42;"
        "add.u32 %r40, %r40, 32; bra D; X:"
    )


def load(name: str, m: TensorMap, start: tuple[int, ...], words: torch.Tensor = _WORDS) -> Case:
    setup, vector = _vector(start)
    body = _LEADER + _INIT + "bar.sync 0; @%p9 bra W;" + setup
    body += f"mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {_box_bytes(m)};"
    body += f"cp.async.bulk.tensor.{len(start)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    body += f"[%r30], [%rd3, {vector}], [%r20];" + _WAIT + _read(_box_bytes(m) // 4)
    expected = _loaded(m, start, words)
    return Case(
        FAMILY, f"load_{name}", body, expected, words, shared=_tile(_box_bytes(m)), maps=(m,)
    )


def _fill(m: TensorMap) -> str:
    """Word i of `in` goes to word i of the tile, which one thread then hands to the copy engine."""
    return (
        _LEADER + f"mov.u32 %r40, %r2; D: setp.ge.u32 %p2, %r40, {_box_bytes(m) // 4}; @%p2 bra X;"
        "mul.wide.u32 %rd8, %r40, 4; add.s64 %rd8, %rd8, %rd1; ld.global.b32 %r42, [%rd8];"
        "mad.lo.u32 %r41, %r40, 4, %r30; st.shared.b32 [%r41], %r42; add.u32 %r40, %r40, 32; bra D; X:"
        "fence.proxy.async.shared::cta; bar.sync 0; @%p9 bra E;"
    )


def store(name: str, m: TensorMap, start: tuple[int, ...], words_out: int = 2048) -> Case:
    setup, vector = _vector(start)
    body = _fill(m) + setup
    body += (
        f"cp.async.bulk.tensor.{len(start)}d.global.shared::cta.tile.bulk_group [%rd3, {vector}], [%r30];"
        + _DONE
    )
    before = torch.full((words_out,), -1, dtype=torch.int32)
    data, tile, size = _bytes(before), _bytes(_WORDS), m.element_bytes
    for index, offset in _coordinates(m, start, store=True):
        if offset is not None:
            at = _swizzled(m, index * size)
            data[offset : offset + size] = tile[at : at + size]
    return Case(
        FAMILY,
        f"store_{name}",
        body,
        _from_bytes(data),
        _WORDS,
        before,
        shared=_tile(_box_bytes(m)),
        maps=(m,),
    )


_TORCH = {
    "u32": torch.int32, "s32": torch.int32, "u64": torch.int64, "s64": torch.int64, "f16": torch.float16,
    "bf16": torch.bfloat16, "f32": torch.float32,
}  # fmt: skip


def _unsigned_order(kind: str, x: torch.Tensor) -> torch.Tensor:
    return x ^ torch.iinfo(x.dtype).min if kind[0] == "u" else x


def reduction(operation: str, kind: str, start: tuple[int, int] = (16, 6), label: str = "") -> Case:
    """A 2-dimensional box, by default half of it outside, reduced into `out`."""
    dtype = _TORCH[kind]
    size = dtype.itemsize
    m = TensorMap("out", kind, (24, 10), (32 * size,), (16, 8))
    g = torch.Generator().manual_seed(71)
    if dtype.is_floating_point:
        old, x = (torch.randn(32 * 10, generator=g).mul(4).to(dtype) for _ in range(2))
    else:
        old, x = (
            random_words(320 * size // 4, 72).view(dtype),
            random_words(320 * size // 4, 73).view(dtype),
        )
    fresh = old.clone()
    for index, offset in _coordinates(m, start, store=True):
        if offset is None:
            continue
        i = offset // size
        a, b = old[i], x[index]
        if operation == "add":
            total = (a.double() + b.double()).to(dtype) if dtype.is_floating_point else a + b
        elif operation in ("min", "max"):
            key = (
                (lambda v: float(v))
                if dtype.is_floating_point
                else (lambda v: int(_unsigned_order(kind, v)))
            )
            total = min(a, b, key=key) if operation == "min" else max(a, b, key=key)
        else:
            total = {"and": a & b, "or": a | b, "xor": a ^ b}[operation]
        fresh[i] = total
    setup, vector = _vector(start)
    body = _fill(m) + setup
    body += f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%rd3, {vector}], [%r30];"
    name = f"reduce_{operation}_{kind}{label}"
    old, x, fresh = (t.view(torch.int32) for t in (old, x, fresh))
    return Case(FAMILY, name, body + _DONE, fresh, x, old, shared=_tile(_box_bytes(m)), maps=(m,))


def _ending(of: str) -> TensorMap:
    """Rows of 64 bytes as a view of 2^30: of those that end before row e, row r is 2^30 less what is left, behind it e
    and 2^30. Addresses are numbers modulo 2^64, and what is not left lies outside."""
    many, more, pitch = 1 << 30, 0x7FFF0000, 64
    return TensorMap(
        of, "f16", (24, many, more, more), (pitch, pitch, (1 << 34) - pitch), (16, 8, 1, 1)
    )


def _loads() -> list[Case]:
    cases = []
    for kind in ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64"):
        size = TensorMap("in", kind, (1,), (), (1,)).element_bytes
        inside, wide = (TensorMap("in", kind, (40, 12), (48 * size,), (n, 8)) for n in (16, 32))
        cases += [
            load(f"{kind}", inside, (16, 3)),
            load(f"{kind}_outside", wide, (-16, 7)),
            load(f"{kind}_right", wide, (16, -2)),
        ]
    shapes = {
        1: (TensorMap("in", "f32", (100,), (), (64,)), ((16,), (-20,), (80,), (200,))),
        2: (
            TensorMap("in", "f32", (40, 9), (176,), (24, 6), offset=256),
            ((0, 0), (20, 5), (-8, -3)),
        ),
        3: (
            TensorMap("in", "f16", (24, 7, 5), (64, 512), (16, 4, 3)),
            ((0, 0, 0), (8, 2, 1), (16, 5, 3), (-8, -1, -2)),
        ),
        4: (
            TensorMap("in", "f32", (8, 5, 4, 3), (48, 288, 1440), (8, 3, 2, 2)),
            ((0, 0, 0, 0), (4, 2, 1, 1), (-4, 3, 3, 2)),
        ),
        5: (
            TensorMap("in", "u16", (12, 4, 3, 3, 3), (32, 160, 640, 2560), (8, 2, 2, 2, 2)),
            ((0, 0, 0, 0, 0), (8, 3, 1, 2, 1), (0, -1, -1, -1, -1)),
        ),
    }
    for rank, (m, starts) in shapes.items():
        cases += [load(f"rank{rank}_{i}", m, start) for i, start in enumerate(starts)]
    for swizzle, kind in itertools.product((32, 64, 128), ("u8", "f16", "f32")):
        size = TensorMap("in", kind, (1,), (), (1,)).element_bytes
        inner = swizzle // size
        m = TensorMap("in", kind, (2 * inner, 20), (2 * swizzle,), (inner, 16), swizzle)
        cases += [
            load(f"swizzle{swizzle}_{kind}", m, (inner // 2, 2)),
            load(f"swizzle{swizzle}_{kind}_edge", m, (inner + 16 // size, 9)),
        ]
    for kind in ("f16", "bf16", "f32", "f64"):
        size = TensorMap("in", kind, (1,), (), (1,)).element_bytes
        m = TensorMap("in", kind, (40, 12), (48 * size,), (32, 8), nan_fill=True)
        cases.append(load(f"{kind}_nan_fill", m, (16, -2)))
    m = TensorMap("in", "tf32", (40, 12), (192,), (32, 8))
    cases += [load("tf32", m, (0, 1)), load("tf32_right", m, (16, -2))]
    cases.append(load("tf32_edges", m, (8, 4), _TF32_EDGES))
    for left, end in ((5, 40), (8, 8), (0, 3)):
        start = 8, (1 << 30) - left, end, 1 << 30
        cases.append(load(f"ending_{left}_{end}", _ending("in"), start))
    m = TensorMap("in", "bf16", (64, 8, 3), (128, 1024), (64, 8, 2), 128)
    cases.append(load("swizzle128_rank3", m, (0, 0, 1)))
    return cases


def _stores() -> list[Case]:
    cases = []
    for kind in ("u8", "f16", "f32", "f64"):
        size = TensorMap("out", kind, (1,), (), (1,)).element_bytes
        inside, wide = (TensorMap("out", kind, (40, 12), (48 * size,), (n, 8)) for n in (16, 32))
        cases += [
            store(kind, inside, (16, 3)),
            store(f"{kind}_below", wide, (0, 7)),
            store(f"{kind}_right", wide, (16, 2)),
        ]
    cases.append(store("rank1", TensorMap("out", "f32", (100,), (), (64,), offset=32), (52,)))
    cases.append(
        store("rank3", TensorMap("out", "f16", (24, 7, 5), (64, 512), (16, 4, 3)), (16, 5, 3))
    )
    cases.append(
        store(
            "rank4",
            TensorMap("out", "f32", (8, 5, 4, 3), (48, 288, 1440), (8, 3, 2, 2)),
            (4, 3, 1, 2),
        )
    )
    m = TensorMap("out", "u16", (12, 4, 3, 3, 3), (32, 160, 640, 2560), (8, 2, 2, 2, 2))
    cases.append(store("rank5", m, (8, 3, 1, 2, 1)))
    for left, end in ((5, 40), (8, 8), (0, 3)):
        start = 8, (1 << 30) - left, end, 1 << 30
        cases.append(store(f"ending_{left}_{end}", _ending("out"), start))
    for swizzle in (32, 64, 128):
        m = TensorMap("out", "f16", (swizzle, 20), (2 * swizzle,), (swizzle // 2, 16), swizzle)
        cases.append(store(f"swizzle{swizzle}", m, (8, 6)))
    for kinds, operations in (
        (("u32", "s32", "u64", "f16", "bf16", "f32"), ("add",)),
        (("u32", "s32", "u64", "s64", "f16", "bf16"), ("min", "max")),
        (("u32", "u64"), ("and", "or", "xor")),
    ):
        cases += [reduction(operation, kind) for kind in kinds for operation in operations]
    for kind, columns in (("u8", 20), ("f16", 13), ("f32", 10), ("f32", 9)):
        size = TensorMap("out", kind, (1,), (), (1,)).element_bytes
        m = TensorMap("out", kind, (columns, 6), (80,), (32 // size, 8))
        cases.append(store(f"{kind}_partial_{columns}", m, (16 // size, 1)))
    starts = {"inside": (8, 1), "right": (16, 1), "below": (4, 6)}
    cases += [reduction("add", "u32", start, f"_{where}") for where, start in starts.items()]
    return cases


def _multicast() -> list[Case]:
    """Each CTA loads its own rows of a box and sends them to every CTA of the mask."""
    cases = []
    for cluster, swizzle in ((2, 0), (4, 128)):
        m = TensorMap("in", "f16", (64, 32), (128,), (64, 8), swizzle)
        part = _box_bytes(m)
        body = _LEADER + "mov.u32 %r21, %cluster_ctarank;" + _INIT + _MEET + "@%p9 bra W;"
        body += f"mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {part * cluster}; mov.b16 %h1, {(1 << cluster) - 1};"
        body += f"mad.lo.u32 %r31, %r21, {part}, %r30; {_FRESH_MAP} mov.s32 %r50, 0; mad.lo.s32 %r51, %r21, 8, 1;"
        body += "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        body += (
            "[%r31], [%rd3, {%r50, %r51}], [%r20], %h1;"
            + _WAIT
            + _read(part * cluster // 4)
            + _MEET
        )
        whole = torch.cat([_loaded(m, (0, 1 + 8 * rank), _WORDS) for rank in range(cluster)])
        expected = whole.repeat(cluster)
        tile = _tile(part * cluster)
        name = f"multicast_{cluster}_swizzle{swizzle}"
        cases.append(
            Case(
                FAMILY,
                name,
                body,
                expected,
                _WORDS,
                None,
                cluster,
                cluster=cluster,
                shared=tile,
                maps=(m,),
            )
        )
    return cases


def _edited() -> list[Case]:
    """A map copied to shared memory, edited there, published, and used."""
    first = TensorMap("in", "f32", (32, 8), (128,), (16, 4))
    second = TensorMap("in", "f32", (20, 6), (192,), (16, 4), offset=1024)
    copy = (
        "mov.u32 %r33, edit; mad.lo.u32 %r34, %r2, 4, %r33; mul.wide.u32 %rd8, %r2, 4; add.s64 %rd8, %rd8, %rd3;"
        "ld.global.b32 %r35, [%rd8]; st.shared.b32 [%r34], %r35; bar.warp.sync -1; add.s64 %rd9, %rd1, 1024;"
        "add.s64 %rd10, %rd3, 128; @%p9 bra P;"
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r33], %rd9;"
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r33], 0, 20;"
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r33], 1, 6; mov.u64 %rd11, 192;"
        "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r33], 0, %rd11;"
        "P: bar.warp.sync -1;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd10], [%r33], 128;"
        "fence.proxy.tensormap::generic.acquire.gpu [%rd10], 128;"
    )
    start = (8, 3)
    setup, vector = _vector(start)
    body = _LEADER + _INIT + copy + "bar.sync 0; @%p9 bra W;" + setup
    body += "mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 256;"
    body += "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    body += f"[%r30], [%rd10, {vector}], [%r20];" + _WAIT + _read(64)
    expected = _loaded(second, start, _WORDS)
    shared = _tile(256) + ".shared .align 128 .b8 edit[128];\n"
    return [Case(FAMILY, "edited_map", body, expected, _WORDS, shared=shared, maps=(first, first))]


CASES = [*_loads(), *_stores(), *_multicast(), *_edited()]
