"""The backward of KDA: gradients of a call's inputs, for which it keeps nothing but the inputs themselves."""
