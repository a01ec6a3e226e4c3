"""A served gateway for tests: an engine with scripted completions, and the real openai client."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import openai

from rollout.chat.chat import Chat
from rollout.chat.segment import Segment
from rollout.engine import Completion, Load, OnTokens, Sampling, StopReason
from rollout.gateway.server import TokenGateway
from rollout.testing.chat import tiny_tokenizer
from seqpack.capability import Supported, Unsupported

T = TypeVar("T")
TOKENIZER = tiny_tokenizer()
TOKEN = "a-token-of-the-test"
QUESTION = {"role": "user", "content": "37+58="}
CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n37\n</parameter>\n<parameter=b>\n58\n</parameter>\n"
    "</function>\n</tool_call>"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def encode(text: str) -> list[int]:
    """Tokenise text into ids."""
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def decode(ids: Sequence[int]) -> str:
    """Decode ids into text."""
    return str(TOKENIZER.decode(list(ids)))


class Script:
    """An engine with scripted completions; log-probs tell the position of each token in its stream.

    With `streams` it streams its tokens one by one, each once a permit of `paces` is there (None: at once), and a
    cancelled request returns the tokens so far.
    """

    def __init__(self, *texts: str, version: int = 3) -> None:
        self.texts = list(texts)
        self.version = version
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.running = 0
        self.most = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.streams = True
        self.paces: asyncio.Semaphore | None = None
        self.ended: set[str] = set()  # requests that were cancelled by name

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether it streams its tokens."""
        return (
            Supported("here") if feature == "streaming" and self.streams else Unsupported(f"a script has no {feature}")
        )

    async def cancel(self, request_id: str) -> bool:
        """End a request before its next token."""
        self.ended.add(request_id)
        return True

    def load(self) -> Load:
        """Return how many requests are open."""
        return Load(self.running, 0)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        media: Any = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Return the next completion, once the gate is open, streamed token by token."""
        del media, deadline
        number = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            ids = encode(self.texts[number % len(self.texts)])[: sampling.max_new_tokens]
            log_probs = [-float(len(prompt_ids) + i) for i in range(len(ids))]
            reason: StopReason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
            for at in range(len(ids)):
                if on_tokens is None:
                    break
                await (asyncio.sleep(0) if self.paces is None else self.paces.acquire())
                if request_id in self.ended:
                    ids, log_probs, reason = ids[:at], log_probs[:at], "abort"
                    break
                on_tokens([ids[at]], [log_probs[at]])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return Completion(tuple(ids), tuple(log_probs), reason, (self.version,) * len(ids))


def client(gateway: TokenGateway, session: str = "s", **options: Any) -> openai.AsyncOpenAI:
    """Return an OpenAI client for one session."""
    return openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.key(session), max_retries=0, **options)


def serve(engine: Any, body: Callable[[TokenGateway], Awaitable[T]], **options: Any) -> T:
    """Run `body(gateway)` against a served engine."""

    async def run() -> T:
        async with TokenGateway(engine, Chat(TOKENIZER), token=TOKEN, **options) as gateway:
            return await asyncio.wait_for(body(gateway), 300)

    return asyncio.run(run())


def check(segment: Segment) -> None:
    """Assert that sampled tokens have the log-probs of their positions, and others none."""
    for at, (mask, log_prob, version) in enumerate(
        zip(segment.loss_mask, segment.log_probs, segment.policy_versions, strict=True)
    ):
        assert (log_prob, version) == ((-float(at), 3) if mask else (0.0, -1))


WITH_REASONING = "<think>\nSum.\n</think>\n\nLet me add." + CALL + "<|im_end|>"
TURNS = [
    WITH_REASONING,
    "plain<|im_end|>",
    CALL + CALL + "<|im_end|>",
    "<tool_call>\n<function=add>\n<parameter=a>\n3",
    " a  \n<|im_end|>",
]


async def ask(api: openai.AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    """Send these messages and return the choice of the response."""
    return (await api.chat.completions.create(model="policy", messages=list(messages), **options)).choices[0]


def turn(content: str) -> dict[str, str]:
    """Return an assistant's message."""
    return {"role": "assistant", "content": content}


def user(content: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": content}
