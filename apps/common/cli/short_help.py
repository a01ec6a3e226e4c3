"""A --help that small runs can read: the many flags of runs over many devices are left to --help-cluster."""

from collections.abc import Sequence

HELP_CLUSTER = "--help-cluster"
MORE = f"Pools, rollout, schedule, media and offload of runs over many devices have flags too: {HELP_CLUSTER}."


def help_flags(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Return the flags for the parser, and whether its help leaves the flags of many devices out."""
    if HELP_CLUSTER in argv:
        return ["--help"], False
    return list(argv), bool({"--help", "-h"} & set(argv))
