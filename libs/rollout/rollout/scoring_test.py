"""Scores from a server of stock transformers in another process: equal, asked for again, and with an end in time."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import RolloutConfig
from rollout.errors import EpisodeFailed
from rollout.native.engine import NativeEngine
from rollout.openai.engine import OpenAIEngine
from rollout.openai.settings.config import OpenAIConfig
from rollout.openai.vocabulary import check_vocabulary
from rollout.scoring import ScoringError, score_all
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model
from rollout.testing.scripted import ScriptedEngine
from rollout.testing.stock_server import StockServer, stock_server
from rollout.token_scores import RESOLUTION, scores_of, scores_of_rows

VOCAB = 48
ROWS = [[3 + i, *range(5, 5 + i % 7), 9] for i in range(20)] + [[7], [4, 4]]
K = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(VOCAB).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[StockServer]:
    with stock_server(folder) as server:
        yield server


def engine_at(server: StockServer, **options: Any) -> OpenAIEngine:
    return OpenAIEngine(RolloutConfig(backend="openai", openai=OpenAIConfig(f"{server.url}/v1", **options)))


def asked(engine: Any, rows: list[list[int]], k: int = K, seconds: float = 60, **options: Any) -> Any:
    return asyncio.run(score_all(engine, rows, k, name="it", seconds=seconds, **options))


@pytest.mark.parametrize("at_once", [1, 64])
def test_scores_of_a_server_are_those_of_the_engine_here_and_of_one_softmax(served: StockServer, at_once: int) -> None:
    model = tiny_model(VOCAB)
    native = asked(NativeEngine(model), ROWS)
    for ids, there, here in zip(ROWS, asked(engine_at(served), ROWS, at_once=at_once), native, strict=True):
        with torch.no_grad():
            table = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double().log_softmax(-1)
        for scores in (there, here):
            assert scores.top_tokens[:, 1:].t().equal(table.topk(K).indices)
            found = [scores.log_probs[1:], scores.top_log_probs[:, 1:].t(), scores.rest[1:]]
            others = table.scatter(1, table.topk(K).indices, -torch.inf).logsumexp(-1)
            want = [table.gather(1, torch.tensor(ids)[1:, None])[:, 0], table.topk(K).values, others]
            torch.testing.assert_close(found, want, rtol=0, atol=1e-5, check_dtype=False)
            assert scores.top_tokens[:, 0].tolist() == [-1] * K
            assert scores.rest[0] == 0


def test_a_server_that_is_killed_is_named_in_time(folder: Path) -> None:
    with stock_server(folder) as server:
        engine = engine_at(server)
        server.kill()
        with pytest.raises(ScoringError, match=r"^it has scored nothing for 1 s \(http://127.0.0.1:\d+/v1 broke off"):
            asked(engine, ROWS, seconds=1)


def test_a_server_that_hangs_is_named_in_time(folder: Path) -> None:
    with stock_server(folder) as server:
        engine = engine_at(server)
        server.stop()
        with pytest.raises(ScoringError, match=r"^it has scored nothing for 1 s \(no answer\): start it again"):
            asked(engine, ROWS, seconds=1)


def test_a_server_that_comes_back_is_asked_again(folder: Path) -> None:
    """It dies with requests under way, and another one takes its port."""

    async def both() -> Any:
        with stock_server(folder) as first:
            engine = engine_at(first)
            before = asyncio.create_task(score_all(engine, ROWS * 20, K, name="it", seconds=120))
            await asyncio.sleep(0.05)
            first.kill()
        assert not before.done()
        with stock_server(folder, port=int(first.url.rpartition(":")[2])):
            return await before, await score_all(engine, ROWS, K, name="it", seconds=120)

    found, again = asyncio.run(both())
    assert len(found) == 20 * len(ROWS)
    for one, other in zip(found, again * 20, strict=True):
        assert one.top_tokens.equal(other.top_tokens)
        torch.testing.assert_close(one.rest, other.rest)


def test_what_is_refused_is_not_asked_again(folder: Path) -> None:
    with stock_server(folder, max_logprobs=3, max_length=9) as server:
        engine = engine_at(server)
        with pytest.raises(ValueError, match="Requested prompt logprobs of 5, which is greater than max allowed: 3"):
            asked(engine, ROWS[:2])
        assert len(asked(engine, ROWS[:2], k=3)) == 2
        with pytest.raises(ValueError, match="is over max_length=9"):
            asked(engine, [[3] * 9], k=3)
        assert engine.max_length == 9


class Failing(ScriptedEngine):
    """An engine whose every score fails in one way."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lambda prompt, turn: ())
        self.error, self.calls = error, 0

    async def score(self, ids: Any, k: int = 0) -> Any:
        """Fail."""
        self.calls += 1
        raise self.error


def test_an_engine_that_is_gone_is_told_at_once_and_one_that_aborts_is_asked_again() -> None:
    gone, aborted = Failing(RuntimeError("its last words")), Failing(EpisodeFailed("aborted", retryable=True))
    with pytest.raises(ScoringError, match=r"^it: its last words$"):
        asked(gone, ROWS[:1])
    with pytest.raises(ScoringError, match=r"^it has scored nothing for 0.5 s \(aborted\)"):
        asked(aborted, ROWS[:1], seconds=0.5)
    assert (gone.calls, aborted.calls > 1) == (1, True)
    assert asked(gone, [[3], []]) != []  # nothing to ask


def test_the_rest_of_a_sure_teacher_is_rounding_and_not_impossible() -> None:
    """The tokens have all of float32's 1: what others have is known to a millionth, and is not nothing."""
    logits = torch.tensor([[30.0, 4.0, 0.0, 1.0, -2.0, 3.0]])
    table = logits.log_softmax(-1)[0]
    row = {i: float(table[i]) for i in (0, 1)}
    exact = scores_of([3, 0], 2, [logits.double()])
    told = scores_of_rows([3, 0], 2, [None, row], vocab_size=6)
    assert exact.rest[1] < math.log(RESOLUTION)
    assert told.rest[1] == pytest.approx(math.log(RESOLUTION))
    assert scores_of_rows([3, 0], 2, [None, row], vocab_size=2).rest[1] == -math.inf
    loose = logits / 10
    every = {i: float(x) for i, x in enumerate(loose.log_softmax(-1)[0])}
    found = scores_of_rows([3, 0], 3, [None, every], vocab_size=6)
    torch.testing.assert_close(found.rest, scores_of([3, 0], 3, [loose]).rest, atol=1e-6, rtol=0)


def test_the_vocabulary_of_a_server_is_compared_token_by_token(served: StockServer, folder: Path) -> None:
    config, tokenizer = OpenAIConfig(f"{served.url}/v1"), tiny_tokenizer()
    ids = sorted(tokenizer.get_vocab().values())
    check_vocabulary(config, ids, tokenizer.decode)

    def swapped(part: Any) -> str:
        return str(tokenizer.decode([{70: 71, 71: 70}.get(i, i) for i in part]))

    with pytest.raises(ValueError, match=r"token 70 is '.' here and '.' there; serve a model of the same family"):
        check_vocabulary(config, ids, swapped)
    silent_is = pytest.raises(ValueError, match=r"status 404.*serve with vLLM, and with its tokenizer")
    with stock_server(folder, tokenizer=False) as silent, silent_is:
        check_vocabulary(OpenAIConfig(f"{silent.url}/v1"), ids, tokenizer.decode)
    with pytest.raises(ValueError, match="nobody answers at"):
        check_vocabulary(OpenAIConfig(f"{silent.url}/v1"), ids, tokenizer.decode)
