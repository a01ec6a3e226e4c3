"""What vLLM can do, and what it refuses, by a model's config."""
