"""The tiny Qwen3.5, its tokenizer and its tasks, which the default run needs and no hub provides."""
