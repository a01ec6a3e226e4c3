"""Ranks that share the experts under FSDP2, against one process that has them all (more: parallel_matrix_test)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.experts.placement import check_sizes
from engines.proofs.forked_ranks import launch_forked
from engines.testing.expert_parallel import assert_same_steps, exact, from_disk, load, run_all, save
from engines.testing.one_rank import one_rank  # noqa: F401
from engines.tiny import tiny_model

ON_TWO = ("Qwen3-Next", "recomputed", "replay, a rank without tokens", "shared sequences")
ON_FOUR = ("Qwen3.5 MoE", "Qwen3 MoE", "replay", "padded")  # two share experts, two each of their matrices
ALL_SHARE = ("one micro-batch", "replay, a rank without tokens")  # four ranks, an expert each


def alone(folder: Path) -> tuple[Any, ...]:
    every = list(dict.fromkeys((*ON_TWO, *ON_FOUR, *ALL_SHARE)))
    return run_all(every, 1), save(folder, "one", 1), exact("moe", 0), exact("moe", 1)


def on_two(folder: Path) -> tuple[Any, ...]:
    return run_all(ON_TWO, 2), save(folder, "two", 2), load(folder, "one", 2), load(folder, "four", 2)


def on_four(folder: Path) -> tuple[Any, ...]:
    read = from_disk(folder / "model", 2)
    return (
        run_all(ON_FOUR, 2),
        run_all(ALL_SHARE, 4),
        save(folder, "four", 2),
        load(folder, "one", 4),
        read,
        exact("moe", 2),
    )


def read_back(folder: Path) -> dict[str, Any]:
    return {name: load(folder, name, 1) for name in ("one", "two", "four")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    model: Any = tiny_model("moe", num_hidden_layers=2)
    model.save_pretrained(folder / "model")
    one = launch_forked(alone, (folder,))
    four = launch_forked(on_four, (folder,), 4)
    two = launch_forked(on_two, (folder,), 2)
    return {"one": one, "two": two, "four": four, "back": launch_forked(read_back, (folder,)), "folder": folder}


def test_ranks_that_share_the_experts_give_the_steps_of_one(found: dict[str, Any]) -> None:
    one = found["one"][0]
    for ranks, runs in (("2 of 2", found["two"][0]), ("2 of 4", found["four"][0]), ("4 of 4", found["four"][1])):
        for name, many in runs.items():
            assert_same_steps(one[name], many, f"{ranks}: {name}")


def test_a_gradient_of_every_expert_is_not_nothing(found: dict[str, Any]) -> None:
    for name, run in found["one"][0].items():
        if "without tokens" not in name:
            assert all(gradient.abs().sum() > 0 for gradient in run.gradients.values()), name
    idle = found["one"][0]["replay, a rank without tokens"].gradients
    assert all(float(g[2:].abs().sum()) == 0 for key, g in idle.items() if key.endswith(("gate_up_proj", "down_proj")))


def test_float64_steps_are_those_of_stock_transformers(found: dict[str, Any]) -> None:
    losses, weights = found["one"][2]
    for other, trained in (found["one"][3], found["four"][5]):
        assert other == pytest.approx(losses, rel=1e-12)
        for key, value in weights.items():
            torch.testing.assert_close(trained[key], value, atol=1e-10, rtol=1e-10, msg=key)
            assert value.dtype == torch.float64


def test_a_checkpoint_fits_any_number_of_ranks_that_share_experts(found: dict[str, Any]) -> None:
    saved = {"one": found["one"][1], "two": found["two"][1], "four": found["four"][2]}
    loads = [("one", found["two"][2]), ("four", found["two"][3]), ("one", found["four"][3]), *found["back"].items()]
    assert len(loads) == 6
    for name, (weights, after) in loads:
        before, straight = saved[name]
        assert all(torch.equal(before[key], value) for key, value in weights.items()), name
        for key in ("loss", "grad_norm", "auxiliary_loss"):
            assert after[key] == pytest.approx(straight[key], rel=3e-6), (name, key)


def test_each_rank_reads_its_own_experts_and_exports_every_byte(found: dict[str, Any], one_rank: None) -> None:  # noqa: F811
    whole = from_disk(found["folder"] / "model", 1)
    read = found["four"][4]
    assert whole.keys() == read.keys()
    assert all(torch.equal(value, read[key]) for key, value in whole.items())
    assert sum(".experts." in key for key in read) == 2 * 4 * 3  # on disk an expert has three tensors


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("moe", {"weights": "replicated"}, r"weights='replicated' keeps all experts on every rank"),
        (
            "moe",
            {"master_dtype": "bfloat16", "prove": "off"},
            r"master_dtype='bfloat16' has not been run with expert_parallel",
        ),
        ("moe", {"expert_parallel": 2}, r"ep=2 must divide"),
    ],
)
def test_what_does_not_go_with_it_is_refused(one_rank: None, kind: str, options: dict[str, Any], words: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=words):
        build_engine(EngineConfig(**{"device": "cpu", "expert_parallel": 2, **options}), tiny_model(kind))


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot share 4 experts evenly"):
        check_sizes(tiny_model("moe"), 3, 1)
    with pytest.raises(ValueError, match=r"5 ranks cannot share 32 rows of an expert's matrix evenly"):
        check_sizes(tiny_model("moe"), 2, 5)
    with pytest.raises(ValueError, match="expert_parallel is for models with experts, qwen3_5_text has none"):
        check_sizes(tiny_model("dense"), 2, 1)
    check_sizes(tiny_model("moe"), 4, 16)
