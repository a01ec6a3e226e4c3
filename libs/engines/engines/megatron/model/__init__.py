"""The model of a Megatron stage: megatron-core's layers on packed tokens."""
