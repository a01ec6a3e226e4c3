"""Fast starts for tests: a process that would be spawned is forked from a server that has imported all they need once.

The server is forked from the process that runs tests before the first one begins. So a child has the modules that the
tests import, as none of them has changed them, and of who starts it the environment, the working directory and the
output, as a spawned process does. A child that starts processes uses the same server.
"""

import faulthandler
import gc
import logging
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import multiprocessing.resource_tracker
import os
import socket
import sys
import threading
import zlib
from typing import Any

_SERVER: Any = multiprocessing.forkserver._forkserver

_PREPARE = """import os, sys
from multiprocessing import forkserver
os.environ.clear()
os.environ.update({environment!r})
for number, file in enumerate({files!r}, 1):
    os.dup2(forkserver.get_inherited_fds()[file], number)
    os.close(forkserver.get_inherited_fds()[file])
if "torch" in sys.modules:
    sys.modules["torch"].manual_seed({seed})
if "ray._raylet" in sys.modules:  # it has read its variables when it was imported
    sys.modules["ray._raylet"].Config.initialize("")
    sys.modules["ray._raylet"].AuthenticationTokenLoader.instance().reset_cache()
"""


class _Preparation:
    """What the child runs when it reads this: before it unpickles, and so imports, anything else."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code, {})


class _Popen(multiprocessing.popen_forkserver.Popen):
    def _launch(self, process: Any) -> None:
        spawn = multiprocessing.popen_forkserver.spawn  # type: ignore[attr-defined]
        files = [self.duplicate_for_child(number) for number in (1, 2)]
        seed = zlib.crc32(repr(process._identity).encode())  # no two ranks draw the same, as none does that is spawned
        code = _PREPARE.format(environment=dict(os.environ), files=files, seed=seed)
        real = spawn.get_preparation_data
        spawn.get_preparation_data = lambda name: {"": _Preparation(code), **real(name)}
        try:
            super()._launch(process)  # type: ignore[misc]
        finally:
            spawn.get_preparation_data = real


class _Process(multiprocessing.context.ForkServerProcess):
    _start_method = "forkserver"

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802  multiprocessing's name
        return _Popen(process)


class _SpawnedProcess(_Process):
    _start_method = "spawn"


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Process


class _SpawnContext(multiprocessing.context.ForkServerContext):
    _name = "spawn"
    Process = _SpawnedProcess


def install() -> None:
    """Make the contexts "spawn" and "forkserver" fork from the server, in this process and those it starts."""
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts |= {"spawn": _SpawnContext(), "forkserver": _Context()}
    _SERVER.ensure_running = start


def start() -> None:
    """Fork the server, unless this process or an ancestor has. Its standard files are what they are now."""
    if _SERVER._forkserver_address is not None:
        return
    multiprocessing.resource_tracker.ensure_running()
    sys.stdout.flush()
    sys.stderr.flush()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(multiprocessing.connection.arbitrary_address("AF_UNIX"))  # type: ignore[attr-defined]
        listener.listen()
        address = listener.getsockname()
        alive_r, alive_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(alive_w)
                _forget_tests()
                multiprocessing.forkserver.main(os.dup(listener.fileno()), alive_r, [])
            finally:
                os._exit(0)
        os.close(alive_r)
    _SERVER._forkserver_address, _SERVER._forkserver_alive_fd, _SERVER._forkserver_pid = address, alive_w, pid


def _forget_tests() -> None:
    """Undo what pytest does to a process, and keep the collector from what is imported, so that it is shared."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "_pytest.assertion.rewrite"]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.getLogger().handlers.clear()
    faulthandler.disable()
    gc.freeze()
