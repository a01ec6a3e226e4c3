"""The fused kernels of Megatron's stages on a GPU."""
