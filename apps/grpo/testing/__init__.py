"""Helpers of the grpo app's tests."""
