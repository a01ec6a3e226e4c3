"""An OpenAI-compatible server as a rollout engine: one that samples from token ids and returns ids and log-probs."""
