"""A sampler in a process of its own: calls over a local pipe, weights through shared memory."""
