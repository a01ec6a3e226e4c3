"""vLLM's own server behind the openai engine, on loopback and with a key: the log-probs are the module's."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import RolloutConfig
from rollout.engine import Completion, Sampling
from rollout.openai.engine import OpenAIEngine
from rollout.openai.settings.config import OpenAIConfig
from rollout.openai.vocabulary import check_vocabulary
from rollout.scoring import score_all
from rollout.testing.chat import tiny_tokenizer
from rollout.vllm.client.process import environment
from rollout.vllm.settings.config import VllmConfig
from rollout.vllm.testing.served import ANSWER, MEAN, MOST, PROMPTS, VOCAB, assert_agrees, sample, served

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
KEY = "a key of the test"
OPTIONS = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512"),
    *("--max-num-seqs", "32", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"),
    *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--host", "127.0.0.1"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    served().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server that has no tokenizer, as tokens come in and go out."""
    with server(folder, "--skip-tokenizer-init") as url:
        yield url


@contextlib.contextmanager
def server(folder: Path, *more: str) -> Iterator[str]:
    """vLLM's server over a directory; all its processes end with the context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "log"
    started = environment(VllmConfig(), os.environ) | {"VLLM_API_KEY": KEY}
    command = [os.environ["TESSERA_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *OPTIONS, *more, "--port", str(port)],
            stdout=out,
            stderr=out,
            env=started,
            start_new_session=True,
        )
    try:
        wait_for(port, process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until somebody listens there."""
    limit = time.monotonic() + 300
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < limit, log.read_text()[-3000:]
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)


@pytest.fixture
def engine(url: str, monkeypatch: pytest.MonkeyPatch) -> OpenAIEngine:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return engine_at(url)


def engine_at(url: str, **own: Any) -> OpenAIEngine:
    return OpenAIEngine(RolloutConfig(backend="openai", max_batch=32, openai=OpenAIConfig(url, **own)), version=3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_module(engine: OpenAIEngine, temperature: float) -> None:
    done = sample(engine, PROMPTS, Sampling(max_new_tokens=8, temperature=temperature))
    assert_agrees(served(), PROMPTS, done, temperature)
    assert all(len(c.ids) == 8 and c.stop_reason == "length" for c in done)
    assert set(done[0].policy_versions) == {3}


def test_greedy_answers_and_seeds_repeat(engine: OpenAIEngine) -> None:
    greedy = [asyncio.run(engine.generate(PROMPTS[0], Sampling(max_new_tokens=16, greedy=True))) for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert_agrees(served(), PROMPTS[:1], greedy[:1])
    together = sample(engine, PROMPTS)
    assert [c.ids for c in sample(engine, PROMPTS)] == [c.ids for c in together]


def test_a_stop_token_ends_and_is_kept(engine: OpenAIEngine) -> None:
    free = sample(engine, PROMPTS)
    stop = free[0].ids[3]
    done = sample(engine, PROMPTS, replace(ANSWER, stop_token_ids=(stop,)))
    for before, after in zip(free, done, strict=True):
        cut = before.ids.index(stop) + 1 if stop in before.ids else len(before.ids)
        assert after.ids == before.ids[:cut]
        assert after.stop_reason == ("stop" if stop in before.ids else "length")


def test_a_cancelled_request_answers_with_what_it_has(engine: OpenAIEngine) -> None:
    async def ask() -> Completion:
        begun = asyncio.Event()
        long = Sampling(max_new_tokens=400)
        task = asyncio.create_task(engine.generate(PROMPTS[0], long, request_id="it", on_tokens=lambda *_: begun.set()))
        await begun.wait()
        assert await engine.cancel("it")
        return await task

    done = asyncio.run(ask())
    assert done.stop_reason == "abort"
    assert 0 < len(done.ids) < 400
    assert_agrees(served(), PROMPTS[:1], [done])


def test_what_is_wrong_is_refused(engine: OpenAIEngine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_length=512"):
        asyncio.run(engine.generate([3] * 510, ANSWER))
    knowing = engine_at(url, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        asyncio.run(knowing.generate([3, VOCAB], ANSWER))  # asked, it would end the server's engine
    assert asyncio.run(knowing.generate([3, VOCAB - 1], ANSWER)).ids
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    with pytest.raises(ValueError, match="the key"):
        OpenAIEngine(RolloutConfig(backend="openai", openai=OpenAIConfig(url)))


def test_a_server_with_a_tokenizer_refuses_an_unknown_id_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at ids where it has one, whose size stands in for the model's."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with server(folder) as url:
        engine = engine_at(url)
        with pytest.raises(ValueError, match=r"refuses a request \(400\): .*out of vocabulary"):
            asyncio.run(engine.generate([3, VOCAB], ANSWER))
        assert_agrees(served(), PROMPTS, sample(engine, PROMPTS))
        check_teacher(engine, url)


def check_teacher(engine: OpenAIEngine, url: str) -> None:
    """Its scores are the module's, its tokens the tokenizer's, and what it does not tell is refused."""
    tokenizer, model = tiny_tokenizer(), served()
    check_vocabulary(OpenAIConfig(url), sorted(tokenizer.get_vocab().values()), tokenizer.decode)
    with pytest.raises(ValueError, match=r"token 70 is .*serve a model of the same family"):
        check_vocabulary(OpenAIConfig(url), range(64, 90), lambda ids: tokenizer.decode([i + (i == 70) for i in ids]))
    found = asyncio.run(score_all(engine, PROMPTS, 20, name="it", seconds=120))
    apart = []
    for prompt, scores in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            table = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        told = scores.top_log_probs[:, 1:].t()
        apart.append((scores.log_probs[1:] - table.gather(1, torch.tensor(prompt)[1:, None])[:, 0]).abs())
        apart.append((told - table.gather(1, scores.top_tokens[:, 1:].t())).abs().flatten())
        torch.testing.assert_close(scores.rest[1:].exp(), 1 - told.exp().sum(-1), atol=2e-6, rtol=0)
    assert torch.cat(apart).max() < MOST
    assert torch.cat(apart).mean() < MEAN
    with pytest.raises(ValueError, match=r"refuses a request \(400\): .*21.*20"):
        asyncio.run(engine.score(PROMPTS[0], 21))
