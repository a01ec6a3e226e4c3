"""What runs a step: the executor protocol, the micro-batches it is handed, and what executors of one kind share."""
