"""The flag `--launch`: what starts the ranks of a run on all its machines."""

from collections.abc import Sequence

from engines.torchrun import under_torchrun

LAUNCH, RAY = "--launch", "ray"
HELP = {
    f"{LAUNCH} {RAY}": "Start all ranks as actors of the Ray cluster at $RAY_ADDRESS, else of one that this command "
    "starts here."
}
"""The flag among those of no field."""


def parse_launch_flag(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Return the command line without `--launch ray`, and whether it was there.

    Raises:
        ValueError: it has another value, or none; torchrun started this process, or a shrunk run starts its own ranks.
    """
    rest, values = list[str](), list[str]()
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == LAUNCH:
            values.append(value if equals else next(words, ""))
        else:
            rest.append(word)
    for value in values:
        if value != RAY:
            raise ValueError(f"{LAUNCH} takes {RAY}, got {value!r}: torchrun and Slurm start the ranks themselves")
    if values and under_torchrun():
        raise ValueError(f"{LAUNCH} {RAY} starts the ranks itself: leave torchrun out")
    if values and any(word.partition("=")[0] == "--shrink" for word in rest):
        raise ValueError(f"--shrink starts its own ranks: leave {LAUNCH} {RAY} out")
    return rest, bool(values)
