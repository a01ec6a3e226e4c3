"""Other programs of the grpo app."""
