"""Benchmark of what follows a turn (`Chat.follow`), by the turns so far: with short histories, and whole.

PYTHONPATH=libs/rollout:libs/chat_tools:libs/seqpack OMP_NUM_THREADS=1 python libs/rollout/benchmarks/long_chat.py

Templates are those of TRL's wheel (`pip install --no-deps trl==1.16.0`). Milliseconds of processor time, the median of
the turns around, in a conversation that follows one as long: of questions and answers, or of calls after one question.
"""

import argparse
import json
import statistics
import time
from typing import Any

from chat_tools.conformance.real_templates import family_of, real_tokenizer
from rollout.chat.chat import Chat
from rollout.tools.tool import Tool

NAMES = ("qwen3_training", "qwen3_5_nothink_training", "llama3_1", "glm4moe", "gptoss")
AT = (4, 40, 400)
AROUND = 3  # turns on either side
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("get_weather", "Tells it.", SCHEMA, str)


def unit(calls: bool, number: int) -> list[dict[str, Any]]:
    """Return an assistant's turn and what is said to it."""
    if not calls:
        answer = {"role": "assistant", "content": f"It is {number} degrees, and the sun shines."}
        return [answer, {"role": "user", "content": f"And in place {number}?"}]
    function = {"name": "get_weather", "arguments": {"city": f"Paris {number}"}}
    call = {"type": "function", "id": f"call{number:05}", "function": function}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "get_weather", "tool_call_id": call["id"], "content": f"{number} degrees, sunny"}
    return [asked, result]


def turns(chat: Chat, calls: bool, short: bool) -> list[float]:
    """Play a conversation and return the milliseconds of each turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in these places?"}]
    outline = chat.outline()
    taken = []
    for number in range(AT[-1] + AROUND + 1):
        turn, *new = unit(calls, number)
        messages.append(turn)
        began = time.process_time()
        if short:
            chat.follow(messages, new, [WEATHER], chat.stop_ids[0], outline)
        elif min(abs(number - at) for at in AT) <= AROUND:
            chat._follow(messages, new, [WEATHER], chat.stop_ids[0])
        taken.append(1000 * (time.process_time() - began))
        messages += new
        chat._texts.clear()  # the renderings of a conversation that was played before
    return taken


def main() -> None:
    """Print the table of all cases, or write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the values as JSON")
    flags = parser.parse_args()
    values = {}
    for name in NAMES:
        for calls in (False, True):
            chat = Chat(real_tokenizer(name), stop_tokens=family_of(name).stops)
            turns(chat, calls, short=True)
            row = {}
            for short in (True, False):
                taken = turns(chat, calls, short)
                for at in AT:
                    median = statistics.median(taken[at - AROUND : at + AROUND + 1])
                    row[f"turn {at}{'' if short else ', whole'} ms"] = float(f"{median:.2g}")
            values[f"{name}, {'calls' if calls else 'answers'}"] = row
            if not flags.json:
                print(f"{name:<26}{'calls' if calls else 'answers':<9}{row}", flush=True)
    if flags.json:
        print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
