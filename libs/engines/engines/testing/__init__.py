"""What tests and benchmarks of engines need: executors of another kind."""
