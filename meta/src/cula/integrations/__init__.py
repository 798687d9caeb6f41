"""Adapters to other libraries; each imports its library at first use."""
