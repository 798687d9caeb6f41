"""What the backward passes of delta rules on Hopper share: the operator, groups of heads with the memory between their
kernels, and both walks through the chunks."""
