"""Privileged prompts: what a teacher reads in place of a task's prompt, with what the policy is not told."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apps.common.data.prompts import Prompt
from apps.common.tasks import Tasks
from apps.grpo.config import GrpoConfig
from apps.grpo.tasks.prompt_tasks import PromptTasks
from rollout import Chat
from rollout.episodes.summary import AnyEpisode
from seqpack import make_batch
from seqpack.batches.jagged import samples_of


class PrivilegedPrompts:
    """The privileged prompts of a file's tasks, and the rows of a batch with them.

    The answer of a row stays as it is, token for token: only the prompt before it is another.
    """

    def __init__(self, prompts: Mapping[str, Prompt], chat: Chat, template: str) -> None:
        self._prompts, self._chat, self._template = prompts, chat, template

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a privileged prompt. ValueError: the template names what its row lacks."""
        *before, last = prompt.messages
        values: dict[str, Any] = {**prompt.columns, "prompt": last["content"]}
        try:
            text = self._template.format_map(values)
        except KeyError as error:
            raise ValueError(
                f"--teacher-prompt-template names {error}, and {prompt.place} has {', '.join(map(str, prompt.columns))}"
            ) from error
        return self._chat.open([*before, {**last, "content": text}])

    def longest(self) -> int:
        """Return the number of tokens of the longest one."""
        return max(len(self.ids(prompt)) for prompt in self._prompts.values())

    def extended(
        self, batch: TensorDict, episodes: Sequence[AnyEpisode], tokens: str | None
    ) -> tuple[TensorDict, list[tuple[int, int]]]:
        """Return the rows with privileged prompts, and the tokens of each row's prompt as it is and privileged.

        `tokens`: a key of tokens of each place, which stay at those of the answer. ValueError: a row does not begin
        with the prompt of its task.
        """
        rows, spans = [], []
        chosen = None if tokens is None else samples_of(batch[tokens])
        parts = zip(
            batch["episode"].tolist(), samples_of(batch["input_ids"]), samples_of(batch["loss_mask"]), strict=True
        )
        for place, (episode, ids, mask) in enumerate(parts):
            prompt = self._prompts[episodes[episode].task_id]
            plain, told = self._chat.open(prompt.messages), self.ids(prompt)
            own = len(plain)
            if ids[:own].tolist() != plain or bool(mask[:own].any()):
                raise ValueError(
                    f"the row of {episodes[episode].task_id} does not begin with its prompt: a teacher with "
                    "--teacher-prompt-template reads another prompt before the same answer"
                )
            row = {
                "input_ids": torch.cat([torch.tensor(told).to(ids), ids[own:]]),
                "loss_mask": torch.cat([mask.new_zeros(len(told)), mask[own:]]),
            }
            if chosen is not None and tokens is not None:
                row[tokens] = moved(chosen[place], own, len(told), none=-1)
            rows.append(row)
            spans.append((own, len(told)))
        return make_batch(rows), spans


def moved(row: Tensor, old: int, new: int, none: int = 0) -> Tensor:
    """Return values of the tokens of a row, (..., j), whose first `old` tokens became `new` ones, those of `none`."""
    return torch.cat([row.new_full((*row.shape[:-1], new), none), row[..., old:]], dim=-1)


def privileged_prompts(config: GrpoConfig, tasks: Tasks, chat: Chat) -> PrivilegedPrompts:
    """Return the privileged prompts of a run.

    Raises:
        ValueError: its tasks are no prompts of a file.
    """
    template = config.teachers.teacher_prompt_template
    assert template is not None, "it is asked for with one"
    if not isinstance(tasks, PromptTasks):
        raise ValueError("--teacher-prompt-template is of prompts of a file: it goes with --data FILE")
    return PrivilegedPrompts(tasks.prompts, chat, template)


def check_privileged(config: GrpoConfig, tasks: Tasks, chat: Chat) -> None:
    """Raise ValueError for privileged prompts that can't be made, or leave an answer no room."""
    longest, answer = privileged_prompts(config, tasks, chat).longest(), config.sampling.max_new_tokens
    if longest + answer > config.max_episode_tokens:
        raise ValueError(
            f"a prompt by --teacher-prompt-template has {longest} tokens, and an answer up to {answer}: raise "
            f"--max-episode-tokens {config.max_episode_tokens} to {longest + answer}"
        )
