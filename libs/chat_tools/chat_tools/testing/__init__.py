"""Templates, tokenizers and texts to test with."""
