"""Caches of decoding states, for prompts that come again or continue earlier ones."""
