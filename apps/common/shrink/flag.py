"""The flags `--shrink` and `--no-vllm`."""

import os
from collections.abc import Sequence

from apps.common.cluster import RolloutLayout
from apps.common.shrink.fields import ProcessLimit
from engines.torchrun import under_torchrun

NO_VLLM, ENGINE = "--no-vllm", "--rollout.engine"
NATIVE = {ENGINE: RolloutLayout.engine, "--rollout.ray-workers": "0", "--pools.placement": "colocated"}
"""What `--no-vllm` stands for: the native sampler, in processes of the run itself."""


def parse_shrink_flag(argv: Sequence[str]) -> tuple[list[str], ProcessLimit | None]:
    """Return the command line without `--shrink` or `--shrink=PROCESSES`, and its limit of processes; None without it.

    Raises:
        ValueError: PROCESSES is no number above 0, or not that of the ranks that torchrun started.
    """
    rest = [word for word in argv if word != "--shrink" and not word.startswith("--shrink=")]
    limits = [word.partition("=")[2] for word in argv if word not in rest]
    if not limits:
        return rest, None
    if limits[-1] and not (limits[-1].isdigit() and int(limits[-1])):
        raise ValueError(f"--shrink={limits[-1]} must be the most processes that may be started, such as --shrink=4")
    limit = int(limits[-1]) if limits[-1] else None
    if not under_torchrun():
        return rest, ProcessLimit(limit)
    ranks = int(os.environ["WORLD_SIZE"])
    if limit not in (None, ranks):
        raise ValueError(f"torchrun started {ranks} ranks, --shrink={limit} asks for others: leave the number out")
    return rest, ProcessLimit(ranks, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def without_vllm(argv: Sequence[str]) -> list[str]:
    """Return the command line with the flags of NATIVE that it does not have in place of `--no-vllm`.

    Raises:
        ValueError: there is no `--shrink`, or a sampler is named too.
    """
    rest = [word for word in argv if word != NO_VLLM]
    if len(rest) == len(argv):
        return rest
    if not any(word.partition("=")[0] == "--shrink" for word in rest):
        raise ValueError(f"{NO_VLLM} is of shrunk runs: use --rollout.engine native, or add --shrink")
    given = {word.partition("=")[0] for word in rest}
    if ENGINE in given:
        raise ValueError(f"{NO_VLLM} and {ENGINE} both name a sampler: leave one of them out")
    return rest + [word for name, value in NATIVE.items() if name not in given for word in (name, value)]
