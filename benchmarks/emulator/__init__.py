"""Measures the emulator itself, on a CPU."""
