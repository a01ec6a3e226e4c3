"""Bytes and seconds of a training step, counted from sizes."""
