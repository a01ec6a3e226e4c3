"""Recipes at the size of one machine."""
