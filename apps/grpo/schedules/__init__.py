"""Who waits for whom between sampling and training."""
