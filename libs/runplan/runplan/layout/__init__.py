"""How ranks, batches and layers divide."""
