"""A model's text to tool calls."""
