"""What the shared tests of KDA must know of this package's recurrence."""

from __future__ import annotations

from collections import Counter

TARGETS = ("sm_100a", "sm_103a")
TILES = (1,)  # of v per CTA
# What no schedule notices when a wait of the chain is left out. The emulator keeps memory longer than its CTA, so
# nobody need wait for the last store.
UNNOTICED = Counter({"cp.async.bulk.wait_group 0": 1})
