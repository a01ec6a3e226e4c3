"""The arrangement of a run's ranks, and which of them computes which rows of a step."""
