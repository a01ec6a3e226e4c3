"""A stop text ends a turn with the token that completes it: of the same tokens as without it, and the turn goes on."""

import asyncio
from dataclasses import replace

import pytest

from rollout.chat.chat import Chat
from rollout.chat.conversation import Conversation
from rollout.chat.stop_texts import generate_until
from rollout.engine import Sampling
from rollout.native.engine import NativeEngine
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model

TOKENIZER = tiny_tokenizer()
SAMPLING = Sampling(max_new_tokens=60, seed=3, stop_token_ids=(TOKENIZER.convert_tokens_to_ids("<|im_end|>"),))
ASK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(tiny_model(len(TOKENIZER), layers=2))


@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_are_those_without_it_up_to_the_text(engine: NativeEngine, seed: int) -> None:
    chat, how = Chat(TOKENIZER), replace(SAMPLING, seed=seed)
    prompt = chat.open(ASK)
    free = engine.generate_batch([prompt], how)[0]
    texts = [chat.decode(free.ids[:count]) for count in range(len(free.ids) + 1)]
    stop = texts[len(texts) // 2][-2:]  # of two tokens, most often: of one character each
    count = next(count for count, text in enumerate(texts) if stop in text)
    done, by_text = asyncio.run(generate_until(engine, chat.decode, prompt, replace(how, stop=("never said", stop))))
    assert by_text
    assert (done.ids, done.log_probs, done.stop_reason) == (free.ids[:count], free.log_probs[:count], "stop")
    assert engine.load().running == 0
    plain, by_text = asyncio.run(generate_until(engine, chat.decode, prompt, replace(how, stop=("never said",))))
    assert (plain, by_text) == (free, False)


def test_a_conversation_goes_on_after_it(engine: NativeEngine) -> None:
    chat = Chat(TOKENIZER)
    free = engine.generate_batch([chat.open(ASK)], SAMPLING)[0]
    stop = chat.decode(free.ids[:9])[-2:]

    async def play() -> tuple[Conversation, int]:
        talk = Conversation(engine, chat, replace(SAMPLING, stop=(stop,)), ASK, seed=None)
        reply = await talk.reply()
        assert reply.finished
        assert reply.text.count(stop) == 1
        assert reply.text.endswith(stop)
        sampled = talk.segments[0].sampled
        assert talk.add_messages([{"role": "user", "content": "and?"}])
        return talk, sampled

    talk, sampled = asyncio.run(play())
    ids, mask = talk.segments[0].ids, talk.segments[0].loss_mask
    after = ids[len(chat.open(ASK)) + sampled :]
    assert after[0] == chat.end_of_turn_id  # which the model did not write
    assert not any(mask[-len(after) :])


def test_what_would_have_no_effect_is_refused(engine: NativeEngine) -> None:
    with pytest.raises(ValueError, match="an engine has no text"):
        engine.generate_batch([[5, 6]], Sampling(stop=("x",)))
    with pytest.raises(ValueError, match="an engine has no text"):
        asyncio.run(engine.generate([5, 6], Sampling(stop=("x",))))
    for wrong in (("",), "x"):
        with pytest.raises(ValueError, match="stop is a tuple of texts"):
            Sampling(stop=wrong)  # type: ignore[arg-type]
