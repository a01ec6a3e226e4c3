"""What the scheduler asks of a model, and the decoder that runs the module's own forward."""
