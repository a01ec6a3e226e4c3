"""Weights that every rank holds whole, with float32 masters and moments sharded."""
