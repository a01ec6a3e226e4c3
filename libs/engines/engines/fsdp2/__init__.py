"""The FSDP2 executor: weights, gradients and optimizer states sharded over all ranks."""
