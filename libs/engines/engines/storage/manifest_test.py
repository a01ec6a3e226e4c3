"""Whatever is torn, missing or flipped in a checkpoint is named, and nothing is changed by it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.storage.checkpoint import load_checkpoint, save_checkpoint
from engines.storage.manifest import MANIFEST, read_manifest, write_manifest


def state(value: float) -> dict[str, Any]:
    tensors = {"layers.0.weight": torch.full((4, 3), value), "norm": torch.full((5,), value)}
    return {"model": tensors, "optimizer": {"state": {"norm": {"exp_avg": torch.full((5,), value)}}}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "one"
    save_checkpoint(path, state(2.0), {"step": 7, "extra": {"cursor": 3}})
    return path


def refused(path: Path, words: str) -> None:
    read = state(0.0)
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        load_checkpoint(path, read)
    assert all(float(tensor.abs().sum()) == 0.0 for tensor in read["model"].values())
    assert torch.equal(torch.get_rng_state(), random)


def test_the_manifest_names_every_file(whole: Path) -> None:
    metadata, files = read_manifest(whole)
    assert set(files) | {MANIFEST} == {path.name for path in whole.iterdir()}
    assert {"__0_0.distcp", ".metadata", "random_0.pt"} == set(files)
    assert metadata == {"step": 7, "extra": {"cursor": 3}, "world_size": 1, "optimizer": True}
    assert files["random_0.pt"]["bytes"] == (whole / "random_0.pt").stat().st_size


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_found(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in whole.iterdir())))
    content = bytearray((whole / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy, dirs_exist_ok=True)
    (copy / name).write_bytes(content)
    if name == MANIFEST and json.loads((whole / name).read_text()) == _lenient(content):
        return  # blanks between the values
    refused(copy, f"{name.replace('.', '[.]')} (is damaged|has)")


def _lenient(content: bytes | bytearray) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "random_0.pt", MANIFEST])
@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_what_is_torn_is_named(whole: Path, tmp_path: Path, name: str, damage: str) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    file = tmp_path / "copy" / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else b"")
    if name == MANIFEST and damage == "cut":  # the newline at its end
        assert load_checkpoint(tmp_path / "copy", state(0.0))["step"] == 7
        file.write_bytes(file.read_bytes()[:-1])
    refused(tmp_path / "copy", name.replace(".", "[.]"))


def test_a_manifest_without_hash_or_of_another_format_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / MANIFEST).write_text('{"step": 1}')
    refused(tmp_path / "copy", "has no hash: it was written by an earlier version")
    (tmp_path / "copy" / MANIFEST).write_text("[1]")
    refused(tmp_path / "copy", "is damaged")


def test_a_file_that_nobody_hashed_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "stray").touch()
    with pytest.raises(RuntimeError, match=r"nobody hashed \['stray'\]"):
        write_manifest(tmp_path, {}, {})


def test_another_dtype_or_other_trained_parameters_are_refused(whole: Path) -> None:
    read = state(0.0)
    read["model"]["norm"] = read["model"]["norm"].bfloat16()
    with pytest.raises(ValueError, match=r"norm is torch.float32 in the checkpoint and torch.bfloat16 here"):
        load_checkpoint(whole, read)
    load_checkpoint(whole, {"model": read["model"]})  # a reference
    assert float(read["model"]["norm"].sum()) == 10.0
    read = state(0.0)
    read["optimizer"]["state"]["layers.0.weight"] = {"exp_avg": torch.zeros(4, 3)}
    with pytest.raises(ValueError, match=r"has no exp_avg of layers\.0\.weight: other parameters were trained"):
        load_checkpoint(whole, read)
