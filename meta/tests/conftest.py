"""Lets tests import what they share from this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
