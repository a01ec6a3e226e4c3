"""For tests of vLLM: models that it serves, and the distance of its log-probs from a module's."""
