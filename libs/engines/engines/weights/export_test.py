"""Exports hold what transformers writes for the same checkpoint (names, dtypes, values), and all else that it held."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engines import EngineConfig
from engines.families.registry import family_of
from engines.loading import LoadedModel, load
from engines.proofs.family_cases import CASES, Case
from engines.weights.model_directory import ModelDirectory
from engines.weights.model_weights import ModelWeights, live_tensors
from engines.weights.saving import save_configuration, save_weights

BY_TYPE = {case.model_type: case for case in reversed(CASES)}
MTP = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.input_layernorm.weight": torch.randn(32).bfloat16()}
_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
_VISION |= {"patch_size": 4, "num_position_embeddings": 16}


def saved(case: Case, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint that transformers wrote, perturbed but for buffers that it does not save."""
    model = AutoModelForCausalLM.from_config(case.config()).to(dtype)
    model.load_state_dict(case.model().state_dict())
    model.save_pretrained(path)
    return model


def vision_language(kind: str, path: Path) -> Path:
    """A vision-language checkpoint with a head for further tokens, as they are published."""
    text = BY_TYPE[f"{kind}_text"].config().to_dict() | {
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    config = AutoConfig.for_model(kind, text_config=text, vision_config=_VISION, tie_word_embeddings=False)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(path)
    save_file(files(path) | MTP, path / "model.safetensors", metadata={"format": "pt"})
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def files(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def export(
    loaded: LoadedModel, path: Path, dtype: torch.dtype | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    path.mkdir()
    save_weights(loaded.weights.export(live_tensors(loaded.module).items(), dtype), path, **options)
    save_configuration(loaded.weights, loaded.module, path, dtype)
    return files(path)


def assert_equal_files(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_names_dtypes_and_values_are_those_of_transformers(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    saved(case, tmp_path / "stock", dtype)
    got = export(load(EngineConfig(model=str(tmp_path / "stock"), device="cpu")), tmp_path / "export")
    assert_equal_files(got, files(tmp_path / "stock"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    again.save_pretrained(tmp_path / "again")
    assert_equal_files(got, files(tmp_path / "again"))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_equal_files(dict(reloaded.state_dict()), dict(again.state_dict()))
    assert json.loads((tmp_path / "export/config.json").read_text()) == json.loads(
        (tmp_path / "stock/config.json").read_text()
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "qwen3_next"])
def test_a_module_is_exported_as_its_own_save_pretrained_does(kind: str, tmp_path: Path) -> None:
    fresh = AutoModelForCausalLM.from_config(BY_TYPE[kind].config())
    fresh.save_pretrained(tmp_path / "fresh")
    assert_equal_files(export(load(EngineConfig(), fresh), tmp_path / "a"), files(tmp_path / "fresh"))
    # As saved with experts in one tensor each: transformers keeps that form.
    save_file({name: t.contiguous() for name, t in fresh.state_dict().items()}, tmp_path / "fresh/model.safetensors")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh")
    read.save_pretrained(tmp_path / "read")
    got = export(load(EngineConfig(), read), tmp_path / "b")
    assert_equal_files(got, files(tmp_path / "read"))
    assert_equal_files(export(load(EngineConfig(model=str(tmp_path / "fresh"))), tmp_path / "c"), got)
    assert any(name.endswith("experts.gate_up_proj") for name in got)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_vision_language_checkpoint_comes_out_whole(kind: str, tmp_path: Path) -> None:
    path = vision_language(kind, tmp_path / "stock")
    loaded = load(EngineConfig(model=str(path)))
    got = export(loaded, tmp_path / "export")
    want = files(path)
    assert_equal_files(got, want)
    assert len([name for name in got if name.startswith("model.visual.")]) > 10
    AutoModelForImageTextToText.from_pretrained(path).save_pretrained(tmp_path / "again")
    assert_equal_files({name: t for name, t in got.items() if name not in MTP}, files(tmp_path / "again"))
    assert (tmp_path / "export/config.json").read_bytes() == (path / "config.json").read_bytes()
    assert (tmp_path / "export/chat_template.jinja").is_file()
    text = AutoModelForCausalLM.from_pretrained(path)
    text.save_pretrained(tmp_path / "text")
    assert set(files(tmp_path / "text")) == {n for n in got if n not in MTP and not n.startswith("model.visual.")}


def test_trained_weights_come_out_and_carried_ones_stay(tmp_path: Path) -> None:
    path = vision_language("qwen3_5_moe", tmp_path / "stock")
    loaded = load(EngineConfig(model=str(path)))
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            parameter.add_(1.0)
    got, before = export(loaded, tmp_path / "export"), files(path)
    for name, tensor in before.items():
        carried = name in MTP or name.startswith("model.visual.")
        assert torch.equal(got[name], tensor if carried else (tensor.float() + 1).bfloat16()), name


def test_without_its_tensors_the_config_fields_of_a_head_are_left_out(tmp_path: Path) -> None:
    path = vision_language("qwen3_5", tmp_path / "stock")
    save_file({n: t for n, t in files(path).items() if n not in MTP}, path / "model.safetensors")
    export(load(EngineConfig(model=str(path))), tmp_path / "export")
    text = json.loads((tmp_path / "export/config.json").read_text())["text_config"]
    assert "mtp_num_hidden_layers" not in text
    assert text["hidden_size"] == 32
    config = BY_TYPE["qwen3_next"].config()
    config.mtp_num_hidden_layers = 1
    export(load(EngineConfig(), config), tmp_path / "new")
    assert not [key for key in json.loads((tmp_path / "new/config.json").read_text()) if key.startswith("mtp")]


def test_another_dtype_leaves_float32_parameters_and_carried_tensors(tmp_path: Path) -> None:
    saved(BY_TYPE["qwen3_5_text"], tmp_path / "stock")
    save_file(files(tmp_path / "stock") | MTP, tmp_path / "stock/model.safetensors")
    got = export(load(EngineConfig(model=str(tmp_path / "stock"))), tmp_path / "export", torch.bfloat16)
    float32 = {n for n, t in got.items() if t.dtype == torch.float32}
    assert float32 == {n for n in got if n.endswith(("A_log", "linear_attn.norm.weight"))} | {"mtp.fc.weight"}
    assert json.loads((tmp_path / "export/config.json").read_text())["dtype"] == "bfloat16"


def test_mixed_dtypes_of_a_checkpoint_are_kept(tmp_path: Path) -> None:
    saved(BY_TYPE["qwen3_5_text"], tmp_path / "stock", torch.bfloat16)
    mixed = {n: t.float() if n.endswith("A_log") else t for n, t in files(tmp_path / "stock").items()}
    save_file(mixed, tmp_path / "stock/model.safetensors")
    assert_equal_files(export(load(EngineConfig(model=str(tmp_path / "stock"))), tmp_path / "export"), mixed)


def test_many_files_and_an_index(tmp_path: Path) -> None:
    saved(BY_TYPE["qwen3_moe"], tmp_path / "stock")
    got = export(load(EngineConfig(model=str(tmp_path / "stock"))), tmp_path / "export", file_bytes=20_000)
    assert_equal_files(got, files(tmp_path / "stock"))
    names = sorted(file.name for file in (tmp_path / "export").glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    for name in names:
        with safe_open(tmp_path / "export" / name, "pt") as opened:
            sizes = [opened.get_tensor(key).nbytes for key in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").num_parameters() > 0
    # and an index is read again
    assert_equal_files(export(load(EngineConfig(model=str(tmp_path / "export"))), tmp_path / "second"), got)


def test_one_tensor_is_alive_at_a_time(tmp_path: Path) -> None:
    """The stream never runs ahead of its reader: tensors are asked for one by one."""
    case = BY_TYPE["qwen3_moe"]
    weights = ModelWeights.of(family_of(case.config()), case.model())
    requested = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in live_tensors(case.model()).items():
            requested.append(name)
            yield name, tensor

    for name, _ in weights.export(tensors()):
        assert name.startswith(requested[-1].rpartition(".")[0])


def test_buffers_that_belong_to_a_model_are_exported(tmp_path: Path) -> None:
    case = BY_TYPE["qwen3_moe"]
    model: Any = case.model()
    for layer in model.model.layers:
        layer.mlp.gate.register_buffer("e_score_correction_bias", torch.rand(4))
    family = dataclasses.replace(family_of(model.config), buffers=("*.mlp.gate.e_score_correction_bias",))
    family.check_module(model)
    out = dict(ModelWeights.of(family, model).export(live_tensors(model).items()))
    for i, layer in enumerate(model.model.layers):
        assert torch.equal(
            out[f"model.layers.{i}.mlp.gate.e_score_correction_bias"], layer.mlp.gate.e_score_correction_bias
        )
    with pytest.raises(RuntimeError, match=r"did not give .*e_score_correction_bias"):
        list(ModelWeights.of(family, model).export(model.named_parameters()))


def test_an_executor_that_gives_other_tensors_is_found_out() -> None:
    model = BY_TYPE["qwen2"].model()
    weights = ModelWeights.of(family_of(model.config), model)
    with pytest.raises(RuntimeError, match="no tensor of the model"):
        list(weights.export([("model.norm.bias", torch.zeros(1))]))
    with pytest.raises(RuntimeError, match="did not give"):
        list(weights.export(list(model.named_parameters())[1:]))


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    saved(BY_TYPE["qwen3_moe"], tmp_path / "stock")

    def too_late(*args: Any, **kwargs: Any) -> Never:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(ModelDirectory, "rows", too_late)
    return tmp_path / "stock"


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = files(path)
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "lacks model.layers.1.mlp.experts.3.up_proj"),
        (lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), r"model\.norm\.weight has shape \(7,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "quantised"),
    ],
)
def test_checkpoints_that_are_not_whole_are_refused_before_loading(
    checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=words):
        load(EngineConfig(model=str(checkpoint)))


def test_damaged_directories_are_refused_before_loading(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is missing or damaged"):
        load(EngineConfig(model=str(checkpoint)))
    file.unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor an index"):
        load(EngineConfig(model=str(checkpoint)))
    (checkpoint / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "model-1.safetensors"}}'
    )
    with pytest.raises(ValueError, match=r"model-1\.safetensors is missing"):
        load(EngineConfig(model=str(checkpoint)))
    (checkpoint / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="no index of weights"):
        load(EngineConfig(model=str(checkpoint)))
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        load(EngineConfig(model=str(checkpoint)))
    shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match="no model directory"):
        load(EngineConfig(model=str(checkpoint)))
