"""Low-rank adapters: what is trained in place of the weights, and how it leaves as files."""
