"""The division of ranks, batches and layers."""
