"""Backend `megatron`: megatron-core's model, schedules and gradient buffers under the same step as FSDP2."""
