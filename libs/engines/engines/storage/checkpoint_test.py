"""Checkpoints continue bitwise and appear whole or not at all; the export loads with plain transformers."""

import json
from pathlib import Path
from typing import Any, Never

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.storage import checkpoint
from engines.storage.checkpoint import load_checkpoint, save_checkpoint
from engines.testing.edit_manifest import edit_metadata
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_config, tiny_model
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2]


def engine(seed: int = 0, trainable: bool = True, **changes: Any) -> Any:
    config = EngineConfig(device="cpu", lr=1e-2, warmup_steps=3, max_tokens_per_rank=20, weight_decay=0.1)
    options = {"num_hidden_layers": 2, **changes}
    return build_engine(config, tiny_model("dense", seed=seed, **options), trainable=trainable)


def weights(built: Any) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def run(built: Any, first: int, last: int) -> list[dict[str, float]]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=seed), SFT()) for seed in range(first, last)]


@pytest.mark.parametrize("tied", [True, False])
def test_resume_is_bitwise(tmp_path: Path, tied: bool) -> None:
    straight, stopped = (engine(tie_word_embeddings=tied) for _ in range(2))
    want = run(straight, 0, 5)
    run(stopped, 0, 3)
    stopped.save(tmp_path / "step3")
    torch.manual_seed(123)  # restored by load
    random_before = torch.random.initial_seed()
    resumed = engine(seed=9, tie_word_embeddings=tied)
    resumed.load(tmp_path / "step3")
    assert resumed.step == 3
    assert torch.random.initial_seed() != random_before
    got = run(resumed, 3, 5)
    assert got == want[3:]
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_reference_reads_the_weights_alone(tmp_path: Path) -> None:
    built = engine()
    run(built, 0, 1)
    built.save(tmp_path / "one")
    reference = engine(seed=5, trainable=False)
    reference.load(tmp_path / "one")
    batch = tiny_batch(LENGTHS)
    assert torch.equal(reference.forward(batch)["log_probs"].values(), built.forward(batch)["log_probs"].values())
    reference.save(tmp_path / "scored")
    with pytest.raises(ValueError, match="holds no optimizer"):
        built.load(tmp_path / "scored")


def small(value: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"model": {"layers.0.weight": torch.full((2, 3), value), "norm": torch.full((4,), value)}, **more}


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", small(), {"step": 1})
    want = torch.rand(5)
    assert load_checkpoint(tmp_path / "one", small()) == {"step": 1, "world_size": 1, "optimizer": False}
    assert torch.equal(torch.rand(5), want)


def test_random_numbers_of_another_world_size_are_left_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", small(2.0), {})
    (tmp_path / "one" / "random_0.pt").unlink()
    edit_metadata(tmp_path / "one", lambda metadata: metadata.update(world_size=2))
    state = small()
    torch.manual_seed(5)
    load_checkpoint(tmp_path / "one", state)
    assert torch.equal(state["model"]["norm"], torch.full((4,), 2.0))
    got = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(got, torch.rand(3))


def test_random_numbers_of_the_device_are_kept_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's generator: saved and restored with one, passed over without."""
    restored = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(3))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: restored.append(state.tolist()))
    saved = checkpoint.random_state()
    assert set(saved) == {"cpu", "cuda"}
    checkpoint._set_random_state(saved)
    assert restored == [[0, 1, 2]]
    checkpoint._set_random_state({"cpu": saved["cpu"]})  # it was written without a device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checkpoint._set_random_state(saved)
    assert restored == [[0, 1, 2]]
    assert set(checkpoint.random_state()) == {"cpu"}


def test_an_optimizer_is_a_fact(tmp_path: Path) -> None:
    optimizer = {"exp_avg": torch.full((2, 3), 7.0), "step": torch.tensor(3.0)}
    save_checkpoint(tmp_path / "with", small(optimizer=optimizer), {})
    save_checkpoint(tmp_path / "without", small(), {})
    state = small(optimizer={"exp_avg": torch.zeros(2, 3), "step": torch.tensor(0.0)})
    assert load_checkpoint(tmp_path / "with", state)["optimizer"] is True
    assert torch.equal(state["optimizer"]["exp_avg"], optimizer["exp_avg"])
    assert load_checkpoint(tmp_path / "with", small())["optimizer"] is True  # a reference reads the weights alone
    with pytest.raises(ValueError, match="holds no optimizer"):
        load_checkpoint(tmp_path / "without", state)


def test_the_parts_of_a_model_are_looked_at_together(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", small(1.0), {})
    state = small()
    load_checkpoint(tmp_path / "one", state, parts=torch.distributed.group.WORLD)
    assert float(state["model"]["norm"].sum()) == 4.0
    state["model"]["norm"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"norm has shape \(4,\) in the checkpoint and \(5,\) in this model"):
        load_checkpoint(tmp_path / "one", state, parts=torch.distributed.group.WORLD)


def test_saving_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    built = engine()
    for _ in range(2):
        run(built, 0, 1)
        built.save(tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    assert json.loads((tmp_path / "last" / "engine.json").read_text())["step"] == 2


def test_a_killed_writer_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine()
    run(built, 0, 1)
    built.save(tmp_path / "last")
    run(built, 1, 2)

    def full_disk(*args: Any, **kwargs: Any) -> Never:
        raise OSError("No space left on device")

    monkeypatch.setattr("engines.storage.checkpoint.dcp.save", full_disk)
    with pytest.raises(OSError, match="No space"):
        built.save(tmp_path / "last")
    resumed = engine()
    resumed.load(tmp_path / "last")
    assert resumed.step == 1
    with pytest.raises(ValueError, match=r"engine\.json"):
        resumed.load(tmp_path / "last.writing")


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            {"num_hidden_layers": 4},
            {},
            r"layers\.2\.input_layernorm\.weight is in the checkpoint and not in this model",
        ),
        (
            {},
            {"num_hidden_layers": 4},
            r"layers\.2\.input_layernorm\.weight is in this model and not in the checkpoint",
        ),
        (
            {"intermediate_size": 64},
            {},
            r"mlp\.gate_proj\.weight has shape \(64, 32\) in the checkpoint and \(48, 32\)",
        ),
        ({"tie_word_embeddings": False}, {}, r"lm_head\.weight is in the checkpoint and not"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], message: str
) -> None:
    engine(**saved).save(tmp_path / "one")
    other = engine(**loaded)
    before = weights(other)
    for reader in (other, engine(trainable=False, **loaded)):
        with pytest.raises(ValueError, match=message):
            reader.load(tmp_path / "one")
    for name, value in weights(other).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
def test_hugging_face_round_trip(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = tiny_model(kind)
    config = EngineConfig(device="cpu", lr=1e-2)
    built = build_engine(config, model)
    run(built, 0, 2)
    built.save_hf(tmp_path / "export")
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert type(plain) is type(model)
    assert plain.config._attn_implementation == "sdpa"
    exported = {part.name: part.flat for part in built.export_weights(max_bytes=2**40, live=True)}
    for name, value in plain.named_parameters():
        assert torch.equal(value.detach().flatten(), exported[name]), name
    if kind == "dense":
        assert plain.lm_head.weight is plain.model.embed_tokens.weight
    batch = tiny_batch(LENGTHS)
    again = build_engine(EngineConfig(model=str(tmp_path / "export"), device="cpu"))
    assert torch.equal(again.forward(batch)["log_probs"].values(), built.forward(batch)["log_probs"].values())


def test_random_weights_from_a_config() -> None:
    torch.manual_seed(0)
    built = build_engine(EngineConfig(device="cpu"), tiny_config())
    assert run(built, 0, 1)[0]["step"] == 1.0
