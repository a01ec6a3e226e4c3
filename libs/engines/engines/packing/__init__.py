"""Packed sequences through a transformers model of a registered family."""
