"""Device code of the backward pass."""
