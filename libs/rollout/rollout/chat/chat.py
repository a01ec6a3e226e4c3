"""Chat templates for episodes, token in, token out: sampled tokens are never tokenised again."""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.formats import find_format
from chat_tools.parsing.parser import parse
from chat_tools.rendering.continuation import extend
from chat_tools.rendering.masks import find_regions
from chat_tools.rendering.render import Rendered
from chat_tools.rendering.replaced_messages import common_prefix
from chat_tools.rendering.template import ChatTemplate, tokens_as_text
from chat_tools.rendering.turn_delimiters import find_turn_delimiters
from chat_tools.sampled_turn import parse_ids
from rollout.chat.images import ImageProcessor, RenderedPrompt, expanded, images_of, without_image_parts, without_images
from rollout.chat.messages import Message, Reply
from rollout.chat.outline import Outline
from rollout.chat.repeated import Repeated
from rollout.chat.short_history import ShortHistories
from rollout.tools.escape_control_tokens import SafeEncoder
from rollout.tools.tool import Tool, ToolCall, call_id
from seqpack.renamed import renamed, renamed_arguments


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render messages as text."""
        ...

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Tokenise text into ids."""
        ...

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by id."""
        ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Decode token ids into text."""
        ...


MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
MAX_OPENINGS = 4096  # cached renderings of conversations' beginnings
MAX_SEEN = 64  # conversations with images whose patches are cached
MAX_TEXTS = 512  # cached renderings of running conversations
SHORT = 128  # tokens of a turn that is cached: the episodes of a group often share short ones


def check_text_only(messages: Sequence[Message]) -> None:
    """Raise ValueError, naming the message, for media where nothing reads them: a template may drop them silently.

    Media are parts of a content that are not of type "text" and the keys in `MEDIA_KEYS` of a message or part.
    """
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        kinds = [part.get("type", "text") for part in parts if isinstance(part, Mapping)]
        keys = [key for part in (message, *parts) if isinstance(part, Mapping) for key in MEDIA_KEYS if key in part]
        for kind in [*(kind for kind in kinds if kind != "text"), *keys]:
            raise ValueError(
                f"message {index} ({message.get('role')}) holds media ({kind!r}), which nobody here reads: "
                "leave such rows out, or write what the media show as text"
            )


class Chat:
    """A tokenizer with its chat template and the format of its tool calls.

    `end_of_turn` is the token with which the template closes an assistant turn. `stop_tokens` are those at which the
    model stops, by text or id (`chat_tools.read_stop_tokens(folder, tokenizer)` names a checkpoint's); the default is
    `end_of_turn`, or without it what the tokenizer and the template name. `options` are passed to the template (such as
    `enable_thinking`). `prefill` is what the generation prompt holds of the turn ("<think>\\n", ""). `image_processor`
    reads the images of a conversation's first messages; without it they are refused. Messages of other roles than the
    system and the assistant can't become a control token (`SafeEncoder`).
    """

    @renamed_arguments(pictures="image_processor")
    def __init__(
        self,
        tokenizer: Tokenizer,
        end_of_turn: str | None = None,
        tool_format: str | Format = "qwen3_xml",
        stop_tokens: Sequence[str | int] | None = None,
        image_processor: ImageProcessor | None = None,
        **options: Any,
    ) -> None:
        stops: tuple[str, ...] | None = None if stop_tokens is None else tokens_as_text(stop_tokens, tokenizer)
        if end_of_turn is None:
            delimiters = find_turn_delimiters(
                ChatTemplate(tokenizer, None, options, stops), {"role": "assistant", "content": "x"}
            )
            stops = stops or delimiters.stops
            end_of_turn = next(iter((*delimiters.closings, *delimiters.stops)), "")
            self._ends = (*(end for end in delimiters.ends if end.endswith(end_of_turn)), end_of_turn)
        else:
            self._ends = (end_of_turn,)
        stops = (end_of_turn,) if stops is None else stops
        self.tokenizer = tokenizer
        self.end_of_turn = end_of_turn
        self.end_of_turn_id = self._single(end_of_turn)
        self.stop_ids = tuple(self._single(stop) for stop in stops)
        self.tool_format = tool_format
        find_format(tool_format)  # raises ValueError with the known formats
        self.options = options
        self.prefill = self._generation_prompt().partition("\n")[2]
        self._encoder = SafeEncoder(tokenizer)
        self.image_processor = image_processor
        self._image_id = None if image_processor is None else self._single(image_processor.token)
        self._openings: dict[Hashable, list[int]] = {}
        self._seen: dict[Hashable, RenderedPrompt] = {}
        self._texts: dict[str, tuple[str, tuple[Tool, ...]]] = {}
        self._turns: dict[tuple[tuple[str, str], ...], str] = {}
        self._replies = Repeated[Reply](MAX_OPENINGS)
        self._following = Repeated[list[int] | None](MAX_TEXTS)
        self._short = ShortHistories(getattr(tokenizer, "chat_template", None), options)

    pictures = renamed("image_processor")

    def _single(self, token: str) -> int:
        ids = self.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"end_of_turn {token!r} is {len(ids)} tokens; name the single token that ends a turn")
        return int(ids[0])

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> RenderedPrompt:
        """Return the tokens of a conversation up to the assistant's turn, and the images that they show.

        Raises ValueError for images that cannot be read, and for other media (`check_text_only`).
        """
        images = [] if self.image_processor is None else images_of(messages)
        if not images or self.image_processor is None or self._image_id is None:
            return RenderedPrompt(self.open(messages, tools))
        key = _key(messages, tools)  # None, as for pictures, which are no text: each is read anew
        if key is None or key not in self._seen:
            bare = without_images(messages)
            check_text_only([without_image_parts(message) for message in bare])
            ids = self._opening(bare, tools)
            opened = expanded(ids, self._image_id, self.image_processor.read(images), self.image_processor.merge_size)
            if key is None:
                return opened
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen[key] = opened
        return self._seen[key]

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a conversation up to the assistant's turn, rendered once for a group.

        Raises ValueError for media in a message (`check_text_only`), which only `opening` takes.
        """
        key = _key(messages, tools)
        if key is None:
            check_text_only(messages)
            return self._opening(messages, tools)
        opened = self._openings.get(key)
        if opened is None:  # a cached rendering was checked when it was made
            check_text_only(messages)
            if len(self._openings) >= MAX_OPENINGS:
                self._openings.clear()
            opened = self._openings[key] = self._opening(messages, tools)
        return list(opened)

    def _opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        escaped = self._encoder.escape(messages, [t.schema for t in tools])
        return self._encoder.encode(self.render(escaped.messages, tools, add_generation_prompt=True), escaped)

    def outline(self) -> Outline | None:
        """Return the outline of an empty conversation, for `follow`; None where the template needs whole ones."""
        return self._short.outline()

    def after_turn(self, new_messages: Sequence[Message]) -> list[int]:
        """Return the token ids that follow a turn's end-of-turn token: the new messages and the next turn's opening.

        They are the difference of two renderings of a placeholder conversation, so the real turn is not changed. The
        result is that of `chat_tools.extend`, in a tenth of its time, as the tests check. Raises ValueError for media
        in a message and for a template that writes earlier turns differently once messages follow.
        """
        check_text_only(new_messages)
        escaped = self._encoder.escape(new_messages)
        new_messages = escaped.messages
        tools = [m for m in new_messages if m.get("role") == "tool"]
        calls = tuple((m.get("name", "f"), m.get("tool_call_id", call_id(i))) for i, m in enumerate(tools))
        placeholder = _placeholder(calls)
        if calls not in self._turns:
            if len(self._turns) >= MAX_OPENINGS:
                self._turns.clear()
            before = self.render(placeholder, (), add_generation_prompt=False)
            self._turns[calls] = before[: before.rfind(self.end_of_turn) + len(self.end_of_turn)]
        turn = self._turns[calls]
        after = self.render([*placeholder, *new_messages], (), add_generation_prompt=True)
        if not turn.endswith(self.end_of_turn) or not after.startswith(turn):
            raise ValueError(
                "the chat template rewrites earlier turns; episodes of several turns need one that keeps them"
            )
        return self._encoder.encode(after[len(turn) :], escaped)

    def follow(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        stop: int | None = None,
        outline: Outline | None = None,
    ) -> list[int] | None:
        """Return the token ids of new messages after the last turn; None where the conversation must be rendered anew.

        `messages` end with an assistant's turn whose tokens were sampled after those of an opening or of an earlier
        call of this; `stop` is the token that ended the turn, None where a limit did. None is returned where the
        template now writes anything before the new messages differently than when the model read it (thinking that is
        stripped once a user speaks), or where that cannot be shown: `open` all the messages then. As in
        `chat_tools.extend`, a sampled stop token replaces the one that the template writes. With the `outline` of
        the messages (`self.outline`), or of the first of them, a turn of a long conversation costs what one of a short
        one does. Raises ValueError for media and for messages that the template refuses.
        """
        check_text_only(new_messages)

        def following(history: Sequence[Message]) -> list[int] | None:
            key = [[dict(m) for m in history], [dict(m) for m in new_messages], [t.schema for t in tools], stop]
            return self._following.of(key, lambda: self._follow(history, new_messages, tools, stop))

        ids = self._short.follow(following, messages, new_messages, outline, (bool(tools), stop))
        return None if ids is None else list(ids)

    def _follow(
        self, messages: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[Tool], stop: int | None
    ) -> list[int] | None:
        """Do the work of `follow` by renderings of all these messages."""
        count = len(messages)
        escaped = self._encoder.escape([*without_images(messages), *new_messages], [t.schema for t in tools])
        everything = escaped.messages
        before, turn = (self._known_text(everything[:n], tools, False) for n in (count - 1, count))
        whole = self._known_text(everything, tools, True)
        if not turn.startswith(before):
            prompted = self.render(everything[: count - 1], tools, add_generation_prompt=True)
            before = before[: common_prefix(before, prompted)]  # Phi-3 ends an unprompted text with its own token
            if not turn.startswith(before):
                return None  # the template drops something once the turn is there
        end = turn.rfind(self.end_of_turn) + len(self.end_of_turn)
        closed = self.end_of_turn in turn[len(before) :] and not turn[end:].strip() and whole.startswith(turn[:end])
        if closed and (stop == self.end_of_turn_id or stop not in self.stop_ids):
            whole_end = next(text for text in self._ends if turn.endswith(text, 0, end))
            missing = "" if stop == self.end_of_turn_id else whole_end
            return self._encoder.encode(missing + whole[end:], escaped)
        following = self._appended(everything, count, turn, whole, tools, stop)
        if following is None and closed:
            following = self.end_of_turn + whole[end:]
        return None if following is None else self._encoder.encode(following, escaped)

    def _appended(
        self, messages: Sequence[Message], count: int, turn: str, whole: str, tools: Sequence[Tool], stop: int | None
    ) -> str | None:
        """Return what `chat_tools.extend` appends to message `count` - 1; None where the template rewrites it."""
        stops = tuple(self.tokenizer.decode([i], skip_special_tokens=False) for i in self.stop_ids)
        template = ChatTemplate(self.tokenizer, [t.schema for t in tools] or None, self.options, stops)
        known = tuple(messages[:count])
        before, after = (
            max((r.body_end for r in find_regions(template, *case).regions if r.message == count - 1), default=None)
            for case in ((known, turn, False), (messages, whole, True))
        )
        if before is None or after is None or turn[:before] != whole[:after]:
            return None
        sampled = "" if stop not in self.stop_ids else self.tokenizer.decode([stop], skip_special_tokens=False)
        said = Rendered([], "", [], (), messages=known, template=template, stop=sampled)
        try:
            return extend(said, messages[count:]).text
        except ValueError:
            return None

    def read(self, ids: Sequence[int], finished: bool, tools: Sequence[Tool] = (), *, calls_before: int = 0) -> Reply:
        """Parse the tokens of one sampled turn into content, reasoning and tool calls.

        The last token of a `finished` turn is its stop token. A call without an id gets one by its number in the
        conversation, of which `calls_before` came in earlier turns.
        """
        sampled = tuple(ids[:-1] if finished else ids)
        if len(sampled) > SHORT:
            return self._read(sampled, finished, tools, calls_before)
        key = (sampled, finished, [t.schema for t in tools], calls_before)  # calls are numbered in their conversation
        return self._replies.of(key, lambda: self._read(sampled, finished, tools, calls_before))

    def structured_problem(self) -> str | None:
        """Return why a structured output would be no content of a turn, which thinking begins; None where it is."""
        if parse("{}", self.tool_format, [], prefill=self.prefill).content == "{}":
            return None
        return (
            "the chat template begins turns with thinking, which no structured output is: turn it off (enable_thinking)"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _read(self, sampled: Sequence[int], finished: bool, tools: Sequence[Tool], calls_before: int) -> Reply:
        text = self.decode(sampled)
        schemas = [t.schema for t in tools]
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            parsed = parse(text, self.tool_format, schemas, prefill=self.prefill)
        else:  # a marker that the model spells is no call
            parsed = parse_ids(sampled, self.tokenizer, self.tool_format, schemas, prefill=self.prefill)
        return Reply(
            text=text,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=tuple(
                ToolCall(c.name, c.arguments, c.id or call_id(calls_before + i))
                for i, c in enumerate(parsed.tool_calls)
            ),
            problems=tuple(m.reason for m in parsed.malformed),
            finished=finished,
        )

    def _generation_prompt(self) -> str:
        """Return what the template adds before an assistant's turn: its role, perhaps an opened thinking."""
        user: list[Message] = [{"role": "user", "content": "x"}]
        before = self.render(user, (), add_generation_prompt=False)
        return self.render(user, (), add_generation_prompt=True)[len(before) :]

    def _known_text(self, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool) -> str:
        """Return a rendering, cached because the episodes of a group begin alike and often go on alike."""
        try:
            key = json.dumps([[dict(m) for m in messages], [id(t) for t in tools], add_generation_prompt])
        except TypeError:  # a value that JSON lacks
            return self.render(messages, tools, add_generation_prompt)
        known = self._texts.get(key)
        if known is None:
            for oldest in list(self._texts)[: len(self._texts) - MAX_TEXTS + 1]:  # several threads may be here
                self._texts.pop(oldest, None)
            text = self.render(messages, tools, add_generation_prompt)
            known = self._texts[key] = (text, tuple(tools))  # ids are unique among living tools
        return known[0]

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool) -> str:
        """Render messages as text by the template, without escaping control tokens in the words of others.

        Raises ValueError for messages that the template refuses.
        """
        schemas = [t.schema for t in tools] or None
        shape = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **self.options}
        problem: Exception | None = None
        for form in ([dict(m) for m in messages], [_with_text_arguments(m) for m in messages]):
            try:
                return str(self.tokenizer.apply_chat_template(form, tools=schemas, **shape))
            except TypeError as error:  # DeepSeek-V3's template joins text to a call's arguments
                problem = error
            except TemplateError as error:
                problem = error
                break
        raise ValueError(f"the chat template refuses these messages: {problem}") from problem


def _key(messages: Sequence[Message], tools: Sequence[Tool]) -> Hashable | None:
    """Return a key of a conversation's beginning, with its keys in order; None for a value that JSON lacks."""
    if not tools and all(type(value) is str for message in messages for value in message.values()):
        return tuple(tuple(message.items()) for message in messages)  # the usual case, in a tenth of the time
    try:
        return json.dumps([[dict(m) for m in messages], [t.schema for t in tools]])
    except TypeError:
        return None


def _placeholder(calls: Sequence[tuple[str, str]]) -> list[Message]:
    """Return a question and an assistant turn with these calls, by name and id: templates look both up for results."""
    answer: dict[str, Any] = {"role": "assistant", "content": "y"}
    if calls:
        answer["tool_calls"] = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": {}}} for name, id_ in calls
        ]
    return [{"role": "user", "content": "x"}, answer]


def _with_text_arguments(message: Message) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    changed = dict(message)
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = dict(call.get("function") or {})
        if not isinstance(function.get("arguments", ""), str):
            call["function"] = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return changed | {"tool_calls": calls} if calls else changed
