"""An OpenAI-compatible server over any rollout engine, which records the exact tokens of every session."""
