"""The process of a rank that an actor starts: `python -m apps.common.launch.rank_process MODULE ARGUMENT ...`.

It runs the module as torchrun would, and ends when the actor does, however that ended: its end of a pipe closes.
"""

import os
import runpy
import signal
import sys
import threading


def main(module: str, arguments: list[str]) -> None:
    """Run a module as this program."""
    threading.Thread(target=_end_with_actor, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's daemons block it, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_actor() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)  # with all that it has started: the actor made this group


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
