"""One module per benchmarked op; each defines `OP`."""
