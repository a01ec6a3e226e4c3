"""A vision-language model trained on packed rows is stock transformers on one sequence at a time, tower included."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForImageTextToText

from engines import EngineConfig, LocalBatch, LoraConfig, TrainEngine, build_engine
from engines.fast.layers import use_layer_functions
from engines.launch import ensure_group
from engines.proofs.forked_ranks import launch_forked
from engines.step import Engine
from engines.testing.one_rank import one_rank
from engines.testing.vision import (
    TOWER,
    Sample,
    as_stock,
    assert_close_gradients,
    gradients,
    samples,
    stock_gradients,
    stock_scores,
    text_only,
    vision_model,
)
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack import index_select, make_batch
from seqpack.batches.batch import jagged

__all__ = ["one_rank"]

model = vision_model


Curve = tuple[list[float], list[float], Tensor]  # losses, gradient norms, scores


def engine(module: Any = None, vision: Any = "trained", **options: Any) -> TrainEngine:
    usual: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 64, "weight_decay": 0.1}
    source = None if "model" in options else module or model()
    return build_engine(EngineConfig(**usual | options, vision=vision), source)


@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_layers_that_run_as_functions_behind_the_tower_change_nothing(vision: str) -> None:
    """As `compile` has them on a GPU, here uncompiled: scores and two steps, with rows that are recomputed."""
    plain, fast = (engine(vision=vision, gradient_checkpointing=vision == "trained") for _ in range(2))
    changed = use_layer_functions(fast.executor.model, None)  # type: ignore[attr-defined]
    assert all("functions" in vars(layer) for layer in changed.layers)
    batch = make_batch(samples())
    scores = [one.forward(batch)["log_probs"].values() for one in (plain, fast)]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=0)
    for _ in range(2):
        want, got = (one.train_batch(batch, SFT()) for one in (plain, fast))
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(want[key], rel=1e-4), key


@pytest.mark.parametrize("kind", ["vision", "vision_moe"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (samples, {}),
        (samples, {"batching": "padded"}),
        (samples, {"max_tokens_per_rank": 40, "gradient_checkpointing": True}),
        (text_only, {"max_tokens_per_rank": 12}),
    ],
    ids=["one row", "padded", "rows and recompute", "text alone"],
)
def test_packed_rows_equal_stock_transformers_one_at_a_time(
    kind: str, make: Callable[[], list[Sample]], options: dict[str, Any]
) -> None:
    rows, module = make(), model(kind)
    stock, built = as_stock(copy.deepcopy(module)), engine(module, **options)
    scores = built.forward(make_batch(rows))["log_probs"]
    with torch.no_grad():
        for mine, theirs in zip(scores.unbind(), stock_scores(stock, rows), strict=True):
            assert float((mine - theirs).abs().max()) < 1e-5
    got, want = gradients(built, make_batch(rows)), stock_gradients(stock, rows)
    assert_close_gradients(got, want)
    tower = {name: grad for name, grad in got.items() if name.startswith(TOWER)}
    assert len(tower) == len(list(module.model.visual.parameters()))
    if make is text_only:
        assert not any(name in want for name in tower)
        assert all(bool((grad == 0).all()) for grad in tower.values())
    else:
        assert all(bool((grad != 0).any()) for name, grad in tower.items() if not name.endswith("qkv.bias"))


@pytest.mark.parametrize("kind", ["vision", "vision_moe"])
def test_a_frozen_tower_stays_bit_for_bit_and_the_rest_learns_as_with_a_trained_one(kind: str, tmp_path: Path) -> None:
    module = model(kind).bfloat16()
    module.save_pretrained(tmp_path / "source")
    files = load_file(tmp_path / "source/model.safetensors")
    rows = make_batch(samples())
    grads = {}
    for vision in ("frozen", "trained"):
        built = engine(vision=vision, model=str(tmp_path / "source"), lr=0.1, eps=1e-8)
        grads[vision] = gradients(built, rows)
        built.save_hf(tmp_path / vision)
        written = load_file(tmp_path / vision / "model.safetensors")
        assert written.keys() == files.keys()
        for name, tensor in files.items():
            assert written[name].dtype == tensor.dtype
            assert torch.equal(written[name], tensor) == (vision == "frozen" and name.startswith(TOWER)), name
        again = AutoModelForImageTextToText.from_pretrained(tmp_path / vision, dtype=torch.float32)
        scored = engine(model=str(tmp_path / vision)).forward(rows)["log_probs"].unbind()
        with torch.no_grad():
            for mine, theirs in zip(scored, stock_scores(as_stock(again), samples()), strict=True):
                assert float((mine - theirs).abs().max()) < 1e-5
    assert not any(name.startswith(TOWER) for name in grads["frozen"])
    for name, grad in grads["frozen"].items():
        assert torch.equal(grad, grads["trained"][name]), name


def test_a_checkpoint_is_read_and_resumed(tmp_path: Path) -> None:
    batches = [make_batch(samples(seed)) for seed in (0, 10, 20)]
    straight = engine()
    first = straight.train_batch(batches[0], SFT())
    straight.save(tmp_path / "saved")
    rest = [straight.train_batch(batch, SFT())["loss"] for batch in batches[1:]]
    resumed = engine()
    resumed.load(tmp_path / "saved")
    assert [resumed.train_batch(batch, SFT())["loss"] for batch in batches[1:]] == rest
    assert first["loss"] != rest[0]


def test_text_alone_is_trained_as_before_and_a_text_model_refuses_images(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    text = engine(vision="off", model=str(tmp_path))
    seeing = engine(model=str(tmp_path))
    batch = tiny_batch([6, 9], vocab=40)
    scores = [built.forward(batch)["log_probs"].values() for built in (text, seeing)]
    assert float((scores[0] - scores[1]).abs().max()) < 1e-6
    with pytest.raises(ValueError, match="leave them out, or set vision='frozen'"):
        text.forward(make_batch(samples()))


def changed(key: str, value: Callable[[Tensor], Tensor]) -> TensorDict:
    rows = samples()
    rows[0][key] = value(rows[0][key])
    return make_batch(rows)


def without(*keys: str) -> TensorDict:
    return make_batch([{k: v for k, v in row.items() if k not in keys} for row in samples()])


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (lambda: without("mm_token_type_ids"), "media without mm_token_type_ids"),
        (lambda: without("image_grid_thw"), "has pixel_values without image_grid_thw"),
        (lambda: changed("image_grid_thw", lambda g: g * torch.tensor([1, 2, 1])), "sample 0: pixel_values has 24"),
        (lambda: changed("pixel_values", lambda p: p * torch.nan), "sample 0: pixel_values must be finite"),
        (lambda: changed("mm_token_type_ids", lambda t: t * 0), "sample 0: 1 image grids are left over"),
        (lambda: changed("input_ids", lambda i: i * 0 + 5), "sample 0: mm_token_type_ids says 1 of a token 5"),
        (lambda: changed("mm_token_type_ids", lambda t: t * 2), "sample 0: mm_token_type_ids says 2 of a token 44"),
    ],
)
def test_media_that_do_not_fit_are_refused_before_a_step(batch: Callable[[], TensorDict], problem: str) -> None:
    built = engine()
    for call in (built.forward, lambda given: built.train_batch(given, SFT())):
        with pytest.raises(ValueError, match=problem):
            call(batch())
    assert isinstance(built, Engine)
    assert built.step == 0
    other = make_batch(samples())
    other["input_features"] = jagged([torch.zeros(1, 2)] * len(samples()), 0)
    with pytest.raises(ValueError, match="has input_features, which no vision tower here reads"):
        built.forward(other)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="vision='off': 'off' is for text models"):
        engine(vision="off")
    with pytest.raises(ValueError, match="sees no images here"):
        engine(tiny_model("attention"))
    with pytest.raises(ValueError, match="sees no images here"):
        engine(tiny_model())
    with pytest.raises(ValueError, match="adapters are on the text part"):
        engine(lora=LoraConfig(rank=2))
    odd = model()
    odd.config.vision_config.deepstack_visual_indexes = [1]
    with pytest.raises(ValueError, match="deepstack_visual_indexes"):
        engine(odd)


def curve(**options: Any) -> Curve:
    built = engine(**options)
    out = [built.train_batch(make_batch(make(10 * step)), GRPO(off_policy="mask")) for step, make in enumerate(STEPS)]
    scores = built.forward(make_batch(samples()))["log_probs"].values().clone()
    return [row["loss"] for row in out], [row["grad_norm"] for row in out], scores


STEPS = (text_only, samples)
MODES = ({"max_tokens_per_rank": 40}, {"context_parallel": "static:2"}, {"context_parallel": "dynamic"})
FROZEN = {"max_tokens_per_rank": 40, "vision": "frozen"}


class Elsewhere(torch.nn.Module):
    """A table of positions whose weight is on another device until its own forward gathers it, as FSDP2 offloads."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self._table = [table]
        self.weight = torch.nn.Parameter(torch.empty_like(table.weight, device="meta"))

    def forward(self, places: Tensor) -> Any:
        return self._table[0](places)


def positions_by_parameter(tower: Any, grid_thw: Tensor) -> Tensor:
    """As in verl before its pull request 5682: what is looked up is made where the table's weight is."""
    size = tower.num_grid_per_side**2
    places: Tensor = torch.arange(int(grid_thw.prod()), device=tower.pos_embed.weight.device) % size
    return places


def test_the_tower_reads_no_device_from_an_offloaded_parameter() -> None:
    whole: Any = tiny_model("vision", num_hidden_layers=2)
    tower = whole.model.visual.eval()
    grid = torch.tensor([[1, 4, 6], [1, 2, 2]])
    patches = torch.randn(int(grid.prod(-1).sum()), tower.patch_embed.proj.weight[0].numel())
    want = tower(patches, grid_thw=grid).pooler_output
    assert positions_by_parameter(tower, grid[:1]).device == grid.device
    tower.pos_embed = Elsewhere(tower.pos_embed)
    assert torch.equal(tower(patches, grid_thw=grid).pooler_output, want)
    assert positions_by_parameter(tower, grid[:1]).device != grid.device  # the bug would show


def on_two() -> list[Any]:
    """All modes; and a step in which one rank holds text alone, the other all images."""
    out: list[Any] = [curve(**mode) for mode in (*MODES, FROZEN)]
    built = engine(max_tokens_per_rank=40)
    rows = samples()
    lengths = tuple(len(row["input_ids"]) for row in rows)
    mine = built.plan(lengths).rows_of(dist.get_rank())
    batch = index_select(make_batch(rows), list(mine))
    out.append(built.train_batch(LocalBatch(batch, mine, lengths), SFT())["loss"])
    return out


def test_two_ranks_equal_one() -> None:
    single = [curve(), curve(vision="frozen")]
    alone = engine().train_batch(make_batch(samples()), SFT())["loss"]
    dist.destroy_process_group()
    results = launch_forked(on_two, world_size=2)
    ensure_group("cpu")
    for got, want in zip(results[:4], [single[0]] * 3 + [single[1]], strict=True):
        assert got[0] == pytest.approx(want[0], rel=1e-4, abs=1e-5)
        assert got[1] == pytest.approx(want[1], rel=1e-3)
        assert float((got[2] - want[2]).abs().max()) < 1e-3
    assert results[4] == pytest.approx(alone, rel=1e-5)
