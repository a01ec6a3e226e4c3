"""For tests of environment processes: an environment that does what its task's data says, to its process too."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from rollout.chat.messages import Reply
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.tools.tool import Tool

SLOW_PATTERN = re.compile(r"(a+)+$")  # its search holds the interpreter's lock for ever


class Faulty:
    """One turn; `data["do"]` says what step() does in the episodes of the indices `data["who"]`."""

    timeout = 0.5

    async def open(self, context: EpisodeContext) -> Observation:
        """Ask."""
        self.do = context.data.get("do") if context.index in context.data.get("who", ()) else None
        self.context = context
        tool = Tool("look", "Looks.", {"type": "object", "properties": {}}, run=str)
        return Observation([{"role": "user", "content": "x"}], tools=[tool])

    async def step(self, reply: Reply) -> StepResult:
        """Do it."""
        del reply
        await asyncio.sleep(self.context.data.get("seconds", 0.0))
        if self.do:
            await getattr(self, f"_{self.do}")()
        return StepResult(metrics={"pid": os.getpid(), "home": float(os.getcwd() != "/")})

    async def finish(self, end: End) -> Score:
        """Return 1, and the rewards of turns that the data names."""
        del end
        return Score(1, turn_rewards=self.context.data.get("turns", ()))

    async def close(self) -> None:
        """Do nothing."""

    async def _block(self) -> None:
        time.sleep(1e6)

    async def _exit(self) -> None:
        os._exit(3)

    async def _hold(self) -> None:
        SLOW_PATTERN.search("a" * 60 + "b")

    async def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    async def _chdir(self) -> None:
        os.chdir("/")

    async def _fork(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
        self.children = child
        raise ValueError(f"child {child.pid}")

    async def _eat(self) -> None:
        self.eaten: list[bytes] = []
        while True:
            self.eaten.append(os.urandom(8 << 20))
            time.sleep(0.01)

    async def _burn(self) -> None:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass

    async def _none(self) -> Any:
        raise SystemExit(4)

    async def _speak(self) -> None:
        talk: Any = self.context.converse([{"role": "user", "content": "sub"}], agent="judge")
        said = await talk.reply()
        branch = talk.fork("branch")
        assert said.content == "ok"
        assert talk.turns == 1
        assert talk.add_messages([{"role": "user", "content": "more"}])
        await talk.reply()
        assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
        assert branch.turns == 1


class SlowFaulty(Faulty):
    """One whose methods may take a minute."""

    timeout = 60
