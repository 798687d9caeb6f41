"""Checks and helpers of the repository; nothing here ships."""
