"""Verifiable rewards."""
