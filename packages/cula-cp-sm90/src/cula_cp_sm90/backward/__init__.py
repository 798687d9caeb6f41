"""The backward pass of KDA on Hopper."""
