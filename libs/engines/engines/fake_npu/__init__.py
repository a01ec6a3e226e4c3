"""A stand-in for Ascend NPUs that computes on the CPU: for tests alone."""
