"""Benchmarks of the cula kernels beside their peers and the physical floor; see README.md."""
