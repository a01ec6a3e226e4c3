"""A sandbox for Python that a model wrote: namespaces, a root of its own, limits and a filter of system calls."""
