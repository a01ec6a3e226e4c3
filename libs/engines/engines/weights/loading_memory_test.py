"""Host memory while an engine is built: a rank holds its share and no more than one tensor besides, measured.

A checkpoint in bfloat16, in several files; ranks note the highest resident memory of their process (VmHWM).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines import EngineConfig, build_engine
from engines.loading import load
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import inside
from engines.tiny import tiny_config, tiny_model
from engines.weights.empty_model import empty_model
from engines.weights.loading_memory import LoadingMemory, loading_memory
from engines.weights.model_weights import live_tensors
from engines.weights.row_shards import own_part
from engines.weights.saving import save_configuration, save_weights

MIB = 2**20
SIZES = {"vocab_size": 24_576, "hidden_size": 512, "intermediate_size": 4096, "tie_word_embeddings": False}
SLACK = 16 * MIB
"""What building costs beside the weights: modules, planners, allocators."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    loaded = load(EngineConfig(master_dtype="bfloat16"), tiny_model("attention", **SIZES).to(torch.bfloat16))
    save_weights(loaded.weights.export(live_tensors(loaded.module).items()), path, file_bytes=20 * MIB)
    save_configuration(loaded.weights, loaded.module, path)
    return path


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def held_while_loading(small: Path, large: Path, options: dict[str, Any]) -> list[int]:
    """The most bytes that a rank held at a time beyond what it had, and those of its weights, each of all ranks."""
    # What is imported and allocated once, whatever the size of a model:
    build_engine(EngineConfig(model=str(small), device="cpu", **options))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    built = build_engine(EngineConfig(model=str(large), device="cpu", **options), trainable=False)
    grown = status("VmHWM") - before
    if options.get("backend") == "megatron":
        own = sum(parameter.nbytes for stage in inside(built).stages for parameter in stage.parameters())
    else:
        own = sum(own_part(parameter).part.nbytes for parameter in inside(built).model.parameters())
    largest = torch.tensor([grown, own])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_holds_its_share_and_one_tensor(tmp_path: Path, checkpoint: Path, ranks: int) -> None:
    stored: Any = tiny_model("attention")
    stored.save_pretrained(tmp_path)
    grown, own = launch_forked(held_while_loading, (tmp_path, checkpoint, {"weights": "sharded"}), ranks)
    memory = loading_memory(tiny_config("attention", **SIZES), ranks)
    assert memory.share == own
    assert own < grown < memory.share + memory.largest + SLACK, (grown / MIB, memory)
    # A rank that held the whole model at any time, even in bfloat16, would be above:
    whole = loading_memory(tiny_config("attention", **SIZES), 1).share
    assert ranks == 1 or memory.share + memory.largest + SLACK < memory.share + whole / 2


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=["TP2", "PP2"])
def test_a_rank_of_megatron_holds_its_part_and_one_tensor(
    tmp_path: Path, checkpoint: Path, sizes: dict[str, Any]
) -> None:
    stored: Any = tiny_model("attention")
    stored.save_pretrained(tmp_path)
    grown, own = launch_forked(held_while_loading, (tmp_path, checkpoint, {"backend": "megatron", **sizes}), 2)
    alone = loading_memory(tiny_config("attention", **SIZES), 1)
    print(grown / MIB, own / MIB, alone)
    assert own < 0.55 * alone.share
    assert grown < own + alone.largest + SLACK


def test_the_arithmetic_counts_rows_as_they_are_cut() -> None:
    config = tiny_config("attention", vocab_size=10, num_hidden_layers=1, tie_word_embeddings=True)
    rows = dict(empty_model(config, torch.float32).named_parameters())
    for ranks in (1, 3, 4):
        share = sum(4 * -(-p.shape[0] // ranks) * p[0].numel() for p in rows.values())
        largest = max(2 * -(-p.shape[0] // ranks) * p[0].numel() for p in rows.values())
        assert loading_memory(config, ranks) == LoadingMemory(ranks, share, largest)
    assert loading_memory(config, 1, master_dtype=torch.bfloat16).share == 2 * sum(p.numel() for p in rows.values())
