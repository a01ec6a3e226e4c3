"""The shards of all ranks are the export: the same names, shapes, dtypes and bits, every element some rank's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines import EngineConfig, LoraConfig, build_engine
from engines.proofs.forked_ranks import launch_forked
from engines.testing.assembled import assemble
from engines.testing.one_rank import one_rank  # noqa: F401  a group for tests of one rank
from engines.tiny import tiny_batch, tiny_config, tiny_model
from engines.weights.box import Box, box_of_part
from objectives import SFT

Shards = dict[str, list[tuple[Box, torch.Tensor]]]
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {"weights": "sharded"},
    "whole": {},
    "replicated": {"weights": "replicated", "dtype": "bfloat16"},
    "hybrid": {"weights": "sharded", "shard_ranks": 2},
    "megatron": {"backend": "megatron", "tensor_parallel": 2},
    "megatron pipeline": {"backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2},
    "megatron optimizer": {"backend": "megatron", "distributed_optimizer": True},
}


def shards_of(engine: Any, live: bool) -> tuple[Shards, dict[str, tuple[Any, Any]]]:
    held: Shards = {}
    specs = {}
    for one in engine.export_shards(live):
        held.setdefault(one.name, []).append((one.box, one.read(one.box).to(one.dtype, copy=True)))
        specs[one.name] = (one.shape, one.dtype)
    return held, specs


def both(path: Path | None, kind: str, options: dict[str, Any], live: bool) -> list[Any]:
    """The export after a step, and every rank's shards of it."""
    source: Any = {"model": str(path)} if path is not None else {}
    model = None if path is not None else tiny_model(kind, scale=2.0, num_hidden_layers=2)
    config = EngineConfig(device="cpu", lr=0.1, max_tokens_per_rank=20, **source, **options)
    engine = build_engine(config) if model is None else build_engine(config, model)
    engine.train_batch(tiny_batch([7, 12, 5, 3]), SFT())
    whole = assemble(engine.export_weights(max_bytes=100, live=live))
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, shards_of(engine, live))
    return [whole, every]


def check(whole: dict[str, torch.Tensor], every: list[tuple[Shards, dict[str, tuple[Any, Any]]]]) -> int:
    """Return how many elements the rank with most holds."""
    seen = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in whole.items()}
    most = 0
    for held, specs in every:
        for name, boxes in held.items():
            assert specs[name] == (tuple(whole[name].shape), whole[name].dtype), name
            for box, values in boxes:
                assert torch.equal(values, whole[name][box.index]), (name, box)
                seen[name][box.index] += 1
        most = max(most, sum(values.numel() for boxes in held.values() for _, values in boxes))
    for name, count in seen.items():
        assert bool((count >= 1).all()), f"nobody holds all of {name}"
    return most


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    ("options", "ranks", "share"),
    [("fsdp2", 2, 0.6), ("replicated", 2, 0.6), ("megatron", 2, 0.75), ("megatron optimizer", 2, 0.6)],
)
def test_shards_of_two_ranks_are_the_export(options: str, ranks: int, share: float, live: bool) -> None:
    kind = "dense" if options == "megatron optimizer" else "moe"
    whole, every = launch_forked(both, (None, kind, OPTIONS[options], live), world_size=ranks, device="cpu")
    assert check(whole, every) <= share * sum(t.numel() for t in whole.values()), "ranks hold shards, not the model"


@pytest.mark.parametrize("options", ["hybrid", "megatron pipeline"])
def test_shards_of_four_ranks_are_the_export(options: str) -> None:
    whole, every = launch_forked(both, (None, "dense", OPTIONS[options], False), world_size=4, device="cpu")
    check(whole, every)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts one by one, a tied head that is there twice, and a tensor that no live model has, in bfloat16."""
    path = tmp_path_factory.mktemp("stock")
    config = tiny_config("moe", num_hidden_layers=2, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    embedding = next(t for name, t in tensors.items() if name.endswith("embed_tokens.weight"))
    tensors |= {"lm_head.weight": embedding.clone(), "mtp.fc.weight": torch.ones(3, 5)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("options", ["fsdp2", "megatron"])
def test_a_checkpoints_names_and_what_it_carries_are_in_the_shards(checkpoint: Path, options: str) -> None:
    arguments = (checkpoint, "moe", OPTIONS[options], False)
    whole, every = launch_forked(both, arguments, world_size=2, device="cpu")
    assert {"lm_head.weight", "mtp.fc.weight"} <= whole.keys() == load_file(checkpoint / "model.safetensors").keys()
    check(whole, every)


def test_one_rank_holds_all_of_it_in_place() -> None:
    engine: Any = build_engine(EngineConfig(device="cpu"), tiny_model("dense", num_hidden_layers=2))
    places = {name: tensor.data_ptr() for name, tensor in engine.executor.model.named_parameters()}
    for one in engine.export_shards(live=True):
        assert one.owner == 0
        assert one.box == Box((0,) * len(one.shape), one.shape)
        if one.name in places:
            assert one.read(one.box).data_ptr() == places[one.name]


def test_adapters_are_refused() -> None:
    config = EngineConfig(device="cpu", lora=LoraConfig(rank=2))
    engine = build_engine(config, tiny_model("dense", num_hidden_layers=2))
    with pytest.raises(ValueError, match="send the adapters"):
        engine.export_shards()


numbers = st.integers(0, 5)


@given(st.lists(st.tuples(numbers, st.integers(1, 4)), min_size=1, max_size=3), st.data())
def test_a_box_in_a_part_is_what_indexing_says(made: list[tuple[int, int]], data: st.DataObject) -> None:
    """Held to a tensor of numbers: those of the box that the part has, at their places in both."""
    box = Box(tuple(at for at, _ in made), tuple(n for _, n in made))
    shape = tuple(at + n + 1 for at, n in made)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    index: list[int | slice] = []
    for n in shape[: data.draw(st.integers(0, len(shape)))]:
        first = data.draw(st.integers(0, n - 1))
        choices: list[int | slice] = [first, slice(first, n), slice(0, first + 1), slice(None)]
        index.append(data.draw(st.sampled_from(choices)))
    inside = set(tensor[box.index].flatten().tolist()) & set(tensor[tuple(index)].flatten().tolist())
    found = box_of_part(box, tuple(index))
    if found is None:
        assert not inside
        return
    place, own = found
    assert torch.equal(tensor[tuple(index)][place.index], tensor[box.index][own])
    assert set(tensor[box.index][own].flatten().tolist()) == inside
