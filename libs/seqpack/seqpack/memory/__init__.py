"""What stays in the memory of a process, by name."""
