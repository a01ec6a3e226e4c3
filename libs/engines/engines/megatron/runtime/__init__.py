"""megatron-core's needs of a process: groups, replacements of its CUDA calls, buffers that can be offloaded."""
