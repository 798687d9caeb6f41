"""Numbers that kernels and those who launch them share."""

import math

LOG2_E = math.log2(math.e)
COLUMNS = 6  # of a row of a table of segments: first token, length, sequence, slot, part, parts
# Dtypes of states that kernels read and write; their arithmetic is that of the first.
STATE_DTYPES = ("float32", "bfloat16", "float16")
