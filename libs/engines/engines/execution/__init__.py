"""The execution of a step: the executor protocol, its micro-batches, and what executors of one kind share."""
