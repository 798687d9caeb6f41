"""The argument contract of the delta rule token by token: decode on a pool of states, and recurrence over sequences.

A kernel package gives it the `Limits` of its kernels; `cula` gives none, because something serves every problem.
"""
