"""A sampler that is wrong stops the run in its first batch; a right one passes, and what was measured is told."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout import Chat, Episode, NativeEngine, RowSource, Sampling, Task, TaskRow
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_dense_model
from schedules.one_step_off import OneStepOffSchedule
from schedules.protocols import TrainResult, WeightExport
from schedules.runtime.interrupts import Runner
from schedules.sampling.first_batch import FirstBatch, SamplerMismatchError, scored_difference
from schedules.sampling.session import RolloutSession
from schedules.sampling.settings import RolloutSettings, RunState
from schedules.schedule import TrainStepResult
from schedules.sync import SyncSchedule
from schedules.weights.sampler_bound import sampler_bound

TOKENIZER = tiny_tokenizer()
MODEL = tiny_dense_model(len(TOKENIZER))
SETTINGS = RolloutSettings(prompts_per_step=4, group_size=4, sampling=Sampling(max_new_tokens=16, seed=0))


class Questions(RowSource):
    """Questions whose answers earn their length."""

    def environment(self, row: TaskRow) -> Any:
        return Task(
            ({"role": "user", "content": row.data["question"]},),
            reward=lambda reply, results: float(len(reply.content)),
        )


class Trainer:
    """The model by stock transformers, one sequence at a time, at temperature 1; a step moves its head."""

    def __init__(self) -> None:
        self.model, self.scored = deepcopy(MODEL), 0

    def log_probs(self, batch: Any) -> Sequence[torch.Tensor]:
        self.scored += 1
        with torch.no_grad():
            logits = [self.model(ids[None]).logits[0] for ids in batch["input_ids"].unbind()]
        rows = zip(batch["input_ids"].unbind(), logits, strict=True)
        found = [out[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0] for ids, out in rows]
        return [torch.nn.functional.pad(row, (1, 0)) for row in found]

    def train(self, step: int, episodes: Sequence[Episode]) -> TrainResult:
        with torch.no_grad():
            self.model.model.norm.weight += 0.01
        return TrainResult({}, [0.0] * len(episodes))

    def export_weights(self, module_names: bool) -> WeightExport:
        return WeightExport.of_tensors(self.model.named_parameters())


class Measuring(Trainer):
    """A trainer that measures while it trains."""

    measures_sampler = True

    def train(self, step: int, episodes: Sequence[Episode]) -> TrainResult:
        found = scored_difference(self, episodes)
        return replace(super().train(step, episodes), sampler_difference=found)


def stepped(
    run_dir: Path,
    settings: RolloutSettings = SETTINGS,
    change: Callable[[PreTrainedModel], object] = lambda module: None,
    trainer: Trainer | None = None,
    schedule: Any = SyncSchedule,
) -> list[TrainStepResult]:
    """Two steps with a native sampler over a copy of the model, changed."""
    module: Any = deepcopy(MODEL)
    change(module)
    tasks = Questions("q", [TaskRow(str(n), {"question": f"say {n} {'again ' * n}"}) for n in range(16)])
    engine = NativeEngine(module, pad_token_id=0, decoder="module", admit="rounds")
    with Runner() as runner:
        session = RolloutSession(settings, tasks, Chat(TOKENIZER), engine, runner)
        with schedule(session, trainer or Trainer(), RunState(run_dir, steps=2)) as steps:
            return [steps.step(0), steps.step(1)]


def rounded_to_8_bits(module: Any) -> None:
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("proj.weight"):
                scale = weight.abs().amax(-1, keepdim=True) / 127
                weight.copy_((weight / scale).round() * scale)


def stale(module: Any) -> None:
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight *= 1.05


def cache_in(dtype: torch.dtype) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for layer in module.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.register_forward_hook(lambda _, inputs, output: output.to(dtype).to(output.dtype))

    return change


WRONG: dict[str, Callable[[Any], None]] = {
    "weights of 8 bits": rounded_to_8_bits,
    "stale weights": stale,
    "a cache in bfloat16": cache_in(torch.bfloat16),
    "a cache in float8": cache_in(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_sampler_stops_the_run_in_its_first_batch(what: str, tmp_path: Path) -> None:
    with pytest.raises(SamplerMismatchError, match=r"step 1: .*float32 explains 0.001.*--allow-untested sampler"):
        stepped(tmp_path, change=WRONG[what])


def test_so_does_another_temperature(tmp_path: Path) -> None:
    warm = replace(SETTINGS, sampling=replace(SETTINGS.sampling, temperature=0.9))
    with pytest.raises(SamplerMismatchError, match="temperature") as error:
        stepped(tmp_path, warm, trainer=Measuring())
    assert error.value.check.mean > 10 * error.value.check.bound.mean


@pytest.mark.parametrize("schedule", [SyncSchedule, OneStepOffSchedule])
@pytest.mark.parametrize("kind", [Trainer, Measuring])
def test_a_right_one_passes_and_is_scored_once(kind: type[Trainer], schedule: Any, tmp_path: Path) -> None:
    trainer = kind()
    first, second = stepped(tmp_path, trainer=trainer, schedule=schedule)
    assert first.sampler is not None
    assert second.sampler is None
    assert first.metrics["proof/sampler_difference"] == first.sampler.mean < 1e-5
    assert first.metrics["proof/sampler_bound"] == 1e-3
    assert "proof/sampler_bound" not in second.metrics
    assert "(bound 0.001: float32)" in str(first.sampler)
    assert trainer.scored == (1 if kind is Trainer else 2)  # a measuring one scores nothing more than its own


def test_a_bound_that_was_accepted_by_name_is_ten_times_as_wide(tmp_path: Path) -> None:
    accepted = replace(SETTINGS, allow_untested=("sampler",))
    first, _ = stepped(tmp_path, accepted, cache_in(torch.bfloat16))
    assert first.sampler is not None
    assert 1e-3 < first.sampler.mean < first.sampler.bound.mean == pytest.approx(1e-2)
    assert "widened by --allow-untested" in str(first.sampler)
    with pytest.raises(SamplerMismatchError, match="the bound is widened already"):
        stepped(tmp_path, replace(accepted, sampling=replace(SETTINGS.sampling, temperature=0.5)))


def test_a_trainer_in_bfloat16_explains_more(tmp_path: Path) -> None:
    first, _ = stepped(tmp_path, replace(SETTINGS, trainer_dtype="bfloat16"), cache_in(torch.bfloat16))
    assert first.sampler is not None
    assert first.sampler.bound.mean == 0.05


KEPT = {"quantization=fp8": "weights", "kv_cache_dtype=fp8": "cache", "enable_lora=true": "rounding"}
MADE_OF: list[tuple[Any, float, str]] = [
    (("float32",), 1e-3, "float32"),
    (("float32", "bfloat16"), 0.05, "bfloat16"),
    (("bfloat16", "float32", {"quantization=fp8": "weights"}), 0.15, "bfloat16 with quantization=fp8"),
    (("bfloat16", "float32", KEPT), 0.25, f"bfloat16 with {', '.join(KEPT)}"),
    (("float16", "float32", {}, ("sampler",)), 0.2, "float16"),
]


@pytest.mark.parametrize(("arguments", "mean", "reason"), MADE_OF)
def test_what_a_bound_is_made_of(arguments: Any, mean: float, reason: str) -> None:
    bound = sampler_bound(*arguments)
    assert bound.mean == pytest.approx(mean)
    assert bound.reason == reason
    for name in bound.settings:
        assert name in bound.advice


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(
        ValueError, match="numbers are of 'float8': it must be one of bfloat16, float16, float32, float64"
    ):
        sampler_bound("float8")
    with pytest.raises(ValueError, match="numbers are of 'bits': it must be one of cache, rounding, weights"):
        sampler_bound("float32", settings={"a=1": "bits"})


def test_tokens_of_older_weights_are_waited_over(tmp_path: Path) -> None:
    """After a resume of a run that samples ahead the first batch is a step old: the next fresh one serves."""
    first, second = stepped(tmp_path, schedule=OneStepOffSchedule)
    check, trainer = FirstBatch(), Measuring()
    bound = [sampler_bound("float32"), sampler_bound("bfloat16")]
    check.begin(trainer, second.episodes, 1, lambda: bound)
    assert check.end(7, TrainResult({}, [], 0.9)) is None
    check.begin(trainer, first.episodes, 0, lambda: bound)
    assert check.end(8, TrainResult({}, [], None)) is None  # every row was skipped: nothing was compared
    check.begin(trainer, first.episodes, 0, lambda: bound)
    found = check.end(9, TrainResult({}, [], 0.01))
    assert found is not None
    assert (found.step, found.mean, found.bound.dtype) == (9, 0.01, "bfloat16")
    check.begin(trainer, first.episodes, 0, lambda: bound)
    assert check.end(10, TrainResult({}, [], 0.9)) is None


def test_nan_is_past_any_bound(tmp_path: Path) -> None:
    check = FirstBatch()
    check.begin(Measuring(), stepped(tmp_path)[0].episodes, 0, lambda: [sampler_bound("bfloat16")])
    with pytest.raises(SamplerMismatchError, match="nan from the trainer's"):
        check.end(0, TrainResult({}, [], float("nan")))
