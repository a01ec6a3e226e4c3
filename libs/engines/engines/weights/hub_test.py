"""Hub names without a network: a cache that was filled before, and every way in which there is none."""

from pathlib import Path
from typing import Any, Never

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

from engines import EngineConfig
from engines.loading import load
from engines.proofs.forked_ranks import launch_forked
from engines.tiny import tiny_model
from engines.weights import hub
from engines.weights.hub import model_directory

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one repository, as huggingface_hub lays it out, and no network."""
    folder = tmp_path / "models--some-lab--tiny-1.5"
    (folder / "refs").mkdir(parents=True)
    for name in ("main", "v2"):
        (folder / "refs" / name).write_text(COMMIT)
    stored: Any = tiny_model("dense")
    stored.save_pretrained(folder / "snapshots" / COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["some-lab/tiny-1.5", "some-lab/tiny-1.5@v2", f"some-lab/tiny-1.5@{COMMIT}"])
def test_a_cached_name_is_its_snapshot(cache: Path, name: str) -> None:
    assert model_directory(name).name == COMMIT
    module = load(EngineConfig(model=name)).module
    for name, parameter in tiny_model("dense").named_parameters():
        assert torch.equal(module.get_parameter(name), parameter), name


@pytest.mark.parametrize("name", ["some-lab/other", "some-lab/tiny-1.5@v3", "some--lab/x..y"])
def test_what_is_nowhere_is_said(cache: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is no local directory, and huggingface_hub has no snapshot of it: "):
        load(EngineConfig(model=name))


@pytest.mark.parametrize("name", ["some-lab/tiny-1.5", f"some-lab/tiny-1.5@{COMMIT}", "some-lab/other"])
def test_without_a_route_the_cache_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As before huggingface_hub 2.0 for a named commit: the error of its transport comes through."""

    def no_route(repository: str, *, local_files_only: bool = False, **options: Any) -> str:
        if not local_files_only:
            raise hub._transport_errors()[0]("[Errno 111] Connection refused")
        return str(snapshot_download(repository, local_files_only=True, **options))

    monkeypatch.setattr(hub, "snapshot_download", no_route)
    if name == "some-lab/other":
        with pytest.raises(ValueError, match=r"no snapshot of it: .* Connection refused"):
            model_directory(name)
    else:
        assert model_directory(name).name == COMMIT


def test_what_is_there_goes_before_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> Never:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "snapshot_download", asked)
    Path("some-lab/tiny-1.5").mkdir(parents=True)
    for path in ("some-lab/tiny-1.5", ".", "/nowhere/at/all", "a/b/c", "./some-lab/x", "tiny"):
        assert model_directory(path) == Path(path)


def test_bin_files_are_asked_for_where_there_are_no_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(repository: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.append("pytorch_model*.bin" in allow_patterns)
        return str(snapshot_download(repository, allow_patterns=allow_patterns, **options))

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    file = model_directory("some-lab/tiny-1.5") / "model.safetensors"
    assert asked == [False]
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    module = load(EngineConfig(model="some-lab/tiny-1.5")).module
    assert asked == [False, False, True]
    assert torch.equal(module.model.norm.weight, tiny_model("dense").get_parameter("model.norm.weight"))


def on_ranks(here: Path, folder: Path) -> Path:
    """Rank 0 fetches; rank 1 takes its result, and would be told of its error."""
    calls = []

    def snapshot(repository: str, **options: Any) -> str:
        calls.append("here" if options.get("local_files_only") else repository)
        if repository == "lab/gone":
            raise ConnectionError("no route")
        return str(here)

    module: Any = hub
    module.snapshot_download = snapshot
    directory = model_directory("lab/model")
    with pytest.raises(ValueError, match=r"lab/gone is no local directory.*no route"):
        model_directory("lab/gone")
    (folder / f"calls{torch.distributed.get_rank()}").write_text(" ".join(calls))
    return directory


def test_one_rank_fetches_for_all(tmp_path: Path) -> None:
    here = tmp_path / "snapshot"
    here.mkdir()
    (here / "model.safetensors").touch()
    assert launch_forked(on_ranks, (here, tmp_path), 2) == here
    assert (tmp_path / "calls0").read_text() == "lab/model lab/gone here"
    assert (tmp_path / "calls1").read_text() == ""
