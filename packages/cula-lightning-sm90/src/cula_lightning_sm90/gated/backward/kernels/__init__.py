"""Kernels of the backward pass of the gated delta rule."""
