"""Teachers of a run that distils: frozen models that score the tokens of the policy's own answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from apps.common.data.tokenizer import load_tokenizer
from apps.common.rollout_teacher import RolloutTeacher, build_rollout_teacher, check_rollout_teacher
from apps.common.tasks import Tasks
from apps.common.teacher_source import TeacherSource, teacher_sources
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.native import engine_config
from apps.grpo.tasks.privileged import PrivilegedPrompts, moved, privileged_prompts
from engines import TrainEngine, build_reference
from engines.weights.hub import model_directory
from objectives import Distillation
from rollout import Chat
from rollout.episodes.summary import AnyEpisode
from seqpack import index_select
from seqpack.batches.jagged import jagged, samples_of
from seqpack.batches.schema import SEVERAL

KEYS = Distillation().required_keys
POLICY_TOKENS = "policy_tokens"
"""Key of the policy's likeliest tokens, where a teacher is asked for theirs."""


def check_teachers(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a teacher that is not there, speaks of other tokens than the model, or can't be asked."""
    for source in teacher_sources(config.teachers.teacher).values():
        if source.kind not in ("self", "server"):
            directory = model_directory(source.place)
            if not directory.is_dir():
                raise ValueError(f"--teacher {source}: there is no such directory; name one that holds a model")
            if load_tokenizer(directory, chat=False).get_vocab() != tokenizer.get_vocab():
                raise ValueError(
                    f"--teacher {source} has another tokenizer than the model: its tokens can't be compared; take a "
                    "teacher of the model's family"
                )
        check_rollout_teacher(source, config.teachers, config.engine, config.max_episode_tokens, tokenizer)


@dataclass(frozen=True)
class Teachers:
    """The teachers by environment, "" that of all, None the policy itself; those in this process are in host memory
    while they do not score."""

    engines: dict[str, TrainEngine | RolloutTeacher | None]
    top_k: int
    tokens_of_policy: bool
    prompts: PrivilegedPrompts | None = None
    """What they read before an answer, where it is not what the policy reads."""

    @classmethod
    def of(cls, config: GrpoConfig, tasks: Tasks, chat: Callable[[], Chat], stack: ExitStack) -> "Teachers | None":
        """Build the teachers of a run, which the stack closes; None where it has none. Collective."""
        engines = {
            name: _built(config, source, stack) for name, source in teacher_sources(config.teachers.teacher).items()
        }
        given = config.teachers
        told = given.teacher_prompt_template is not None
        prompts = privileged_prompts(config, tasks, chat()) if engines and told else None
        return cls(engines, given.teacher_top_k, given.teacher_tokens == "policy", prompts) if engines else None

    def score(self, batch: TensorDict, episodes: Sequence[AnyEpisode], policy: TrainEngine) -> None:
        """Add the keys that `objectives.Distillation` reads to a batch. Collective.

        Raises:
            ValueError: an episode's environment has no teacher.
        """
        asked: dict[str, Any] = {"tokens": POLICY_TOKENS} if self.tokens_of_policy else {"top_k": self.top_k}
        if self.tokens_of_policy:
            batch[POLICY_TOKENS] = policy.forward(batch, top_k=self.top_k)[SEVERAL[0]]
        names = [episodes[i].task_id.partition("/")[0] for i in batch["episode"].tolist()]
        names = [""] * len(names) if "" in self.engines else names
        if missing := set(names) - self.engines.keys():
            raise ValueError(f"environment {min(missing)} has no teacher: add --teacher {min(missing)}=DIR")
        read, spans = batch, None
        if self.prompts is not None:
            read, spans = self.prompts.extended(batch, episodes, POLICY_TOKENS if self.tokens_of_policy else None)
        rows = {key: [batch["loss_mask"]] * len(names) for key in KEYS}
        for name, teacher in self.engines.items():
            own = [place for place, other in enumerate(names) if other == name]
            if not own:
                continue
            part = read if len(own) == len(names) else index_select(read, own)
            scores = policy.forward(part, **asked) if teacher is None else _scored(teacher, part, asked)
            for key, of in zip(KEYS, SEVERAL, strict=True):
                none = -1 if of == SEVERAL[0] else 0
                for place, row in zip(own, samples_of(scores[of]), strict=True):
                    rows[key][place] = row if spans is None else moved(row, spans[place][1], spans[place][0], none)
        for key in KEYS:
            batch[key] = jagged(rows[key])


def _built(config: GrpoConfig, source: TeacherSource, stack: ExitStack) -> TrainEngine | RolloutTeacher | None:
    """Build a teacher; None for the policy itself. Collective."""
    if source.kind == "self":
        return None
    trained = replace(engine_config(config, Path(source.place)), routing_replay=False)
    if source.kind == "engine":
        return build_reference(replace(trained, model=str(model_directory(source.place))))
    return build_rollout_teacher(source, config.teachers, trained, config.max_episode_tokens, stack)


def _scored(teacher: TrainEngine | RolloutTeacher, batch: TensorDict, asked: dict[str, Any]) -> Mapping[str, Tensor]:
    """Return what a teacher says of a batch; one in this process leaves the device then."""
    if isinstance(teacher, RolloutTeacher):
        return teacher.forward(batch, **asked)
    teacher.onload()
    try:
        scores: Mapping[str, Tensor] = teacher.forward(batch, **asked)
        return scores
    finally:
        teacher.offload()
