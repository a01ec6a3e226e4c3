"""The first lines of vLLM's process: run by path, `python .../rollout/vllm/server/start.py DESCRIPTOR`.

It makes this library importable beside vLLM, and nothing else of the folder that it is installed in: the trainer's
packages lie there too, in versions that vLLM may not want. Where several workers share a model, vLLM starts them from
here by multiprocessing's "spawn", which runs this file in each of them under another name.
"""

import ctypes
import os
import signal
import sys
import types
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SERVER = "TESSERA_VLLM_SERVER"
_SEEING = "TESSERA_VLLM_SEEING"


def make_importable() -> None:
    """Make `rollout` importable, and take the folder of this file off the path."""
    here = Path(__file__).absolute()
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here.resolve().parent]
    package = types.ModuleType("rollout")
    package.__path__ = [str(here.parents[2])]
    sys.modules["rollout"] = package


def end_with_server() -> None:
    """Let the kernel kill this worker when the process that started it ends, however it ends (Linux): a worker that
    waits in vLLM's shared memory for a dead one notices nothing else."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_SERVER]):  # it has ended by now
        os._exit(1)


def see_as_server() -> None:
    """Let this worker's model take images as the server's does, which has set a variable by then (`Generator`)."""
    if os.environ.get(_SEEING):
        from rollout.vllm.server.images import replace_processors  # vLLM, which a worker imports next

        replace_processors()


def listen_on_loopback() -> None:
    """Bind torch's stores of this process to loopback, before vLLM imports them."""
    # found by the path and the package made above
    from rollout.vllm.server.loopback_store import hold_stores_to_loopback

    hold_stores_to_loopback()


def main() -> None:
    """Serve one engine."""
    os.environ[_SERVER] = str(os.getpid())
    listen_on_loopback()
    from rollout.vllm.server.serve import serve  # found by the path and the package made above

    serve(int(sys.argv[1]))


if __name__ == "__main__":
    make_importable()
    main()
elif __name__ == "__mp_main__":  # a worker
    make_importable()
    end_with_server()
    listen_on_loopback()
    see_as_server()
