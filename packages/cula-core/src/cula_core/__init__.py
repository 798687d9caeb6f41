"""What cula's kernel packages are built on: argument checks, references, helpers of CuTe DSL, the delta rule's parts.

Importing it imports neither a kernel language nor torch.
"""

__version__ = "0.1.0"
