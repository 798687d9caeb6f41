"""Test suites and helpers that several of cula's kernel packages share. Only tests import it."""

__version__ = "0.1.0"
