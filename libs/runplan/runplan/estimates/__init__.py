"""Estimates of a training step, in bytes and seconds, counted from sizes."""
