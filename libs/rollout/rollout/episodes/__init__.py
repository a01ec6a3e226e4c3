"""Episodes: played turn by turn, kept as exact token streams, made into training batches."""
