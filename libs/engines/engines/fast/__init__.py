"""The fast path of a training step on a GPU: compiled layers, a fused head, an optimizer that never waits."""
