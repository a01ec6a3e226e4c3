"""Fast starts for tests: a process that would be spawned is forked from a server that has imported torch once.

As with a spawned process, the modules of this repository are imported anew in each, and it has the environment, the
working directory and the output of who starts it. Modules of other distributions (`ROOTS`) are there already. A child
that starts processes uses the same server.
"""

import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import os
import sys
from pathlib import Path
from typing import Any

ROOTS = ("numpy", "torch", "tensordict", "sympy", "transformers", "safetensors", "tokenizers", "megatron", "jinja2")
"""Top-level packages that the server imports, where the process that starts it has imported them."""
STARTERS = ("engines.launch", "rollout.workers.process")
"""Modules that spawn: a process that has imported one and is forked starts the server before, for its children."""
LONGEST = 100_000
"""Characters of an argument; the kernel takes 131,072."""

_SERVER: Any = multiprocessing.forkserver._forkserver
_owner = 0

_PREPARE = """import os, sys, types
from multiprocessing import forkserver
os.environ.clear()
os.environ.update({environment!r})
for number, file in enumerate({files!r}, 1):
    os.dup2(forkserver.get_inherited_fds()[file], number)
    os.close(forkserver.get_inherited_fds()[file])
module = sys.modules[{name!r}] = types.ModuleType({name!r})
module.__file__ = {path!r}
exec(compile({text!r}, {path!r}, "exec"), module.__dict__)
module.install()
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
        code = _PREPARE.format(
            environment=dict(os.environ), files=files, name=__name__, path=__file__, text=Path(__file__).read_text()
        )
        real = spawn.get_preparation_data
        spawn.get_preparation_data = lambda name: {"": _Preparation(code), **real(name)}
        try:
            super()._launch(process)  # type: ignore[misc]
        finally:
            spawn.get_preparation_data = real


class _Process(multiprocessing.context.ForkServerProcess):
    _start_method = "spawn"

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802  multiprocessing's name
        return _Popen(process)


class _Context(multiprocessing.context.ForkServerContext):
    _name = "spawn"
    Process = _Process


def install() -> None:
    """Make the context "spawn" of multiprocessing fork from the server, in this process and those it starts."""
    multiprocessing.context._concrete_contexts["spawn"] = _Context()  # type: ignore[attr-defined]
    _SERVER.ensure_running = _ensure_running
    os.register_at_fork(before=_start_for_children)


def _ensure_running() -> None:
    """Start the server, unless an ancestor of this process has."""
    global _owner
    if _SERVER._forkserver_address is not None and _owner != os.getpid():
        return
    if _SERVER._forkserver_address is None:
        _SERVER._preload_modules = [*_preloaded(), *(_SERVER._preload_modules or ())]
    type(_SERVER).ensure_running(_SERVER)
    _owner = os.getpid()


def _preloaded() -> list[str]:
    """Return the modules of other distributions that this process has imported, in that order.

    They are words of one argument of a command line, so private ones, which others import, are left out, and what is
    too much.
    """
    names, length = [], 0
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        public = name.split(".")[0] in ROOTS and "._" not in name.replace("torch._dynamo", "torch.dynamo")
        length += len(name) + 4 if public else 0
        if public and spec is not None and spec.name == name and spec.has_location and length < LONGEST:
            names.append(name)
    return names


def _start_for_children() -> None:
    if any(name in sys.modules for name in STARTERS):
        _ensure_running()
