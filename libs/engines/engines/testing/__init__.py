"""Executors, models and checks that tests and benchmarks of engines need."""
