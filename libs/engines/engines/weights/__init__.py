"""Weights between a live model and files: names, dtypes, pieces."""
