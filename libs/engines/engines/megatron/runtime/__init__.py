"""What megatron-core needs of a process: groups, answers to its CUDA calls, buffers that can be offloaded."""
