"""Weight mappings of other projects: which box of a transformers tensor a parameter of Megatron is."""
