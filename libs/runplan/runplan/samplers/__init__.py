"""Samplers in a plan: memory, requirements and launch needs of each, and the lines on them."""
