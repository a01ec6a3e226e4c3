"""Files to prompts, tokenizers and model directories."""
