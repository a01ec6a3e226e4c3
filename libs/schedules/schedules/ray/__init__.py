"""Samplers in actors of a Ray cluster."""
