"""The backward pass of KDA."""
