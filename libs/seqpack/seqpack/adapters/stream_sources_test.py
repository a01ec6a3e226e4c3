"""Other people's streams as sources, with real DataLoader workers: every sample once, or counted; resumption exact."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterableDataset

from seqpack.adapters import PackedStream

SAMPLES = 40


def hub(shards: int) -> IterableDataset:
    return IterableDataset.from_generator(one_shard, gen_kwargs={"shards": list(range(shards)), "count": shards})


def one_shard(shards: list[int], count: int) -> Iterator[dict[str, list[int]]]:
    for shard in shards:
        for i in range(shard, SAMPLES, count):
            yield {"input_ids": [i] * (1 + i % 7)}


def rows_of(start: int = 0, step: int = 1) -> list[dict[str, list[int]]]:
    return [{"input_ids": [i] * (1 + i % 7)} for i in range(start, SAMPLES, step)]


class DividesItself(TorchIterableDataset[Any]):
    """A stream as torch's documentation writes one: each worker gives its share."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        return iter(rows_of(worker.id, worker.num_workers) if worker else rows_of())


class Unrepeatable(TorchIterableDataset[Any]):
    """A stream in an order of its own in each process."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = rows_of() * 4
        random.shuffle(rows)
        return iter(rows)


SOURCES: dict[str, Callable[[], Any]] = {
    "hub, one shard": lambda: hub(1),
    "hub, three shards": lambda: hub(3),
    "hub, shuffled": lambda: hub(2).shuffle(seed=3, buffer_size=8),
    "hub, mapped and filtered": lambda: hub(2).map(lambda row: row).filter(lambda row: True),
    "hub, from a table": lambda: Dataset.from_list(rows_of()).to_iterable_dataset(num_shards=4),
    "divides itself": DividesItself,
    "list": rows_of,
}


def ids(row: list[Any]) -> list[int]:
    return [sample["input_ids"][0] for sample in row]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shard", ["rows", "samples"])
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 1), (1, 3), (2, 2)])
def test_every_sample_once_over_ranks_and_workers_or_counted(name: str, shard: Any, world: int, workers: int) -> None:
    seen, dropped = [], set()
    for rank in range(world):
        stream = PackedStream(SOURCES[name](), 16, rank=rank, world_size=world, shard=shard, lookahead=2)
        loader = DataLoader(stream, batch_size=None, num_workers=workers)
        seen += [i for row in loader for i in ids(row)]
        dropped.add(stream.dropped)
    assert len(dropped) == 1
    assert len(seen) + dropped.pop() == SAMPLES
    assert len(set(seen)) == len(seen)


def test_a_source_that_is_split_by_rank_is_divided_once() -> None:
    parts = [split_dataset_by_node(hub(2), rank, 2) for rank in range(2)]
    seen = [
        i
        for part in parts
        for row in DataLoader(PackedStream(part, 16), batch_size=None, num_workers=2)
        for i in ids(row)
    ]
    assert sorted(seen) == list(range(SAMPLES))
    with pytest.raises(ValueError, match=r"split by rank already.*leave rank and world_size out"):
        PackedStream(parts[0], 16, world_size=2)


@pytest.mark.parametrize("shard", ["rows", "samples"])
def test_workers_that_read_different_samples_are_refused(shard: Any) -> None:
    stream = PackedStream(Unrepeatable(), 16, shard=shard, lookahead=2)
    with pytest.raises(ValueError, match=r"workers of the DataLoader read different samples.*shuffle\(seed"):
        list(DataLoader(stream, batch_size=None, num_workers=2))
    assert len(list(DataLoader(stream, batch_size=None, num_workers=1)))


def test_epochs_reach_the_source_and_its_persistent_workers() -> None:
    stream = PackedStream(SOURCES["hub, shuffled"](), 16)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 1):
        stream.set_epoch(epoch)
        orders.append([i for row in loader for i in ids(row)])
        assert sorted(orders[-1]) == list(range(SAMPLES))
    assert orders[0] != orders[1] == orders[2]
    stream.load_state_dict({"rows": 1})
    with pytest.raises(ValueError, match="a state was loaded after these persistent workers began"):
        list(loader)
    PackedStream(rows_of(), 16).set_epoch(1)  # a source without epochs


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "divides itself"])
def test_a_stream_goes_on_exactly_and_later_epochs_are_whole(name: str) -> None:
    whole = [ids(row) for row in PackedStream(SOURCES[name](), 16, lookahead=2)]
    for done in range(0, len(whole) + 1, 3):
        stream = PackedStream(SOURCES[name](), 16, lookahead=2)
        rows = iter(stream)
        for _ in range(done):
            next(rows)
        state = json.loads(json.dumps(stream.state_dict()))
        assert ("source" in state) == (name.startswith("hub") and "shuffled" not in name and done > 0)
        later = PackedStream(SOURCES[name](), 16, lookahead=2)
        later.load_state_dict(state)
        assert [ids(row) for row in later] == whole[done:]
        assert [ids(row) for row in later] == whole, "the place holds for one iteration"


def test_another_order_than_the_states_is_refused() -> None:
    def after_two(source: Any, epoch: int = 0) -> dict[str, Any]:
        stream = PackedStream(source, 16, lookahead=2)
        stream.set_epoch(epoch)
        rows = iter(stream)
        next(rows), next(rows)
        return stream.state_dict()

    def resume(source: Any, state: dict[str, Any]) -> None:
        stream = PackedStream(source, 16, lookahead=2)
        stream.load_state_dict(state)
        list(stream)

    again = "does not give the .* samples again that were read.*fix the seed"
    with pytest.raises(ValueError, match=again):
        resume(hub(2).shuffle(seed=4, buffer_size=8), after_two(SOURCES["hub, shuffled"]()))
    with pytest.raises(ValueError, match=again):
        resume(SOURCES["hub, shuffled"](), after_two(SOURCES["hub, shuffled"](), epoch=1))
    with pytest.raises(ValueError, match=again):
        resume(rows_of()[:3], after_two(rows_of()))
    with pytest.raises(ValueError, match=r"epoch 1 of the source, which is at 0: call set_epoch\(1\)"):
        resume(hub(2), after_two(hub(2), epoch=1))


@pytest.mark.parametrize("name", ["hub, three shards", "hub, shuffled", "list"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shard", ["rows", "samples"])
def test_torchdatas_loader_resumes_its_workers(name: str, workers: int, shard: Any) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        return stateful(
            PackedStream(SOURCES[name](), 16, lookahead=2, shard=shard), batch_size=None, num_workers=workers
        )

    whole = [ids(row) for row in loader()]
    assert sorted(i for row in whole for i in row) == list(range(SAMPLES))
    for done in (1, 4):
        first, later = loader(), loader()
        rows = iter(first)
        assert [ids(next(rows)) for _ in range(done)] == whole[:done]
        later.load_state_dict(first.state_dict())
        assert [ids(row) for row in later] == whole[done:]


def test_torchdatas_nodes_are_sources() -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def stream() -> PackedStream:
        return PackedStream(nodes.Loader(nodes.IterableWrapper(rows_of())), 16, lookahead=2)

    whole = [ids(row) for row in stream()]
    assert sorted(i for row in whole for i in row) == list(range(SAMPLES))
    for done in range(len(whole) + 1):
        first, later = stream(), stream()
        rows = iter(first)
        for _ in range(done):
            next(rows)
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [ids(row) for row in later] == whole[done:]
        assert [ids(row) for row in later] == whole
