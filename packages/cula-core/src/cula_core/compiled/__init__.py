"""Kernels that have been compiled: what they depend on, where they are kept, and how they are loaded. Nothing here
imports the DSL before something must be compiled."""
