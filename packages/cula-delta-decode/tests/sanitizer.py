"""Runs the tiny problems of this package on a GPU and prints a line for each; status 1 if a number is wrong.

`tools/sanitizer.py` runs it under compute-sanitizer.
"""

import sys

from delta_sanitizer import run_here

if __name__ == "__main__":
    sys.exit(int(run_here(*map(int, sys.argv[1:])) > 0))
