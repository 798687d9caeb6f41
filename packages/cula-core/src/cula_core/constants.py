"""Numbers that kernels and those who launch them share."""

import math

LOG2_E = math.log2(math.e)
COLUMNS = 6  # of a row of a table of segments: first token, length, sequence, slot, part, parts
