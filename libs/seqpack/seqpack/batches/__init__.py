"""Batches: jagged tensors, TensorDicts of them, packed rows."""
