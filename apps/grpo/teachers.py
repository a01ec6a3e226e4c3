"""Teachers of a run that distils: frozen engines that score the tokens of the policy's own answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from apps.common.data.tokenizer import load_tokenizer
from apps.common.learning_config import SELF
from apps.common.named_values import named_values
from apps.common.tasks import Tasks
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.native import engine_config
from apps.grpo.tasks.privileged import PrivilegedPrompts, moved, privileged_prompts
from engines import TrainEngine, build_reference
from engines.weights.hub import model_directory
from objectives import Distillation
from rollout import Chat, Episode
from seqpack import index_select
from seqpack.batches.jagged import jagged, samples_of
from seqpack.batches.schema import SEVERAL

KEYS = Distillation().required_keys
POLICY_TOKENS = "policy_tokens"
"""Key of the policy's likeliest tokens, where a teacher is asked for theirs."""


def teachers_by_name(config: GrpoConfig) -> dict[str, Path | None]:
    """Return the directories of the teachers by environment, None for the policy itself; "" is that of all.

    Raises:
        ValueError: several of them lack a name, or two have one.
    """
    given = config.teachers.teacher
    if len(given) == 1 and "=" not in given[0]:
        named: Mapping[str, object] = {"": given[0]}
    else:
        named = named_values("--teacher", given, "math=DIR")
    return {name: None if str(path) == SELF else model_directory(str(path)) for name, path in named.items()}


def check_teachers(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a teacher that is not there, or speaks of other tokens than the model."""
    for directory in teachers_by_name(config).values():
        if directory is None:
            continue
        if not directory.is_dir():
            raise ValueError(f"--teacher {directory}: there is no such directory; name one that holds a model")
        if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"--teacher {directory} has another tokenizer than the model: its tokens can't be compared; take a "
                "teacher of the model's family"
            )


@dataclass(frozen=True)
class Teachers:
    """The teachers by environment, "" that of all, None the policy itself; in host memory while they do not score."""

    engines: dict[str, TrainEngine | None]
    top_k: int
    tokens_of_policy: bool
    prompts: PrivilegedPrompts | None = None
    """What they read before an answer, where it is not what the policy reads."""

    @classmethod
    def of(cls, config: GrpoConfig, tasks: Tasks, chat: Callable[[], Chat]) -> "Teachers | None":
        """Build the teachers of a run; None where it has none. Collective."""
        engines = {
            name: build_reference(replace(engine_config(config, path), routing_replay=False)) if path else None
            for name, path in teachers_by_name(config).items()
        }
        given = config.teachers
        told = given.teacher_prompt_template is not None
        prompts = privileged_prompts(config, tasks, chat()) if engines and told else None
        return cls(engines, given.teacher_top_k, given.teacher_tokens == "policy", prompts) if engines else None

    def score(self, batch: TensorDict, episodes: Sequence[Episode], policy: TrainEngine) -> None:
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


def _scored(teacher: TrainEngine, batch: TensorDict, asked: Mapping[str, Any]) -> TensorDict:
    """Return what a teacher says of a batch; it leaves the device then."""
    teacher.onload()
    try:
        return teacher.forward(batch, **asked)
    finally:
        teacher.offload()
