"""What a step agrees on, writes and says of itself: each call that it makes below is held to its arguments."""

import dataclasses
import json
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

import engines.engine_state
import engines.step
from engines import EngineConfig, LocalBatch, NonFiniteError, StepPlan
from engines.execution.metrics import MetricSum, agreed_number
from engines.execution.micro_batches import MicroBatches
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.proofs.plain_executor import build_plain_engine
from engines.step import Engine
from engines.testing.assembled import assemble
from engines.testing.bigram_executor import Bigram, BigramExecutor
from engines.testing.edit_manifest import edit_metadata
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from engines.weights.model_weights import ModelWeights
from objectives import GRPO, SFT
from seqpack import view_batch
from seqpack.batches.batch import jagged


class Recorded(BigramExecutor):
    """Keeps what it was given to score."""

    def score(self, micro_batches: MicroBatches, take: Any, scoring: Any) -> None:
        self.scored = [sorted(one.packed.values) for one in micro_batches]
        super().score(micro_batches, take, scoring)


@dataclasses.dataclass(frozen=True)
class RecordedPlanner(DataParallelPlanner):
    prepared: list[StepPlan] = dataclasses.field(default_factory=list)

    def prepare(self, plan: StepPlan) -> None:
        self.prepared.append(plan)


def bigram(cap: int = 20, **options: Any) -> Any:
    config = EngineConfig(**{"device": "cpu", "lr": 0.5, "max_tokens_per_rank": cap, **options})
    executor: Any = Recorded(ParallelGroups.make(ParallelLayout()), Bigram(48))
    nothing: Any = None
    return Engine(config, executor, RecordedPlanner(cap, 1), weights=nothing)


def plain(**options: Any) -> Any:
    model = tiny_model("attention", scale=2.0, num_hidden_layers=2)
    return build_plain_engine(EngineConfig(**{"device": "cpu", "lr": 1e-2, **options}), model)


# ------------------------------------------------------------------ what ranks agree on


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen = []
    monkeypatch.setattr(engines.step, "check_agreement", lambda *args: seen.append(args))
    return seen


def parts_of(batch: TensorDict) -> LocalBatch:
    view = view_batch(batch)
    return LocalBatch(view, tuple(range(len(view))), view.lengths)


def test_ranks_compare_the_kind_of_call_the_plan_and_the_counts(agreements: list[Any]) -> None:
    built = bigram()
    batch = tiny_batch([5, 7])
    longer = tiny_batch([5, 8])
    fewer = batch.clone()
    fewer["loss_mask"] = jagged([*(row & (torch.arange(len(row)) > 3) for row in batch["loss_mask"].unbind())])
    calls: list[Callable[[TensorDict], Any]] = [
        lambda one: built.train_batch(one, SFT()),
        lambda one: built.train_batch(parts_of(one), SFT()),
        lambda one: built.forward(one),
        lambda one: built.forward(parts_of(one)),
    ]
    for call in calls:
        call(batch)
    first = [number for number, *_ in agreements]
    assert len(set(first)) == 4  # no kind of call agrees with another
    hash_ = built.plan([5, 7]).hash
    totals = view_batch(batch).totals
    assert first == [
        agreed_number(("whole", hash_, totals)),
        agreed_number(("parts", hash_, (5, 7))),
        agreed_number(("scores", hash_, False, True)),
        agreed_number(("scores", hash_, True, True)),
    ]
    for call in calls:
        call(batch)
    assert [number for number, *_ in agreements[4:]] == first
    for call in calls:
        call(longer)
    assert not {number for number, *_ in agreements[8:]} & set(first)
    calls[0](fewer)
    assert agreements[-1][0] not in first  # the same plan, other counts
    assert {args[1:] for args in agreements} == {("the plan of this step", built.device, built.groups.world)}


def test_the_plan_that_was_agreed_on_is_prepared(agreements: list[Any]) -> None:
    built = bigram(cap=8)
    batch = tiny_batch([5, 7, 4])
    batch["advantages"] = jagged([row * (i != 1) for i, row in enumerate(batch["advantages"].unbind())])
    built.train_batch(batch, GRPO())
    built.train_batch(parts_of(batch), GRPO())
    built.forward(batch)
    agreed = [built.plan(lengths).hash for lengths in ([5, 4], [5, 7, 4], [5, 7, 4])]
    assert [plan.hash for plan in built.planner.prepared] == agreed


def test_a_batch_made_ahead_is_agreed_on_and_not_planned_again(agreements: list[Any]) -> None:
    built, first, following = bigram(), tiny_batch([5, 7]), tiny_batch([4, 6])
    built.prefetch(following, SFT())
    built.train_batch(first, SFT())
    assert len(built.planner.prepared) == 1
    built.train_batch(following, SFT())
    assert len(built.planner.prepared) == 1  # the very batch, for the same objective: it was made ahead
    expected = agreed_number(("whole", built.plan([4, 6]).hash, view_batch(following).totals))
    assert agreements[-1][0] == expected
    built.prefetch(first, SFT())
    built.train_batch(following, SFT())
    built.train_batch(first, GRPO())
    assert len(built.planner.prepared) == 3  # for another objective it was not


@pytest.mark.parametrize("vision", [None, "how the tower sees"])
def test_media_and_routes_are_checked_as_the_model_takes_them(
    monkeypatch: pytest.MonkeyPatch, vision: str | None
) -> None:
    """A batch says whether the model sees its media, gets positions where it does, and its routes are of the model."""

    class Batch:
        view = "the rows"

        def require(self, keys: tuple[str, ...], sees: bool) -> None:
            self.asked = keys, sees

        def with_positions(self, settings: Any) -> tuple[str, Any]:
            return "positions", settings

    checked = []
    monkeypatch.setattr(engines.step, "check_routed_experts", lambda *args: checked.append(args))
    monkeypatch.setattr(engines.step, "routed_sizes", lambda model: (len(model.table), 3, 4))
    built, batch = bigram(routing_replay=True), Batch()
    built.vision = vision
    result = built._checked(batch, ("advantages",))
    assert batch.asked == (("advantages",), vision is not None)
    assert result == (batch if vision is None else ("positions", vision))
    assert checked == [("the rows", 48, 3, 4)]


def test_settings_of_the_tower_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.step.VisionSettings.of", lambda config: ("of", config))
    monkeypatch.setattr(Bigram, "config", "the model's", raising=False)
    assert bigram().vision is None
    assert bigram(vision="frozen").vision == ("of", "the model's")


def test_a_step_is_as_finite_as_its_loss_and_its_gradient() -> None:
    built = bigram(on_nonfinite="skip")
    for loss, norm in ((math.inf, 1.0), (math.nan, 1.0), (1.0, math.inf)):
        assert not math.isfinite(built._take_update(loss, torch.tensor(norm)))
        assert built.step == 0
    assert built._take_update(1.0, torch.tensor(2.0)) == 2.0
    assert built.step == 1


def test_an_error_carries_the_batch_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    built, batch = bigram(), tiny_batch([5, 7])
    with torch.no_grad():
        built.executor.model.table[:] = math.nan
    with pytest.raises(NonFiniteError) as raised:
        built.train_batch(batch, SFT())
    assert raised.value.batch is batch


def test_only_what_scoring_needs_is_packed() -> None:
    built = bigram()
    batch = tiny_batch([5, 7])
    built.forward(batch)
    assert built.executor.scored == [["input_ids"]]
    batch["position_ids"] = jagged([torch.arange(5), torch.arange(7)])
    built.forward(batch)
    assert built.executor.scored == [["input_ids", "position_ids"]]


def test_metrics_are_summed_over_the_ranks_that_split_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []
    start = MetricSum.start

    def recorded(self: MetricSum, group: Any = "none") -> Callable[[], dict[str, float]]:
        groups.append(group)
        return start(self)

    monkeypatch.setattr(MetricSum, "start", recorded)
    built = bigram()
    built.groups = dataclasses.replace(built.groups, plan="those of the plan")
    built.train_batch(tiny_batch([5, 7]), SFT())
    assert groups == ["those of the plan"]


# ------------------------------------------------------------------ weights


def test_an_export_is_the_checkpoint_or_the_live_module() -> None:
    built = plain()
    live = {name: tensor.clone() for name, tensor in built.executor.tensors()}
    assert {name: tensor.dtype for name, tensor in assemble(built.export_weights(live=True)).items()} == {
        name: tensor.dtype for name, tensor in live.items()
    }
    for name, tensor in assemble(built.export_weights(live=True, max_bytes=64)).items():
        assert torch.equal(tensor, live[name])
    assert max(part.flat.numel() for part in built.export_weights(max_bytes=64)) == 16
    assert all(part.offset == 0 for part in built.export_weights())
    built.weights.dtypes["lm_head.weight"] = torch.bfloat16  # what its checkpoint has
    assert assemble(built.export_weights())["lm_head.weight"].dtype == torch.bfloat16
    assert assemble(built.export_weights(live=True))["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_saved_model_is_loaded_by_transformers(tmp_path: Path, dtype: torch.dtype | None) -> None:
    built = plain()
    built.train_batch(tiny_batch([5, 7]), SFT())
    target = tmp_path / "export"
    target.mkdir()
    (target / "earlier").write_text("of the last export")
    built.save_hf(str(target), dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert not (target / "earlier").exists()
    again = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert again.dtype == (dtype or torch.float32)
    assert json.loads((target / "config.json").read_text())["dtype"] == str(again.dtype).removeprefix("torch.")
    files = [load_file(path) for path in target.glob("*.safetensors")]
    assert {tensor.dtype for tensors in files for tensor in tensors.values()} == {again.dtype}
    want = dict(built.executor.tensors())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, want[name].to(tensor.dtype)), name


def test_the_last_step_must_have_made_an_update(tmp_path: Path) -> None:
    built = plain()
    built.guard.in_a_row = 2
    with pytest.raises(NonFiniteError, match="the last 2 steps made no update"):
        built.save_hf(tmp_path / "export")
    with torch.no_grad():
        next(built.executor.model.parameters())[0, 0] = torch.nan
    calls: list[Callable[[], Any]] = [
        lambda: list(built.export_weights()),
        lambda: list(built.export_weights(live=True)),
    ]
    for call in calls:
        with pytest.raises(NonFiniteError, match=r"embed_tokens\.weight has values"):
            call()
    built.guard.in_a_row = 0
    with pytest.raises(NonFiniteError, match=r"embed_tokens\.weight has values"):
        built.save_hf(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_other_ranks_gather_one_tensor_at_a_time_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 takes part in the gathering of every tensor, keeps none, and waits for rank 0."""
    built, alive, barriers = plain(), [], []
    parameters = dict(built.executor.tensors())

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in parameters.items():
            copy = tensor.detach().clone()
            alive.append(weakref.ref(copy))
            assert sum(one() is not None for one in alive) <= 2  # what is handed on, and what comes next
            yield name, copy

    exported = []
    built.executor.tensors = tensors
    export = ModelWeights.export

    def recorded(weights: ModelWeights, *args: Any, **kwargs: Any) -> Any:
        exported.append(kwargs)
        return export(weights, *args, **kwargs)

    monkeypatch.setattr(ModelWeights, "export", recorded)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: barriers.append(list(tmp_path.iterdir())))
    built.save_hf(tmp_path / "export")
    assert len(alive) == len(parameters)
    assert exported == [{"carried": False}]
    assert barriers == [[]]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    built.save_hf(tmp_path / "export")
    assert exported[1:] == [{"carried": True}]
    assert barriers[1:] == [[tmp_path / "export"]]


# ------------------------------------------------------------------ checkpoints and facts


def test_a_checkpoint_without_a_count_has_skipped_nothing(tmp_path: Path) -> None:
    built, other = bigram(), bigram()
    built.train_batch(tiny_batch([5, 7]), SFT())
    built.save(str(tmp_path / "one"))
    edit_metadata(tmp_path / "one", lambda metadata: metadata.pop("skipped_steps"))
    other.load(str(tmp_path / "one"))
    assert (other.step, other.guard.skipped, other.guard.config) == (1, 0, other.config)


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_of_a_pipeline_read_a_checkpoint_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: int
) -> None:
    built = bigram()
    calls: list[Any] = []
    loaded: list[Any] = []

    def load_checkpoint(*args: Any) -> dict[str, int]:
        calls.append(args)
        return {"step": 7}

    built.groups = dataclasses.replace(built.groups, layout=ParallelLayout(pp=stages), world="all ranks")
    monkeypatch.setattr(engines.engine_state, "load_checkpoint", load_checkpoint)
    built.executor.load_state = loaded.append
    built.load(tmp_path)
    assert built.step == 7
    (args,) = calls
    assert args[0] == tmp_path
    assert args[1] is loaded[0]
    assert args[2] == (None if stages == 1 else "all ranks")


def test_plain_facts() -> None:
    built = plain()
    built.train_batch(tiny_batch([5, 7]), SFT())
    assert built.state_summary() == {
        "backend": "fsdp2",
        "batching": "packed",
        "compiled": "no: the plain executor calls stock transformers",
        "device": "cpu",
        "dtype": "float32",
        "layout": str(ParallelLayout()),
        "optimizer": "torch's AdamW",
        "parameters": sum(p.numel() for p in built.executor.model.parameters()),
        "step": 1,
        "world_size": 1,
    }
    assert plain(dtype="bfloat16", batching="padded").state_summary()["dtype"] == "bfloat16"
    assert built.supports("packed")
    assert not built.supports("tensor_parallel")
    with pytest.raises(ValueError, match="unknown feature"):
        built.supports("teleport")
