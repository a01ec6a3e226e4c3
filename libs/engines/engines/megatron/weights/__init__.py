"""Weights of a transformers model in Megatron's parameters, and back."""
