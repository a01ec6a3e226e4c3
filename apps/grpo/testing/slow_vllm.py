"""Process that stands for vLLM while it starts: a real one, on a real socket, that is ready once there is a file.

It is run by a script in place of vLLM's interpreter (`write_script`), and needs neither vLLM nor packages of the run.
"""

import os
import socket
import stat
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

BUILT, READY, PID = "built", "ready", "pid"
"""Files in the stand-in's folder: training is built; the process is ready; its number."""
SECONDS = 60.0
"""Most seconds that it waits."""
_SCRIPT = """#!{python}
import importlib.util, sys
def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
load("slow_vllm", {own!r}).serve(load("wire", {wire!r}), int(sys.argv[2]), {folder!r}, {waits!r}, {fails!r})
"""


def write_script(folder: Path, waits: bool, fails: bool = False) -> Path:
    """Write the script that stands for vLLM's interpreter, and return its path.

    Args:
        folder: where its files and those of `BUILT` and `READY` lie.
        waits: whether it is ready only once there is a file `BUILT`.
        fails: whether it ends with an error then.
    """
    import rollout.vllm.client.wire as wire  # the process itself has no such package

    script = folder / "python"
    named = {"python": sys.executable, "own": __file__, "wire": wire.__file__, "folder": str(folder)}
    script.write_text(_SCRIPT.format(**named, waits=waits, fails=fails))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def wait_for_file(path: Path, why: str) -> None:
    """Wait until there is such a file. SystemExit, with the reason: there is none in `SECONDS`."""
    limit = time.monotonic() + SECONDS
    while not path.exists():
        if time.monotonic() > limit:
            sys.exit(why)
        time.sleep(0.01)


def serve(wire_module: ModuleType, descriptor: int, folder: str, waits: bool, fails: bool) -> None:
    """Answer the messages of a start until the other end of the socket is gone."""
    wire = wire_module.Wire(socket.socket(fileno=descriptor))
    place = Path(folder)
    (place / PID).write_text(str(os.getpid()))
    start = wire.receive()["start"]
    if waits:
        wait_for_file(place / BUILT, "training was not built while vLLM started")
    if fails:
        sys.exit("no kernel for this model")
    facts: dict[str, Any] = {"device": "cpu", "dtype": "float32", "workers": [], "ends": []}
    (place / READY).touch()
    wire.send({"ready": facts | {"vocab_size": start["config"]["vocab_size"], "max_length": 512}})
    while (message := wire.receive()) is not None:
        if "load" in message:
            wire.send({"loaded": message["load"]["call"], "seconds": 0.0})
        elif "ask" in message:
            wire.send({"step": [[message["ask"][0][0], [0], [0.0], "length", None]], "version": 0})
