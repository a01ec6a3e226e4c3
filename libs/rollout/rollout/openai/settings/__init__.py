"""The settings of an OpenAI-compatible backend and its capabilities."""
