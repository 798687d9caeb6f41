"""Every result file on one HTML page: `python -m benchmarks.report`."""
