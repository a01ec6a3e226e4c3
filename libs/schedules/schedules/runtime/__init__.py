"""Interrupts and collectives of a run's processes."""
