r"""Verifiable rewards for an answer in \boxed{...}, compared exactly."""

from collections.abc import Sequence

from rollout.chat.messages import Reply
from rollout.environments.task import Reward
from rollout.tools.tool import ToolResult
from rollout.tools.workers import instant

_MARK = "\\boxed{"


def boxed(text: str) -> str | None:
    r"""Return the contents of the last complete \boxed{...} of a text, inner braces balanced; None without one."""
    at = text.rfind(_MARK)
    while at >= 0:
        depth = 1
        for i in range(at + len(_MARK), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[at + len(_MARK) : i].strip()
        at = text.rfind(_MARK, 0, at)
    return None


def exact_answer(answer: str) -> Reward:
    """Return a reward of 1.0 when the boxed answer is this text, blanks aside; else 0.0."""
    wanted = "".join(answer.split())

    @instant
    def reward(reply: Reply, results: Sequence[ToolResult]) -> float:
        del results
        marked = boxed(reply.content)
        return float(marked is not None and "".join(marked.split()) == wanted)

    return reward
