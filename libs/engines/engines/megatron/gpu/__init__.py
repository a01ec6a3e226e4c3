"""What Megatron's stages compute by fused kernels on a GPU."""
