"""The base of cula's kernel packages: argument checks, references, helpers of CuTe DSL, and the delta rule's parts.

Importing it imports neither a kernel language nor torch.
"""

import time

__version__ = "0.1.0"
IMPORTED = time.time()  # a source that is younger may not be the one that is loaded
