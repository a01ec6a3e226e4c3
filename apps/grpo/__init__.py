"""GRPO: reinforcement learning with verifiable rewards."""
