"""Metrics, progress and samples of a GRPO run."""
