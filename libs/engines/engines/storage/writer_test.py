"""A checkpoint written in the background: training goes on, and what is written is the moment of the call."""

import threading

import pytest
import torch
from torch.distributed.tensor import DTensor

from engines import EngineConfig, build_engine
from engines.storage import checkpoint
from engines.storage.writer import CheckpointWriter, on_host
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2]


def engine(seed=0, **options):
    config = EngineConfig(device="cpu", lr=1e-2, max_tokens_per_rank=20, **options)
    return build_engine(config, tiny_model("dense", seed=seed, num_hidden_layers=2))


def run(built, first, last):
    return [built.train_batch(tiny_batch(LENGTHS, seed=seed), SFT()) for seed in range(first, last)]


@pytest.fixture
def gate(monkeypatch):
    """The disk, which writes nothing until it is opened."""
    opened, real = threading.Event(), checkpoint.dcp.save

    def slow(*args, **kwargs):
        assert opened.wait(60)
        real(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", slow)
    yield opened
    opened.set()


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, gate, weights):
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


def test_one_is_on_its_way_at_a_time_and_a_reader_waits_for_it(tmp_path, gate):
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


def test_what_went_wrong_is_raised_by_the_next_call_once(tmp_path, monkeypatch):
    built = engine()

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.dcp, "save", full)
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


def test_a_copy_on_the_host_shares_nothing():
    built = engine()
    run(built, 0, 1)
    state = built.executor.state()
    copy = on_host(state)
    before = {name: tensor.full_tensor().clone() for name, tensor in copy["model"].items()}
    run(built, 1, 2)
    assert copy["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for name, tensor in copy["model"].items():
        assert isinstance(tensor, DTensor)
        assert tensor.placements == state["model"][name].placements
        assert torch.equal(tensor.full_tensor(), before[name]), name
        assert not torch.equal(tensor.full_tensor(), state["model"][name].full_tensor()), name


def test_a_writer_that_wrote_nothing_waits_for_nothing(tmp_path):
    writer = CheckpointWriter()
    writer.wait()
    writer.save(tmp_path / "one", {"model": {"x": torch.ones(2)}}, {})
    writer.wait()
    assert (tmp_path / "one").is_dir()
