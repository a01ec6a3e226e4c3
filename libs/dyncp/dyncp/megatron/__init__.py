"""The same for models of Megatron-Core."""
