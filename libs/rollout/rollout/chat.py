"""Between messages and tokens, for episodes: token in, token out. What the model sampled is never tokenised again."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from chat_tools.parsing.parser import parse
from rollout.environment import Message, Reply, ToolCall
from rollout.tools import Tool


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Messages to text."""
        ...

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Token ids to text."""
        ...


MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
MAX_OPENINGS = 4096  # renderings of conversations' beginnings that a Chat keeps


def check_text_only(messages: Sequence[Message]) -> None:
    """Raise ValueError, naming the message, for media: no engine takes them yet, and a template may drop them unseen.

    Media are parts of a content that are not of type "text" and the keys in `MEDIA_KEYS` of a message or part.
    """
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        kinds = [part.get("type", "text") for part in parts if isinstance(part, Mapping)]
        keys = [key for part in (message, *parts) if isinstance(part, Mapping) for key in MEDIA_KEYS if key in part]
        for kind in [*(kind for kind in kinds if kind != "text"), *keys]:
            raise ValueError(
                f"message {index} ({message.get('role')}) holds media ({kind!r}), which no rollout engine takes yet: "
                "leave such rows out, or write what the media show as text"
            )


class Chat:
    """A tokenizer with its chat template and the format of its tool calls.

    `end_of_turn` is the token that closes an assistant turn (the one to stop sampling at); `options` are handed to the
    template (such as `enable_thinking`).
    """

    def __init__(
        self, tokenizer: Tokenizer, end_of_turn: str = "<|im_end|>", tool_format: str = "qwen3_xml", **options: Any
    ) -> None:
        ids = tokenizer(end_of_turn, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(
                f"end_of_turn {end_of_turn!r} is {len(ids)} tokens; name the single token that ends a turn"
            )
        self.tokenizer = tokenizer
        self.end_of_turn = end_of_turn
        self.end_of_turn_id = int(ids[0])
        self.tool_format = tool_format
        self.options = options
        self._prefill = self._generation_prompt().partition("\n")[2]
        self._openings: dict[str, list[int]] = {}
        self._turns: dict[int, str] = {}

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a conversation up to where the assistant begins, rendered once for a group.

        Raises ValueError for media in a message (`check_text_only`).
        """
        check_text_only(messages)
        try:
            key = json.dumps([[dict(m) for m in messages], [t.schema for t in tools]])
        except TypeError:  # a value that JSON lacks
            return self._encode(self._text(messages, tools, add_generation_prompt=True))
        if key not in self._openings:
            if len(self._openings) >= MAX_OPENINGS:
                self._openings.clear()
            self._openings[key] = self._encode(self._text(messages, tools, add_generation_prompt=True))
        return list(self._openings[key])

    def after_turn(self, new_messages: Sequence[Message]) -> list[int]:
        """Return the token ids that follow a turn's end-of-turn token: the new messages and the next turn's opening.

        They are the difference of two renderings of a placeholder conversation, so the real turn is not touched; this
        is `chat_tools.extend` in a tenth of its time, and the tests hold it to that. Raises ValueError for media in a
        message and for a template that writes earlier turns differently once messages follow.
        """
        check_text_only(new_messages)
        calls = sum(m.get("role") == "tool" for m in new_messages)
        placeholder = _placeholder(calls)
        if calls not in self._turns:
            before = self._text(placeholder, (), add_generation_prompt=False)
            self._turns[calls] = before[: before.rfind(self.end_of_turn) + len(self.end_of_turn)]
        turn = self._turns[calls]
        after = self._text([*placeholder, *new_messages], (), add_generation_prompt=True)
        if not turn.endswith(self.end_of_turn) or not after.startswith(turn):
            raise ValueError(
                "the chat template rewrites earlier turns; episodes of several turns need one that keeps them"
            )
        return self._encode(after[len(turn) :])

    def read(self, ids: Sequence[int], finished: bool, tools: Sequence[Tool] = ()) -> Reply:
        """One sampled turn as content, reasoning and tool calls; a `finished` turn's last token is its stop token."""
        sampled = list(ids[:-1] if finished else ids)
        text = self.tokenizer.decode(sampled, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parsed = parse(text, self.tool_format, tools=[t.schema for t in tools], prefill=self._prefill)
        return Reply(
            text=text,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=tuple(ToolCall(c.name, c.arguments) for c in parsed.tool_calls),
            problems=tuple(m.reason for m in parsed.malformed),
            finished=finished,
        )

    def _generation_prompt(self) -> str:
        """What the template adds for the assistant to go on from: its role, perhaps the opening of its thinking."""
        user: list[Message] = [{"role": "user", "content": "x"}]
        before = self._text(user, (), add_generation_prompt=False)
        return self._text(user, (), add_generation_prompt=True)[len(before) :]

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool) -> str:
        schemas = [t.schema for t in tools] or None
        return str(
            self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=schemas,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.options,
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _placeholder(calls: int) -> list[Message]:
    """A question and an answer that makes so many tool calls."""
    answer: dict[str, Any] = {"role": "assistant", "content": "y"}
    if calls:
        answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}] * calls
    return [{"role": "user", "content": "x"}, answer]
