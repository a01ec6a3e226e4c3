"""Backends by name: one of a user's own is built, checked and refused as those of this library are."""

from collections.abc import Iterator
from typing import Any

import pytest

from engines import EngineConfig, Supported, TrainBackend, TrainEngine, Unsupported, build_engine
from engines.backends import TRAIN_BACKENDS, register_train_backend
from engines.build import build_fsdp2_engine
from engines.capability import FSDP2, supports
from engines.testing.one_rank import one_rank  # noqa: F401  a group for every test
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

FEATURES = {**FSDP2, "bfloat16_moments": Unsupported("moments are float32")}
OWN = TrainBackend(f"{__name__}:build_own", f"{__name__}:FEATURES")
built: list[EngineConfig] = []


def build_own(config: EngineConfig, model: Any, trainable: bool) -> TrainEngine:
    built.append(config)
    return build_fsdp2_engine(config, model, trainable)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_train_backend("own", OWN)
    yield
    del TRAIN_BACKENDS["own"]
    built.clear()


def test_a_backend_of_ones_own_is_built_by_its_name() -> None:
    config = EngineConfig(backend="own", device="cpu")
    engine = build_engine(config, tiny_model(num_hidden_layers=1))
    assert built == [config]
    assert engine.train_batch(tiny_batch([5, 3]), SFT())["loss"] > 0


def test_its_features_are_its_own() -> None:
    config = EngineConfig(backend="own", moments_dtype="bfloat16")
    assert isinstance(supports(config, "own"), Supported)
    assert supports(config, "bfloat16_moments") == FEATURES["bfloat16_moments"]
    with pytest.raises(ValueError, match="bfloat16_moments is not supported: moments are float32"):
        build_engine(config, tiny_model())


def test_a_name_stands_for_one_backend() -> None:
    register_train_backend("own", OWN)  # the same again
    with pytest.raises(ValueError, match="'fsdp2' is another one already"):
        register_train_backend("fsdp2", OWN)
    with pytest.raises(ValueError, match="backend must be one of 'fsdp2', 'megatron', 'own', got 'other'"):
        EngineConfig(backend="other")
    with pytest.raises(ValueError, match="unknown feature 'other'"):
        supports(EngineConfig(backend="own"), "other")
