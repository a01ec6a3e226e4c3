"""A recipe at the size of a laptop: the same code path, on CPU processes, with a tiny random model."""
