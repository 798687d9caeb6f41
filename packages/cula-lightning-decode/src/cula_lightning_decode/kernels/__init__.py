"""Device code of the decode kernel."""
