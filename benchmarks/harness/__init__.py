"""What every measurement shares: timing, running an op, result files, provenance and tables; no op is named here."""
