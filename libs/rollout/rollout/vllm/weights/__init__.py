"""Weights in memory that the engine and vLLM share."""
