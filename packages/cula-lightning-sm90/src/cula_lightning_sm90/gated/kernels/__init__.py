"""The kernel of the gated delta rule, one module for every role of its threads."""
