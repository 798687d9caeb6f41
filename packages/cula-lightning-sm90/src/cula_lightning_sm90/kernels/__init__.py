"""Device code of the prefill kernel: one class per role of its warps."""
