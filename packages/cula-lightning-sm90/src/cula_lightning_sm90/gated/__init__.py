"""Prefill of the gated delta rule: the prefill of this package with an erasing write to the state."""
