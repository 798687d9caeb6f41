"""Tiny problems of every mode for compute-sanitizer, on a GPU; `tools/sanitizer.py` runs it."""

import sys

from cula_cp_sm90 import chunk_kda
from cula_testing.kda import sanitizer

if __name__ == "__main__":
    sys.exit(sanitizer.main(chunk_kda, sys.argv[1:], trains=True, beside=True))
