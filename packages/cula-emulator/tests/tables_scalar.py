"""Every scalar instruction and warp collective as data: one Case per variant, with an oracle in exact arithmetic.

A test, on the emulator or on a GPU, does for each case of CASES:

    text = HEADER + "\\n".join(entry(c) for c in CASES)     one module for sm_90a; an entry (in, out) per case
    inputs = samples(case)                                 256 tuples of bit patterns, one per thread
    in_buffer = pack(case, inputs)                         `case.words_in` 32-bit words per thread, low word first
    launch case.name with 8 blocks of 32 threads; out_buffer has `case.words_out` zeroed words per thread
    assert not mismatches(case, inputs, out_buffer)        one line per wrong thread

Threads of warp cases are lanes: block k holds inputs[32 * k : 32 * k + 32]. 8- and 16-bit values are in the low bits of
a word, predicates are 0 or 1; where one value has 64 bits, all take two words. `case.kind` is
None where every bit must agree, or an Approximate.
"""

from scalar_rows import HEADER, Approximate, Case, entry, expected, mismatches, pack, samples
from tables_conversion import CASES as CONVERSION
from tables_floating import CASES as FLOATING
from tables_integer import CASES as INTEGER
from tables_logic import CASES as LOGIC
from tables_warp import CASES as WARP

__all__ = [
    "CASES",
    "FAMILIES",
    "HEADER",
    "Approximate",
    "Case",
    "entry",
    "expected",
    "mismatches",
    "pack",
    "samples",
]

FAMILIES = {
    "integer": INTEGER,
    "logic": LOGIC,
    "floating": FLOATING,
    "conversion": CONVERSION,
    "warp": WARP,
}
CASES = [case for cases in FAMILIES.values() for case in cases]
