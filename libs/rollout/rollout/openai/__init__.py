"""An OpenAI-compatible server as a rollout engine: one that samples from token ids and tells ids and log-probs."""
