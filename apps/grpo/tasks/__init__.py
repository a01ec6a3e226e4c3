"""Prompts and environments that a step asks."""
