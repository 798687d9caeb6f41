"""What the backward passes of delta rules on Hopper share: both walks through the chunks, and the memory between their
kernels."""
