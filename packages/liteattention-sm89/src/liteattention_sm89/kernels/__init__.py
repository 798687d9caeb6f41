"""Device code, one kernel class per file."""
