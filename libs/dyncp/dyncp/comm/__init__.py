"""Groups of ranks, and what they say to each other."""
