"""The base of cula's kernel packages: argument checks, references, helpers of CuTe DSL, and the delta rule's parts.

Importing it imports neither a kernel language nor torch.
"""

__version__ = "0.1.0"
