"""Teachers of a run that distils: frozen engines that score the tokens of the policy's own answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from apps.common.data.tokenizer import load_tokenizer
from apps.common.named_values import named_values
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.native import engine_config
from engines import TrainEngine, build_reference
from engines.weights.hub import model_directory
from objectives import Distillation
from rollout import Episode
from seqpack import index_select
from seqpack.batches.jagged import jagged
from seqpack.batches.schema import SEVERAL

KEYS = Distillation().required_keys


def teachers_by_name(config: GrpoConfig) -> dict[str, Path]:
    """Return the directories of the teachers by environment; "" is that of all.

    Raises:
        ValueError: several of them lack a name, or two have one.
    """
    given = config.teachers.teacher
    if len(given) == 1 and "=" not in given[0]:
        return {"": model_directory(given[0])}
    return {name: model_directory(str(path)) for name, path in named_values("--teacher", given, "math=DIR").items()}


def check_teachers(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a teacher that is not there, or speaks of other tokens than the model."""
    for directory in teachers_by_name(config).values():
        if not directory.is_dir():
            raise ValueError(f"--teacher {directory}: there is no such directory; name one that holds a model")
        if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"--teacher {directory} has another tokenizer than the model: its tokens can't be compared; take a "
                "teacher of the model's family"
            )


@dataclass(frozen=True)
class Teachers:
    """The teachers by environment, "" that of all; in host memory while they do not score."""

    engines: dict[str, TrainEngine]
    top_k: int
    tokens_of_policy: bool

    @classmethod
    def of(cls, config: GrpoConfig) -> "Teachers | None":
        """Build the teachers of a run; None where it has none. Collective."""
        engines = {
            name: build_reference(replace(engine_config(config, path), routing_replay=False))
            for name, path in teachers_by_name(config).items()
        }
        given = config.teachers
        return cls(engines, given.teacher_top_k, given.teacher_tokens == "policy") if engines else None

    def score(self, batch: TensorDict, episodes: Sequence[Episode], policy: TrainEngine) -> None:
        """Add the keys that `objectives.Distillation` reads to a batch. Collective.

        Raises:
            ValueError: an episode's environment has no teacher.
        """
        if self.tokens_of_policy:
            batch["asked"] = policy.forward(batch, top_k=self.top_k)[SEVERAL[0]]
        names = [episodes[i].task_id.partition("/")[0] for i in batch["episode"].tolist()]
        names = [""] * len(names) if "" in self.engines else names
        if missing := set(names) - self.engines.keys():
            raise ValueError(f"environment {min(missing)} has no teacher: add --teacher {min(missing)}=DIR")
        rows = {key: [batch["loss_mask"]] * len(names) for key in KEYS}
        for name, teacher in self.engines.items():
            own = [place for place, other in enumerate(names) if other == name]
            if not own:
                continue
            part = batch if len(own) == len(names) else index_select(batch, own)
            teacher.onload()
            try:
                asked: dict[str, Any] = {"tokens": "asked"} if self.tokens_of_policy else {"top_k": self.top_k}
                scores = teacher.forward(part, **asked)
            finally:
                teacher.offload()
            for key, of in zip(KEYS, SEVERAL, strict=True):
                for place, row in zip(own, scores[of].unbind(), strict=True):
                    rows[key][place] = row
        for key in KEYS:
            batch[key] = jagged(rows[key])
