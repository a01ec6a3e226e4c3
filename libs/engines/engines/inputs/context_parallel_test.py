"""Training with static and dynamic context parallelism on two and four gloo processes gives one process' curve."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

from dyncp.planning.planner import plan
from engines import EngineConfig, TrainEngine, build_engine
from engines.inputs.context_parallel import ContextParallel, shard_stream
from engines.launch import ensure_group
from engines.proofs.forked_ranks import launch_forked
from engines.tiny import tiny_batch, tiny_config, tiny_model
from objectives import GRPO, SFT, Distillation
from seqpack import Objective
from seqpack.batches.schema import SEVERAL

LENGTHS = [29, 3, 12, 5, 17, 2, 1, 6, 4]
STEPS = 2
MODES = {2: ["static:2", "dynamic"], 4: ["static:4", "dynamic"]}


def engine(kind: str = "dense", cap: int = 16, mode: str = "off") -> TrainEngine:
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    options: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
    return build_engine(
        EngineConfig(**options, max_tokens_per_rank=cap, context_parallel=mode),
        tiny_model(kind, scale=2.0, num_hidden_layers=2),
    )


def curve(built: TrainEngine, objective: Objective) -> list[dict[str, float]]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), objective) for step in range(STEPS)]


def results_of(built: TrainEngine) -> dict[str, Any]:
    batch = tiny_batch(LENGTHS)
    scored = built.forward(batch, entropy=True, top_k=3)  # of the first weights, which the later ones are to learn
    out: dict[str, Any] = {"grpo": curve(built, GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask"))}
    batch.update(dict(zip(Distillation().required_keys, (scored[key] for key in SEVERAL), strict=True)))
    out["grpo"].append(built.train_batch(batch, Distillation("jsd")))
    scored = built.forward(batch, entropy=True, tokens="teacher_tokens")
    out["scores"] = [scored[key].values().clone() for key in ("log_probs", "entropy", *SEVERAL[1:])]
    out["weights"] = {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}
    return out


class CollectiveCount:
    """Counts the collectives of this rank by name while it is open."""

    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")

    def __enter__(self) -> Self:
        self.counts: Counter[str] = Counter()
        self.originals = {name: getattr(dist, name) for name in self.names if hasattr(dist, name)}
        world = dist.group.WORLD
        assert world is not None
        for name, original in self.originals.items():

            def counted(*args: Any, _name: str = name, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                if kwargs.get("group") in (None, world) or kwargs["group"].size() == world.size():
                    self.counts[_name] += 1
                return _original(*args, **kwargs)

            setattr(dist, name, counted)
        return self

    def __exit__(self, *exc: Any) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)


def cases(world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for mode in MODES[world]:
        built = engine(mode=mode)
        with CollectiveCount() as count:
            out[mode] = results_of(built)
        everyone = [None] * world
        dist.all_gather_object(everyone, dict(count.counts))
        out[mode]["collectives"] = everyone
    if world == 4:
        out["attention"] = curve(engine(kind="attention", mode="dynamic"), SFT())
    out["long only"] = [engine(mode="dynamic").train_batch(tiny_batch([29]), SFT())]
    return out


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    made = ensure_group("cpu")
    out = results_of(engine(cap=40))
    out["attention"] = curve(engine(kind="attention", cap=40), SFT())
    out["long only"] = [engine(cap=40).train_batch(tiny_batch([29]), SFT())]
    if made:
        dist.destroy_process_group()
    return out


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest, alone: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return request.param, launch_forked(cases, (request.param,), world_size=request.param)


def assert_same_curve(one: list[dict[str, float]], two: list[dict[str, float]]) -> None:
    for left, right in zip(one, two, strict=True):
        for key in left:
            if key not in ("plan_hash", "micro_batches", "fill"):
                assert right[key] == pytest.approx(left[key], rel=5e-5, abs=2e-6), key


def test_same_curves_scores_and_weights(alone: dict[str, Any], together: tuple[int, dict[str, Any]]) -> None:
    world, ranks = together
    for mode in MODES[world]:
        assert_same_curve(alone["grpo"], ranks[mode]["grpo"])
        for left, right in zip(alone["scores"], ranks[mode]["scores"], strict=True):
            torch.testing.assert_close(right, left, atol=2e-5, rtol=2e-5, msg=mode)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(ranks[mode]["weights"][name], value, atol=2e-5, rtol=2e-5, msg=f"{mode} {name}")


def test_every_rank_issues_the_same_collectives(together: tuple[int, dict[str, Any]]) -> None:
    world, results = together
    for mode in MODES[world]:
        counts = results[mode]["collectives"]
        assert all(count == counts[0] for count in counts), (mode, counts)
        assert sum(counts[0].values()) > 0


def test_attention_models_use_zigzag(alone: dict[str, Any], together: tuple[int, dict[str, Any]]) -> None:
    world, results = together
    if world == 4:
        assert_same_curve(alone["attention"], results["attention"])


def test_one_sequence_for_the_whole_world(alone: dict[str, Any], together: tuple[int, dict[str, Any]]) -> None:
    assert_same_curve(alone["long only"], together[1]["long only"])


def test_the_cap_binds() -> None:
    made = plan(LENGTHS, 4, 16)
    assert any(group.cp_size > 1 for _, group in made.groups())


def test_shards_cover_the_stream_once() -> None:
    for layout in ("contiguous", "zigzag"):
        pieces = [shard_stream([5, 1, 9], rank, 3, layout)[1] for rank in range(3)]
        real = sorted(place for piece in pieces for place in piece.tolist() if place >= 0)
        assert real == list(range(15))
        assert len({len(piece) for piece in pieces}) == 1


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="batching='packed'"):
        build_engine(EngineConfig(device="cpu", context_parallel="dynamic", batching="padded"), tiny_model())
    with pytest.raises(ValueError, match="needs a multiple of 3 ranks, this run has 1: start another number"):
        build_engine(EngineConfig(device="cpu", context_parallel="static:3"), tiny_model())
    config = tiny_config("attention", layer_types=["sliding_attention"] * 4, sliding_window=4)
    with pytest.raises(ValueError, match="sliding-window"):
        ContextParallel.of(EngineConfig(device="cpu", context_parallel="dynamic"), config, 2)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 2.0}
    config = tiny_config("attention", rope_parameters={**rope, "short_factor": [1.0] * 2, "long_factor": [2.0] * 2})
    with pytest.raises(ValueError, match="longrope chooses rotary angles"):
        ContextParallel.of(EngineConfig(device="cpu", context_parallel="dynamic"), config, 2)
