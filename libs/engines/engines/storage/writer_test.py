"""A checkpoint written in the background: training goes on, and what is written is the moment of the call."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from engines import EngineConfig, build_engine
from engines.fsdp2.sharding import whole
from engines.storage.writer import CheckpointWriter, on_host
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2]


def engine(seed: int = 0, **options: Any) -> Any:
    config = EngineConfig(device="cpu", lr=1e-2, max_tokens_per_rank=20, **options)
    return build_engine(config, tiny_model("dense", seed=seed, num_hidden_layers=2))


def run(built: Any, first: int, last: int) -> list[dict[str, float]]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=seed), SFT()) for seed in range(first, last)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk, which writes nothing until it is opened."""
    opened, real = threading.Event(), dcp.save

    def slow(*args: Any, **kwargs: Any) -> None:
        assert opened.wait(60)
        real(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", slow)
    yield opened
    opened.set()


@pytest.mark.parametrize("weights", ["auto", "sharded", "replicated"])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, gate: threading.Event, weights: str) -> None:
    straight, built = engine(weights=weights), engine(weights=weights)
    want = run(straight, 0, 4)
    run(built, 0, 2)
    random = torch.get_rng_state()
    built.save(tmp_path / "two", extra={"row": 17}, wait=False)
    assert run(built, 2, 4) == want[2:]  # on, in place, while nothing is on disk
    torch.rand(3)
    assert not (tmp_path / "two").exists()
    gate.set()
    built.wait_for_saves()
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    resumed = engine(seed=3, weights=weights)
    assert resumed.load(tmp_path / "two") == {"row": 17}
    assert torch.equal(torch.get_rng_state(), random)
    assert run(resumed, 2, 4) == want[2:]


def test_one_is_on_its_way_at_a_time_and_a_reader_waits_for_it(tmp_path: Path, gate: threading.Event) -> None:
    built = engine()
    built.save(tmp_path / "one", wait=False)
    threading.Timer(0.2, gate.set).start()
    run(built, 0, 1)
    built.save(tmp_path / "one", wait=False)  # waits for the first, and replaces it
    assert (tmp_path / "one").is_dir()
    other = engine()
    built.load(tmp_path / "one")  # waits for the second
    other.load(tmp_path / "one")
    assert (built.step, other.step) == (1, 1)


def test_what_went_wrong_is_raised_by_the_next_call_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine()

    def full(*args: Any, **kwargs: Any) -> Never:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(dcp, "save", full)
        built.save(tmp_path / "one", wait=False)
        with pytest.raises(OSError, match="No space"):
            built.wait_for_saves()
        built.wait_for_saves()
        built.save(tmp_path / "one", wait=False)
        with pytest.raises(OSError, match="No space"):
            built.save(tmp_path / "one", wait=False)
    built.save(tmp_path / "one", wait=False)
    built.wait_for_saves()
    assert (tmp_path / "one" / "engine.json").is_file()


@pytest.mark.parametrize("weights", ["auto", "sharded"])
def test_a_copy_on_the_host_shares_nothing(weights: str) -> None:
    built = engine(weights=weights)
    run(built, 0, 1)
    state = built.executor.state()
    copy = on_host(state)
    before = {name: whole(tensor).clone() for name, tensor in copy["model"].items()}
    run(built, 1, 2)
    assert copy["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for name, tensor in copy["model"].items():
        assert isinstance(tensor, DTensor) is (weights == "sharded")
        if isinstance(tensor, DTensor):
            assert tensor.placements == state["model"][name].placements
        assert torch.equal(whole(tensor), before[name]), name
        assert not torch.equal(whole(tensor), whole(state["model"][name])), name


def test_a_writer_that_wrote_nothing_waits_for_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    writer.wait()
    writer.save(tmp_path / "one", {"model": {"x": torch.ones(2)}}, {})
    writer.wait()
    assert (tmp_path / "one").is_dir()
