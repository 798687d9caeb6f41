"""Device code that backward passes of delta rules share."""
