"""Device code with Blackwell's own instructions."""
