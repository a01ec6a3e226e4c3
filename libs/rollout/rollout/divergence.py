"""The error that tells of a policy that diverged, wherever the sampler meets it first."""


class NotFiniteError(ValueError):
    """The model's logits, or the weights on their way to it, hold NaN or infinity."""
