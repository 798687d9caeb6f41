"""Prefill of the delta rule with a decay per channel (KDA): all of it but the recurrence, which each architecture has.

A kernel package describes its architecture with a `Target` and gets its operator, its public functions and what a
dispatcher reads from here. Of prefill with a decay per head there is the contract, in `gated`.
"""
