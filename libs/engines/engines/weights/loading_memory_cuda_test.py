"""Device and host memory while a checkpoint of about 1 GB is read into an engine on a GPU, measured."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.loading import load
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import inside
from engines.tiny import tiny_config, tiny_model
from engines.weights.loading_memory import loading_memory
from engines.weights.model_weights import live_tensors
from engines.weights.saving import save_configuration, save_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20
SIZES = {
    "vocab_size": 65_536,
    "hidden_size": 1024,
    "intermediate_size": 16_384,
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
}
DEVICE_SLACK, HOST_SLACK = 16 * MIB, 96 * MIB
"""Of the device: buffers, and what the allocator rounds up. Of the host: modules, kernels and the driver's own."""


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def held_while_loading(small: str, large: str) -> tuple[int, int, int]:
    """The most bytes at a time beyond what was there, of the device and of the host; those of the weights."""
    options: dict[str, Any] = {"device": "cuda", "weights": "sharded"}
    build_engine(EngineConfig(model=small, **options), trainable=False)  # what is imported and made once
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    device, host = torch.cuda.memory_allocated(), status("VmRSS")
    built = build_engine(EngineConfig(model=large, **options), trainable=False)
    torch.cuda.synchronize()
    own = sum(parameter.to_local().nbytes for parameter in inside(built).model.parameters())
    return torch.cuda.max_memory_allocated() - device, status("VmHWM") - host, own


def test_a_gpu_holds_its_share_and_the_host_one_tensor(tmp_path: Path) -> None:
    small: Any = tiny_model("attention")
    small.save_pretrained(tmp_path / "small")
    made = load(EngineConfig(master_dtype="bfloat16"), tiny_model("attention", **SIZES).to(torch.bfloat16))
    (tmp_path / "large").mkdir()
    save_weights(made.weights.export(live_tensors(made.module).items()), tmp_path / "large", file_bytes=300 * MIB)
    save_configuration(made.weights, made.module, tmp_path / "large")
    memory = loading_memory(tiny_config("attention", **SIZES), 1)
    device, host, own = launch_forked(
        held_while_loading, (str(tmp_path / "small"), str(tmp_path / "large")), device="cuda"
    )
    print(f"{own / MIB:.0f} MiB of weights: {device / MIB:.0f} of the device, {host / MIB:.0f} of the host, {memory}")
    assert own == memory.share > 2 * 900 * MIB
    assert own <= device <= memory.share + memory.largest + DEVICE_SLACK
    assert host <= memory.largest + HOST_SLACK
    assert memory.largest + HOST_SLACK < memory.share / 4  # a host that held it all would be above
