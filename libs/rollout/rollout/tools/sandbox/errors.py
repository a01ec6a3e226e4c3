"""Errors of the sandbox."""


class SandboxRefusedError(RuntimeError):
    """The kernel refuses a part of the sandbox, so nothing is run. The text says which."""


class SandboxDiedError(RuntimeError):
    """The sandbox's server was lost (the machine ran out of memory, or it was killed): the run may be tried again."""
