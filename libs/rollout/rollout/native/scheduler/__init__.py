"""The scheduler: which requests decode together, when they begin, and how their results are delivered."""
