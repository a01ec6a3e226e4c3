"""Decoding states that are kept for prompts that come again or go on."""
