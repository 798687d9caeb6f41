"""What the shared tests of KDA must know of this package's recurrence."""

from __future__ import annotations

from collections import Counter

TARGETS = ("sm_90a",)
TILES = (1, 2)  # of v per CTA
# What no schedule notices when a wait of the chain is left out. Products with kg and Aqk are two groups that one wait
# waits for. The emulator keeps memory longer than its CTA, so nobody need wait for the last store.
UNNOTICED = Counter({"wgmma.commit_group.sync.aligned": 1, "cp.async.bulk.wait_group 0": 1})
