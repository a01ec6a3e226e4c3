"""What updates Megatron's parameters: torch's AdamW or megatron-core's own optimizer, under one norm."""
