"""Episodes: played turn by turn, recorded as exact token streams, made into training batches."""
