"""Host copies on the stand-in for an NPU, whose copies arrive late and whose host memory can be pinned; and layouts."""

import gc
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.devices import host_copies
from engines.devices.detect import devices_of
from engines.devices.host_copies import BLOCK, HostCopies, layout
from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import assert_same, inside, state_of
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

ON_NPU = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with fake_npu_on_path():
        yield


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [0, 5, 0, 700], [BLOCK, 1], [BLOCK + 1, 3 * BLOCK, 12], [40_000_000] * 20, [257] * 9]
)
def test_tensors_lie_apart_in_blocks_that_hold_little_else(sizes: list[int]) -> None:
    plan = layout(sizes)
    places = sorted(
        (block, start, start + size) for (block, start), size in zip(plan.places, sizes, strict=True) if size
    )
    for (block, _, end), (other, start, _) in itertools.pairwise(places):
        assert block != other or end <= start
    assert all(end <= plan.blocks[block] and start % 256 == 0 for block, start, end in places)
    assert all(size & (size - 1) == 0 for size in plan.blocks)
    assert sum(plan.blocks) <= 2 * sum(sizes) + 512 * len(sizes)
    if len(sizes) == 20:
        assert sum(plan.blocks) < 1.25 * sum(sizes)


def on_npu(function: Any, *args: Any, ranks: int = 1) -> Any:
    return launch_forked(function, args, ranks, device="npu")


def there_and_back() -> dict[str, Any]:
    """Tensors of several kinds; a second time with other values, a third with one more."""
    copies, device = HostCopies(), devices_of("npu").current()
    kinds: list[Any] = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    wanted = [torch.arange(60 + i).view(-1, 3 if i % 3 == 0 else 1).to(kind) for i, kind in enumerate(kinds)]
    results: dict[str, Any] = {"pointers": [], "equal": [], "pinned": []}
    for extra in (0, 1, 2):
        values = [want + extra for want in wanted] + [torch.ones(9)] * (extra == 2)
        sources = [value.to(device) for value in values]
        got = copies.moved([*sources, sources[0]], torch.device("cpu"))
        host = [got[id(tensor)] for tensor in sources]
        back = copies.moved(host, device)
        results["equal"] += [torch.equal(one, value) for one, value in zip(host, values, strict=True)]
        results["equal"] += [torch.equal(back[id(one)].cpu(), value) for one, value in zip(host, values, strict=True)]
        results["pinned"] += [tensor.is_pinned() for tensor in host]
        results["pointers"].append([tensor.data_ptr() for tensor in host][: len(wanted)])
    return results


@ON_NPU
def test_what_comes_back_is_what_went_and_memory_is_kept() -> None:
    results = on_npu(there_and_back)
    assert all(results["equal"])
    assert all(results["pinned"])
    assert results["pointers"][0] == results["pointers"][1]


def allocated(devices: Any) -> int:
    return int(devices.memory().allocated)


def moved_engine(weights: str, lame: bool) -> dict[str, Any]:
    """Bytes that an offload frees, what the engine is made of, where that was kept, and what was said."""
    gc.disable()  # what is freed does not depend on when Python looks for cycles
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    host_copies.LOG.addHandler(handler)
    if lame:

        def refuse(size: int) -> torch.Tensor:
            raise RuntimeError(f"cannot lock {size} bytes")

        host_copies.pinned = refuse
    options: Any = {"weights": weights, "dtype": "bfloat16" if weights == "replicated" else "float32"}
    # 33 rows of the embedding: the last rank's shard is shorter, which FSDP2 pads itself
    model = tiny_model("dense", num_hidden_layers=2, vocab_size=65)
    built = build_engine(EngineConfig(device="npu", lr=1e-2, max_tokens_per_rank=64, **options), model)
    batch = tiny_batch([min(length, 9) for length in LENGTHS])
    batch["input_ids"].values().clamp_(max=64)
    built.train_batch(batch, SFT())
    before, devices, places = state_of(built), devices_of("npu"), []
    for _ in range(2):
        at_first = allocated(devices)
        built.offload()
        left = allocated(devices)
        parameters = list(inside(built).model.parameters())
        places.append([getattr(p, "_local_tensor", p.data).data_ptr() for p in parameters])
        pinned = {getattr(p, "_local_tensor", p.data).is_pinned() for p in parameters}
        built.onload()
    assert_same(state_of(built), before)
    again = float(built.train_batch(batch, SFT())["loss"])
    size = sum(value.nbytes for value in before.values() if isinstance(value, torch.Tensor) and value.ndim)
    return {
        "freed": at_first - left, "size": size, "same": places[0] == places[1], "pinned": pinned,
        "loss": again, "said": said,
    }  # fmt: skip


@ON_NPU
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_an_engine_goes_to_memory_that_is_kept(weights: str, ranks: int) -> None:
    """And frees the device of all that it is made of; where nothing can be pinned, too, and says so."""
    results, lame = (on_npu(moved_engine, weights, lame, ranks=ranks) for lame in (False, True))
    print(results)
    assert results["freed"] >= 0.99 * results["size"] > 0 if weights == "sharded" else results["freed"] > 0
    assert (lame["freed"], lame["loss"]) == (results["freed"], results["loss"])
    assert lame["pinned"] == {False}
    assert all("cannot be pinned, moves are slower (cannot lock" in text for text in lame["said"])
    assert lame["said"]
    assert not results["said"]
    if ranks == 1:
        assert results["pinned"] == {True}
        assert results["same"]


def moved_megatron() -> tuple[int, int, float, float]:
    """Bytes that an offload frees and those of weights, masters and moments; the next step's loss, and of one that
    stayed."""
    devices, losses = devices_of("npu"), []
    for moves in (True, False):
        model = tiny_model("dense", num_hidden_layers=2)
        built = build_engine(EngineConfig(device="npu", backend="megatron", lr=1e-2, max_tokens_per_rank=64), model)
        built.train_batch(tiny_batch(LENGTHS), SFT())
        if moves:
            kept = inside(built).memory.kept(inside(built).device)
            before, size = state_of(built), sum(tensor.nbytes for tensor in kept)
            for _ in range(2):
                at_first = allocated(devices)
                built.offload()
                freed = at_first - allocated(devices)
                assert all(content.is_pinned() for _, content in inside(built)._moved._kept)
                built.onload()
            assert_same(state_of(built), before)
        losses.append(float(built.train_batch(tiny_batch(LENGTHS, seed=1), SFT())["loss"]))
    return freed, size, losses[0], losses[1]


@ON_NPU
def test_megatrons_buffers_go_there_too() -> None:
    freed, size, moved, stayed = on_npu(moved_megatron)
    assert freed >= size > 0
    assert moved == stayed
