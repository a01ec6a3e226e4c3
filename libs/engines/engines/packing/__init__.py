"""Packed sequences through a transformers model: contexts, layers and the change of one model instance."""
