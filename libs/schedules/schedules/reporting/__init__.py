"""Metrics, progress and timeline of a schedule."""
