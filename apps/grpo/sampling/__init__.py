"""Samplers of a run, and how weights reach them."""
