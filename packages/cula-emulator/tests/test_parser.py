"""The parser on what compilers write, and on text that is wrong."""

import time

import pytest
import torch

import cula_emulator as emulator
from cula_emulator.ptx import PtxSyntaxError, ir, parse
from cula_emulator.ptx.text import integer, literal, literal_bits

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"


def kernel(
    body: str,
    registers: str = ".reg .pred %p<4>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>;",
):
    return parse(
        f"{HEAD}.visible .entry k(.param .u64 a)\n{{\n{registers}\n{body}\nret;\n}}\n"
    ).kernels[0]


def instructions(body: str) -> list[ir.Instruction]:
    return [i for i in kernel(body).body if isinstance(i, ir.Instruction)][:-1]


NVCC = """
// comment with { braces } and ; semicolons
/* a block
   comment */
.version 8.4
.target sm_90a, debug
.address_size 64
.file 1 "/a//b/*c.cu"
.extern .func  (.param .b32 func_retval0) vprintf (.param .b64 vprintf_param_0, .param .b64 vprintf_param_1);
.func  (.param .b32 func_retval0) helper(.param .b32 helper_param_0)
{
  .reg .b32 %r<3>;
  { .reg .b32 %t; mov.b32 %t, 1; }
  ret;
}
.weak .func nothing();
.extern .shared .align 16 .b8 dynamic[];
.shared .align 8 .u64 bars[2][3];
.visible .global .align 4 .b8 table[8] = {1, 0x02, 0377, 0b11, -1};
.global .align 4 .f32 floats[3] = {0f3F800000, -2.5, 3};
.global .v2 .u32 pair = {7, 8};
.const .align 2 .u16 one = 515;
.global .u32 a, b;
.global .align 1 .b8 $str[3] = {72, 105, 0};
.pragma "nounroll";
.visible .entry k(
  .param .u64 .ptr .global .align 16 k_param_0,
  .param .align 64 .b8 k_param_1[128],
  .param .u32 k_param_2
)
.maxntid 128, 1, 1
.minnctapersm 2
.explicitcluster
.reqnctapercluster 2, 1
.maxclusterrank 8
.pragma "used_bytes_mask 0xff";
{
  .reg .pred %p<3>;
  .reg .b16 %rs<5>;
  .reg .b32 %r<9>, %q;
  .reg .b64 %rd<4>;
  .loc 1 5 3
  .loc 1 6 1, function_name $L__info_string0, inlined_at 1 10 3
  .local .align 8 .b8 __local_depot0[16];
  .pragma "nounroll";
  mov.u32 %r1,
    %tid.x;
  bra.uni $L_later;
$L_back:
  { .param .b32 param0; st.param.b32 [param0+0], %r1; }
  {
    .reg .b32 %r1;
$L_back:
    mov.b32 %r1, -7;
    @ %p1 bra $L_back;
  }
  @!%p1 bra $L_end;
$L_later: @%p2 bra $L_back;
  ld.param.v2.u32 {%r2, %r3}, [k_param_1+8];
  mov.b32 %q, {%rs1, %rs2};
  ld.global.u32 %r4, [%rd1+-16];
  ld.shared.u32 %r4, [bars+0x10];
$L_end:
  ret;
}
.section .debug_abbrev
{
.b8 1
$L__b: .b8 { }
}
.section .debug_loc { }
"""


def test_what_nvcc_writes():
    module = parse(NVCC)
    assert module.target == "sm_90a" and [k.name for k in module.kernels] == ["k"]
    variables = {v.name: v for v in module.variables}
    assert variables["dynamic"].size == 0 and variables["bars"].size == 48
    assert variables["table"].data == bytes([1, 2, 255, 3, 255])
    assert variables["floats"].data == torch.tensor([1.0, -2.5, 3.0]).numpy().tobytes()
    assert (variables["pair"].size, variables["pair"].data[4]) == (8, 8)
    assert variables["one"].data == b"\x03\x02" and {"a", "b", "$str"} <= set(variables)
    k = module.kernels[0]
    assert k.cluster == (2, 1, 1) and [p.size for p in k.parameters] == [8, 128, 4]
    text = NVCC.split("\n")
    for i in k.body:
        if isinstance(i, ir.Instruction):
            assert i.opcode in text[i.line - 1]


def test_labels_and_registers_belong_to_their_block():
    body = kernel(
        "$A: mov.b32 %r1, 1; { .reg .b32 %r1; $A: mov.b32 %r1, 2; bra $A; } bra $A; bra $B; $B:"
    ).body
    outer, inner = (b.name for b in body if isinstance(b, ir.Label) and "A" in b.name)
    branches = [b.operands for b in body if isinstance(b, ir.Instruction) and b.opcode == "bra"]
    assert [b[0].name for b in branches[:2]] == [inner, outer]
    assert [b[1].text for b in branches] == ["1", "1", "0"]
    first, second = (
        b.operands[0].name for b in body if isinstance(b, ir.Instruction) and b.opcode == "mov.b32"
    )
    assert first != second


def test_operands():
    (i,) = instructions("@!%p1 shfl.sync.down.b32 %r1|%p2, %r2, -3, 0x1fU, 0b11;")
    assert isinstance(i.guard, ir.Not) and isinstance(i.operands[0], ir.Pair)
    assert [o.text for o in i.operands[2:]] == ["-3", "31", "3"]
    (i,) = instructions(
        "cp.async.bulk.tensor.2d.shared::cluster.global [%r1], [%rd1, {%r2, %r3}], [%r4];"
    )
    assert isinstance(i.operands[1], ir.TensorAddress) and len(i.operands[1].coordinates) == 2
    (i,) = instructions("st.global.v2.f32 [%rd1 + 8], {%f1, 0f3F800000};")
    assert i.operands[0].offset == 8 and i.operands[1].items[1].text == "0f3f800000"
    (i,) = instructions("mov.b32 {_, %r1}, %tid.x;")
    assert i.operands == (
        ir.Vector((ir.Special("_"), i.operands[0].items[1])),
        ir.Special("%tid.x"),
    )


@pytest.mark.parametrize(
    "text, value",
    [
        ("10", 10),
        ("-5", -5),
        ("017", 15),
        ("0x1F", 31),
        ("0XabU", 171),
        ("0b101", 5),
        ("7U", 7),
        ("0", 0),
        ("08", None),
        ("1a", None),
    ],
)
def test_integer_literals(text, value):
    assert integer(text) == value


@pytest.mark.parametrize(
    "text, kind, bits",
    [
        ("0F3f800000", "f32", 0x3F800000),
        ("0d3FF0000000000000", "f32", 0x3F800000),
        ("0f3F800000", "f64", 0x3FF0000000000000),
        ("1.5", "f32", 0x3FC00000),
        ("-1e3", "f64", 0xC08F400000000000),
        (".25", "f32", 0x3E800000),
        ("1e300", "f32", 0x7F800000),
        ("-1", "s16", 0xFFFF),
        ("0f3F800000", "b32", 0x3F800000),
    ],
)
def test_literals_as_bits(text, kind, bits):
    assert literal_bits(literal(text), kind, int(kind[1:])) == bits


WRONG = {
    "not PTX": ("hello world\nthis is no PTX", 1, "not PTX"),
    "empty": ("", 1, "not PTX"),
    "truncated": (
        HEAD + ".visible .entry k()\n{\n  .reg .b32 %r<2>;\n  mov.b32 %r1, 1;\n",
        5,
        "ends inside kernel k",
    ),
    "no semicolon at the end": (
        HEAD + ".entry k()\n{\n  mov.b32 %r1, 1\n}\n",
        6,
        "the text ends before the ';'",
    ),
    "missing semicolon": (
        HEAD + ".entry k()\n{\n .reg .b32 %r<2>;\n  mov.b32 %r1, 1\n mov.b32 %r0, 2;\n}\n",
        7,
        "mov.b32",
    ),
    "register": (
        HEAD + ".entry k()\n{\n  .reg .b32 %r<2>;\n  mov.b32 %r1, %r2;\n}\n",
        7,
        "unknown register '%r2'",
    ),
    "label": (HEAD + ".entry k()\n{\n\n  bra $L;\n}\n", 7, r"unknown label '\$L'"),
    "label in an inner block": (
        HEAD + ".entry k()\n{\n  { $L: ret; }\n  bra $L;\n}\n",
        7,
        r"unknown label '\$L'",
    ),
    "two labels": (HEAD + ".entry k()\n{\n L: ret;\n L: ret;\n}\n", 7, "defined twice"),
    "guard": (HEAD + ".entry k()\n{\n @%p7 ret;\n}\n", 6, "unknown register '%p7'"),
    "branch table": (HEAD + ".entry k()\n{\n .reg .b32 r; brx.idx r, T;\n}\n", 6, "branchtargets"),
    "directive": (HEAD + ".nonsense 5;\n", 4, "unknown directive"),
    "directive in a kernel": (HEAD + ".entry k()\n{\n .nonsense 5;\n}\n", 6, "unknown directive"),
    "instruction": (HEAD + ".entry k()\n{\n 5 + 5;\n}\n", 6, "not an instruction"),
    "register type": (HEAD + ".entry k()\n{\n .reg .v4 .f32 %v;\n}\n", 6, "unknown type"),
    "bracket": (HEAD + ".entry k()\n{\n .reg .b64 r; ld.global.b64 r, [r;\n}\n", 6, "operand"),
    "address": (HEAD + ".entry k()\n{\n .reg .b64 r; ld.global.b64 r, [r+x];\n}\n", 6, "address"),
    "initial value": (HEAD + ".global .u64 p = generic(q);\n", 4, "initial value"),
    "function": (HEAD + ".func f()\n{\n", 4, "never closed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_text_is_an_error_with_its_line(name):
    text, line, message = WRONG[name]
    with pytest.raises(PtxSyntaxError, match=f"PTX line {line}: .*{message}") as caught:
        parse(text)
    assert caught.value.line == line
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, emulator.EmulatorError)


def test_every_prefix_of_a_module_parses_or_is_a_syntax_error():
    for end in range(0, len(NVCC), 7):
        try:
            parse(NVCC[:end])
        except PtxSyntaxError as error:
            assert 1 <= error.line <= NVCC.count("\n") + 1


def test_ten_thousand_lines_parse_in_two_seconds():
    lines = []
    for n in range(2500):
        lines += [
            f"add.f32 %f{n % 8}, %f{(n + 1) % 8}, 0f3F800000;",
            f"@%p{n % 4} bra $L_{n};",
            "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+16];",
            f"$L_{n}: .loc 1 5 3, function_name $L__info_string0, inlined_at 1 10 3",
        ]
    # Of the thread alone, the best of three: other work on the machine says nothing of the parser.
    taken = []
    for _ in range(3):
        start = time.thread_time()
        assert len(kernel("\n".join(lines)).body) == 4 * 2500 + 1
        taken.append(time.thread_time() - start)
    assert min(taken) < 2
