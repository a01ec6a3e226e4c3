"""A bad value of an environment fails its episode alone, and the reason names the file and line of what returned it."""

import asyncio
import inspect
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from rollout import Chat, Observation, Sampling, Score, StepResult, Tool, run_group
from rollout.environments.checked import MAX_CHARACTERS
from rollout.testing import ScriptedEngine
from rollout.testing.chat import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)
SAYS = [*TOKENIZER("ok", add_special_tokens=False)["input_ids"], CHAT.end_of_turn_id]
USER = {"role": "user", "content": "x"}
REWARD = "reward"
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
SILENT = Tool("f", "\ud800", {"type": "object", "properties": {}}, run=str)
NAMELESS = Tool(None, "x", {"type": "object", "properties": {}}, run=str)  # type: ignore[arg-type]


class UnreadableError(RuntimeError):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise self


class Unreadable(dict[str, Any]):
    """A message that raises such."""

    def get(self, *_: Any) -> Any:
        raise UnreadableError


def says(*contents: Any) -> tuple[Any, ...]:
    return tuple({"role": "user", "content": content} for content in contents)


@pytest.mark.parametrize("instant", [True, False])
@pytest.mark.parametrize(
    ("method", "value", "reason"),
    [
        ("open", [USER], "returned a list, a rollout.Observation is needed"),
        ("open", Observation("hello"), "messages of type str"),  # type: ignore[arg-type]
        ("open", Observation(["hello"]), "messages[0] = 'hello': a message is a mapping with a role"),  # type: ignore[list-item]
        ("open", Observation(says("\ud800")), "messages[0] with a lone surrogate ('\\ud800')"),
        ("open", Observation(says([{"type": "text", "text": "a\udfff"}])), "lone surrogate"),
        ("open", Observation(says("x" * (MAX_CHARACTERS + 1))), f"at most {MAX_CHARACTERS} can be read"),
        ("open", Observation(({**USER, "tool_calls": 3},)), "messages[0].tool_calls = 3: a list of calls"),
        ("open", Observation(({**USER, "name": Decimal(1)},)), "messages[0] with a Decimal"),
        ("open", Observation(({**USER, 3: "x"},)), "messages[0] with a key 3 that is no text"),  # type: ignore[dict-item]
        (
            "open",
            Observation(says([{"type": "text", "text": "a", "more": CYCLE}])),
            "lists and mappings in more than 64",
        ),
        ("open", Observation([USER], [SILENT]), "a tool with a lone surrogate"),
        ("open", Observation([USER], [NAMELESS]), "tools with a Tool: rollout.Tool with texts as name"),
        ("step", StepResult(metrics={"\ud800": 1.0}), "a lone surrogate"),
        ("step", StepResult(done=np.zeros(2)), "step() raised ValueError: The truth value"),  # type: ignore[arg-type]
        ("step", StepResult((Unreadable(),)), "step() raised UnreadableError: <exception str() failed>"),
        ("step", None, "returned a NoneType, a rollout.StepResult is needed"),
        ("step", StepResult(says(3)), "messages[0] whose content is a int"),
        ("step", StepResult(done=None), "done=None"),  # type: ignore[arg-type]
        ("step", StepResult(metrics={"moves": 1e39}), "'moves' = 1e+39"),
        ("step", StepResult(metrics=[1]), "metrics of type list"),  # type: ignore[arg-type]
        ("step", StepResult(context=says("\ud800")), "context[0] with a lone surrogate"),
        ("finish", 1.0, "returned a float, a rollout.Score is needed"),
        ("finish", REWARD, "reward is tensor(1.)"),
    ],
)
def test_it_fails_its_episode_alone(method: str, value: Any, reason: str, instant: bool) -> None:
    class World:
        async def open(self, context: Any) -> Any:
            self.bad = context.index == 1
            return value if self.bad and method == "open" else Observation([USER])

        async def step(self, reply: Any) -> Any:
            return value if self.bad and method == "step" else StepResult(metrics={"moves": 1})

        async def finish(self, end: Any) -> Any:
            if self.bad and value is REWARD:
                return Score(torch.tensor(1.0))  # type: ignore[arg-type]
            return value if self.bad and method == "finish" else Score(1)

        async def close(self) -> None: ...

    World.instant = instant  # type: ignore[attr-defined]
    engine = ScriptedEngine(lambda prompt, turn: SAYS)
    first, second, third = asyncio.run(run_group(World, engine, CHAT, Sampling(), size=3))
    assert first.score == third.score == Score(1.0)
    assert reason in (second.error or "")
    (second.error or "").encode()
    if value is not REWARD and " raised " not in reason:
        line = inspect.getsourcelines(getattr(World, method))[1]
        assert (second.error or "").startswith(f"{__file__}, line {line}: {method}() returned")
        assert second.attempt == 0
