"""Read turns with the tool parsers of vLLM's or SGLang's sources: one process a server, JSON lines in and out.

    python server_process.py vllm SOURCES < cases.jsonl > answers.jsonl

Modules of the parsers are the server's own. What else they import of it (engines, protocols, logging) is not imported:
a module without contents stands for it, whose classes keep what they are given. Needs regex, pydantic,
partial-json-parser and orjson.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

OWN = {
    "vllm": ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning", "vllm.envs"),
    "sglang": ("sglang.srt.function_call", "sglang.srt.parser"),
}
PARENTS = {"vllm", "sglang", "sglang.srt"}
RAISED = (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError, TimeoutError)
SECONDS = 5  # for a turn
MARKERS = (
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<tool_sep>",
    "<think>",
    "</think>",
)  # looked for by parsers when they are made


class Kept(type):
    """The type of a class that has any attribute, and whose instances keep their arguments."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kept(name, (Holder,), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return Any

    def __ror__(cls, _: Any) -> Any:
        return Any


class Holder(metaclass=Kept):
    """An object that keeps its arguments, with nothing for all else."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else Nothing()


class Nothing(Holder):
    """An absent setting."""

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__


class Absent(ModuleType):
    """A module without contents."""

    __path__: list[str] = []  # noqa: RUF012  what Python looks for in a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = Kept(name, (Holder,), {}) if name[:1].isupper() else Holder()
        if name == "init_logger":
            value = logging.getLogger
        if name == "is_list_of":
            value = lambda items, kind, **_: isinstance(items, list) and all(isinstance(v, kind) for v in items)  # noqa: E731
        setattr(self, name, value)  # the same class for who asks again
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of the server's parser modules in its sources, and of modules without contents for what is absent."""

    def __init__(self, server: str, root: Path) -> None:
        self.server, self.root = server, root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return where a module is."""
        del path, target
        top = name.partition(".")[0]
        if top == self.server:
            own = any(name == module or name.startswith(f"{module}.") for module in OWN[self.server])
            place = self.root / name.replace(".", "/")
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            if own and file.exists():
                folders = [str(place)] if place.is_dir() else None
                return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        elif importlib.machinery.PathFinder.find_spec(top) is not None or top in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """Return a module without contents."""
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


class Tokens:
    """A tokenizer whose tokens are words, spaces, signs, and markers in angle or square brackets."""

    bos_token, eos_token, pad_token = "<s>", "</s>", "<pad>"
    all_special_tokens: Sequence[str] = ()
    all_special_ids: Sequence[int] = ()
    is_fast, chat_template, name_or_path = True, None, "words"

    def __init__(self, texts: Sequence[str]) -> None:
        self.ids: dict[str, int] = {}
        self.init_kwargs: dict[str, Any] = {}
        for text in texts:
            self.encode(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the tokens of a text."""
        pieces = re.findall(r"</?[^<>\s]{1,60}>|\[/?[A-Z_]+\]|\w+|\s|.", text, re.DOTALL)
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    def decode(self, ids: Any, **_: Any) -> str:
        """Return the text of tokens."""
        names = list(self.ids)
        return "".join(names[i] for i in ([ids] if isinstance(ids, int) else ids))

    def get_vocab(self) -> dict[str, int]:
        """Return the numbers of all tokens."""
        return self.ids

    @property
    def vocab(self) -> dict[str, int]:
        """The numbers of all tokens."""
        return self.ids

    def convert_tokens_to_ids(self, token: Any) -> Any:
        """Return the number of a token."""
        return self.ids.get(token) if isinstance(token, str) else [self.ids.get(t) for t in token]

    def tokenize(self, text: str, **_: Any) -> list[str]:
        """Return a text cut into tokens."""
        names = list(self.ids)
        return [names[i] for i in self.encode(text)]


TOOLS = {
    "vllm": ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionToolsParam"),
    "sglang": ("sglang.srt.entrypoints.openai.protocol", "Tool"),
}


def _tool(tool: dict[str, Any], server: str) -> Any:
    function = tool["function"]
    held = Holder(name=function["name"], parameters=function.get("parameters"), description="", strict=False)
    module, name = TOOLS[server]
    return getattr(importlib.import_module(module), name)(type="function", function=held)


class Vllm:
    """vLLM's parsers."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.registry = tokens, importlib.import_module("vllm.tool_parsers").ToolParserManager

    def read(self, name: str, text: str, tools: list[dict[str, Any]]) -> list[list[str]]:
        """Return the names and arguments of the calls."""
        given = [_tool(tool, "vllm") for tool in tools]
        request = SimpleNamespace(
            tools=given, tool_choice="auto", chat_template_kwargs=None, skip_special_tokens=False, messages=[],
            include_reasoning=True, response_format=None, parallel_tool_calls=True, structured_outputs=None,
        )  # fmt: skip
        parser = self.registry.get_tool_parser(name)(self.tokens, given)
        result = parser.extract_tool_calls(text, request)
        return [[call.function.name, call.function.arguments] for call in result.tool_calls]


class Sglang:
    """SGLang's detectors."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.registry = importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser

    def read(self, name: str, text: str, tools: list[dict[str, Any]]) -> list[list[str]]:
        """Return the names and arguments of the calls."""
        kind = self.registry.ToolCallParserEnum[name]
        try:
            detector = kind(tokenizer=self.tokens)
        except TypeError:  # most take none
            detector = kind()
        result = detector.detect_and_parse(text, [_tool(tool, "sglang") for tool in tools])
        return [[call.name, call.parameters] for call in result.calls]


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"no answer within {SECONDS} s")


def main() -> None:
    """Answer each case with its calls, or with the name of the exception."""
    server, root = sys.argv[1], Path(sys.argv[2])
    logging.disable(logging.CRITICAL)
    sys.meta_path.insert(0, Finder(server, root))
    cases = [json.loads(line) for line in sys.stdin]
    tokens = Tokens([*MARKERS, *(case["text"] for case in cases)])
    judge = Vllm(tokens) if server == "vllm" else Sglang(tokens)
    signal.signal(signal.SIGALRM, _too_long)
    for case in cases:
        signal.alarm(SECONDS)
        try:
            answer: dict[str, Any] = {"calls": judge.read(case["name"], case["text"], case["tools"])}
        except RAISED as error:  # what a parser lets out at a text is an answer
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
