"""A shell and a Python for models that last an episode and share its files, in the sandbox (`sandbox.session`)."""

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from rollout.errors import EpisodeFailed
from rollout.tools.python_tool import describe
from rollout.tools.sandbox.client_run import Limits, Ran
from rollout.tools.sandbox.errors import SandboxDiedError
from rollout.tools.sandbox.session import SESSION_LIMITS, Session, SessionSandbox
from rollout.tools.tool import EpisodeTool

_SHELL = (
    "Runs a command by bash and returns what it prints. Files, the current folder and exported variables are kept. "
    "There is no network; what still runs in the background ends with the command."
)
_PYTHON = (
    "Runs Python code and returns what it prints; the value of a last line that is an expression is shown too. "
    "Variables and files are kept. There is no network."
)


def shell_tool(
    seconds: float = 30.0, memory_mib: int = 1024, output_kib: int = 64, backend: str = "auto", image: str | None = None
) -> EpisodeTool:
    """Return a tool `shell(command: string)`, by bash in a session that lasts an episode.

    A `python_session_tool` with the same limits shares its files. A command that fails or meets a limit (`seconds`,
    of processors too; `memory_mib` of all its processes) gets that as its result. `backend` and `image` as for
    `SessionSandbox`. Raises SandboxRefusedError, now
    rather than in an episode, where the kernel refuses the sandbox.
    """
    limits = _limits(seconds, memory_mib, output_kib)

    def run(session: Session, command: str) -> str:
        ran = _ran("shell", session.shell, command)
        told = describe(ran, limits)
        return f"{ran.output}[exit status {ran.status}]" if ran.status is not None and ran.status > 0 else told

    return _tool("shell", _SHELL, ("command", "The command"), run, limits, (backend, image))


def python_session_tool(
    seconds: float = 30.0, memory_mib: int = 1024, output_kib: int = 64, backend: str = "auto", image: str | None = None
) -> EpisodeTool:
    """Return a tool `python(code: string)` whose variables last an episode; see `shell_tool`."""
    limits = _limits(seconds, memory_mib, output_kib)

    def run(session: Session, code: str) -> str:
        ran = _ran("python", session.python, code)
        if ran.status is None and ran.reason is None:
            return ran.output or "[no output]"
        how = f"by exit status {ran.status}" if ran.status is not None and ran.status >= 0 else ""
        told = f"{ran.output}\n[Python ended {how}]" if how else describe(ran, limits)
        return f"{told}\n[Variables are lost, files are kept]"

    return _tool("python", _PYTHON, ("code", "The code"), run, limits, (backend, image))


def _limits(seconds: float, memory_mib: int, output_kib: int) -> Limits:
    bytes_of = {"memory_bytes": memory_mib << 20, "output_bytes": output_kib << 10}
    return replace(SESSION_LIMITS, wall_seconds=seconds, cpu_seconds=max(1, round(seconds)), **bytes_of)


def _tool(
    name: str,
    says: str,
    argument: tuple[str, str],
    run: Callable[..., str],
    limits: Limits,
    where: tuple[str, str | None],
) -> EpisodeTool:
    sandbox = _sandbox(tuple(asdict(limits).items()), *where)
    sandbox.start()
    word, meaning = argument
    schema = {"type": "object", "properties": {word: {"type": "string", "description": meaning}}, "required": [word]}
    # The sandbox ends a run at its own limit; this limit is for a sandbox that hangs.
    return EpisodeTool(name, says, schema, run, timeout=limits.wall_seconds + 60, opens=sandbox.open)


@functools.cache
def _sandbox(limits: tuple[tuple[str, Any], ...], backend: str, image: str | None) -> SessionSandbox:
    """Return the sandbox of these limits, one a process: its tools share a session."""
    return SessionSandbox(Limits(**dict(limits)), backend=backend, image=image)


def _ran(name: str, run: Callable[[str], Ran], text: str) -> Ran:
    try:
        return run(text)
    except SandboxDiedError as error:
        raise EpisodeFailed(f"tool {name}: {error}", retryable=True) from error
