"""What is Blackwell's own: all other files but `recurrence.py` are shared with the package for Hopper."""

from __future__ import annotations

NAME = "cula-kda-sm100"
TARGETS = {(10, 0): "sm_100a", (10, 3): "sm_103a"}  # what is compiled for, by compute capability
ARCHS = ("sm100", "sm103")  # as a dispatcher names them

V_TILE = 128  # columns of v that one group of threads of the recurrence has
STAGES, SCAN_STAGES = 2, 3  # chunks that the recurrence holds at once

# The cost model, in microseconds, as docs/kda-sm100.md predicts it: not measured. A chain is a CTA that walks through
# chunks one after the other; alone it takes CHAIN_US a chunk, and all of them together share the memory's pace.
START_US = 6.0  # of a kernel, until its first chunk is done
CHAIN_US = {1: 0.81}  # by tiles of v
BLOCK_US = 0.0128  # a chunk and value head, at the memory's pace
SCAN_CHAIN_US, SCAN_BLOCK_US = 0.81, 0.0065
MERGE_US, MERGE_STEP_US = 2.7, 3.4
