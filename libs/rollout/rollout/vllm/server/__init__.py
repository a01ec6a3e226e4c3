"""What runs in vLLM's process: the standard library, torch and vLLM, and nothing of the trainer's environment."""
