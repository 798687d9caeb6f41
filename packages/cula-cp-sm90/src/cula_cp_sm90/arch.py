"""What is Hopper's own: all other files but `recurrence.py` are shared with the package for Blackwell."""

from __future__ import annotations

NAME = "cula-cp-sm90"
TARGETS = {(9, 0): "sm_90a"}  # what is compiled for, by compute capability
ARCHS = ("sm90",)  # as a dispatcher names them

V_TILE = 64  # columns of v that one group of threads of the recurrence has
STAGES, SCAN_STAGES = 2, 3  # chunks that the recurrence holds at once

# The cost model, in microseconds, fitted on an H200 (docs/kda-prefill.md). A chain is a CTA that walks through chunks
# one after the other; alone it takes CHAIN_US a chunk, and all of them together share the memory's pace.
START_US = 6.0  # of a kernel, until its first chunk is done
CHAIN_US = {1: 0.95, 2: 1.6}  # by tiles of v
BLOCK_US = 0.0227  # a chunk and value head, at the memory's pace
SCAN_CHAIN_US, SCAN_BLOCK_US = 1.1, 0.0115
MERGE_US, MERGE_STEP_US = 5.0, 1.5
