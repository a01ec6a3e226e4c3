"""The settings of the vLLM backend."""
