"""Pairs of an adapter alone: always added to the base, whatever came before, and all or nothing."""

from collections.abc import Mapping

import pytest
import torch

from rollout.errors import NotFiniteError
from rollout.sync.adapter import Adapter
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import buckets
from rollout.sync.staging import WeightStaging
from rollout.testing.pieces import pieces_of
from rollout.workers.bucket_messages import manifest_from, manifest_message

BOTH = Adapter(rank=2, scale=0.5, layers=("x", "y"))
ONE = Adapter(rank=1, scale=3.0, layers=("y",))


def base() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = {"x.weight": (4, 3), "y.weight": (5, 4), "norm.weight": (4,)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def pairs(adapter: Adapter, seed: int) -> dict[str, torch.Tensor]:
    rng, whole = torch.Generator().manual_seed(seed), base()
    found = {}
    for layer in adapter.layers:
        out, inner = whole[f"{layer}.weight"].shape
        found[f"{layer}.lora_A"] = torch.randn(adapter.rank, inner, generator=rng)
        found[f"{layer}.lora_B"] = torch.randn(out, adapter.rank, generator=rng)
    return found


def with_adapter(adapter: Adapter, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = base()
    for layer in adapter.layers:
        found[f"{layer}.weight"] += adapter.scale * given[f"{layer}.lora_B"] @ given[f"{layer}.lora_A"]
    return found


class Plain:
    """A model's own tensors."""

    def __init__(self) -> None:
        self.tensors = base()
        self.weights = WeightStaging(self.tensors)

    def now(self) -> Mapping[str, torch.Tensor]:
        return self.tensors


class Shared:
    """The two files that vLLM reads."""

    def __init__(self) -> None:
        pytest.importorskip("rollout.vllm")
        from rollout.vllm.weights.shared_weights import SharedWeights  # vLLM's, for these cases alone

        with torch.device("meta"):
            shapes = {name: torch.empty(t.shape) for name, t in base().items()}
        self.weights = SharedWeights(shapes, {}, version=0)
        for name, value in base().items():
            self.weights.regions[0].tensors[name].copy_(value)

    def now(self) -> Mapping[str, torch.Tensor]:
        return self.weights.regions[self.weights.in_use].tensors


@pytest.fixture(params=[Plain, Shared])
def receiver(request: pytest.FixtureRequest) -> Plain | Shared:
    made: Plain | Shared = request.param()
    return made


def send(
    receiver: Plain | Shared,
    version: int,
    tensors: dict[str, torch.Tensor],
    adapter: Adapter | None = None,
    settle: bool = True,
) -> list[int]:
    manifest = manifest_from(manifest_message(Manifest(version, adapter=adapter)))  # as it travels
    receiver.weights.prepare(manifest)
    missing = [receiver.weights.receive(b.pieces()) for b in buckets(pieces_of(tensors.items(), 3), 48)]
    receiver.weights.commit(version)
    if settle:
        receiver.weights.settle()
    return missing


def assert_holds(receiver: Plain | Shared, wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.allclose(receiver.now()[name], value, atol=1e-6), name


def test_each_adapter_is_added_to_the_base(receiver: Plain | Shared) -> None:
    """And not to the one before; a layer that only an earlier one had is the base's again."""
    for version, (adapter, seed) in enumerate([(BOTH, 1), (BOTH, 2), (ONE, 3), (BOTH, 4)], start=1):
        given = pairs(adapter, seed)
        missing = send(receiver, version, given, adapter)
        assert missing == sorted(missing, reverse=True)
        assert missing[-1] == 0
        assert_holds(receiver, with_adapter(adapter, given))


def test_an_abort_brings_the_weights_before_back(receiver: Plain | Shared) -> None:
    first = pairs(BOTH, 1)
    send(receiver, 1, first, BOTH)
    send(receiver, 2, pairs(BOTH, 2), BOTH, settle=False)
    receiver.weights.abort()
    assert receiver.weights.version == 1
    assert_holds(receiver, with_adapter(BOTH, first))
    send(receiver, 3, pairs(ONE, 3), ONE)
    assert_holds(receiver, with_adapter(ONE, pairs(ONE, 3)))


def test_whole_weights_are_the_next_base(receiver: Plain | Shared) -> None:
    """Once they are settled; taken back they are not."""
    send(receiver, 1, pairs(BOTH, 1), BOTH)
    other = {name: value + 1 for name, value in base().items()}
    send(receiver, 2, other, settle=False)
    receiver.weights.abort()
    given = pairs(BOTH, 2)
    send(receiver, 3, given, BOTH)
    assert_holds(receiver, with_adapter(BOTH, given))
    send(receiver, 4, other)
    assert_holds(receiver, other)
    send(receiver, 5, given, BOTH)
    assert_holds(receiver, {name: value + 1 for name, value in with_adapter(BOTH, given).items()})


def test_what_is_not_the_adapter_is_refused(receiver: Plain | Shared) -> None:
    with pytest.raises(ValueError, match=r"this model has no matrix z\.weight"):
        receiver.weights.prepare(Manifest(1, adapter=Adapter(1, 1.0, ("z",))))
    with pytest.raises(ValueError, match=r"this model has no matrix norm\.weight"):
        receiver.weights.prepare(Manifest(1, adapter=Adapter(1, 1.0, ("norm",))))
    with pytest.raises(ValueError, match="shape"):
        send(receiver, 1, pairs(BOTH, 1), Adapter(rank=3, scale=1.0, layers=("x", "y")))
    with pytest.raises(ValueError, match=r"unknown weight 'x\.weight'"):
        send(receiver, 1, base(), BOTH)
    given = pairs(BOTH, 1)
    del given["y.lora_B"]
    with pytest.raises(ValueError, match=r"weights never arrived: y\.lora_B"):
        send(receiver, 1, given, BOTH)
    huge = {name: value.abs() * 1e30 for name, value in pairs(BOTH, 1).items()}
    with pytest.raises(NotFiniteError, match=r"x\.weight is not finite with its adapter"):
        send(receiver, 1, huge, BOTH)
    receiver.weights.abort()
    assert_holds(receiver, base())
    with pytest.raises(ValueError, match="a rank of at least 1 and some layers"):
        Adapter(0, 1.0, ("x",))
