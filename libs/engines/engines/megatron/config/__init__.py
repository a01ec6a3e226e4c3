"""Sizes and options that megatron-core is given for a model and a layout."""
