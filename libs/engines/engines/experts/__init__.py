"""Layers with experts: which tokens go where, and how evenly."""
