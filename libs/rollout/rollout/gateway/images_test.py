"""Images that agents send: read from the request itself, sampled after, recorded with their stream, held to stock."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch

from rollout.chat.chat import Chat
from rollout.chat.images import ImageProcessor
from rollout.chat.segment import Segment
from rollout.engine import Sampling
from rollout.gateway.server import TokenGateway
from rollout.native.engine import NativeEngine
from rollout.testing.chat import TEMPLATE, tiny_tokenizer
from rollout.testing.gateway import TOKEN, client
from rollout.testing.model import tiny_vision_model

IMAGE = 44  # of the model; the tokenizer writes it as M
PARTS = """{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{{- 'M' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"""
TOKENIZER = tiny_tokenizer(TEMPLATE.replace("{{ message.content }}\n{%- for call", PARTS + "\n{%- for call"))
MODEL = tiny_vision_model(len(TOKENIZER)).eval()


def uri(text: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(text.encode()).decode()}"


def read(images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches that follow from an image's bytes; each is of two tokens."""
    drawn = []
    for image in images:
        name = base64.b64decode(image.partition(",")[2])
        drawn.append(torch.randn(8, 24, generator=torch.Generator().manual_seed(sum(name))))
    return torch.cat(drawn), torch.tensor([[1, 2, 4]] * len(drawn))


def asked(*parts: str) -> dict[str, Any]:
    """A user's message of texts, and of images in brackets."""
    made = [
        {"type": "image_url", "image_url": {"url": uri(part), "detail": "auto"}}
        if part.startswith("[")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": made}


def stock_log_probs(segment: Segment) -> list[float]:
    given = {**(segment.media or {})}
    types = [*given.pop("mm_token_type_ids"), *[0] * len(segment.ids)][: len(segment.ids)]
    with torch.no_grad():
        logits = MODEL(
            input_ids=torch.tensor([segment.ids]), mm_token_type_ids=torch.tensor([types]), use_cache=False, **given
        ).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(segment.ids[1:])[:, None])[:, 0].tolist()


def play(*turns: dict[str, Any], responses: bool = False, n: int = 1) -> tuple[Segment, ...]:
    """The segments of a conversation whose user says these."""

    async def run() -> tuple[Segment, ...]:
        chat = Chat(TOKENIZER, image_processor=ImageProcessor(read, 24, token="M"))
        async with (
            TokenGateway(NativeEngine(MODEL), chat, token=TOKEN, sampling=Sampling(seed=4)) as gateway,
            client(gateway) as api,
        ):
            messages: list[Any] = []
            for turn in turns:
                messages.append(turn)
                if responses:
                    parts: list[Any] = [
                        {"type": "input_text", "text": part["text"]}
                        if part["type"] == "text"
                        else {"type": "input_image", "image_url": part["image_url"]["url"]}
                        for part in turn["content"]
                    ]
                    given: Any = [{"role": "user", "content": parts}]
                    await api.responses.create(model="policy", input=given, max_output_tokens=5)
                    continue
                answer = await api.chat.completions.create(model="policy", messages=messages, max_tokens=5, n=n)
                messages.append(answer.choices[0].message)
            return gateway.session("s").segments

    return asyncio.run(run())


def check(segment: Segment, images: int) -> None:
    assert segment.media is not None
    assert len(segment.media["image_grid_thw"]) == images
    assert segment.ids.count(IMAGE) == 2 * images
    stock = stock_log_probs(segment)
    for at in (at for at, sampled in enumerate(segment.loss_mask) if sampled):
        assert segment.log_probs[at] == pytest.approx(stock[at - 1], abs=2e-4)


@pytest.mark.parametrize("responses", [False, True])
def test_an_answer_is_sampled_after_the_image_that_was_sent(responses: bool) -> None:
    (segment,) = play(asked("what is ", "[one]", "?"), responses=responses)
    check(segment, 1)


def test_a_later_turn_keeps_the_image_and_another_image_begins_a_stream() -> None:
    first, second = play(asked("[one]"), asked("and?"), asked("[two]", "?"))
    assert first.sampled + second.sampled <= 15
    check(first, 1)
    check(second, 2)


def test_every_choice_has_the_image() -> None:
    segments = play(asked("[one]"), n=3)
    assert len(segments) == 3
    for segment in segments:
        check(segment, 1)


@pytest.mark.parametrize("url", ["https://example.org/a.png", "/etc/passwd", "file:///etc/passwd", "data:text/html,x"])
def test_nothing_is_fetched_or_opened(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError, match="nothing is fetched here") as refused:
        play({"role": "user", "content": [part]})
    assert refused.value.param == "messages[0].content[0]"
    with pytest.raises(openai.BadRequestError, match="nothing is fetched here"):
        play({"role": "user", "content": [part]}, responses=True)
