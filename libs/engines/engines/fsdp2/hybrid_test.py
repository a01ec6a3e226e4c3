"""Hybrid sharding on gloo processes: copies of shards give the steps, files and exports of one process."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from engines import EngineConfig, LoraConfig, build_engine
from engines.families.registry import family_of
from engines.fsdp2.fsdp2_executor import FSDP2Executor
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.parallel.configured_layout import layout_of, shards_of
from engines.parallel.groups import ParallelGroups
from engines.proofs.float64 import KeepFloat64
from engines.proofs.forked_ranks import launch_forked
from engines.step import Engine
from engines.testing.expert_parallel import float64_shards, gradients, weights
from engines.testing.one_rank import one_rank  # noqa: F401
from engines.testing.vision import samples, vision_model
from engines.tiny import tiny_batch, tiny_model
from engines.weights.model_weights import ModelWeights
from engines.weights.row_shards import own_part
from objectives import SFT
from seqpack import make_batch

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]
STEPS = 2
Cases = dict[str, tuple[str, dict[str, Any]]]
CASES: Cases = {
    "dense": ("dense", {}),
    "experts": ("moe", {"router_aux_loss_coef": 0.5, "router_forwards_ahead": 1}),
    "one micro-batch": ("dense", {"max_tokens_per_rank": 1000}),
    "shared as needed": ("moe", {"context_parallel": "dynamic"}),
    "moments on the host": ("dense", {"optimizer_on_host": True}),
    "adapters": ("dense", {"lora": LoraConfig(rank=3)}),
    "images": ("vision", {"vision": "trained", "max_tokens_per_rank": 40}),
    "bfloat16": ("dense", {"dtype": "bfloat16"}),
}
LONG: Cases = {
    "recomputed": ("dense", {"gradient_checkpointing": True, "activation_offload": True}),
    "shared sequences": ("dense", {"context_parallel": "static:2"}),
    "bfloat16 masters": ("dense", {"master_dtype": "bfloat16", "dtype": "float32"}),
    "padded": ("dense", {"batching": "padded"}),
    "gathered weights stay": ("dense", {"reshard_after_forward": False}),
    "tower frozen": ("vision", {"vision": "frozen", "max_tokens_per_rank": 40}),
    "bfloat16 moments": ("dense", {"moments_dtype": "bfloat16"}),
}
"""Cases of hybrid_long_test."""
TOLERANCES = {"bfloat16 masters": (2e-3, 0.03), "bfloat16": (3e-3, 0.03)}
"""Relative of losses and norms, and of all else, where other sums are rounded to bfloat16 (2^-9 = 0.002 each): with
AVX2 a norm of four ranks differs by 0.0023."""
ON_TWO = ("dense", "experts", "adapters")
ADAPTERS = (("one", "adapters"), ("four", "adapters"))
LOADED_BY_TWO = (*((name, "dense") for name in ("one", "two", "copies", "four")), *ADAPTERS)
LOADED_BY_FOUR = (
    *((name, 2) for name in LOADED_BY_TWO),
    *((("four", "dense"), shards) for shards in (1, None)),
)


def config_of(shards: int | None, **given: Any) -> EngineConfig:
    usual = {"device": "cpu", "lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "grad_clip": 0.1, "max_tokens_per_rank": 14}
    options: dict[str, Any] = usual | given
    if dist.get_world_size() == 1:  # alone nobody shares a sequence
        options |= {"context_parallel": "off", "max_tokens_per_rank": max(LENGTHS) + options["max_tokens_per_rank"]}
    return EngineConfig(shard_ranks=shards, **options)


def engine(name: str, shards: int | None = None, seed: int = 0) -> Any:
    kind, options = (CASES | LONG)[name]
    torch.manual_seed(seed)  # of adapters
    make = vision_model if kind == "vision" else tiny_model
    sizes: dict[str, Any] = {} if kind == "vision" else {"scale": 2.0, "num_hidden_layers": 2}
    return build_engine(config_of(shards, **options), make(kind, **sizes))


def batch_of(built: Any, seed: int = 0) -> TensorDict:
    if built.config.vision != "off":
        return make_batch(samples(10 * seed))
    batch = tiny_batch(LENGTHS, seed=seed)
    batch["loss_weights"] = -batch["old_log_probs"]  # some weights, which every rank has to apply to its own tokens
    return batch


def curve(built: Any, steps: Iterable[int] = range(STEPS)) -> list[dict[str, float]]:
    return [built.train_batch(batch_of(built, step), SFT()) for step in steps]


def gathered(value: Any) -> list[Any]:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def run(name: str, shards: int | None = None) -> tuple[Any, ...]:
    """Of a case: its curve, the first step's gradients, weights, scores, and of each rank: what it holds, and bits."""
    built = engine(name, shards)
    seen: dict[str, torch.Tensor] = {}
    step = built.executor.optimizer_step

    def looked(*args: Any) -> Any:
        seen.update(seen or gradients(built))
        return step(*args)

    built.executor.optimizer_step = looked
    rows = curve(built)
    own = [own_part(p).part.detach().flatten() for p in built.executor.scorer.parameters()]
    owned = gathered((sum(p.numel() for p in own), hash(tuple(torch.cat(own).tolist()))))
    scores = built.forward(batch_of(built))["log_probs"].values()
    return rows, seen, weights(built), scores, owned


def exact(shards: int | None = None) -> tuple[Any, ...]:
    """Losses, norms and weights in float64."""
    config = config_of(shards)
    module = tiny_model("dense", scale=2.0, num_hidden_layers=2).double()
    model_weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(layout_of(config, dist.get_world_size()))
    planner, inputs = planner_and_inputs(config, module.config, groups)
    with KeepFloat64(), float64_shards():
        built = Engine(config, FSDP2Executor(config, groups, module, inputs), planner, model_weights)
        rows = [(row["loss"], row["grad_norm"]) for row in curve(built)]
        return rows, weights(built)


def save(
    folder: Path, name: str, case: str, shards: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float], int]:
    """Train and save: what was saved, what the next step is, and the bytes of the files of shards."""
    built = engine(case, shards)
    curve(built, range(2))
    built.offload()
    built.onload()
    built.save(folder / name / case)
    built.save_hf(folder / "hf" / name / case)
    size = sum(path.stat().st_size for path in (folder / name / case).glob("__*")) if dist.get_rank() == 0 else 0
    return weights(built), curve(built, [2])[0], size


def load(
    folder: Path, name: str, case: str, shards: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    built = engine(case, shards, seed=5)
    built.load(folder / name / case)
    return weights(built), curve(built, [2])[0]


def one(folder: Path) -> dict[Any, Any]:
    return {
        "runs": {name: run(name) for name in CASES},
        "exact": exact(),
        **{case: save(folder, "one", case) for case in ("dense", "adapters")},
    }


def two(folder: Path) -> dict[Any, Any]:
    return {
        "runs": {name: run(name, 1) for name in ON_TWO},
        "exact": exact(1),
        "dense": save(folder, "two", "dense"),
        **{(case, 1): save(folder, "copies", case, 1) for case in ("dense", "adapters")},
    }


def four(folder: Path) -> dict[Any, Any]:
    return {
        "runs": {name: run(name, 2) for name in CASES},
        "exact": exact(2),
        "disk": weights(build_engine(EngineConfig(model=str(folder / "model"), device="cpu", shard_ranks=2))),
        **{case: save(folder, "four", case, 2) for case in ("dense", "adapters")},
        "loaded": {(name, shards): load(folder, *name, shards) for name, shards in LOADED_BY_FOUR},
        "crossings": crossings(),
        "broken off": broken_off(),
    }


def back(folder: Path, shards: int | None) -> dict[Any, Any]:
    return {name: load(folder, *name, shards) for name in LOADED_BY_TWO}


def crossings() -> list[tuple[float, list[int]]]:
    """Sums over ranks of different copies that a step of several micro-batches makes, and one of a single."""
    counts, stock = [], dist.all_reduce

    for name in ("dense", "one micro-batch"):
        built = engine(name, 2)
        sizes: list[int] = []

        def counted(tensor: torch.Tensor, *args: Any, sizes: list[int] = sizes, **options: Any) -> Any:
            group = options.get("group")
            sizes += [tensor.numel()] if group is not None and dist.get_process_group_ranks(group) == [0, 2] else []
            return stock(tensor, *args, **options)

        dist.all_reduce = counted
        row = curve(built, [0])[0]
        dist.all_reduce = stock
        counts.append((row["micro_batches"], sizes))
    return counts


class BreaksOff(SFT):
    def __call__(self, *args: Any) -> Any:
        Calls.number += 1
        if Calls.number == 2:
            raise ArithmeticError("the second micro-batch")
        return super().__call__(*args)


class Calls:
    number = 0


def broken_off() -> list[str]:
    built, said = engine("dense", 2), []
    for objective in (BreaksOff(), SFT()):
        try:
            built.train_batch(tiny_batch(LENGTHS), objective)
        except (ArithmeticError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    model: Any = tiny_model("moe", num_hidden_layers=2)
    model.save_pretrained(folder / "model")
    results = {
        1: launch_forked(one, (folder,)),
        2: launch_forked(two, (folder,), 2),
        4: launch_forked(four, (folder,), 4),
    }
    loaded = {shards: launch_forked(back, (folder, shards), 2) for shards in (None, 1)}
    return results, loaded | {"one": launch_forked(back, (folder, None))}, folder


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float, what: str) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=tolerance, rtol=tolerance, msg=f"{what}: {name}")


def assert_same_run(name: str, alone: tuple[Any, ...], together: tuple[Any, ...]) -> None:
    """`name`: of the case; the other two are what `run` gives on one rank and on several."""
    (rows, grads, trained, scores, _), (others, other_grads, also, other_scores, _) = alone, together
    close, far = TOLERANCES.get(name, (2e-6, 1e-5))
    for left, right in zip(rows, others, strict=True):
        for key in ("loss", "grad_norm", "lr", *({"auxiliary_loss"} & left.keys())):
            assert math.isclose(right[key], left[key], rel_tol=close), (key, left[key], right[key])
    assert all(row["grad_norm"] > 0.1 for row in rows), "it is clipped, so that the norm matters to the weights"
    same(grads, other_grads, far, "gradient")
    same(trained, also, far, "weight")
    torch.testing.assert_close(other_scores, scores, atol=far, rtol=0)


def assert_shares(alone: tuple[Any, ...], together: tuple[Any, ...]) -> None:
    """Of four ranks, two copies of two shards: equal bits, and each about half of all."""
    (everything, _), *_ = alone[4]
    shards = together[4]
    assert shards[0] == shards[2]
    assert shards[1] == shards[3]
    assert shards[0] != shards[1]
    assert everything / 2 <= max(size for size, _ in shards) < 0.6 * everything


@pytest.mark.parametrize(("ranks", "name"), [*((4, name) for name in CASES), *((2, name) for name in ON_TWO)])
def test_copies_of_shards_give_the_steps_of_one_process(found: tuple[Any, ...], ranks: int, name: str) -> None:
    assert_same_run(name, *(found[0][number]["runs"][name] for number in (1, ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_float64_steps_are_those_of_one_process(found: tuple[Any, ...], ranks: int) -> None:
    (rows, trained), (others, also) = (found[0][number]["exact"] for number in (1, ranks))
    assert [pytest.approx(row, rel=1e-12) for row in rows] == others
    same(trained, also, 1e-11, "weight")
    assert all(value.dtype == torch.float64 for value in also.values())


@pytest.mark.parametrize("name", CASES)
def test_copies_have_equal_bits_and_shards_their_share(found: tuple[Any, ...], name: str) -> None:
    alone = found[0][1]["runs"][name]
    assert_shares(alone, found[0][4]["runs"][name])
    if name in ON_TWO:  # a shard of each copy is all of it
        assert [size for size, _ in found[0][2]["runs"][name][4]] == [alone[4][0][0]] * 2


def test_gradients_cross_the_copies_once_a_step(found: tuple[Any, ...]) -> None:
    (several, many), (single, few) = found[0][4]["crossings"]
    assert several > single == 1.0
    assert many == few
    assert len(few) == 3  # two layers and the rest


def test_a_step_that_was_broken_off_is_not_followed_by_another(found: tuple[Any, ...]) -> None:
    first, second = found[0][4]["broken off"]
    assert first == "ArithmeticError: the second micro-batch"
    assert "RuntimeError: an error ended the step before" in second


@pytest.mark.parametrize("case", ["dense", "adapters"])
def test_a_checkpoint_fits_any_layout(found: tuple[Any, ...], case: str) -> None:
    """Every bit of the weights; the next step is that of the run that went on."""
    results, loaded, _ = found
    worlds = {"one": results[1][case], "two": results[2].get(case), "four": results[4][case]}
    saved = {(name, case): result for name, result in (worlds | {"copies": results[2][case, 1]}).items()}
    loads = [(name, result) for (name, _), result in results[4]["loaded"].items()]
    loads += [each for every in loaded.values() for each in every.items()]
    loads = [(name, result) for name, result in loads if name in saved]
    assert len(loads) == {"dense": 4 + 2 + 3 * 4, "adapters": 2 + 3 * 2}[case]
    for name, (read, after) in loads:
        before, straight, _ = saved[name]
        assert all(torch.equal(before[key], value) for key, value in read.items()), name
        for key in ("loss", "grad_norm"):
            assert after[key] == pytest.approx(straight[key], rel=5e-6), (name, key)


def test_each_shard_is_written_once(found: tuple[Any, ...]) -> None:
    """Four ranks with two copies of two shards write what two ranks write, but for the headers."""
    sizes = found[0][2]["dense"][2], found[0][4]["dense"][2]
    assert sizes[1] < 1.2 * sizes[0]


@pytest.mark.parametrize("case", ["dense", "adapters"])
def test_exports_are_those_of_one_process(found: tuple[Any, ...], case: str) -> None:
    from safetensors.torch import load_file

    folder = found[2]
    left, *others = (load_file(folder / "hf" / name / case / "model.safetensors") for name in ("one", "copies", "four"))
    for right in others:
        same(left, right, 1e-5, case)


def test_each_rank_reads_its_own_rows_and_exports_every_byte(found: tuple[Any, ...], one_rank: None) -> None:  # noqa: F811
    built = build_engine(EngineConfig(model=str(found[2] / "model"), device="cpu"))
    read = found[0][4]["disk"]
    whole = weights(built)
    assert whole.keys() == read.keys()
    assert all(torch.equal(value, read[key]) for key, value in whole.items())


def test_a_size_that_does_not_divide_is_refused(one_rank: None) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="shard_ranks=3 does not divide the 4 ranks of this run: choose a divisor"):
        shards_of(EngineConfig(shard_ranks=3), 4)
    assert [shards_of(EngineConfig(shard_ranks=n), 4) for n in (None, 1, 2, 4)] == [4, 1, 2, 4]
    with pytest.raises(ValueError, match="shard_ranks=2 does not divide the 1 ranks"):
        build_engine(EngineConfig(device="cpu", shard_ranks=2), tiny_model("dense"))
