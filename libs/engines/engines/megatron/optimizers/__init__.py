"""Optimizers over Megatron's gradient buffers, and the choice between them."""
