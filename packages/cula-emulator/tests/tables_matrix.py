"""Matrix instructions as data: PTX, inputs, an oracle in float64. No test framework and no emulator is imported here.

`CASES` maps a name to a `Case`. To run one, on the emulator or on a GPU (sm_90a):

    module = EmulatedModule(module_text({case.name: case}))       # or ptxas; many cases fit into one module
    problem = case.problem("exact", seed=0)                       # or "random"
    out = torch.full((case.out_words,), -1, dtype=torch.int32)
    module.launch(case.name, (1,), (case.threads,), (problem.words, out, 0))
    error = problem.mismatch(out)                                 # None, or what differs

"exact" inputs are small integers (and extreme ones where integers saturate): every product and sum is exact in any
order, so the result must agree bit for bit. "random" inputs are compared to `rounding` times |A| |B| + |C|.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
_PROLOGUE = """
    .reg .pred %p<16>; .reg .b32 %r<96>; .reg .b64 %rd<32>;
    ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r2, %tid.x;
"""
FORMATS = {  # PTX name -> (torch type of the storage, explicit mantissa bits)
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8,
}  # fmt: skip
ACCUMULATORS = {"f32": torch.float32, "f16": torch.float16, "s32": torch.int32}
# What one instruction may lose, relative to the sum of the absolute products. The tensor core aligns the products of
# one instruction to the largest and cuts; for 8-bit floats on sm_90 it keeps about 13 bits.
ROUNDING = {"f32": 2.0**-18, "f16": 2.0**-10, "s32": 0.0}
TENSOR_CORE_ROUNDING = {"f32": 2.0**-18, "f32.fp8": 2.0**-11, "f16": 2.0**-9, "s32": 0.0}


@dataclass(frozen=True)
class Problem:
    """Input words (int32), and how to read and judge the output words."""

    words: torch.Tensor
    decode: Callable[[torch.Tensor], torch.Tensor]  # output words -> values, or raw words for moves
    expected: torch.Tensor  # float64 or int64
    allowed: torch.Tensor  # per element; zeros: bit for bit

    def mismatch(self, out: torch.Tensor) -> str | None:
        got = self.decode(out)
        expected = self.expected.to(got.dtype) if not self.allowed.any() else self.expected
        wrong = ~((got.double() - expected.double()).abs() <= self.allowed)
        if not wrong.any():
            return None
        first = tuple(wrong.nonzero()[0].tolist())
        return f"{int(wrong.sum())} of {wrong.numel()} differ; at {first}: {got[first]} instead of {expected[first]}"


@dataclass(frozen=True)
class Case:
    name: str
    body: str  # %rd1 input, %rd2 output, %r2 thread; declares what else it uses
    out_words: int
    problem: Callable[[str, int], Problem]  # ("exact" | "random", seed)
    shared: int = 0  # bytes of the static array `tile`
    threads: int = 32
    kinds: tuple[str, ...] = ("exact", "random")


def module_text(cases: dict[str, Case], header: str = HEADER) -> str:
    """PTX of a module with one entry (in, out, n) per case."""
    parameters = ".param .u64 in, .param .u64 out, .param .u32 n"
    entries = []
    for name, case in cases.items():
        tile = f".shared .align 1024 .b8 tile[{case.shared}];\n" if case.shared else ""
        lines = case.body.replace(";", ";\n")
        entries.append(
            f".visible .entry {name}({parameters})\n{{{_PROLOGUE}{tile}{lines}\n    ret;\n}}"
        )
    return header + "\n".join(entries)


# ---- numbers
def raw(values: torch.Tensor, name: str) -> torch.Tensor:
    """Values in a format, as bytes with one more dimension."""
    stored = values.to(FORMATS[name] if name in FORMATS else ACCUMULATORS[name]).contiguous()
    return stored.view(torch.uint8).view(*values.shape, stored.element_size())


def width(name: str) -> int:
    return FORMATS[name].itemsize


def operand(kind: str, name: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Values (float64) that the format holds exactly."""
    if name in ("s8", "u8"):
        low, high = (0, 256) if name == "u8" else (-128, 128)
        values = torch.randint(low, high, shape, generator=g)
        extreme = torch.randint(0, 4, shape, generator=g) == 0
        return torch.where(
            extreme, torch.full_like(values, low if name == "s8" else high - 1), values
        ).double()
    if kind == "exact":
        return torch.randint(-3, 4, shape, generator=g).double()
    values = torch.randn(shape, generator=g)
    if name == "tf32":
        values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return values.to(FORMATS[name]).double()


def accumulator(kind: str, name: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    if name == "s32":
        ends = torch.tensor([-(2**31), 2**31 - 1, 0, 12345])
        return ends[torch.randint(0, 4, shape, generator=g)].double()
    if kind == "exact":
        return torch.randint(-8, 9, shape, generator=g).double()
    return torch.randn(shape, generator=g).to(ACCUMULATORS[name]).double()


def finish(total: torch.Tensor, name: str, saturate: bool) -> torch.Tensor:
    """The exact sum as the accumulator holds it."""
    if name != "s32":
        return total
    if saturate:
        return total.clamp(-(2**31), 2**31 - 1).long()
    return (total.long() + 2**31) % 2**32 - 2**31


def allowed(kind: str, name: str, scale: torch.Tensor, rounding: dict[str, float]) -> torch.Tensor:
    return (
        torch.zeros_like(scale)
        if kind == "exact" or name == "s32"
        else rounding[name] * scale + 1e-30
    )


def words_of(*pieces: torch.Tensor) -> torch.Tensor:
    return torch.cat([p.contiguous().view(-1) for p in pieces]).view(torch.int32)


def vector(names: list[str]) -> str:
    return "{" + ", ".join(names) + "}"


def at_thread(register: str, base: str, bytes_per_thread: int) -> str:
    """register = base + thread * bytes_per_thread"""
    return (
        f"mul.wide.u32 {register}, %r2, {bytes_per_thread}; add.s64 {register}, {register}, {base};"
    )


# ---- mma.sync.m16n8k*: fragments as PTX ISA draws them; e elements per register, g = lane / 4, t = lane % 4
def fragment_a(a: torch.Tensor, name: str) -> torch.Tensor:
    """A [16, k] -> bytes [32 lanes, registers, 4]."""
    e, k = 4 // width(name), a.shape[1]
    bytes_ = raw(a, name)
    count = max(1, k // (4 * e)) * 2
    out = torch.zeros(32, count, 4, dtype=torch.uint8)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for r in range(count):
            first = e * t + 4 * e * (r // 2)
            out[lane, r] = bytes_[g + 8 * (r % 2), first : first + e].reshape(4)
    return out


def fragment_b(b: torch.Tensor, name: str) -> torch.Tensor:
    """B [k, 8] -> bytes [32 lanes, registers, 4]."""
    return fragment_a(torch.cat([b.t(), b.t()]), name)[:, 0::2]


def _places_c(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of element i of each lane, [32, n / 2]."""
    lane, i = torch.arange(32).view(-1, 1), torch.arange(n // 2)
    return lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2


def fragment_c(c: torch.Tensor, name: str) -> torch.Tensor:
    """C [16, n] -> bytes [32 lanes, registers, 4]."""
    return raw(c, name)[_places_c(c.shape[1])].reshape(32, -1, 4)


def unfragment_c(words: torch.Tensor, n: int, name: str) -> torch.Tensor:
    """[32 lanes, registers] -> [16, n]"""
    out = torch.empty(16, n, dtype=ACCUMULATORS[name])
    out[_places_c(n)] = words.contiguous().view(ACCUMULATORS[name]).view(32, n // 2)
    return out


def mma_case(k: int, a: str, b: str, acc: str, saturate: bool = False) -> Case:
    e = 4 // width(a)
    counts = (max(1, k // (4 * e)) * 2, max(1, k // (4 * e)), 2 if acc == "f16" else 4)
    names, start = [], 0
    for count in (*counts, counts[2]):
        names.append([f"%m{start + i}" for i in range(count)])
        start += count
    total = sum(counts)
    loads = " ".join(f"ld.global.b32 %m{i}, [%rd6+{4 * i}];" for i in range(total))
    stores = " ".join(f"st.global.b32 [%rd7+{4 * i}], {r};" for i, r in enumerate(names[3]))
    suffix = f"m16n8k{k}.row.col{'.satfinite' if saturate else ''}.{acc}.{a}.{b}.{acc}"
    operands = ", ".join(map(vector, (names[3], names[0], names[1], names[2])))
    body = (
        f".reg .b32 %m<{start}>; {at_thread('%rd6', '%rd1', 4 * total)} {at_thread('%rd7', '%rd2', 4 * counts[2])}"
        f"{loads} mma.sync.aligned.{suffix} {operands}; {stores}"
    )

    def problem(kind: str, seed: int) -> Problem:
        g = torch.Generator().manual_seed(seed)
        left, right = operand(kind, a, (16, k), g), operand(kind, b, (k, 8), g)
        c = accumulator(kind, acc, (16, 8), g)
        lanes = [fragment_a(left, a), fragment_b(right, b), fragment_c(c, acc)]
        scale = left.abs() @ right.abs() + c.abs()
        return Problem(
            words_of(torch.cat(lanes, 1)),
            lambda out: unfragment_c(out.view(32, -1), 8, acc),
            finish(left @ right + c, acc, saturate),
            allowed(kind, acc, scale, ROUNDING),
        )

    name = f"mma_k{k}_{a}_{b}_{acc}{'_satfinite' if saturate else ''}"
    return Case(
        name,
        body,
        32 * counts[2],
        problem,
        kinds=("exact",) if acc == "s32" else ("exact", "random"),
    )


def _mma_cases() -> list[Case]:
    cases = [mma_case(k, "f16", "f16", acc) for k in (8, 16) for acc in ("f32", "f16")]
    cases += [mma_case(k, "bf16", "bf16", "f32") for k in (8, 16)]
    cases += [mma_case(k, "tf32", "tf32", "f32") for k in (4, 8)]
    for k in (16, 32):
        cases += [
            mma_case(k, a, b, acc)
            for a in ("e4m3", "e5m2")
            for b in ("e4m3", "e5m2")
            for acc in ("f32", "f16")
        ]
        cases += [
            mma_case(k, a, b, "s32", sat)
            for a in ("s8", "u8")
            for b in ("s8", "u8")
            for sat in (False, True)
        ]
    return cases


# ---- ldmatrix, stmatrix, movmatrix: 16-byte rows of the tile, named in a scrambled order
def _scrambled(lane: int) -> int:
    return (5 * lane + 3) % 32


_ROW_ADDRESS = (
    "mov.u32 %r12, tile; shl.b32 %r11, %r2, 4; add.u32 %r11, %r11, %r12;"
    "mad.lo.u32 %r13, %r2, 5, 3; and.b32 %r13, %r13, 31; shl.b32 %r13, %r13, 4; add.u32 %r13, %r13, %r12;"
)


def _halves(words: torch.Tensor) -> torch.Tensor:
    return words.contiguous().view(torch.int16)


def _matrices(rows: torch.Tensor, transpose: bool) -> torch.Tensor:
    """[count, 8, 8] halves -> [32 lanes, count, 2 halves]: lane l holds row l / 4, columns 2 (l % 4) and the next."""
    rows = rows.transpose(1, 2) if transpose else rows
    return rows.reshape(-1, 32, 2).transpose(0, 1)


def move_case(instruction: str, count: int, transpose: bool) -> Case:
    registers = vector([f"%r{20 + i}" for i in range(count)])
    suffix = f"x{count}{'.trans' if transpose else ''}.shared.b16"
    load = instruction == "ldmatrix"
    if load:
        move = f"ldmatrix.sync.aligned.m8n8.{suffix} {registers}, [%r13];" + " ".join(
            f"st.global.b32 [%rd7+{4 * i}], %r{20 + i};" for i in range(count)
        )
        fill = "ld.global.v4.b32 {%r30, %r31, %r32, %r33}, [%rd6]; st.shared.v4.b32 [%r11], {%r30, %r31, %r32, %r33};"
        body = f"{at_thread('%rd6', '%rd1', 16)} {at_thread('%rd7', '%rd2', 4 * count)} {_ROW_ADDRESS} {fill}"
        body += f"bar.warp.sync -1; {move}"
    else:
        loads = " ".join(f"ld.global.b32 %r{20 + i}, [%rd6+{4 * i}];" for i in range(count))
        body = (
            f"{at_thread('%rd6', '%rd1', 4 * count)} {at_thread('%rd7', '%rd2', 16)} {_ROW_ADDRESS} {loads}"
            "mov.b32 %r30, 0; st.shared.v4.b32 [%r11], {%r30, %r30, %r30, %r30}; bar.warp.sync -1;"
            f"stmatrix.sync.aligned.m8n8.{suffix} [%r13], {registers}; bar.warp.sync -1;"
            "ld.shared.v4.b32 {%r30, %r31, %r32, %r33}, [%r11]; st.global.v4.b32 [%rd7], {%r30, %r31, %r32, %r33};"
        )

    def problem(kind: str, seed: int) -> Problem:
        g = torch.Generator().manual_seed(seed)
        order = torch.tensor([_scrambled(lane) for lane in range(8 * count)])
        if load:
            tile = torch.randint(-(2**15), 2**15, (32, 8), generator=g).short()
            words, expected = tile, _matrices(tile[order].view(count, 8, 8), transpose).long()
        else:
            matrices = torch.randint(-(2**15), 2**15, (count, 8, 8), generator=g).short()
            words = _matrices(matrices, transpose)
            tile = torch.zeros(32, 8, dtype=torch.int16)
            tile[order] = matrices.view(-1, 8)
            expected = tile.long()
        shape = expected.shape
        return Problem(
            words_of(words), lambda out: _halves(out).view(shape), expected, torch.zeros(shape)
        )

    name = f"{instruction}_x{count}{'_trans' if transpose else ''}"
    return Case(name, body, 32 * (count if load else 4), problem, shared=512, kinds=("exact",))


def _movmatrix() -> Case:
    body = (
        f"{at_thread('%rd6', '%rd1', 4)} {at_thread('%rd7', '%rd2', 4)} ld.global.b32 %r20, [%rd6];"
        "movmatrix.sync.aligned.m8n8.trans.b16 %r21, %r20; st.global.b32 [%rd7], %r21;"
    )

    def problem(kind: str, seed: int) -> Problem:
        x = torch.randint(
            -(2**15), 2**15, (8, 8), generator=torch.Generator().manual_seed(seed)
        ).short()
        return Problem(
            words_of(x), lambda out: _halves(out).view(8, 8), x.t().long(), torch.zeros(8, 8)
        )

    return Case("movmatrix", body, 32, problem, kinds=("exact",))


MMA = {c.name: c for c in _mma_cases()}
MOVES = {
    c.name: c
    for c in [
        move_case(i, n, t)
        for i in ("ldmatrix", "stmatrix")
        for n in (1, 2, 4)
        for t in (False, True)
    ]
} | {"movmatrix": _movmatrix()}
