"""Checkpoints on disk: whole or not at all."""
