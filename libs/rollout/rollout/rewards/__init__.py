"""Rewards that can be checked."""
