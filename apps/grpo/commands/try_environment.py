"""Play a few episodes before training, with the settings that a run would have, and show all of each:

bazel run //apps/grpo:try -- --environment FILE.py:NAME --model DIR

Every flag of the grpo app is taken; besides, `--episodes N` says how many to play, `--greedy` takes likeliest tokens.
Nothing is trained and nothing is written but a tiny model where none is given. The program ends with status 1 where an
episode failed.
"""

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from apps.common.cli import command_line as cli
from apps.common.cli.help import HELP
from apps.common.program import command, program
from apps.grpo.first_look import look
from apps.grpo.main import configure

USAGE = """usage: {program} [--episodes N] [--greedy] FLAGS

Play a few episodes before training, with the settings that a run would have, and show all of each: tokens, coloured by
what is trained, tool calls with their results, how it ended, and its reward. Nothing is trained.

  --episodes N
        Episodes to play. (default: 4)
  --greedy
        Take the likeliest token in place of sampling.
  --environment FILE.py:NAME, or --data FILE with --reward FILE.py:NAME
        What is played.
  --model DIR
        Whose model plays; a tiny one is made where none is given.
  --sampling.max-new-tokens INT, --max-turns INT, --max-episode-tokens INT
        The limits of an answer and of an episode.

The other flags are those of the grpo app: {grpo} --help
"""
"""The help of this command."""


def _own_flags(argv: Sequence[str]) -> tuple[list[str], int, bool]:
    """Return the words for the grpo app, and the values of --episodes and --greedy.

    Raises:
        ValueError: --episodes has no number of at least 1.
    """
    rest, count, greedy = [], 4, False
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--episodes":
            text = value if equals else next(words, "")
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"--episodes takes a number of at least 1, got {text!r}")
            count = int(text)
        elif word == "--greedy":
            greedy = True
        else:
            rest.append(word)
    return rest, count, greedy


def main(argv: Sequence[str]) -> None:
    """Run the episodes that the command line asks for."""
    if set(HELP) & set(argv):
        sys.stdout.write(USAGE.format(program=program("try"), grpo=command("grpo")))
        raise SystemExit(0)
    rest, count, greedy = _own_flags(argv)
    config = configure(rest)
    with look(config, None):
        from apps.grpo.commands.play_episodes import try_episodes  # it imports torch, which help and errors need not

        episodes = try_episodes(config, count, greedy)
    if any(episode.error is not None for episode in episodes):
        raise SystemExit(1)


if __name__ == "__main__":
    cli.main(lambda: main(sys.argv[1:]))
