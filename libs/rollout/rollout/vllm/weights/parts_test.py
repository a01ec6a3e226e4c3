"""Parts of weights in several regions, without vLLM: what each worker reads, to the bit, and no more than its own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.errors import NotFiniteError
from rollout.sync.boxes import Box
from rollout.sync.manifest import TensorSpec
from rollout.sync.parallel_boxes import WorkerLayout, worker_boxes
from rollout.sync.shard_plan import Shard
from rollout.vllm.settings.config import VllmConfig
from rollout.vllm.weights.parts import PartRegions, PartsPlan, Place, ReadBytes, assembled, layout_of, plan_parts

CPU = torch.device("cpu")
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (200, 8),
    f"{LAYER}self_attn.q_proj.weight": (16, 8),
    f"{LAYER}self_attn.k_proj.weight": (8, 8),
    f"{LAYER}self_attn.o_proj.weight": (8, 16),
    f"{LAYER}input_layernorm.weight": (8,),
    f"{LAYER}mlp.experts.gate_up_proj": (4, 8, 8),
}


class Host:
    """Regions by path, as a device's driver keeps them."""

    def __init__(self) -> None:
        self.regions: dict[str, Tensor] = {}

    def path_of(self, region: Tensor) -> str:
        path = f"region {len(self.regions)}"
        self.regions[path] = region
        return path

    def open(self, path: str) -> ReadBytes:
        return lambda first, nbytes: self.regions[path][first : first + nbytes].clone()


def weights(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng).bfloat16() for name, shape in SHAPES.items()}


def rows(ranks: int) -> list[Shard]:
    """As FSDP2 holds them: a run of rows each, the last ones fewer."""
    held = []
    for name, shape in SHAPES.items():
        each = -(-shape[0] // ranks)
        for rank in range(ranks):
            count = min(each, shape[0] - rank * each)
            if count > 0:
                held.append(Shard(rank, name, Box((rank * each, *(0,) * (len(shape) - 1)), (count, *shape[1:]))))
    return held


def plan_for(ranks: int, samplers: dict[int, WorkerLayout], most: int = 1 << 20) -> PartsPlan:
    specs = [TensorSpec(name, shape, torch.bfloat16) for name, shape in SHAPES.items()]
    return plan_parts(specs, rows(ranks), samplers, most)


def staged(host: Host, plan: PartsPlan, regions: list[PartRegions], seed: int, in_use: int | None = None) -> Place:
    now, version = weights(seed), seed
    before = seed - 1 if in_use is None else in_use
    told = {
        rank: one.stage(lambda name, box: now[name][box.index], version, before) for rank, one in enumerate(regions)
    }
    return plan.place(0, told)


def made(plan: PartsPlan, ranks: int, host: Host) -> list[PartRegions]:
    return [PartRegions(plan, rank, lambda n: torch.zeros(n, dtype=torch.uint8), host.path_of) for rank in range(ranks)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(64, 600), st.booleans())
def test_each_worker_has_its_boxes_of_every_tensor(ranks: int, workers: int, most: int, apart: bool) -> None:
    layout = WorkerLayout(workers, 2, experts=4, experts_apart=apart)
    host = Host()
    plan = plan_for(ranks, {0: layout}, most)
    regions = made(plan, ranks, host)
    for seed in (1, 2, 3):  # each of the two regions is written again
        place, now = staged(host, plan, regions, seed), weights(seed)
        for worker in range(workers):
            found = dict(assembled(place, worker, host.open, CPU))
            assert found.keys() == now.keys()
            for name, value in found.items():
                own = torch.zeros_like(value, dtype=torch.bool)
                for box in worker_boxes(name, value.shape, layout, worker):
                    own[box.index] = True
                assert torch.equal(value, torch.where(own, now[name], 0))


def test_ranks_have_their_own_shards_and_a_second_sampler_costs_nothing() -> None:
    layout = WorkerLayout(2, 2, experts=4)
    one, two = plan_for(4, {0: layout}), plan_for(4, {0: layout, 2: layout})
    size = sum(2 * value.numel() for value in weights(0).values())
    assert sum(2 * slot.box.numel for rank in range(4) for slot in one.regions[rank]) == size
    assert one.regions == two.regions
    assert two.reads[0] == two.reads[2]
    read = [sum(one.regions[rank][slot].box.numel for rank, slot in worker) for worker in one.reads[0]]
    assert all(2 * count < 0.75 * size for count in read), "a worker reads its own part"


def test_the_last_weights_stay_readable_until_the_next_are_staged() -> None:
    """An abort lets workers read the place before, and numbers that are not finite leave it whole."""
    layout, host = WorkerLayout(1, 2, experts=4), Host()
    plan = plan_for(2, {0: layout})
    regions = made(plan, 2, host)
    first = staged(host, plan, regions, 1)
    staged(host, plan, regions, 2)
    assert torch.equal(
        dict(assembled(first, 0, host.open, CPU))[f"{LAYER}input_layernorm.weight"],
        weights(1)[f"{LAYER}input_layernorm.weight"],
    )
    second = staged(host, plan, regions, 3)
    staged(host, plan, regions, 4, in_use=3)  # which is not taken
    staged(host, plan, regions, 5, in_use=3)
    broken = weights(6) | {"model.embed_tokens.weight": torch.full((200, 8), float("nan"))}
    with pytest.raises(NotFiniteError, match=r"model\.embed_tokens\.weight is not finite"):
        regions[0].stage(lambda name, box: broken[name][box.index], 6, 3)
    assert torch.equal(
        dict(assembled(second, 0, host.open, CPU))["model.embed_tokens.weight"], weights(3)["model.embed_tokens.weight"]
    )


def test_a_changed_byte_is_found_by_the_worker_that_reads_it() -> None:
    layout, host = WorkerLayout(2, 2, experts=4), Host()
    plan = plan_for(2, {0: layout})
    place = staged(host, plan, made(plan, 2, host), 1)
    slot = place["slots"][place["reads"][1][-1]]
    host.regions[place["regions"][slot[0]]][slot[4]] ^= 1
    with pytest.raises(RuntimeError, match="is not what was staged"):
        list(assembled(place, 1, host.open, CPU))


def test_a_layout_is_read_off_a_config() -> None:
    config = SimpleNamespace(
        num_key_value_heads=2, linear_num_key_heads=3, linear_key_head_dim=4, linear_num_value_heads=5,
        linear_value_head_dim=6, num_experts=7,
    )  # fmt: skip
    assert WorkerLayout.of(config, 2, True) == WorkerLayout(2, 2, 12, 30, 7, True)
    settings = VllmConfig(tensor_parallel=2, expert_parallel=True)
    assert layout_of(vars(config), settings) == WorkerLayout(2, 2, 12, 30, 7, True)
    for change in ({"device": "cpu"}, {"tensor_parallel": 3}, {"nodes": 2}):
        unknown = replace(settings, **change)
        assert layout_of(vars(config), unknown) is None
    assert layout_of({}, settings) is None
