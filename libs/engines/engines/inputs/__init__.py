"""Inputs of the model for a micro-batch: packed, padded, or sharded over context-parallel ranks."""
