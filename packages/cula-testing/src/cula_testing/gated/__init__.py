"""Prefill of the gated delta rule: the calls that it is tested with, and the arguments that it refuses."""
