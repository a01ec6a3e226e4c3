"""Two files of weights: what is in use is never written, whatever the order of calls, and it is what a reader finds."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Never

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollout.sync.manifest import Manifest
from rollout.testing.pieces import pieces_of
from rollout.vllm.weights.shared_weights import SharedWeights, checkpoint_pieces, checkpoint_shapes, tied_head

SHAPES: dict[str, tuple[int, ...]] = {"embed": (3, 2), "norm": (5,), "half": (7,)}
DTYPES = {"embed": torch.float32, "norm": torch.float32, "half": torch.bfloat16}


def values(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(number), dtype=DTYPES[name]) for name, shape in SHAPES.items()}


@pytest.fixture
def weights() -> Iterator[SharedWeights]:
    with torch.device("meta"):
        shapes = {name: torch.empty(shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()}
    made = SharedWeights(shapes, {"head": "embed"}, version=0)
    for name, value in values(0).items():
        made.regions[0].tensors[name].copy_(value)
    yield made
    made.close()


def assert_reads(weights: SharedWeights, number: int) -> None:
    """As another process reads the file in use: by its path and the slots alone."""
    assert weights.version == number
    path, _ = weights.locate(weights.in_use)
    assert os.stat(path).st_size == weights.nbytes
    with open(path, "rb") as file:
        data = bytearray(file.read())
    for name, dtype, shape, start in (slot.plain() for slot in weights.slots):
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel()
        found = torch.frombuffer(data, dtype=kind, count=size, offset=start).view(shape)
        assert torch.equal(found, values(number)[name])
        assert start % 64 == 0


def stage(
    weights: SharedWeights, version: int, names: Sequence[str] = tuple(SHAPES), rename: dict[str, str] | None = None
) -> int:
    weights.prepare(Manifest(version))
    given = values(version)
    return weights.receive(pieces_of(((rename or {}).get(n, n), given[n]) for n in names))


def test_a_commit_changes_the_file_and_an_abort_changes_it_back(weights: SharedWeights) -> None:
    assert stage(weights, 1) == 0
    assert_reads(weights, 0)
    weights.commit(1)
    assert_reads(weights, 1)
    weights.abort()
    assert_reads(weights, 0)
    stage(weights, 2)
    weights.commit(2)
    weights.settle()
    weights.abort()
    assert_reads(weights, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: shared_device_gpu_test has it")
def test_there_is_no_place_on_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="weights_on_device needs a CUDA device"):
        SharedWeights({"a": torch.zeros(3)}, {}, 0, on_device=True)


def test_beside_an_accelerator_that_is_not_cuda_torch_cuda_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU's process has none, and code that is carried to CUDA unseen would be wrong there."""

    def asked() -> Never:
        raise AssertionError("torch.cuda was asked")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mtia"))
    made = SharedWeights({"a": torch.zeros(3)}, {}, 0)
    made.close()
    with pytest.raises(ValueError, match="weights_on_device needs a CUDA device"):
        SharedWeights({"a": torch.zeros(3)}, {}, 0, on_device=True)


def test_a_head_may_arrive_for_the_embedding_and_be_taken_back(weights: SharedWeights) -> None:
    assert stage(weights, 1, rename={"embed": "head"}) == 0
    weights.commit(1)
    assert_reads(weights, 1)
    weights.abort()
    assert_reads(weights, 0)


steps = st.lists(st.sampled_from(["stage", "part", "head", "commit", "abort", "settle"]), max_size=20)


@settings(max_examples=100)
@given(steps)
def test_whatever_the_order_of_calls_the_file_in_use_is_of_one_version(calls: list[str]) -> None:
    with torch.device("meta"):
        shapes = {name: torch.empty(shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()}
    weights = SharedWeights(shapes, {"head": "embed"}, version=0)
    for name, value in values(0).items():
        weights.regions[0].tensors[name].copy_(value)
    version = 0
    for call in calls:
        try:
            if call in ("stage", "head", "part"):
                version += 1
                names = ("embed",) if call == "part" else tuple(SHAPES)
                stage(weights, version, names, {"embed": "head"} if call == "head" else None)
            elif call == "commit":
                weights.commit(version)
            elif call == "abort":
                weights.abort()
            else:
                weights.settle()
        except ValueError:
            pass
        assert_reads(weights, weights.version)
    weights.close()


def test_a_checkpoint_is_read_by_name_shape_and_type(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model-1.safetensors")
    (tmp_path / "part").mkdir()
    save_file({"b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "part/model-2.safetensors")
    save_file({"c": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "part/model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shapes = checkpoint_shapes(tmp_path)
    assert {name: (tuple(t.shape), t.dtype) for name, t in shapes.items()} == {
        "a": ((2, 3), torch.float32),
        "b": ((2,), torch.bfloat16),
    }
    found = {piece.name: piece.flat.view(piece.shape) for piece in checkpoint_pieces(tmp_path)}
    assert torch.equal(found["a"], torch.arange(6.0).view(2, 3))
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")  # newer: transformers reads this one alone
    (piece,) = checkpoint_pieces(tmp_path)
    assert torch.equal(piece.flat, torch.ones(6))
    assert list(checkpoint_shapes(tmp_path)) == ["a"]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    for folder, words in ((tmp_path, "no index of weights"), (tmp_path / "nowhere", r"has no model\.safetensors")):
        with pytest.raises(ValueError, match=words):
            checkpoint_shapes(folder)


@pytest.mark.parametrize(
    ("said", "tied"), [({}, True), ({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False)]
)
def test_a_head_that_is_not_on_disk_is_tied_unless_the_config_says_otherwise(
    said: dict[str, bool], tied: bool, tmp_path: Path
) -> None:
    name = "model.language_model.embed_tokens.weight"
    save_file({name: torch.ones(3, 2)}, tmp_path / "model.safetensors")
    assert tied_head(tmp_path, said) == ({"lm_head.weight": name} if tied else {})
    save_file({name: torch.ones(3, 2), "lm_head.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    assert tied_head(tmp_path, said) == {}
