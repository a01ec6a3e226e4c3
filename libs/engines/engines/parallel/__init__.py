"""How the ranks of a run are arranged, and which of them computes which rows of a step."""
