"""Comparisons of the sharded operations with one process."""
