"""New weights on several workers, each a process with a model of its own: all of them, or none, whoever fails when."""

import asyncio
import copy
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import RolloutEngine, Sampling
from rollout.errors import NotFiniteError
from rollout.native.engine import NativeEngine
from rollout.sync.manifest import Manifest, manifest_of
from rollout.sync.pieces import Bucket, buckets
from rollout.sync.transfer import transfer_weights
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of
from rollout.testing.workers import Fault, Worker

VOCAB = 24
PROMPT = [3, 5, 7]
GREEDY = Sampling(greedy=True, max_new_tokens=8)
BUCKET_BYTES = 20_000


def small(seed: int) -> PreTrainedModel:
    torch.set_num_threads(1)
    return tiny_model(VOCAB, layers=2, seed=seed)


def make_engine() -> NativeEngine:
    return NativeEngine(small(0))


def weights(seed: int) -> tuple[Manifest, Iterator[Bucket]]:
    """Manifest and buckets of another model's weights."""
    named = list(small(seed).named_parameters())
    return manifest_of(seed, pieces_of(named)), buckets(pieces_of(named), BUCKET_BYTES)


def answer_of(seed: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Tokens and log-probs of a stock model with these weights: the tied head among them."""
    model = small(seed)
    done = NativeEngine(model).generate_batch([PROMPT], GREEDY)[0]
    row = torch.tensor([[*PROMPT, *done.ids]])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, len(PROMPT) - 1 : -1].double()
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(done.ids)[:, None])[:, 0]
    return done.ids, expected


async def assert_samples_with(engine: RolloutEngine | Worker, seed: int, version: int) -> None:
    """It is not paused, and it answers as a stock model with these weights does."""
    done = await asyncio.wait_for(engine.generate(PROMPT, GREEDY), 60)
    ids, log_probs = answer_of(seed)
    assert done.ids == ids
    assert torch.tensor(done.log_probs).double().sub(log_probs).abs().max() < 1e-5
    assert set(done.policy_versions) == {version}


class Workers:
    """Three workers, of which one may have a fault."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.all = [Worker(make_engine, fault if i == 1 else None) for i in range(3)]

    def __enter__(self) -> list[Worker]:
        for worker in self.all:
            worker.wait_until_ready()
        return self.all

    def __exit__(self, *error: object) -> None:
        for worker in self.all:
            worker.close()


def test_all_workers_take_the_new_weights() -> None:
    async def play(workers: list[Worker]) -> None:
        await asyncio.gather(*(assert_samples_with(worker, 0, 0) for worker in workers))
        await transfer_weights(workers, *weights(1))
        await asyncio.gather(*(assert_samples_with(worker, 1, 1) for worker in workers))
        await transfer_weights(workers, *weights(2), pause=None)
        await asyncio.gather(*(assert_samples_with(worker, 2, 2) for worker in workers))

    with Workers() as workers:
        asyncio.run(play(workers))


LAST = 5  # the number of the last bucket


@pytest.mark.parametrize("how", ["raise", "die before", "die after"])
@pytest.mark.parametrize(
    "point", [("prepare", 0), ("receive", 0), ("receive", LAST), ("pause", 0), ("commit", 0)], ids=str
)
def test_one_that_fails_or_dies_keeps_all_others_at_the_old_weights(point: tuple[str, int], how: str) -> None:
    async def play(workers: list[Worker]) -> None:
        error = ValueError if how == "raise" else RuntimeError
        with pytest.raises(error, match=r"weights 1 are not taken, the old ones stay: receiver 1 of 3"):
            await transfer_weights(workers, *weights(1))
        living = [w for i, w in enumerate(workers) if i != 1 or how == "raise"]
        await asyncio.gather(*(assert_samples_with(worker, 0, 0) for worker in living))
        await transfer_weights(living, *weights(2))  # and the next ones are taken
        await asyncio.gather(*(assert_samples_with(worker, 2, 2) for worker in living))

    with Workers((*point, how)) as workers:
        asyncio.run(play(workers))


def test_there_are_as_many_buckets_as_the_points_above_say() -> None:
    assert len(list(weights(1)[1])) == LAST + 1


def test_one_that_hangs_is_not_waited_for() -> None:
    async def play(workers: list[Worker]) -> None:
        with pytest.raises(RuntimeError, match="receiver 1 of 3: TimeoutError"):
            await transfer_weights(workers, *weights(1), timeout=5)
        await asyncio.gather(*(assert_samples_with(workers[i], 0, 0) for i in (0, 2)))
        for worker in workers:
            worker.close()

    with Workers(("commit", 0, "hang")) as workers:
        asyncio.run(play(workers))


def spoil(name: str, value: float) -> tuple[Manifest, Iterator[Bucket]]:
    """Weights 1 with one element that is `value`."""
    model = small(1)
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] = value
    named = list(model.named_parameters())
    return manifest_of(1, pieces_of(named)), buckets(pieces_of(named), BUCKET_BYTES)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_in_one_process_too(value: float) -> None:
    model = small(0)
    engine, before = NativeEngine(model), copy.deepcopy(model.state_dict())

    async def play() -> None:
        with pytest.raises(NotFiniteError, match=r"norm.weight: element 3 is (nan|inf)"):
            await transfer_weights([engine], *spoil("model.norm.weight", value))
        with pytest.raises(ValueError, match="element 3 is"):
            await engine.update_weights(1, [p for b in spoil("model.norm.weight", value)[1] for p in b.pieces()])
        await assert_samples_with(engine, 0, 0)
        await transfer_weights([engine], *weights(1))
        await assert_samples_with(engine, 1, 1)

    asyncio.run(play())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_stream_that_ends_early_is_refused() -> None:
    engine = NativeEngine(small(0))

    async def play() -> None:
        manifest, stream = weights(1)
        with pytest.raises(ValueError, match=r"stream ended while receiver 0 still lacked \d+ elements"):
            await transfer_weights([engine], manifest, list(stream)[:-1])
        with pytest.raises(ValueError, match="still lacked everything"):
            await transfer_weights([engine], manifest, [])
        await assert_samples_with(engine, 0, 0)

    asyncio.run(play())


def test_a_transfer_that_is_cancelled_leaves_nobody_paused() -> None:
    engine = NativeEngine(small(0))

    async def play() -> None:
        manifest, stream = weights(1)
        started = asyncio.Event()

        class Slow(NativeEngine):
            async def commit(self, version: int) -> None:
                await super().commit(version)
                started.set()
                await asyncio.sleep(3600)

        slow = Slow(small(0))
        task = asyncio.create_task(transfer_weights([engine, slow], manifest, stream))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_samples_with(engine, 0, 0)
        await assert_samples_with(slow, 0, 0)

    asyncio.run(play())
