"""Types without a family: what transformers writes is read, exported in the same names and bytes, and read by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engines import EngineConfig, build_engine
from engines.families.registry import admit
from engines.prove.generic_family import generic_family
from engines.prove.proof import random_model, small_config
from engines.testing.one_rank import one_rank  # noqa: F401  a group for every test
from engines.weights.disk_names import DiskNames, DiskPart, names_in
from engines.weights.row_shards import rows_of

SETTINGS: dict[str, Any] = {"device": "cpu", "lr": 1e-3, "max_tokens_per_rank": 24}
KINDS = ["mixtral", "nemotron_h", "kimi_linear", "gpt_oss"]
"""Gate and up of an expert joined; experts stacked; three convolutions joined; one tensor."""


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.families.registry._ADMITTED", {})


def model_of(kind: str) -> Any:
    config = small_config(AutoConfig.for_model(kind))
    admit(config, generic_family(config))
    return random_model(config).float()


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("as_module", [False, True], ids=["directory", "module"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_names_and_bytes_that_transformers_writes(kind: str, as_module: bool, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if as_module:
        engine = build_engine(EngineConfig(**SETTINGS), model)
    else:
        read = AutoConfig.from_pretrained(tmp_path / "model")
        admit(read, generic_family(read))
        engine = build_engine(EngineConfig(model=str(tmp_path / "model"), **SETTINGS))
    engine.save_hf(str(tmp_path / "export"))
    want, got = tensors(tmp_path / "model"), tensors(tmp_path / "export")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert all(torch.equal(before[name], tensor) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_rows_of_each_rank_are_read(kind: str, ranks: int, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    disk = tensors(tmp_path)
    names = names_in(disk, model, model)
    for name, tensor in model.state_dict().items():
        for rank in range(ranks):
            rows = rows_of(tensor.shape[0], ranks, rank)
            own = torch.full((rows.stop - rows.start, *tensor.shape[1:]), torch.nan)
            for read in names.reads(name, tensor.shape, rows):
                piece = disk[read.name] if read.rows is None else disk[read.name][read.rows]
                (own[read.index] if read.index else own).copy_(piece)
            assert torch.equal(own, tensor[rows]), name


def test_what_is_not_whole_or_there_twice_is_refused(tmp_path: Path) -> None:
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    disk = tensors(tmp_path)
    one = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    with pytest.raises(ValueError, match="has 8 experts, the checkpoint holds \\[7\\]"):
        names_in({name: tensor for name, tensor in disk.items() if name != one}, model, model)
    twice = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ValueError, match="are both read as"):
        names_in({**disk, twice: model.state_dict()[twice]}, model, model)


def test_reads_of_joined_rows_are_the_rows_asked_for() -> None:
    names = DiskNames(joined={"conv": (DiskPart("q", (slice(0, 3),)), DiskPart("k", (slice(3, 4),)))})
    assert [(r.name, r.rows, r.index) for r in names.reads("conv", (4, 2), slice(2, 4))] == [
        ("q", slice(2, 3), (slice(0, 1),)),
        ("k", slice(0, 1), (slice(1, 2),)),
    ]
