"""The backward pass of the gated delta rule, in which all channels of a head decay alike."""
