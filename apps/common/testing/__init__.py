"""Helpers of the apps' tests."""
