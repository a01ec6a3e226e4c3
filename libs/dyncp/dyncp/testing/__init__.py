"""What holds the sharded operations to one process."""
