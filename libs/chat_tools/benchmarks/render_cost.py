"""What `render` costs beside a tokenizer's own `apply_chat_template`, by the number of turns, on this machine.

    python libs/chat_tools/benchmarks/render_cost.py [NAME ...] [--turns 64 256 750]
    python libs/chat_tools/benchmarks/render_cost.py --every --turns 64     (all of TRL's real templates)
    python libs/chat_tools/benchmarks/render_cost.py --fetch DIR            (TRL's, llama-cpp-python's and vLLM's)

Needs transformers, tokenizers, jinja2 and trl's wheel. Each template that is named (Qwen3's where none is), with a
tokenizer trained on the spot: conversations with tool calls, results and answers to them are rendered to ids by both,
in turn; processor seconds, the least of several rounds. `render` gives the mask, spans and owners besides. A template
that refuses the conversation gets the first form of it that it takes: calls' arguments as JSON text, contents as lists
of parts, no calls. Those that are fetched get contents as parts besides. 1 where a ratio is above 2.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from chat_tools import render
from chat_tools.conformance.real_templates import real_tokenizer, template_names
from chat_tools.rendering.template import rendering_errors

TURNS = (64, 256, 750)
ROUNDS = 8
LONGEST = 4.0  # seconds of rounds
MOST = 2.0  # times


def conversation(turns: int) -> list[dict[str, Any]]:
    """Return a conversation of so many assistant turns, every fourth of which calls a tool."""
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
            messages.append({"role": "assistant", "content": "It is sunny there, with 21 degrees."})
        messages.append({"role": "user", "content": f"what is the weather in city number {turn}?"})
        messages.append({"role": "assistant", "content": f"The weather in city number {turn} is fine, with some wind."})
    return messages


def seconds(*calls: Callable[[], Any]) -> list[float]:
    """Return the least processor seconds of each call over several rounds of all calls, at least two."""
    best = [float("inf")] * len(calls)
    begun = time.process_time()
    for turn in range(ROUNDS):
        if turn > 1 and time.process_time() - begun > LONGEST:
            break
        for number, call in enumerate(calls):
            start = time.process_time()
            call()
            best[number] = min(best[number], time.process_time() - start)
    return best


def as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of calls as JSON text."""

    def call_as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}

    return [{**m, "tool_calls": [*map(call_as_text, m["tool_calls"])]} if "tool_calls" in m else m for m in messages]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with contents as lists of parts."""
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the questions and answers alone; of two consecutive questions, the second."""
    texts = [m for m in messages if m["role"] != "tool" and "tool_calls" not in m]
    return [m for m, after in zip(texts, [*texts[1:], None], strict=True) if not after or m["role"] != after["role"]]


FORMS: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "": list,
    "arguments as text": as_text,
    "in parts": in_parts,
    "no calls": without_calls,
    "no calls, in parts": lambda messages: in_parts(without_calls(messages)),
}


def taken(tokenizer: Any, parts: bool = False) -> str:
    """Return the first form that a template takes, of those with contents as parts if asked for; "none" for none.

    One that writes no answer is none either: those of rerankers write a question and a document.
    """
    for name, form in FORMS.items():
        if parts and "in parts" not in name:
            continue
        try:
            text = tokenizer.apply_chat_template(form(conversation(4)), tokenize=False)
        except rendering_errors():
            continue
        return name if "city number 2 is fine" in text else "none"
    return "none"


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the templates that the words choose, each with the forms of the conversation that it gets."""
    if options.fetch:
        from chat_tools.conformance.corpus import fetched_templates  # downloads

        names = [str(path) for path in fetched_templates(options.fetch)]
    elif options.every:
        names = template_names()
    else:
        names = options.names or [name for name in template_names() if name.startswith("qwen3")][:3]
    for name in names:
        tokenizer = real_tokenizer(name)
        forms = dict.fromkeys(taken(tokenizer, parts) for parts in ((False, True) if options.fetch else (False,)))
        yield from ((name, form) for form in forms if form != "none")


def main() -> int:
    """Print the table; return 1 where a ratio is above MOST."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--fetch", type=Path, metavar="DIR")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    options = parser.parse_args()
    ratios: dict[int, dict[str, float]] = {turns: {} for turns in options.turns}
    print("template                        turns   apply_chat_template     render   ratio")
    for name, form in chosen(options):
        tokenizer = real_tokenizer(name)
        for turns, found in ratios.items():
            messages = FORMS[form](conversation(turns))
            plain, ours = seconds(
                partial(tokenizer.apply_chat_template, messages, tokenize=True), partial(render, tokenizer, messages)
            )
            found[f"{Path(name).stem} {form}".rstrip()] = ours / plain
            times = f"{1e3 * plain:16.1f} ms {1e3 * ours:7.1f} ms   {ours / plain:5.2f}"
            line = f"{Path(name).stem:32}{turns:5d}   {times}  {form}"
            print(line.rstrip(), flush=True)
    if not all(ratios.values()):
        raise SystemExit("none of these templates takes the conversation")
    for turns, found in ratios.items():
        above = [f"{name} {ratio:.2f}" for name, ratio in found.items() if ratio > MOST]
        between = f"{min(found.values()):.2f} to {max(found.values()):.2f} times, median {median(found.values()):.2f}"
        print(f"{len(found)} forms at {turns} turns: {between}; above {MOST}: {', '.join(above) or 'none'}")
    return int(any(ratio > MOST for found in ratios.values() for ratio in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
