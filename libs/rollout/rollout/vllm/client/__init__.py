"""The engine's side of vLLM's processes: start, messages, requests, images."""
