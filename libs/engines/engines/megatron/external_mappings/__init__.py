"""Weight mappings of other projects: which box of a transformers tensor a Megatron parameter is."""
