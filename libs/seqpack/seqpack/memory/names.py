"""Names of the rows of the memory table, which a plan prints too: nothing slow is imported."""

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
REFERENCE = "reference model"
OFFLOAD = "offloaded states"
CHECKPOINT = "checkpoint being written"
BATCH = "batch"
BUCKETS = "weight sync buckets"
SAMPLER_WEIGHTS = "sampler weights"
SAMPLER_STAGED = "sampler staged weights"
SAMPLER_CACHES = "sampler caches"
NAMES = (
    *(WEIGHTS, GRADIENTS, OPTIMIZER, REFERENCE, OFFLOAD, CHECKPOINT, BATCH, BUCKETS),
    *(SAMPLER_WEIGHTS, SAMPLER_STAGED, SAMPLER_CACHES),
)
"""Names of the rows, in the order in which they are printed."""
PLACES = ("device", "host")
