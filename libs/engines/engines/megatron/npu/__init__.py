"""Megatron's stages on NPUs: their operators, and MindSpeed's patches."""
