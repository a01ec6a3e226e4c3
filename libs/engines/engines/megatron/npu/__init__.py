"""What Megatron's stages are on NPUs: their operators, and MindSpeed's patches."""
