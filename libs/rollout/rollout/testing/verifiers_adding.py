"""For tests: a taskset of verifiers in which sums are added by a tool; `python -m` of it is the tool's server."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    """One tool, served by MCP."""

    TOOL_PREFIX = "adder"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class Sum(vf.Task):
    """A sum; the answer must hold it."""

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        """Return a server of its own for each rollout."""
        del config
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: Any) -> float:
        """Return whether the sum is in the last turn."""
        return float(self.data.name in (trace.nodes[-1].message.content or ""))

    @vf.metric
    async def turns(self, trace: Any) -> float:
        """Return the number of turns."""
        return float(trace.num_turns)


class Sums(vf.Taskset):
    """Three sums."""

    def load(self) -> Iterator[Any]:
        """Yield the sums 3+4, 3+5 and 3+6."""
        for b in (4, 5, 6):
            yield Sum(vf.TaskData(name=str(3 + b), prompt=f"3+{b}?", system_prompt="Use the tool."))


if __name__ == "__main__":
    Adder.run()
