"""Parameters in host memory beside a device, which is the stand-in for an NPU here."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.devices.detect import devices_of
from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import inside
from engines.testing.metrics import shared_metrics
from engines.testing.vision import samples, vision_model
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from seqpack import make_batch

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with fake_npu_on_path():
        yield


def model_of(kind: str) -> Any:
    return vision_model() if kind == "vision" else tiny_model(kind, num_hidden_layers=2)


def with_parameters_on(host: bool, kind: str, source: str, folder: str) -> tuple[Any, ...]:
    """Bytes on the device; where parameters and buffers are; steps, weights, scores, of a resumed run too."""
    text = kind != "vision"
    options: dict[str, Any] = {
        "optimizer_on_host": host,
        "parameters_on_host": host,
        "vision": "off" if text else "trained",
    }
    config = EngineConfig(device="npu", lr=1e-2, max_tokens_per_rank=64 if text else 40, grad_clip=0.1, **options)
    batches = [tiny_batch(LENGTHS, seed=seed) if text else make_batch(samples(seed)) for seed in (0, 10, 20)]
    built = build_engine(dataclasses.replace(config, model=source))  # empty at first, the other is not
    steps = [shared_metrics(built.train_batch(batch, SFT())) for batch in batches[:2]]
    built.save(folder)
    built.offload()
    built.onload()
    memory = devices_of("npu").memory()
    assert memory is not None
    resident = memory.allocated
    other = build_engine(config, model_of(kind))
    other.load(folder)
    steps += [shared_metrics(one.train_batch(batches[2], SFT())) for one in (built, other)]
    weights = [{p.name: p.flat.cpu().clone() for p in one.export_weights(max_bytes=2**40)} for one in (built, other)]
    scores = built.forward(batches[0])["log_probs"].values().cpu()
    parameters = list(inside(built).model.parameters())
    places = [{t.device.type for t in tensors} for tensors in (parameters, inside(built).model.buffers())]
    places.append({part.flat.device.type for part in built.export_weights()})  # gathered by the device's collectives
    return resident, places, sum(p.to_local().nbytes for p in parameters), steps, weights, scores


@pytest.mark.parametrize(("kind", "ranks"), [("dense", 1), ("moe", 2), ("vision", 2)])
def test_parameters_on_the_host_change_no_bit(kind: str, ranks: int, tmp_path: Path) -> None:
    """Nor a checkpoint's, nor after an offload; a tower finds its positions where the device is, not the parameters."""
    model_of(kind).save_pretrained(tmp_path / "source")
    runs = [
        launch_forked(
            with_parameters_on, (host, kind, str(tmp_path / "source"), str(tmp_path / str(host))), ranks, device="npu"
        )
        for host in (True, False)
    ]
    (lean, places, size, steps, weights, scores), (full, plain_places, _, wanted, plain, plain_scores) = runs
    assert (places, plain_places) == ([{"cpu"}, {"npu"}, {"npu"}], [{"npu"}] * 3)
    assert steps == wanted
    assert steps[2] == steps[3]
    for one in (*weights, plain[1]):
        assert [name for name, value in plain[0].items() if not torch.equal(value, one[name])] == []
    assert torch.equal(scores, plain_scores)
    print(f"{full - lean} bytes less on the device, {size} of parameters")
    assert full - lean >= 0.95 * 3 * size > 0  # of parameters and two moments
