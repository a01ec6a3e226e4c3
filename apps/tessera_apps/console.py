"""The console scripts: `tessera-grpo`, and those of sft, plan, try, evaluate and prepare.

Ranks that a run starts import this module again, so it imports the apps when they are called.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

MAINS = {"grpo": "apps.grpo.main", "sft": "apps.sft.main"}
USAGE = """usage: tessera-plan [grpo | sft] FLAGS

Print the plan of a run: memory, time, ranks, and what keeps it from starting. It needs no GPU.
The flags are those of tessera-grpo (unless sft is named) or tessera-sft; both print them with --help.

    tessera-plan --recipe quickstart
    tessera-plan sft --model DIR --data FILE
    tessera-plan --recipe list        which recipes can be run today
"""


def grpo() -> None:
    """Run the grpo app."""
    _run(MAINS["grpo"], sys.argv[1:])


def sft() -> None:
    """Run the sft app."""
    _run(MAINS["sft"], sys.argv[1:])


def plan() -> None:
    """Print the plan of a run."""
    words = sys.argv[1:]
    app = words.pop(0) if words and words[0] in MAINS else "grpo"
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        raise SystemExit(0 if words else 2)
    _run(MAINS[app], [*words, "--plan"])


def try_environment() -> None:
    """Play some episodes of an environment."""
    _run("apps.grpo.commands.try_environment", sys.argv[1:])


def evaluate() -> None:
    """Evaluate a model on held-out tasks."""
    _run("apps.grpo.commands.evaluate", sys.argv[1:])


def prepare() -> None:
    """Bring a data set to disk."""
    if find_spec("datasets") is None:
        sys.exit("error: tessera-prepare needs datasets: pip install 'tessera-apps[hub]' (of a checkout './apps[hub]')")
    _run("apps.grpo.commands.prepare_data", sys.argv[1:])


def _run(module: str, argv: Sequence[str]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses
    main: Callable[..., None] = import_module(module).main
    own = {"own_process": True} if module.endswith(".main") else {}
    import_module("apps.common.cli.command_line").main(lambda: main(argv, **own))
