"""The protocol between scheduler and model, and the decoder that runs the module's own forward."""
