"""End-to-end tests of the grpo app."""
