"""The teachers that `--teacher` names: model directories by what computes with them, servers, and the policy itself.

A command line reads them, and needs no torch for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from apps.common.named_values import named_values

Kind = Literal["self", "engine", "native", "vllm", "server"]
SELF = "self"
"""The teacher that is the policy itself, behind another prompt."""


@dataclass(frozen=True)
class TeacherSource:
    """One teacher: `place` is a model directory, a repository of the hub, a server's URL, or nothing."""

    kind: Kind
    place: str = ""

    @classmethod
    def of(cls, text: str) -> TeacherSource:
        """Read self, DIR, native:DIR, vllm:DIR or http://HOST:PORT."""
        if text == SELF:
            return cls("self")
        if text.startswith(("http://", "https://")):
            return cls("server", text.rstrip("/"))
        for kind in ("native", "vllm"):
            if text.startswith(f"{kind}:"):
                return cls(kind, text.partition(":")[2])
        return cls("engine", text)

    @property
    def uses_rollout(self) -> bool:
        """Whether a rollout engine scores for it."""
        return self.kind in ("native", "vllm", "server")

    def __str__(self) -> str:
        """Return what the command line says."""
        return f"{self.kind}:{self.place}" if self.kind in ("native", "vllm") else self.place or self.kind


def teacher_sources(given: Sequence[str]) -> dict[str, TeacherSource]:
    """Return the teachers by environment; "" is that of all.

    Raises:
        ValueError: several of them lack a name, or two have one.
    """
    if len(given) == 1 and ("=" not in given[0] or not given[0].partition("=")[0].isidentifier()):
        named: Mapping[str, object] = {"": given[0]}
    else:
        named = named_values("--teacher", given, "math=DIR")
    return {name: TeacherSource.of(str(text)) for name, text in named.items()}
