"""atom and red: every operation and type, on global and shared memory, alone on a word and all threads on one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cases.case import Case, random_words, words

FAMILY = "atomics"
_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_COUNT = 32


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


# operation -> (types, new value of (old, operand, bits), all unsigned patterns)
_INTEGER: dict[str, tuple[tuple[str, ...], Callable[[int, int, int], int]]] = {
    "add": (("u32", "s32", "u64"), lambda old, x, n: old + x),
    "min": (("u32", "u64"), lambda old, x, n: min(old, x)),
    "max": (("u32", "u64"), lambda old, x, n: max(old, x)),
    "min_s": (("s32", "s64"), lambda old, x, n: min(_signed(old, n), _signed(x, n))),
    "max_s": (("s32", "s64"), lambda old, x, n: max(_signed(old, n), _signed(x, n))),
    "and": (("b32", "b64"), lambda old, x, n: old & x),
    "or": (("b32", "b64"), lambda old, x, n: old | x),
    "xor": (("b32", "b64"), lambda old, x, n: old ^ x),
    "exch": (("b32", "b64"), lambda old, x, n: x),
    "inc": (("u32",), lambda old, x, n: 0 if old >= x else old + 1),
    "dec": (("u32",), lambda old, x, n: x if old == 0 or old > x else old - 1),
}
_EDGES = [0, 1, _M32, 1 << 31, (1 << 31) - 1, 5, 7, 6]


def _patterns(bits: int, seed: int) -> list[int]:
    """Edges among random patterns."""
    low, high = (x.tolist() for x in random_words(2 * _COUNT, seed).view(2, _COUNT))
    values = [(x & _M32) | (y & _M32) << 32 for x, y in zip(low, high)]
    for i, edge in enumerate(_EDGES):
        values[3 * i] = edge if i % 2 == 0 or bits == 32 else edge << 31
    return [v & ((1 << bits) - 1) for v in values]


def _pack(values: list[int], bits: int) -> torch.Tensor:
    return torch.tensor(
        [_signed(v & ((1 << bits) - 1), bits) for v in values],
        dtype={16: torch.int16, 32: torch.int32, 64: torch.int64}[bits],
    )


def _register(bits: int, n: int) -> str:
    return {16: f"%h{n}", 32: f"%r{n + 10}", 64: f"%rd{n + 20}"}[bits]


def _alone(
    name: str, opcode: str, kind: str, bits: int, old: list[int], x: list[int], fresh: list[int]
) -> list[Case]:
    """Thread t works on its own word: `out` gets the new words, then the old ones that atom returned."""
    size, a, d = bits // 8, _register(bits, 1), _register(bits, 2)
    at = f"mul.wide.u32 %rd7, %r2, {size}; add.s64 %rd8, %rd1, %rd7; add.s64 %rd9, %rd2, %rd7;"
    load = f"{at} ld.global.b{bits} {a}, [%rd8];"
    after = f"st.global.b{bits} [%rd9+{_COUNT * size}], {d};"
    start = torch.cat([_pack(old, bits), torch.zeros_like(_pack(old, bits))])
    both = torch.cat([_pack(fresh, bits), _pack(old, bits)])
    no_return = torch.cat([_pack(fresh, bits), torch.zeros_like(_pack(old, bits))])
    source = words(_pack(x, bits))
    shared_at = (
        f"mov.u32 %r30, tile; mad.lo.u32 %r30, %r2, {size}, %r30; ld.global.b{bits} {d}, [%rd9];"
    )
    shared_at += f"st.shared.b{bits} [%r30], {d};"
    back = f"ld.shared.b{bits} {a}, [%r30]; st.global.b{bits} [%rd9], {a};"
    tile = f".shared .align 16 .b8 tile[{size * _COUNT}];\n"
    word = opcode.format(space="global", kind=kind)
    atom, red = f"{load} atom.{word} {d}, [%rd9], {a}; {after}", f"{load} red.{word} [%rd9], {a};"
    shared = f"{load} {shared_at} atom.{opcode.format(space='shared', kind=kind)} {d}, [%r30], {a}; {after} {back}"
    cases = [Case(FAMILY, f"atom_{name}", atom, words(both), source, words(start))]
    if not name.startswith("exch"):
        cases.append(Case(FAMILY, f"red_{name}", red, words(no_return), source, words(start)))
    cases.append(
        Case(FAMILY, f"atom_shared_{name}", shared, words(both), source, words(start), shared=tile)
    )
    return cases


def _integers() -> list[Case]:
    cases = []
    for operation, (kinds, formula) in _INTEGER.items():
        for kind in kinds:
            bits = int(kind[1:])
            old, x = _patterns(bits, 2), _patterns(bits, 3)[::-1]
            old[:3] = x[:3]  # equal values, too
            fresh = [formula(o, v, bits) for o, v in zip(old, x)]
            base = operation.removesuffix("_s")
            cases += _alone(
                f"{base}_{kind}", f"{{space}}.{base}.{{kind}}", kind, bits, old, x, fresh
            )
    for kind in ("relaxed.cta", "acquire.gpu", "release.cluster", "acq_rel.sys", "relaxed.gpu"):
        old, x = _patterns(32, 4), _patterns(32, 5)
        fresh = [o + v for o, v in zip(old, x)]
        name = f"add_{kind.replace('.', '_')}"
        cases.append(_alone(name, f"{kind}.{{space}}.add.{{kind}}", "u32", 32, old, x, fresh)[0])
    return cases


def _compare_and_swap() -> list[Case]:
    cases = []
    for bits in (16, 32, 64):
        size, a, b, d = bits // 8, _register(bits, 1), _register(bits, 2), _register(bits, 3)
        old, fresh = _patterns(bits, 6), _patterns(bits, 7)
        expected_old = [o if i % 3 else o ^ 1 for i, o in enumerate(old)]
        result = [f if i % 3 else o for i, (o, f) in enumerate(zip(old, fresh))]
        at = f"mul.wide.u32 %rd7, %r2, {size}; add.s64 %rd8, %rd1, %rd7; add.s64 %rd9, %rd2, %rd7;"
        body = (
            f"{at} ld.global.b{bits} {a}, [%rd8]; ld.global.b{bits} {b}, [%rd8+{_COUNT * size}];"
            f"atom.global.cas.b{bits} {d}, [%rd9], {a}, {b}; st.global.b{bits} [%rd9+{_COUNT * size}], {d};"
        )
        source = words(torch.cat([_pack(expected_old, bits), _pack(fresh, bits)]))
        start = words(torch.cat([_pack(old, bits), torch.zeros_like(_pack(old, bits))]))
        expected = words(torch.cat([_pack(result, bits), _pack(old, bits)]))
        cases.append(Case(FAMILY, f"atom_cas_b{bits}", body, expected, source, start))
    return cases


_FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}


def _float_values(kind: str, seed: int, count: int = _COUNT) -> torch.Tensor:
    """Values whose sums round, in the type of `kind`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    scale = 2.0 ** torch.randint(-6, 7, (count,), generator=generator).double()
    return (x * scale).to(_FLOATS[kind])


def _sum(kind: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One rounding to nearest even: 16-bit sums are exact in double."""
    return (a.double() + b.double()).to(_FLOATS[kind]) if kind != "f64" else a + b


def _floats() -> list[Case]:
    cases = []
    for kind, dtype in _FLOATS.items():
        bits = 8 * dtype.itemsize
        view = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
        old, x = _float_values(kind, 10), _float_values(kind, 11)
        if kind in ("f32", "f64"):
            old[:6] = torch.tensor([float("inf"), 0.0, -0.0, 1e38, -3.0, 1.0], dtype=dtype)
            x[:6] = torch.tensor([1.0, -0.0, -0.0, 1e38, 3.0, 2.0**-24], dtype=dtype)
        fresh = _sum(kind, old, x)
        noftz = ".noftz" if bits == 16 else ""
        lists = [[v & ((1 << bits) - 1) for v in t.view(view).tolist()] for t in (old, x, fresh)]
        cases += _alone(f"add_{kind}", f"{{space}}.add{noftz}.{{kind}}", kind, bits, *lists)
        if bits == 16:
            packed = [words(t) for t in (_float_values(kind, n, 2 * _COUNT) for n in (12, 13))]
            both = words(_sum(kind, packed[0].view(dtype), packed[1].view(dtype)))
            lists = [[v & _M32 for v in t.tolist()] for t in (*packed, both)]
            cases += _alone(f"add_{kind}x2", "{space}.add.noftz.{kind}", f"{kind}x2", 32, *lists)
    # Subnormal values: global memory flushes them, shared memory keeps them.
    old, x = (
        [0x00000001, 0x80000003, 0x00400000, 0x00800000] * 8,
        [0x00000002, 0x00000001, 0x00400000, 0x80000001] * 8,
    )
    flushed, kept = [], []
    for a, b in zip(old, x):
        pair = torch.tensor([_signed(a, 32), _signed(b, 32)], dtype=torch.int32).view(torch.float32)
        kept.append(int(pair.sum().view(torch.int32)) & _M32)
        flat = torch.where(pair.abs() < 2.0**-126, torch.zeros_like(pair).copysign(pair), pair)
        flushed.append(int(flat.sum().view(torch.int32)) & _M32)
    atom, red, _ = _alone("add_f32_subnormal", "{space}.add.{kind}", "f32", 32, old, x, flushed)
    *_, shared = _alone("add_f32_subnormal", "{space}.add.{kind}", "f32", 32, old, x, kept)
    return [*cases, atom, red, shared]


def _vectors() -> list[Case]:
    """atom and red over 2 to 8 neighbouring values in global memory."""
    cases = []
    shapes = [("f32", 2, ""), ("f32", 4, "")]
    shapes += [(kind, n, ".noftz") for kind in ("f16", "bf16") for n in (2, 4, 8)]
    shapes += [(f"{kind}x2", n, ".noftz") for kind in ("f16", "bf16") for n in (2, 4)]
    for kind, count, noftz in shapes:
        element = kind.removesuffix("x2")
        dtype, bits = _FLOATS[element], 32 if kind != element else 8 * _FLOATS[element].itemsize
        halves = bits // (8 * dtype.itemsize) * count
        old, x = (_float_values(element, n, halves * _COUNT) for n in (14, 15))
        combine = {"add": lambda a, b, e=element: _sum(e, a, b)}
        if element != "f32":
            combine |= {"min": torch.minimum, "max": torch.maximum}
        size = bits // 8 * count
        a, d = ([_register(bits, k + i) for i in range(count)] for k in (1, 11))
        at = f"mul.wide.u32 %rd7, %r2, {size}; add.s64 %rd8, %rd1, %rd7; add.s64 %rd9, %rd2, %rd7;"
        load = at + "".join(
            f"ld.global.b{bits} {r}, [%rd8+{i * bits // 8}];" for i, r in enumerate(a)
        )
        save = "".join(
            f"st.global.b{bits} [%rd9+{_COUNT * size + i * bits // 8}], {r};"
            for i, r in enumerate(d)
        )
        for operation, formula in combine.items():
            fresh = formula(old, x)
            word = f"global.{operation}{noftz}.v{count}.{kind}"
            body = f"{load} atom.{word} {{{', '.join(d)}}}, [%rd9], {{{', '.join(a)}}}; {save}"
            start = words(torch.cat([old, torch.zeros_like(old)]))
            name = f"v{count}_{operation}_{kind}"
            expected = words(torch.cat([fresh, old]))
            cases.append(Case(FAMILY, f"atom_{name}", body, expected, words(x), start))
            body = f"{load} red.{word} [%rd9], {{{', '.join(a)}}};"
            expected = words(torch.cat([fresh, torch.zeros_like(old)]))
            cases.append(Case(FAMILY, f"red_{name}", body, expected, words(x), start))
    return cases


def _contended() -> list[Case]:
    """Eight CTAs add to one word: order does not matter for what is left."""
    cases = []
    threads = 8 * 64
    x = random_words(threads, 20)
    total = int(x.to(torch.int64).sum()) & _M32
    one = torch.tensor([_signed(total, 32), 0, 0, 0], dtype=torch.int32)
    zero = torch.zeros(4, dtype=torch.int32)
    load = "ld.global.b32 %r10, [%rd4];"
    grid = {"grid": 8, "block": 64}
    cases.append(
        Case(FAMILY, "all_add", f"{load} red.global.add.u32 [%rd2], %r10;", one, x, zero, **grid)
    )
    top = torch.tensor([int(x.max()), 0, 0, 0], dtype=torch.int32)
    low = torch.tensor([-(2**31), 0, 0, 0], dtype=torch.int32)
    cases.append(
        Case(FAMILY, "all_max", f"{load} red.global.max.s32 [%rd2], %r10;", top, x, low, **grid)
    )
    loop = (
        "L: ld.relaxed.gpu.global.b32 %r11, [%rd2]; add.u32 %r12, %r11, 3;"
        "atom.global.cas.b32 %r13, [%rd2], %r11, %r12; setp.ne.u32 %p1, %r13, %r11; @%p1 bra L;"
    )
    cases.append(
        Case(
            FAMILY,
            "all_cas",
            loop,
            torch.tensor([3 * threads, 0, 0, 0], dtype=torch.int32),
            x,
            zero,
            **grid,
        )
    )
    ticket = "atom.global.inc.u32 %r11, [%rd2], 1023; mul.wide.u32 %rd7, %r11, 4; add.s64 %rd7, %rd7, %rd2;"
    ticket += "st.global.b32 [%rd7+16], 7;"
    taken = torch.full((threads + 4,), 7, dtype=torch.int32)
    taken[:4] = torch.tensor([threads, 0, 0, 0])
    cases.append(Case(FAMILY, "tickets", ticket, taken, x, torch.zeros_like(taken), **grid))
    histogram = (
        "mov.u32 %r30, tile; mad.lo.u32 %r31, %r2, 4, %r30; st.shared.b32 [%r31], 0; bar.sync 0;"
        "and.b32 %r11, %r10, 63;"
        "mad.lo.u32 %r32, %r11, 4, %r30; red.shared.add.u32 [%r32], 1; bar.sync 0; ld.shared.b32 %r12, [%r31];"
        "mul.wide.u32 %rd7, %r2, 4; add.s64 %rd7, %rd7, %rd2; red.global.add.u32 [%rd7], %r12;"
    )
    bins = torch.bincount(x & 63, minlength=64).to(torch.int32)
    tile = ".shared .align 16 .b8 tile[256];\n"
    cases.append(
        Case(
            FAMILY,
            "histogram",
            load + histogram,
            bins,
            x,
            torch.zeros_like(bins),
            shared=tile,
            **grid,
        )
    )
    return cases


CASES = [*_integers(), *_compare_and_swap(), *_floats(), *_vectors(), *_contended()]
