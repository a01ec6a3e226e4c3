"""Log-probs of chosen tokens from a transformers model on packed rows."""
