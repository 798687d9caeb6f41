"""Device code of the delta rule that runs on every architecture: mma.sync, cp.async and TMA."""
