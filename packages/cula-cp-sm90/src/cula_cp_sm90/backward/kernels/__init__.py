"""Device code with Hopper's own instructions."""
