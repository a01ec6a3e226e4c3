"""What is read from a directory is what transformers reads, in every family; what is torn or foreign is named."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Never

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PaliGemmaConfig

from engines import EngineConfig, build_engine
from engines.loading import load, load_model, open_model
from engines.proofs.family_cases import CASES, Case
from engines.testing.executors import inside
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_model
from engines.weights.empty_model import empty_model
from engines.weights.model_directory import INDEX, ModelDirectory


def same(got: Any, want: Any) -> None:
    """The same tensors, tied ones, dtypes and bits, in the same order; buffers too."""
    for kind in ("named_parameters", "named_buffers"):
        left, right = dict(getattr(got, kind)()), dict(getattr(want, kind)())
        assert list(left) == list(right)
        for name, tensor in right.items():
            assert left[name].dtype == tensor.dtype, name
            assert torch.equal(left[name], tensor), name
    settings = ("_attn_implementation", "_experts_implementation")
    assert [getattr(got.config, key) for key in settings] == [getattr(want.config, key) for key in settings]
    assert got.config.to_dict() == want.config.to_dict()
    assert got.generation_config.to_dict() == want.generation_config.to_dict()
    assert not got.training


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_family_is_read_as_transformers_reads_it(
    case: Case, master: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    stored: Any = case.model().to(torch.bfloat16)
    stored.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    got = load(EngineConfig(model=str(tmp_path), master_dtype=master)).module
    assert torch.equal(torch.get_rng_state(), before)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, master))
    same(got, want)


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
@pytest.mark.parametrize("case", [case for case in CASES if case.model_type.startswith("gemma")], ids=str)
def test_an_engine_is_filled_after_it_was_sharded(
    case: Case, weights: Literal["sharded", "replicated"], tmp_path: Path
) -> None:
    stored: Any = case.model()
    stored.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", weights=weights)
    built, want = build_engine(config), AutoModelForCausalLM.from_pretrained(tmp_path)
    live = dict(inside(built).tensors())
    assert list(live) == [name for name, _ in want.named_parameters()]
    for name, tensor in want.named_parameters():
        assert torch.equal(live[name], tensor), name
    for name, buffer in want.named_buffers():
        assert torch.equal(inside(built).model.get_buffer(name), buffer), name


def test_what_is_opened_takes_no_memory_and_knows_its_buffers(tmp_path: Path) -> None:
    stored: Any = tiny_model("dense")
    stored.save_pretrained(tmp_path)
    opened = open_model(EngineConfig(model=str(tmp_path)))
    assert all(parameter.is_meta for parameter in opened.module.parameters())
    assert opened.disk is not None
    assert set(opened.disk.buffers) == {name for name, _ in opened.module.named_buffers()}
    with pytest.raises(ValueError, match="no directory"):
        type(opened.disk).of(load(EngineConfig(), tiny_model("dense")).weights, opened.module)


def test_a_sampler_is_read_in_its_own_dtype_with_exact_buffers(tmp_path: Path) -> None:
    stored: Any = tiny_model("dense")
    stored.save_pretrained(tmp_path)
    module = load_model(EngineConfig(model=str(tmp_path)), dtype=torch.bfloat16, device=torch.device("cpu"))
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in want.named_parameters():
        assert torch.equal(module.get_parameter(name), parameter.bfloat16()), name
    for name, buffer in want.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    assert module.lm_head.weight is module.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["llama", "gpt_bigcode"])
def test_a_buffer_that_nobody_fills_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies, and a mask: truth values have no NaN to be seen by."""
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1} if kind == "gpt_bigcode" else TINY
    config = AutoConfig.for_model(kind, **sizes)
    empty_model(config, torch.float32)
    monkeypatch.setattr("engines.weights.empty_model.init_weights", lambda model, module: None)
    with pytest.raises(ValueError, match=r"buffer \w+\.(rotary_emb\.inv_freq|bias), which is in no checkpoint"):
        empty_model(config, torch.float32)


def test_a_tied_head_that_differs_on_disk_is_read_as_its_own(tmp_path: Path) -> None:
    stored: Any = tiny_model("dense")
    stored.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, tied in ((embedding.clone(), True), (embedding + 1, False)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        loaded = load(EngineConfig(model=str(tmp_path)))
        same(loaded.module, AutoModelForCausalLM.from_pretrained(tmp_path))
        assert (loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight) == tied
        assert ("lm_head.weight" in loaded.weights.shapes) == (not tied)


# ------------------------------------------------------------------ files


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of several files with an index."""
    stored: Any = tiny_model("attention")
    stored.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_rows_are_those_of_safetensors(sharded: Path) -> None:
    whole: dict[str, torch.Tensor] = {}
    for file in sharded.glob("*.safetensors"):
        whole |= load_file(file)
    directory = ModelDirectory.read(sharded)
    assert set(directory.tensors) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(directory.rows(name), tensor), name
        for rows in (slice(0, 0), slice(0, 3), slice(5, 6), slice(7, tensor.shape[0])):
            assert torch.equal(directory.rows(name, rows), tensor[rows]), (name, rows)


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def torn_header(path: Path) -> None:
    data = bytearray(files_of(path)[1].read_bytes())
    data[:8] = struct.pack("<Q", 2**40)
    files_of(path)[1].write_bytes(data)


def no_json(path: Path) -> None:
    data = bytearray(files_of(path)[1].read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    files_of(path)[1].write_bytes(data)


def cut(path: Path) -> None:
    file = files_of(path)[1]
    file.write_bytes(file.read_bytes()[:-4])


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def other_file(path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["model.norm.weight"] = next(file for file in found.values() if file != found["model.norm.weight"])

    edit(path, change)


def twice(path: Path) -> None:
    first, second = (load_file(file) for file in files_of(path)[:2])
    name = next(iter(first))
    save_file(second | {name: first[name]}, files_of(path)[1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (torn_header, r"model-00002-of-\d+\.safetensors is missing or damaged"),
        (no_json, r"model-00002-of-\d+\.safetensors is missing or damaged"),
        (cut, r"model-00002-of-\d+\.safetensors is missing or damaged"),
        (lambda path: files_of(path)[1].write_bytes(b"\x03"), r"model-00002-of-\d+\.safetensors is missing or damaged"),
        (lambda path: files_of(path)[1].unlink(), r"model-00002-of-\d+\.safetensors is missing or damaged"),
        (other_file, None),
        (
            lambda path: edit(path, lambda m: m.update({"x": files_of(path)[0].name})),
            r"the index of .* says that model-00001-.*\.safetensors holds x, which no file of it does",
        ),
        (twice, r"model-00002.* and .*model-00001.* both hold "),
        (lambda path: edit(path, lambda m: m.update({"x": "../a"})), r"places x in '\.\./a', which is no file of"),
        (lambda path: edit(path, lambda m: m.update({"x": 3})), "places x in 3, which is no file of"),
        (lambda path: edit(path, lambda m: m.pop("model.norm.weight")), None),
        (lambda path: (path / INDEX).write_text('{"weight_map": [3]}'), "no index of weights"),
    ],
)
def test_damaged_files_are_named_before_anything_is_built(
    sharded: Path, damage: Callable[[Path], Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*args: Any) -> Never:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(ModelDirectory, "rows", too_late)
    damage(sharded)
    if words is None:  # what an index leaves out, or places in another of its files, is there all the same
        assert "model.norm.weight" in ModelDirectory.read(sharded).tensors
        return
    with pytest.raises(ValueError, match=words):
        build_engine(EngineConfig(model=str(sharded), device="cpu"))


def test_a_file_that_became_shorter_meanwhile_is_named(sharded: Path) -> None:
    directory = ModelDirectory.read(sharded)
    last = max(directory.tensors.items(), key=lambda item: (item[1].file, item[1].offset))[0]
    file = directory.tensors[last].file
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=rf"{file.name} ends within {last}"):
        directory.rows(last)


def test_buffers_of_a_model_inside_of_another_are_filled_by_its_own_code() -> None:
    """PaliGemma's class knows nothing of the scale that Gemma's embedding has."""
    config = PaliGemmaConfig(
        text_config={"model_type": "gemma", **TINY, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
        vision_config={"model_type": "siglip_vision_model", **TINY, "image_size": 28, "vision_use_head": False},
        projection_dim=16, image_token_index=31,
    )  # fmt: skip
    want = dict(AutoModelForImageTextToText.from_config(config).named_buffers())
    got = dict(empty_model(config, torch.float32, whole=True).named_buffers())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32, "intermediate_size": 16}
