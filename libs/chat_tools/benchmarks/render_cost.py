"""What `render` costs beside a tokenizer's own `apply_chat_template`, by the number of turns, on this machine.

    python libs/chat_tools/benchmarks/render_cost.py [NAME ...]      (transformers, tokenizers, jinja2, trl's wheel)

Each of TRL's real templates that is named (Qwen3's where none is), with a tokenizer trained on the spot: conversations
with tool calls are rendered to ids by both, in turn; processor seconds, the least of several rounds. `render` gives the
mask, spans and owners besides.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from chat_tools import render
from chat_tools.testing.real_templates import real_tokenizer, template_names

TURNS = (4, 16, 64)
ROUNDS = 30


def conversation(turns: int) -> list[dict[str, Any]]:
    """A conversation of so many assistant turns, every fourth of which calls a tool."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        if turn % 4 == 3:
            function = {"name": "weather", "arguments": {"city": "Paris", "days": turn}}
            call = {"type": "function", "id": f"call{turn:05d}", "function": function}
            messages += [
                {"role": "user", "content": "and there?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            messages.append({"role": "tool", "content": "sunny, 21 degrees", "tool_call_id": call["id"]})
        messages.append({"role": "user", "content": f"what is the weather in city number {turn}?"})
        messages.append({"role": "assistant", "content": f"The weather in city number {turn} is fine, with some wind."})
    return messages


def seconds(*calls: Callable[[], Any]) -> list[float]:
    """The least processor seconds of each call over several rounds, in which all take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            begun = time.process_time()
            call()
            best[number] = min(best[number], time.process_time() - begun)
    return best


def main(names: list[str]) -> None:
    """Print the table."""
    print("template                      turns   apply_chat_template    render   ratio")
    for name in names or [name for name in template_names() if name.startswith("qwen3")][:3]:
        tokenizer = real_tokenizer(name)
        for turns in TURNS:
            messages = conversation(turns)
            plain, ours = seconds(
                partial(tokenizer.apply_chat_template, messages, tokenize=True), partial(render, tokenizer, messages)
            )
            print(f"{name:30}{turns:5d}   {1e3 * plain:16.1f} ms {1e3 * ours:6.1f} ms   {ours / plain:5.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
