"""What a run of many devices would be, computed from its settings alone: no GPU, no weights, no processes."""
