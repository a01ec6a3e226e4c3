"""Whether torchrun started this process, by its variables."""

import os


def under_torchrun() -> bool:
    """Return whether torchrun (or anything that sets its variables) started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
