"""Device code of the decode kernels."""
