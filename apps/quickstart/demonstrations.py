"""Worked examples of the synthetic tasks, as conversations: what a warm start imitates."""

from typing import Any, Literal

from apps.quickstart.arithmetic import Problem

Message = dict[str, Any]


def demonstration(problem: Problem, task: Literal["arithmetic", "calculator"]) -> list[Message]:
    """Return the question and the right reply; with the calculator, also the call and its result."""
    question: Message = {"role": "user", "content": problem.question}
    answer: Message = {"role": "assistant", "content": problem.solution}
    if task == "arithmetic":
        return [question, answer]
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": problem.expression}}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": problem.answer},
        answer,
    ]
