"""What the default run needs and no hub provides: a tiny Qwen3.5, its tokenizer and its tasks."""
