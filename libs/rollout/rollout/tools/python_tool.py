"""Python as a tool for models, run in the kernel's sandbox (`sandbox.sandbox`)."""

from rollout.errors import EpisodeFailed
from rollout.tools.sandbox.sandbox import Limits, Ran, Sandbox, SandboxDiedError
from rollout.tools.tool import Tool

_DESCRIPTION = (
    "Runs a Python program and returns what it prints; the value of a last line that is an expression is shown too. "
    "Every call starts anew: no variable or file is kept. The standard library is there, the network is not."
)


def python_tool(sandbox: Sandbox | None = None, name: str = "python") -> Tool:
    """Return a tool `name(code: string)` that runs the code in a sandbox (one of its own, unless one is given).

    A program that fails or meets a limit gets that as its result. Raises SandboxRefusedError, now rather than in an
    episode, where the kernel refuses a sandbox; a sandbox that dies fails the episode (to be tried again).
    """
    box = Sandbox() if sandbox is None else sandbox
    box.start()

    def run(code: str) -> str:
        try:
            return describe(box.run(code), box.limits)
        except SandboxDiedError as error:
            raise EpisodeFailed(f"tool {name}: {error}", retryable=True) from error

    schema = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program"}},
        "required": ["code"],
    }
    # The sandbox ends a run at its own limit; this limit is for a sandbox that hangs.
    return Tool(name, _DESCRIPTION, schema, run, timeout=box.limits.wall_seconds + 60, max_characters=10_000)


def describe(ran: Ran, limits: Limits) -> str:
    """Return the end of a run as text for the model."""
    met = {
        "wall time": f"it ran longer than {limits.wall_seconds:g} s",
        "CPU time": f"it computed longer than {limits.cpu_seconds} s",
        "output": f"it wrote more than {limits.output_bytes} bytes",
        "files": f"it made more than {limits.files} files",
        "memory": f"it took more than {limits.memory_bytes >> 20} MiB of memory",
    }
    if ran.reason is not None:
        return f"{ran.output}\n[ended: {met[ran.reason]}]"
    if ran.status is not None and ran.status < 0:
        return f"{ran.output}\n[ended by signal {-ran.status}]"
    return ran.output or "[no output]"
