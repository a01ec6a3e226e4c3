"""Weights that are lent in place: the very memory of the trainer, with the values of an export; and who lends none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from engines import (
    EngineConfig,
    LoraConfig,
    NonFiniteError,
    SharedParameters,
    Unsupported,
    build_engine,
    shared_parameters,
)
from engines.proofs.forked_ranks import launch_forked
from engines.testing.one_rank import one_rank  # noqa: F401  a group for every test
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [7, 3, 12, 5]


def engine(kind: str = "dense", **options: Any) -> Any:
    config = {"device": "cpu", "lr": 1e-2, "max_tokens_per_rank": 16, **options}
    return build_engine(EngineConfig(**config), tiny_model(kind, scale=2.0, num_hidden_layers=2))


def lent(built: Any) -> SharedParameters:
    shared = shared_parameters(built)
    assert isinstance(shared, SharedParameters), shared
    return shared


def places(tensors: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def own_places(built: Any) -> set[int]:
    """Where the trained parameters lie."""
    parameters = [p.detach() for p in built.executor.model.parameters()]
    return {(p.to_local() if isinstance(p, DTensor) else p).data_ptr() for p in parameters}


def differing(shared: SharedParameters, built: Any) -> list[str]:
    """Names whose values are not those of an export, in the dtype that is lent."""
    exported = {piece.name: piece for piece in built.export_weights(max_bytes=2**40, live=True)}
    assert exported.keys() == shared.tensors.keys()
    return [
        name
        for name, tensor in shared.tensors.items()
        if not torch.equal(exported[name].flat.to(tensor.dtype).view(exported[name].shape), tensor)
    ]


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_ranks": 1},
        {"dtype": "bfloat16", "master_dtype": "bfloat16"},
        {"weights": "replicated"},
        {"weights": "replicated", "dtype": "bfloat16"},
    ],
)
def test_they_are_the_values_of_an_export_in_place(kind: str, options: dict[str, Any]) -> None:
    """Before and after steps, which write into the tensors that were lent first; only bits of the dtype are seen."""
    built = engine(kind, **options)
    first = lent(built)
    assert differing(first, built) == []
    assert set(places(first.tensors).values()) == own_places(built)
    before, updates = {name: tensor.clone() for name, tensor in first.tensors.items()}, first.updates()
    for step in range(2):
        built.train_batch(tiny_batch(LENGTHS, seed=step), SFT())
        assert first.updates() > updates
        updates = first.updates()
    assert places(lent(built).tensors) == places(first.tensors)
    assert differing(first, built) == []
    assert any(not torch.equal(before[name], tensor) for name, tensor in first.tensors.items())


def test_a_checkpoint_is_read_into_them(tmp_path: Path) -> None:
    built, other = engine(), engine()
    built.train_batch(tiny_batch(LENGTHS), SFT())
    built.save(tmp_path / "one")
    shared = lent(other)
    before = shared.updates()
    other.load(tmp_path / "one")
    assert shared.updates() != before
    assert differing(shared, built) == []


def test_a_step_that_makes_no_update_changes_nothing() -> None:
    built = engine(on_nonfinite="skip")
    shared = lent(built)
    before, updates = {name: tensor.clone() for name, tensor in shared.tensors.items()}, shared.updates()
    batch = tiny_batch(LENGTHS)
    batch["advantages"].values().fill_(torch.nan)
    with torch.no_grad():  # a gradient that is not finite, of finite weights
        handle = built.executor.model.get_input_embeddings().register_forward_hook(lambda *a: a[-1] * torch.inf)
    metrics = built.train_batch(batch, SFT())
    handle.remove()
    assert metrics["skipped"] == 1
    assert shared.updates() == updates
    assert all(torch.equal(before[name], tensor) for name, tensor in shared.tensors.items())


@pytest.mark.parametrize("options", [{}, {"weights": "replicated", "dtype": "bfloat16"}])
def test_values_that_are_not_finite_are_lent_as_little_as_exported(options: dict[str, Any]) -> None:
    built = engine(**options)
    lent(built).tensors["model.norm.weight"][1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight has values that are not finite"):
        shared_parameters(built)


def test_an_engine_that_was_moved_lends_other_tensors() -> None:
    built = engine()
    built.offload()
    answer = shared_parameters(built)
    assert isinstance(answer, Unsupported)
    assert "offloaded" in answer.reason
    built.onload()
    assert differing(lent(built), built) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "bfloat16"}, "weights are float32, and bfloat16 is computed with"),
        ({"lora": LoraConfig(rank=2)}, "adapters lie beside the weights"),
        ({"backend": "megatron"}, "Megatron lays weights out"),
    ],
)
def test_who_lends_none_says_why(options: dict[str, Any], says: str) -> None:
    answer = shared_parameters(engine(**options))
    assert isinstance(answer, Unsupported)
    assert says in answer.reason


WHOLE: dict[str, dict[str, Any]] = {
    "replicated": {"weights": "replicated", "dtype": "bfloat16"},
    "copies": {"shard_ranks": 1},
}


def on_two_ranks() -> dict[str, Any]:
    sharded = shared_parameters(engine())
    assert isinstance(sharded, Unsupported)
    out: dict[str, Any] = {"sharded": sharded.reason}
    for name, options in WHOLE.items():
        built = engine(**options)
        shared = lent(built)
        for step in range(2):
            built.train_batch(tiny_batch(LENGTHS, seed=step), SFT())
            again = lent(built)  # waits for rows of the other rank
            out[f"{name} {step}"] = differing(shared, built), places(again.tensors) == places(shared.tensors)
    return out


def test_two_ranks_that_hold_weights_whole_lend_them() -> None:
    results = launch_forked(on_two_ranks, (), world_size=2)
    assert results.pop("sharded").startswith("2 ranks share the weights, each has a part of ")
    assert results == {f"{name} {step}": ([], True) for name in WHOLE for step in range(2)}
