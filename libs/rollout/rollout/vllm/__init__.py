"""vLLM as a rollout engine: in a process and an environment of its own."""
